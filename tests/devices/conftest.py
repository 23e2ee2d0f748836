"""What every forked process would otherwise import anew."""

import torch._dynamo  # noqa: F401
