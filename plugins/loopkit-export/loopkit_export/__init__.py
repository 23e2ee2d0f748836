"""A trained model as a file for inference: `export` writes it, `load` reads it; `SaveWeights` keeps weights alone."""

from loopkit_export.exporting import export as export
from loopkit_export.exporting import load as load
from loopkit_export.save_weights import SaveWeights as SaveWeights

__all__ = ["SaveWeights", "export", "load"]


def __dir__() -> list[str]:
    return __all__
