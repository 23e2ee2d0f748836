"""Places of the values that a recorded step makes, among the outputs of its graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from loopkit_whole_step.sealed import Refused, SealedStep

if TYPE_CHECKING:
    from loopkit import Step
    from loopkit_whole_step.given import Given

REPLAYED = "replayed"
"""The attribute of a step that was replayed: the plugins whose hooks of ``step_end`` were."""


class Places:
    """Where the tensors of a structure come from: an output of the graph, or a tensor of the batch."""

    def __init__(self, value: Any, given: dict[int, int], outputs: list[Tensor], what: str) -> None:
        leaves, self._spec = tree_flatten(value)
        self._marks: list[tuple[str, Any]] = []
        self.kind, self.only = "", 0
        """Where it comes from, if it is no more than one leaf."""
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                if leaf is not None and not isinstance(leaf, (bool, int, float, str)):
                    raise Refused(f"{what} is a {type(leaf).__name__}, which holds tensors where they cannot be seen")
                self._marks.append(("constant", leaf))
            elif id(leaf) in given:
                self._marks.append(("batch", given[id(leaf)]))
            else:
                at = next((i for i, output in enumerate(outputs) if output is leaf), len(outputs))
                if at == len(outputs):
                    outputs.append(leaf)
                self._marks.append(("output", at))
        if len(leaves) == 1 and leaves[0] is value:
            self.kind, self.only = self._marks[0]

    def outputs(self) -> list[int | None]:
        """For each leaf the number of the output that it is; None if it is no output."""
        return [at if kind == "output" else None for kind, at in self._marks]

    def made(self, outputs: Sequence[Any], batch: Sequence[Any]) -> Any:
        """The structure, of a graph's outputs and a batch's tensors."""
        if self.kind:
            return (
                outputs[self.only] if self.kind == "output" else batch[self.only] if self.kind == "batch" else self.only
            )
        held = {"output": outputs, "batch": batch}
        return tree_unflatten([at if kind == "constant" else held[kind][at] for kind, at in self._marks], self._spec)


class Ends:
    """The values at the ends of a recorded step's updates.

    Args:
        owners: The attributes that hooks set, with their plugins.
    """

    def __init__(self, owners: Mapping[tuple[str, str], Any]) -> None:
        self.grads: dict[str, list[Tensor | None]] = {}
        """By optimizer, its parameters' gradients."""
        self._owners = owners
        self._old = self._now()
        self._then: dict[str, dict[tuple[str, str], Any]] = {}

    def _now(self) -> dict[tuple[str, str], Any]:
        """The values of the attributes, in new containers."""
        return {key: tree_map(lambda leaf: leaf, getattr(owner, key[1])) for key, owner in self._owners.items()}

    def updated(self, name: str, params: Sequence[Tensor]) -> None:
        """An optimizer has made its step."""
        self.grads[name], self._then[name] = [p.grad for p in params], self._now()
        for p in params:
            p.grad = None

    def sets(self) -> dict[str, dict[tuple[str, str], Any]]:
        """The attributes that were set, by the optimizer whose update came next; with one optimizer under ""."""
        last, then = self._now(), self._old
        found: dict[str, dict[tuple[str, str], Any]] = {}
        for name, now in self._then.items() if len(self._then) > 1 else ():
            found[name] = {key: now[key] for key in now if not _is(now[key], then[key]) and self._is_new(key, now)}
            then = now
        changed = {key: value for key, value in last.items() if not _is(value, self._old[key])}
        found[""] = {key: value for key, value in changed.items() if all(key not in each for each in found.values())}
        for key in changed:
            if not _is(last[key] if key not in found[""] else self._old[key], then[key]):
                raise Refused(f"{key[1]} of plugin {key[0]!r} is set in a part at one update, and in a part later")
        return found

    def _is_new(self, key: tuple[str, str], now: dict[tuple[str, str], Any]) -> bool:
        """Whether no tensor of an attribute is one that it held before the step."""
        old = {id(leaf) for leaf in tree_flatten(self._old[key])[0] if isinstance(leaf, Tensor)}
        return not any(id(leaf) in old for leaf in tree_flatten(now[key])[0])


@dataclass(frozen=True)
class Result:
    """Where the values that a recorded step makes are among the outputs of its graph."""

    given: Given
    values: dict[str, Places]
    """The attributes of the step."""
    sets: dict[str, dict[tuple[str, str], Places]]
    """The attributes that hooks set, by the optimizer whose update ends next; "": before all of them."""
    grads: dict[str, list[int | None]]
    """By optimizer, the outputs that are its parameters' gradients."""
    votes: bool
    """Whether the first output is whether the update was made."""

    @classmethod
    def of(
        cls, given: Given, step: SealedStep, ends: Ends, found: Sequence[Tensor], votes: list[Tensor]
    ) -> tuple[list[Tensor], Result]:
        """The outputs of a step's graph, and where its values are among them.

        Args:
            given: The step's own.
            step: The step, which has ended.
            ends: What there was at the ends of its updates.
            found: The tensors of its batch.
            votes: Whether the update was made, if plugins vote on it.
        """
        outputs: list[Tensor] = list(votes)
        batch = {id(leaf): at for at, leaf in zip(given.where, found, strict=True)}
        values = {name: Places(value, batch, outputs, f"step.{name}") for name, value in step.values.items()}
        sets = {
            optimizer: {
                (name, attribute): Places(value, batch, outputs, f"{attribute} of plugin {name!r}")
                for (name, attribute), value in of_one.items()
            }
            for optimizer, of_one in ends.sets().items()
        }
        grads = {name: Places(each, batch, outputs, "a gradient").outputs() for name, each in ends.grads.items()}
        return [output.detach() for output in outputs], cls(given, values, sets, grads, bool(votes))

    def hand_over(self, step: Step, outputs: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Give the step, the plugins and the engine what came of it."""
        values = {
            name: outputs[places.only] if places.kind == "output" else places.made(outputs, leaves)
            for name, places in self.values.items()
        }
        self.mark(values)
        if not self.given.phase.training:
            self.give(outputs, leaves)
            vars(step).update(values)
            return
        grads = {name: [None if at is None else outputs[at] for at in each] for name, each in self.grads.items()}
        self.give(outputs, leaves)
        before = partial(self.give, outputs, leaves) if len(self.given.windows) > 1 else None
        step.applied(values, grads, before=before)

    def mark(self, values: dict[str, Any]) -> None:
        """Note among a step's values that it was replayed."""
        values[REPLAYED] = self.given.ends

    def give(self, outputs: Sequence[Any], leaves: Sequence[Any], optimizer: str = "") -> None:
        """Set what hooks set of their plugins."""
        for (plugin, attribute), places in self.sets.get(optimizer, {}).items():
            setattr(self.given.owners[plugin], attribute, places.made(outputs, leaves))


def _is(one: Any, other: Any) -> bool:
    """Whether two structures hold the same objects."""
    (left, spec), (right, other_spec) = tree_flatten(one), tree_flatten(other)
    return spec == other_spec and all(map(operator.is_, left, right))
