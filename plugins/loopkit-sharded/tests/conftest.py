"""What every started process would otherwise import anew."""

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401
from distributed.conftest import recorded_elsewhere as recorded_elsewhere
