"""Where the time of a loopkit run goes, what waits for the device, and what comes out of the modules.

::

    from loopkit_insight import Cost

    learner = Learner(model, loss_fn, optimizer, plugins=[Cost()])
"""

from loopkit_insight.cost import Cost
from loopkit_insight.find_syncs import FindSyncs, Sync
from loopkit_insight.module_profile import ModuleProfile
from loopkit_insight.watch import Watch

__version__ = "0.1.0"
__all__ = ["Cost", "FindSyncs", "ModuleProfile", "Sync", "Watch"]
