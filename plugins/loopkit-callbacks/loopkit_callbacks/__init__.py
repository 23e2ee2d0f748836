"""Run callbacks of Lightning and handlers of Ignite inside loopkit.

::

    from lightning.pytorch.callbacks import EarlyStopping
    from loopkit_callbacks import LightningCallback

    learner = Learner(model, loss_fn, optimizer, plugins=[LightningCallback(EarlyStopping("val/loss"))])
"""

from loopkit_callbacks import _core as _core
from loopkit_callbacks.callback import LightningCallback
from loopkit_callbacks.common import UnsupportedError
from loopkit_callbacks.handler import IgniteHandler

__all__ = ["IgniteHandler", "LightningCallback", "UnsupportedError"]
