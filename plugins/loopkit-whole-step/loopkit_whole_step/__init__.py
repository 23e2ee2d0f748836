"""The whole training step as one compiled graph, by adding one plugin.

::

    from loopkit_whole_step import WholeStep

    learner = Learner(model, loss_fn, optimizer, plugins=[WholeStep()])
"""

from loopkit_whole_step import _core as _core
from loopkit_whole_step.cuda_graph import CudaGraph
from loopkit_whole_step.shapes import Shape
from loopkit_whole_step.whole_step import WholeStep

__version__ = "0.1.0"
__all__ = ["CudaGraph", "Shape", "WholeStep"]
