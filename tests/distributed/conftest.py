"""What every started process would otherwise import anew."""

import multiprocessing

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

multiprocessing.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.fsdp", "loopkit.plugins"])
