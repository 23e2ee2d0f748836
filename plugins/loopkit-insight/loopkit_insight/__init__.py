"""The time of a loopkit run, the activity of its model, and a failed step once more.

::

    from loopkit_insight import Cost

    learner = Learner(model, loss_fn, optimizer, plugins=[Cost()])
"""

from loopkit_insight import _core as _core
from loopkit_insight.cost import Cost
from loopkit_insight.detect_anomaly import DetectAnomaly
from loopkit_insight.dry_run import dry_run
from loopkit_insight.find_syncs import FindSyncs, Sync
from loopkit_insight.log_gradients import LogGradients
from loopkit_insight.log_histograms import LogHistograms
from loopkit_insight.log_predictions import LogPredictions
from loopkit_insight.log_resources import LogResources
from loopkit_insight.lr_finder import LRFinder, LRFinderResult
from loopkit_insight.module_profile import ModuleProfile
from loopkit_insight.peak_memory import PeakMemory
from loopkit_insight.profile import Profile
from loopkit_insight.replay_bundle import ReplayBundle, replay
from loopkit_insight.summary import Summary, summarize
from loopkit_insight.try_validation import TryValidation
from loopkit_insight.watch import Watch

__version__ = "0.1.0"
__all__ = [
    "Cost",
    "DetectAnomaly",
    "FindSyncs",
    "LRFinder",
    "LRFinderResult",
    "LogGradients",
    "LogHistograms",
    "LogPredictions",
    "LogResources",
    "ModuleProfile",
    "PeakMemory",
    "Profile",
    "ReplayBundle",
    "Summary",
    "Sync",
    "TryValidation",
    "Watch",
    "dry_run",
    "replay",
    "summarize",
]
