"""What every started process would otherwise import anew."""

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401
