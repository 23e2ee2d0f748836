"""Source: data that was given, asked once a fit for batches, length and set-up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from loopkit.base.batches import describe, length_of, wrapped
from loopkit.base.notes import warn
from loopkit.data import Loader
from loopkit.errors import EmptyDataError, ExhaustedIteratorError, PhaseInputError, PluginError

if TYPE_CHECKING:
    from loopkit.engine.compile.registry import Registry
    from loopkit.phases import Phase
    from loopkit.progress import Progress

MANY = 1_000
"""Batches of an epoch that does not train, after which data without a length is named at the earliest."""
TABLES = ("numpy", "pandas")
"""Modules whose objects hold samples, not batches."""


class Source:
    """The data of a phase.

    Args:
        registry: Holds the plugins that set data up.
        phase: The phase.
        given: An iterable of batches, or a function that returns one for each epoch.

    Raises:
        PhaseInputError: It is neither.
        EmptyDataError: There is no batch.
    """

    def __init__(self, registry: Registry, phase: Phase, given: Any) -> None:
        _check_data(given)
        self.phase = phase
        self.given = given
        self.made = not hasattr(given, "__iter__") and callable(given)
        """Whether a function makes the data of each epoch."""
        self._registry = registry
        self._data: Any = given
        """As the plugins have set it up."""
        self._seen = -1
        self._length: int | None = None
        self.length = None if self.made else self.epoch()[1]
        """How many batches the first epoch has, if that is known."""

    def epoch(self) -> tuple[Any, int | None]:
        """The data of the epoch that begins, and how many batches they are.

        Raises:
            EmptyDataError: None.
        """
        if self.made or self._seen != self._registry.version:  # the first time, or a plugin came or went
            data = self.given() if self.made else self.given
            if self._registry.implemented and hasattr(data, "__iter__"):
                for impl in self._registry.plan(self.phase).setup_data:
                    data = self._registry.call(impl, phase=self.phase, data=data)
                    if not hasattr(data, "__iter__"):
                        raise PluginError(
                            f"plugin {impl.entry.plugin!r}: setup_data returned {describe(data)}, not an iterable of "
                            f"batches"
                        )
            length = length_of(data)
            if not self.made:
                self._data = data
                self._length = length
                self._seen = self._registry.version
        else:
            data = self._data
            length = self._length
        if length == 0:
            raise EmptyDataError(
                f"the data of phase {self.phase.name!r} holds no batch: len() is 0 ({type(data).__name__})"
            )
        return data, length

    def check_count(self, data: Any, steps: int, length: int | None, first: bool) -> None:
        """Look at how many batches came.

        Args:
            data: The data of an epoch that has ended.
            steps: The batches that came.
            length: How many there were to be.
            first: It was the first epoch over this data.
        """
        if steps == 0:
            if not first:
                self._raise_used_up(data)
            raise EmptyDataError(f"the data of phase {self.phase.name!r} gave no batch ({type(data).__name__})")
        if length is not None and steps != length:
            warn(
                f"len() of the data of phase {self.phase.name!r} is {length}, but it gave {steps} batches; {steps} "
                f"counts"
            )

    def _raise_used_up(self, data: Any) -> NoReturn:
        """Raise for data without a batch, over which an earlier epoch had some."""
        once = [each for each in wrapped(data) if hasattr(each, "__next__")]
        again = "give something that can be iterated again, or a function that returns a new iterator"
        if not once:
            raise EmptyDataError(
                f"the data of phase {self.phase.name!r} gave no batch ({type(data).__name__}), and an earlier epoch "
                f"had some: if there is an iterator in it, {again}"
            )
        verb = "is" if once[0] is data else "holds"
        raise ExhaustedIteratorError(
            f"the data of phase {self.phase.name!r} {verb} a {type(once[0]).__name__} that an earlier epoch "
            f"used up: {again}"
        )


def named_if_endless(
    batches: Iterable[Any], phase: str, trained: Progress, say: Callable[[str], None]
) -> Iterator[Any]:
    """The batches of data without a length, and a line about them when there are many.

    Args:
        batches: The batches of an epoch that does not train.
        phase: The name of its phase.
        trained: The steps trained by then: ten times as many steps as a training epoch has are many.
        say: Prints the line.
    """
    each = iter(batches)
    many = max(MANY, 10 * trained.steps // max(trained.epochs, 1))
    return itertools.chain(itertools.islice(each, many), _named(each, phase, many, say))


def _named(rest: Iterator[Any], phase: str, many: int, say: Callable[[str], None]) -> Iterator[Any]:
    for index, batch in enumerate(rest):
        if index == 0:
            say(
                f"the data of phase {phase!r} has no len() and has given {many:,} batches; if it never ends, bound it: "
                f"lambda: itertools.islice(data, 100) in its place gives 100 batches an epoch"
            )
        yield batch


def check_given(train: Any, val: Any) -> None:
    """Raise for other things than data among the first two arguments of ``fit``.

    Raises:
        PhaseInputError: It is none.
    """
    if isinstance(val, (int, float)):
        raise PhaseInputError(
            f"fit(train, {val!r}): the second argument is the data of the validation; did you mean epochs={val!r}?"
        )
    if isinstance(val, (list, tuple)) and any(isinstance(each, (DataLoader, Loader)) for each in val):
        raise PhaseInputError('val is a list of loaders: give several sets by name, {"val": a, "ood": b}')
    if _is_array(train) and _is_array(val):
        raise PhaseInputError(
            f"fit(X, y) with {describe(train)} and {describe(val)}: fit takes batches, and the second argument is the "
            f"data of the validation. Did you mean fit(loopkit.data.TensorLoader(X, y, batch_size=32), epochs=...)?"
        )


def _is_array(data: Any) -> bool:
    """Whether it is a tensor, a NumPy array or a table of pandas: samples, not batches."""
    return isinstance(data, Tensor) or type(data).__module__.partition(".")[0] in TABLES


def _check_no_model(data: Any, made_by: str) -> None:
    """Raise for a model, or a class, in the place of data."""
    if isinstance(data, nn.Module) and (made_by == "torch" or not hasattr(data, "__iter__")):
        raise PhaseInputError(
            f"data is the module {type(data).__name__}: give a loader of batches; the model is in the learner, "
            f"Learner(model, loss_fn, optimizer)"
        )
    if isinstance(data, type) and issubclass(data, (DataLoader, Loader)):
        raise PhaseInputError(f"data is the class {data.__name__}: give a loader, {data.__name__}(..., batch_size=32)")


def _check_data(data: Any) -> None:
    made_by = type(data).__module__.partition(".")[0]
    _check_no_model(data, made_by)
    if made_by == "datasets":
        raise PhaseInputError(
            f"data is a {type(data).__name__} of Hugging Face, which gives samples, not batches: "
            f"loopkit_huggingface.DatasetLoader(data, batch_size=32) makes them, or "
            f"DataLoader(data.with_format('torch'), batch_size=32)"
        )
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise PhaseInputError(
            f"data is a {type(data).__name__}, which gives samples, not batches: DataLoader(data, batch_size=32) does"
        )
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        raise PhaseInputError(
            f"data is {describe(data)}, which is one batch, or whole tensors: give [batch], or "
            f"loopkit.data.TensorLoader(*tensors, batch_size=32)"
        )
    if (
        made_by in TABLES
        or isinstance(data, (Tensor, str, bytes, Mapping))
        or not (callable(data) or hasattr(data, "__iter__") or hasattr(data, "__getitem__"))
    ):
        hint = "; loopkit.data.TensorLoader(inputs, targets, batch_size=32) makes batches of tensors"
        raise PhaseInputError(
            f"data is {describe(data)}: it must be an iterable of batches, or a function returning one{hint}"
        )
