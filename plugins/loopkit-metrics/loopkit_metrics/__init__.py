"""More metrics than in `loopkit.metrics`. Each is exact over uneven batches, processes and resumed epochs."""

from loopkit_metrics import _core as _core
from loopkit_metrics.classification import AUROC as AUROC
from loopkit_metrics.classification import AveragePrecision as AveragePrecision
from loopkit_metrics.classification import ConfusionMatrix as ConfusionMatrix
from loopkit_metrics.classification import Dice as Dice
from loopkit_metrics.classification import IoU as IoU
from loopkit_metrics.classification import PrecisionRecall as PrecisionRecall
from loopkit_metrics.classification import TopK as TopK
from loopkit_metrics.kept import Quantile as Quantile
from loopkit_metrics.regression import MAE as MAE
from loopkit_metrics.regression import MSE as MSE
from loopkit_metrics.regression import R2 as R2
from loopkit_metrics.regression import RMSE as RMSE
from loopkit_metrics.running import ExponentialMean as ExponentialMean
from loopkit_metrics.running import SamplesPerSecond as SamplesPerSecond

__all__ = [
    "AUROC",
    "MAE",
    "MSE",
    "R2",
    "RMSE",
    "AveragePrecision",
    "ConfusionMatrix",
    "Dice",
    "ExponentialMean",
    "IoU",
    "PrecisionRecall",
    "Quantile",
    "SamplesPerSecond",
    "TopK",
]
__dir__ = __all__.copy
