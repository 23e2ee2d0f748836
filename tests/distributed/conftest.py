"""What every forked process would otherwise import anew when it wraps a model."""

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401
