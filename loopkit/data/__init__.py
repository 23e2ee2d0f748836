"""Loaders of batches with a position: tensors in memory, and batches made by a function.

They do no work per sample and start no processes. For samples that are read or decoded one by one,
``torch.utils.data.DataLoader`` is the right tool; `ResumableSampler` gives it a position, and `seeded` random numbers
that belong to the sample.

Several processes share the samples of an epoch: `Loader.shard` and `ResumableSampler.shard` give each its part.
"""

from loopkit.data.loader import Loader as Loader
from loopkit.data.loader import from_function as from_function
from loopkit.data.loader import same as same
from loopkit.data.place import LoaderError as LoaderError
from loopkit.data.place import Shares as Shares
from loopkit.data.place import Tail as Tail
from loopkit.data.prefetch import Prefetch as Prefetch
from loopkit.data.sampler import ResumableBatchSampler as ResumableBatchSampler
from loopkit.data.sampler import ResumableSampler as ResumableSampler
from loopkit.data.sampler import SampleIndex as SampleIndex
from loopkit.data.sampler import seeded as seeded
from loopkit.data.tensor_loader import TensorLoader as TensorLoader

__all__ = [
    "Loader",
    "LoaderError",
    "Prefetch",
    "ResumableBatchSampler",
    "ResumableSampler",
    "TensorLoader",
    "from_function",
    "same",
    "seeded",
]
__dir__ = __all__.copy
