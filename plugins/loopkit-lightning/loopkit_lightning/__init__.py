"""Run callbacks of Lightning and handlers of Ignite inside loopkit.

::

    from lightning.pytorch.callbacks import EarlyStopping
    from loopkit_lightning import LightningCallback

    learner = Learner(model, loss_fn, optimizer, plugins=[LightningCallback(EarlyStopping("val/loss"))])
"""

from loopkit_lightning import _core as _core
from loopkit_lightning.callback import LightningCallback
from loopkit_lightning.common import UnsupportedError
from loopkit_lightning.handler import IgniteHandler

__all__ = ["IgniteHandler", "LightningCallback", "UnsupportedError"]
