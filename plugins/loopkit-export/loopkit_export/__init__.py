"""Models out and in: `export` writes a file for inference, `load_torch` reads the tensors of one of ``torch.save``."""

from loopkit_export import _core as _core
from loopkit_export.exporting import export as export
from loopkit_export.exporting import load as load
from loopkit_export.torch_files import load_torch as load_torch

__all__ = ["export", "load", "load_torch"]
__dir__ = __all__.copy
