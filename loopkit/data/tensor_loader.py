"""TensorLoader: batches of tensors in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.base.batches import describe
from loopkit.base.words import takes
from loopkit.data.loader import Loader
from loopkit.data.place import LoaderError, Shares, ordered, processes_of, whole_number
from loopkit.errors import EmptyDataError

if TYPE_CHECKING:
    from numpy.typing import NDArray


BLOCK_BYTES = 1 << 20


BLOCK_BATCHES = 1024


# Above this torch copies with several threads. That gains microseconds; where others keep the cores busy, waiting for
# a thread was measured to take 2 to 10 milliseconds a block.
BLOCK_ELEMENTS_CPU = 32_768


class TensorLoader(Loader):
    """Batches of tensors that are in memory, of a CPU or of a device.

    Blocks of whole batches are gathered at once and cut into batches, so that a small batch costs a few microseconds.
    A block holds at most 1 MiB, 1,024 batches and, on a CPU, 32,768 elements of a tensor, but always one batch.
    Batches are contiguous and share no memory with the tensors or with each other, but a batch that is kept may keep
    its block in memory: ``clone()`` what you keep or save.

    Args:
        tensors: Tensors or NumPy arrays of the same length, ``(samples, ...)``, or one mapping of names to such. One
            gives batches that are tensors ``(batch_size, ...)``, several give tuples, a mapping gives dicts. Tensors
            that are on ``device`` already are used as they are, not copied; so are arrays that can be written to.
        batch_size: Samples per batch, from 1; the last batch holds what is left.
        shuffle: Take the samples in a new order in every epoch. The order depends on the seed and the epoch, not on
            the device or on torch's global generator, which is not used. It takes 8 bytes per sample.
        seed: For ``shuffle``.
        drop_last: Leave out a last batch that is not full.
        device: Move the tensors there, once.

    Raises:
        LoaderError: There is no tensor, something that is no tensor, an array whose dtype no tensor has, lengths or
            devices that differ, a tensor that requires grad, or ``batch_size < 1``.
        EmptyDataError: There is no batch.

    Example::

        >>> inputs, targets = torch.arange(10.0).reshape(5, 2), torch.arange(5)
        >>> loader = TensorLoader(inputs, targets, batch_size=2, shuffle=True, seed=1)
        >>> len(loader), [targets.shape[0] for _, targets in loader]
        (3, [2, 2, 1])
        >>> for batch in TensorLoader({"inputs": inputs, "targets": targets}, batch_size=5):
        ...     print(batch["targets"])
        tensor([0, 1, 2, 3, 4])

        >>> batches = iter(loader)
        >>> first, state = next(batches), loader.state_dict()
        >>> state["epoch"], state["position"]
        (1, 1)
        >>> again = TensorLoader(inputs, targets, batch_size=2, shuffle=True, seed=1)
        >>> again.load_state_dict(state)
        >>> all(torch.equal(one[1], other[1]) for one, other in zip(batches, again, strict=True))
        True
    """

    @takes(batch="give batch_size=...", num_workers="leave it out: the tensors are in memory")
    def __init__(
        self,
        *tensors: Tensor | NDArray[Any] | Mapping[str, Tensor | NDArray[Any]],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        named = _named(tensors)
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.shuffle = bool(shuffle)
        self.seed = whole_number("seed", seed)
        self.drop_last = bool(drop_last)
        self.samples = _check_tensors(named, device)
        self._tensors = [tensor if device is None else tensor.to(device) for tensor in named.values()]
        self._keys = list(named) if isinstance(tensors[0], Mapping) else None
        if not self.samples or (drop_last and self.samples < self.batch_size):
            dropped = " with drop_last=True" if self.samples else ""
            raise EmptyDataError(
                f"there is no batch: the tensors hold {self.samples} samples and batch_size is {self.batch_size}"
                f"{dropped}"
            )
        super().__init__(Shares(self.samples, self.batch_size, tail="drop" if drop_last else "uneven"))
        self._block = self._batches_of_a_block() * self.batch_size
        self._copied = [self._is_copied(tensor) for tensor in self._tensors]

    def _batch_bytes(self, tensor: Tensor) -> int:
        return tensor.nbytes // self.samples * self.batch_size

    def _batches_of_a_block(self) -> int:
        total = sum(map(self._batch_bytes, self._tensors))
        most = min(BLOCK_BATCHES, BLOCK_BYTES // max(1, total))
        for tensor in self._tensors:
            if tensor.device.type == "cpu":
                elements = tensor.numel() // self.samples * self.batch_size
                most = min(most, BLOCK_ELEMENTS_CPU // max(1, elements))
        return max(1, most)

    def _is_copied(self, tensor: Tensor) -> bool:
        """Whether batches are copied out of their block, as they would not begin like a tensor of their own.

        Where a matrix begins may decide which kernel multiplies it, and so the last bits of the product.
        """
        if self._block == self.batch_size:
            return False
        alignment = 64 if tensor.device.type == "cpu" else 256
        return self._batch_bytes(tensor) % alignment != 0

    def __repr__(self) -> str:
        held = dict(zip(self._keys, self._tensors, strict=True)) if self._keys else tuple(self._tensors)
        text = (
            f"TensorLoader({describe(held)}, batch_size={self.batch_size}, shuffle={self.shuffle}, seed={self.seed}, "
            f"drop_last={self.drop_last})"
        )
        shares = self._shares
        if shares.size > 1:
            text += f".shard({self._rank}, {shares.size}, {shares.tail!r})"
        return text

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it takes batches from."""
        return tuple(self._tensors)

    def identity(self) -> dict[str, Any]:  # noqa: D102
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
            **processes_of(self._shares),
        }

    def _shuffles(self) -> int | None:
        return self.seed if self.shuffle else None

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:  # noqa: D102
        order = ordered(self.samples, self._shuffles(), epoch, indices)
        for chosen, low, high, size in self._blocks(order, start):
            columns = self._gather(chosen, low, high, size)
            if self._keys is not None:
                for row in zip(*columns, strict=True):
                    yield dict(zip(self._keys, row, strict=True))
            elif len(columns) > 1:
                yield from zip(*columns, strict=True)
            else:
                yield from columns[0]

    def _blocks(self, order: Tensor | None, start: int) -> Iterator[tuple[Tensor | None, int, int, int]]:
        """The blocks of an epoch from sample ``start`` on: an order, the first and last of it, and a batch's size."""
        shares = self._shares
        if shares.size == 1:
            yield from self._all_blocks(order, start)
            return
        steps = shares.steps(start)
        if not steps:
            return
        own, last = self._own_places(start, steps)
        device = self._tensors[0].device
        for places, size in ((own, self.batch_size), (last, len(last))):
            chosen = (places if order is None else order[places]).to(device)
            stop = len(chosen)
            for low in range(0, stop, self._block):
                yield chosen, low, min(low + max(self._block, size), stop), size

    def _all_blocks(self, order: Tensor | None, start: int) -> Iterator[tuple[Tensor | None, int, int, int]]:
        """The blocks of a single process."""
        stop = self.samples
        if self.drop_last:
            stop = start + (stop - start) // self.batch_size * self.batch_size
        if order is not None:
            order = order.to(self._tensors[0].device)
        for low in range(start, stop, self._block):
            yield order, low, min(low + self._block, stop), self.batch_size

    def _own_places(self, start: int, steps: int) -> tuple[Tensor, Tensor]:
        """The places of this process's samples in the order; those of the last batch apart if it is a larger one."""
        shares = self._shares
        first, end = shares.part(self._rank, start, steps - 1)
        last = torch.arange(first, end, device="cpu") % self.samples
        begins = start + self._rank * self.batch_size + shares.whole * torch.arange(steps - 1, device="cpu")
        own = (begins[:, None] + torch.arange(self.batch_size, device="cpu")).flatten()
        if len(last) > self.batch_size:  # it has one or two more
            return own, last
        return torch.cat([own, last]), last[:0]

    def _gather(self, order: Tensor | None, low: int, high: int, size: int) -> list[Iterator[Tensor]]:
        """For each tensor the batches of a block, that is of the samples from ``low`` to ``high`` in this order."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # a block may serve steps inside and outside of inference mode
                return self._gather(order, low, high, size)
        columns: list[Iterator[Tensor]] = []
        for tensor, copied in zip(self._tensors, self._copied, strict=True):
            if order is None:
                block = tensor[low:high].clone(memory_format=torch.contiguous_format)
            else:
                block = tensor.index_select(0, order[low:high])
            if high - low <= size:
                columns.append(iter((block,)))
            else:
                # unsafe: each part counts its in-place changes by itself, else autograd would take a change of one
                # batch for a change of the others
                batches: tuple[Tensor, ...] = block.unsafe_split(size)
                columns.append(map(torch.clone, batches) if copied else iter(batches))
        return columns


def _named(given: tuple[Any, ...]) -> dict[str, Any]:
    """The tensors by name, or by their number."""
    if given and isinstance(given[0], Mapping):
        if len(given) > 1:
            raise LoaderError("give TensorLoader one mapping of tensors, or only tensors")
        named = dict(given[0])
    else:
        named = {str(number): tensor for number, tensor in enumerate(given)}
    if not named:
        raise LoaderError("TensorLoader was given no tensor")
    return {name: _tensor(name, value) for name, value in named.items()}


def _tensor(name: str, value: Any) -> Any:
    """A NumPy array as a tensor, which shares its memory where it can be written to; anything else as it is."""
    if type(value).__module__ != "numpy":
        return value
    can_be_shared = value.flags.writeable and min(value.strides, default=0) >= 0
    try:
        return torch.from_numpy(value if can_be_shared else value.copy())
    except TypeError:
        raise LoaderError(
            f"array {name!r} is of dtype {value.dtype}, which tensors do not have: give numbers, such as "
            f"array.astype('float32'), or class indices"
        ) from None


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        if isinstance(tensor, (tuple, list)) and any(isinstance(part, Tensor) for part in tensor):
            fix = "give the tensors themselves, TensorLoader(*tensors, batch_size=...)"
        else:
            fix = "torch.as_tensor(...) makes one of numbers"
        raise LoaderError(f"tensor {name!r} is {describe(tensor)}, not a tensor: {fix}")
    if not tensor.ndim:
        raise LoaderError(f"tensor {name!r} has no dimension: the first dimension must be the samples")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise LoaderError(f"tensor {name!r} has layout {tensor.layout}: only dense tensors can be cut into batches")
    if tensor.requires_grad:
        raise LoaderError(f"tensor {name!r} requires grad, which batches cannot pass on: give tensor.detach()")


def _check_tensors(named: Mapping[str, Any], device: Any) -> int:
    """Raise what is wrong with the tensors; return their length."""
    for name, tensor in named.items():
        _check_tensor(name, tensor)
    lengths = {name: tensor.shape[0] for name, tensor in named.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise LoaderError(f"the tensors have different numbers of samples (their first dimension): {listed}")
    devices = {name: tensor.device for name, tensor in named.items()}
    if device is None and len(set(devices.values())) > 1:
        listed = ", ".join(f"{name!r} is on {place}" for name, place in devices.items())
        raise LoaderError(f"the tensors are on different devices: {listed}. Give device=... to move them to one")
    length = next(iter(lengths.values()))
    return int(length)
