"""Positions of data: the notes on a loader with which a run resumes at the next batch.

How the engine uses it::

    begun = begin(data)                              # before an epoch begins
    batches = batches_of(data, begun)                # in the place of the data
    saved = save_position(data, steps, running=True, begun=begun)

    skip = load_position(data, saved, replay=True)   # in another process
    if saved["running"] and saved["begun"] is not None:
        generators.restore(saved["begun"]["generators"])
    batches = resume(data, saved, skip)              # in the place of iter(data)
    generators.restore(...)                          # those of the place where it was saved

The generators that the data holds (`DataParts`) are put back as of the epoch's begin before its iterator is made. After
a replay they are where it put them; where nothing was replayed they are put where they were at the save.

Where several processes share the samples, a position says how many samples of the epoch all of them have used. It is
the same in each, and fits any number of processes; the steps go on counting, see `epoch_length`.

The generators inside of a ``DataLoader``'s workers cannot be saved: where workers draw, the batches of the epoch are
made again. `loopkit.data.seeded` needs none.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from loopkit.base import generators
from loopkit.base.batches import IMAGE, count_samples, known_samples, length_of, parts
from loopkit.base.facts import fact
from loopkit.base.kinds import ANY, COUNT, FLAG, MAPPING, Kind, is_plain, wrong
from loopkit.base.notes import warn
from loopkit.data import Loader, LoaderError, ResumableBatchSampler, ResumableSampler, Shares
from loopkit.engine.kept.data.data_check import DataCheck, batch_of_loader, batch_of_sampler
from loopkit.engine.kept.data.data_parts import DataParts, is_told_epochs, plain, same
from loopkit.engine.kept.data.torchdata_loaders import (
    buffer_lost,
    draw_order,
    drawn_again,
    end_epoch,
    has_begun,
    is_of_nodes,
    is_stateful_loader,
    is_stream,
)
from loopkit.engine.kept.data.worker_draws import drew, has_workers, watched
from loopkit.errors import StateError

# Kinds of data, by where their position is
LOADER = "loader"  # a loopkit.data.Loader has it
SAMPLER = "sampler"  # a DataLoader's ResumableSampler has it
STATEFUL = "stateful"  # the data has a state of its own
SEQUENCE = "sequence"  # an index is all it takes
ITERATOR = "iterator"  # nowhere, and it can be used once
ITERABLE = "iterable"  # nowhere
FUNCTION = "function"  # none: it makes the data of each epoch

WORDS = {
    "kind": "position kept by",
    "class": "class",
    "length": "batches",
    "batch_size": "batch size",
    "samples": "samples",
    "workers": "workers",
    "in_order": "in_order",
    "processes": "processes",
    "content": "content",
    "per_step": "samples per step of all processes",
}
# What must not change in mid-epoch, because the position would be that of another batch
UNSAFE = {
    LOADER: ("length", "batch_size", "samples"),
    SAMPLER: ("samples",),
    STATEFUL: ("class", "length", "batch_size", "samples", "workers"),
    SEQUENCE: ("length",),
    ITERATOR: ("length",),
    ITERABLE: ("length", "batch_size", "samples"),
    FUNCTION: (),
}
# What makes no difference at all
FREE = {
    LOADER: ("class",),
    SAMPLER: ("class", "workers"),
    SEQUENCE: ("class",),
    FUNCTION: ("class", "length"),
}

REPLAYED = (ITERATOR, ITERABLE)
"""Kinds of which a position in mid-epoch can only be reached by making the batches before it again."""


def _are_states(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_state, value.values()))


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def _is_held(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("generators"), Mapping) and isinstance(value.get("states"), Mapping)


def _is_place(value: Any) -> bool:
    if not is_plain(value):
        return False
    is_count = COUNT[1]
    return is_count(value.get("epoch")) and is_count(value.get("position"))


KIND: Kind = ("a kind of position", lambda v: v in UNSAFE)
FACTS: Kind = ("facts about data", lambda v: is_plain(v) and type(v.get("class")) is str)
STATES: Kind = ("states of generators", _are_states)
HELD: Kind = ("the generators and states that data holds", _is_held)
PLACE: Kind = ("a place in an epoch", _is_place)

_resumed: WeakKeyDictionary[ResumableSampler, tuple[int, int, int]] = WeakKeyDictionary()
"""The epoch and the samples at which a sampler's epoch was resumed, and the steps that had been taken by then."""


def keeps_place(data: Any) -> bool:
    """Whether epochs over the data move a position that it keeps."""
    return _kind(data) in (LOADER, SAMPLER, STATEFUL)


def needs_replay(data: Any) -> bool:
    """Whether a position in mid-epoch can only be reached by making the batches before it again."""
    return _kind(data) in REPLAYED


def facts(data: Any) -> dict[str, Any]:
    """Return facts that identify the data for a person and show changes, as far as they are known.

    ``kind`` and ``class`` (names), ``length`` (batches), ``batch_size``, ``samples`` (of the dataset), ``workers``,
    ``processes`` (if they share the samples), ``content`` (a fingerprint of some values of tensors).
    """
    found: dict[str, Any] = {"kind": _kind(data), "class": type(data).__name__, "length": length_of(data)}
    if isinstance(data, DataLoader):
        found["batch_size"] = _batch_size(data)
        found["samples"] = length_of(data.dataset)
        found["content"] = _content(getattr(data.dataset, "tensors", ()))
        found["workers"] = data.num_workers
        found["in_order"] = data.num_workers == 0 or getattr(data, "in_order", True)
    elif isinstance(data, Loader):
        found["batch_size"] = getattr(data, "batch_size", None)
        found["samples"] = getattr(data, "samples", None)
        found["content"] = _content(getattr(data, "tensors", ()))
    shares = _shares(data)
    if shares is not None and shares.size > 1:
        found["processes"] = shares.size
    return {name: value for name, value in found.items() if value is not None}


def begin(data: Any, function: Any = None) -> dict[str, Any] | None:
    """Return the states that a replay of the new epoch will need, for ``save_position(..., begun=...)``.

    Args:
        data: The argument of the next ``iter()``.
        function: The function that made it, if one did.

    Returns:
        The states of the global generators, and of the objects in the data; None if no replay is needed.
    """
    kind = _kind(data)
    may_be_replayed = kind in (*REPLAYED, STATEFUL) or (kind == SAMPLER and has_workers(data))
    if not may_be_replayed:
        return None
    begun = {
        "generators": generators.save(),
        "parts": _parts(data, function).saved(),
        "workers_running": _workers_running(data),
    }
    sampler = _sampler(data)
    if sampler is not None:
        begun["state"] = sampler.state_dict(next_epoch=True)
    elif _draws_unseen(data):
        begun["state"] = _state_of(data)
    return begun


def batches_of(data: Any, begun: dict[str, Any] | None) -> Iterable[Any]:
    """Return an iterable in the place of data which notes in ``begun``, or with the workers, whether they draw."""
    if begun is not None and _draws_unseen(data):
        return _FirstBatch(data, begun)
    return watched(data)


def save_position(
    data: Any, steps: int, *, running: bool, begun: Any = None, earlier_epochs: int = 0, function: Any = None
) -> dict[str, Any]:
    """Return the position in the data after some batches of an epoch.

    Args:
        data: The argument of ``iter()``; between epochs, the function that makes such data.
        steps: Batches that were consumed in this epoch.
        running: An epoch is open. Without one, or before its first batch, the next one is new.
        begun: The return value of `begin` when the epoch began; needed if one is open.
        earlier_epochs: Epochs that came before over this very object; only for iterators does it make a difference.
        function: The function that made the data of this epoch.

    Raises:
        StateError: The data's own state holds what cannot be saved, or another epoch has moved its position.
    """
    kind = _kind(data)
    middle = running and steps > 0
    saved: dict[str, Any] = {
        "kind": kind,
        "facts": facts(data),
        "running": middle,
        "steps": steps if middle else 0,
        "parts": _parts(data, function).saved(),
        "workers_running": _workers_running(data),
        "begun": begun if middle else None,
        "drew": middle and _drew(data, begun),
    }
    saved.update(_state_by_kind(kind, data, steps if middle else None))
    if kind == ITERATOR:
        saved["used"] = earlier_epochs > 0 or (steps > 0 and not running)
    return saved


def _state_by_kind(kind: str, data: Any, steps: int | None) -> dict[str, Any]:
    """The state of the data after some steps of an epoch, or between epochs; nothing where it has none."""
    if kind == LOADER:
        return {"state": _state_of_loader(data, steps)}
    if kind == STATEFUL:
        if steps is not None:
            _check_buffer(data)
        elif not _has_state_between(data):
            return {}
        return {"state": _state_of(data)}
    sampler = _sampler(data)
    if sampler is None:
        return {}
    if steps is None:
        return {"state": sampler.state_dict(None, next_epoch=True)}
    position = _samples_used(data, sampler, steps) if kind == SAMPLER else 0
    return {"state": sampler.state_dict(position, next_epoch=False)}


def _check_buffer(data: Any) -> None:
    """Raise for a stream whose position in mid-epoch leaves out samples."""
    problem = buffer_lost(data)
    if problem:
        raise StateError(problem)


def _has_state_between(data: Any) -> bool:
    """Whether data with a state of its own has one between epochs."""
    if is_of_nodes(data):
        return has_begun(data)
    return not is_stateful_loader(data)


def _drew(data: Any, begun: Any) -> bool:
    """Whether making the batches of this epoch drew random numbers, where only workers or the data itself know."""
    return drew(data) or bool(begun and begun.get("drew", False))


def _state_of_loader(data: Loader, steps: int | None) -> dict[str, Any]:
    """The state of a loader, after some steps of an epoch, or between epochs."""
    state = data.state_dict(next_epoch=steps is None)
    if steps is not None and state["position"] < steps:
        raise StateError(
            f"{steps} batches of {_name(data)} were used, but its position is {state['position']}: "
            f"another epoch over the same object moved it. Give each phase its own loader; "
            f"loader.map(lambda batch: batch) makes one"
        )
    return state


def load_position(data: Any, saved: Mapping[str, Any], *, replay: bool, function: Any = None) -> int:
    """Put data where it was saved.

    Between epochs a change of the data gives one warning that lists what changed. In mid-epoch it is refused where the
    next batch would be another one; a `ResumableSampler` goes on with another batch size, see `epoch_length`. Another
    number of processes makes no difference by itself; a warning says if a step has another number of samples then.

    Args:
        data: The argument of the next ``iter()``; between epochs, the function that makes such data.
        saved: The return value of `save_position`.
        replay: Whether the batches before the position may be made again where there is no other way.
        function: The function that made the data of this epoch.

    Returns:
        How many batches the epoch has to leave out; hand it to `resume`.

    Raises:
        StateError: The position cannot be reached, or is not one of this data.
    """
    kind = _kind(data)
    middle = bool(saved["running"])
    if kind == FUNCTION != saved["kind"] and "parts" not in saved:
        return 0  # of an older state, which has the data that a function made for an epoch before
    then, here, changed = _changes(data, kind, saved)
    if saved["kind"] == ITERATOR and saved["used"]:
        raise StateError(
            f"{then['class']} is an iterator that can be used once, and an earlier epoch had used it: what comes "
            f"next cannot be reached again. Give a list, a loader, or a function that returns a new iterator"
        )
    if middle:
        _check_middle(data, kind, saved, here, changed, replay)
    again = middle and _is_replayed(kind, saved, here, replay)
    safe = _load(data, kind, saved, changed, _parts(data, function), again)
    if middle and saved["kind"] == kind:
        _tell_filled_up(data)
    _warn_of_changes(data, middle, _in_words(changed, then, here) + safe)
    if again or (middle and kind == SEQUENCE):
        return int(saved["steps"])
    return 0


def _in_words(changed: Iterable[str], then: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The facts that have changed, before and now."""
    return [f"{WORDS[name]}: {then.get(name)} before, {here.get(name)} now" for name in changed]


def _warn_of_changes(data: Any, middle: bool, changes: list[str]) -> None:
    if changes:
        place = "in mid-epoch" if middle else "between epochs"
        warn(
            f"the data of {_name(data)} changed since its position was saved, {place}: {'; '.join(changes)}. "
            f"The run continues, but it is not the one that would have been"
        )


def _changes(data: Any, kind: str, saved: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any], list[str]]:
    """The facts then and now, and the names of the differences that count."""
    then = saved["facts"]
    here = facts(data)
    free = set(FREE.get(kind, ()))
    is_shared = kind == saved["kind"] in (LOADER, SAMPLER)
    if is_shared and then.get("processes") != here.get("processes"):
        own = data.state_dict() if isinstance(data, Loader) else {}
        then = {**then, "per_step": _per_step(then, saved["state"])}
        here = {**here, "per_step": _per_step(here, own)}
        free |= {"length", "batch_size", "processes"}
    if "content" not in then:  # of an older state
        free.add("content")
    changed = [name for name in WORDS if then.get(name) != here.get(name)]
    return then, here, [name for name in changed if name not in free]


def resume(
    data: Any,
    saved: Mapping[str, Any],
    skip: int,
    *,
    function: Any = None,
    shared: Collection[int] = (),
    proof: DataCheck | None = None,
) -> Iterator[Any]:
    """An iterator over the rest of the epoch, after `load_position`.

    It leaves the data's own generators where they were when the position was saved; the global ones may have moved.

    Args:
        data: The data.
        saved: The return value of `save_position`.
        skip: The return value of `load_position`.
        function: The function that made the data of this epoch.
        shared: Generators, by ``id``, that others draw from, too: a replay does not bring them where they were.
        proof: Looks at the batch before the position.

    Raises:
        StateError: The data ended before the position.
    """
    replayed = skip > 0
    if proof is None:
        proof = DataCheck(None, True)
    if saved["running"]:
        _read_last(data, saved, skip, function, proof)
    if skip and _kind(data) == SEQUENCE:
        batches: Iterator[Any] = map(data.__getitem__, range(skip, len(data)))
        replayed = False
    else:
        if is_of_nodes(data):  # begin another at an epoch's end
            vars(data)["restart_on_stop_iteration"] = not saved["running"]
        batches = _go_over(data, saved, replayed, function)
        used = proof.skip(batches, skip)
        if used < skip:
            raise StateError(
                f"{_name(data)} ended after {used} batches, but {skip} of this epoch were used before: "
                f"the data is not the same. Begin without its position, or restore the data"
            )
        if proof.differs and proof.repeats and replayed:
            _put_begun(data, saved["begun"], function)
            proof.look_again(iter(batches_of(data, saved["begun"])), skip)
    if saved["running"]:
        _settle(data, _parts(data, function), saved, replayed, shared)
    return batches


def _put_begun(data: Any, begun: Mapping[str, Any], function: Any) -> None:
    """Put all random generators to where an epoch began."""
    generators.restore(begun["generators"])
    _parts(data, function).load_generators(_held(begun))


def _read_last(data: Any, saved: Mapping[str, Any], skip: int, function: Any, proof: DataCheck) -> None:
    """Read the batch before a position that was reached at once, where that is quick."""
    kind = _kind(data)
    make: Any = None
    if kind == SEQUENCE:
        make = partial(data.__getitem__, saved["steps"] - 1)
    elif skip or saved["kind"] != kind:
        return
    elif kind == LOADER:
        make = batch_of_loader(data, saved["state"])
    elif kind == SAMPLER:
        make = batch_of_sampler(data, _sampler(data), saved["state"], saved["steps"])
    if make is not None:
        proof.read(_parts(data, function), make)


def _go_over(data: Any, saved: Mapping[str, Any], replayed: bool, function: Any) -> Iterator[Any]:
    """Return an iterator over data; its order is drawn from where the epoch began."""
    begun = saved.get("begun") if saved["running"] else None
    if replayed or begun is None or not is_stateful_loader(data):
        return iter(batches_of(data, begun))
    with drawn_again(data, _parts(data, function), begun["workers_running"]):
        batches = iter(batches_of(data, begun))
        draw_order(batches)
    return batches


def _settle(data: Any, parts: DataParts, saved: Mapping[str, Any], replayed: bool, shared: Collection[int]) -> None:
    """Put the generators of data where they were saved, except where a replay has done so."""
    held = _held(saved)
    if not replayed:
        parts.load_generators(held)
        return
    moved = parts.moved(held)
    if not moved or saved["facts"].get("workers") != facts(data).get("workers"):
        return  # with other workers a sampler runs ahead by another number of batches
    others = {}
    left = []
    for path in moved:
        if isinstance(data, DataLoader) or id(parts.generators[path]) in shared:
            others[path] = held["generators"][path]
        else:
            left.append(path)
    parts.load_generators({"generators": others})
    if left:
        warn(
            f"{', '.join(left)} of {_name(data)} is not where it was when the position was saved, although the batches "
            f"before it were made again: something else draws from it, or the data are others. Give the data a "
            f"generator that only it uses"
        )


def leave(data: Any) -> None:
    """Let an epoch whose position was loaded be over without another batch; then another epoch comes."""
    target = data if isinstance(data, Loader) else _sampler(data)
    if target is not None:
        target.set_epoch(target.epoch + 1)


def epoch_length(data: Any, saved: Mapping[str, Any]) -> int | None:
    """How many steps the resumed epoch will have in all, those before its position included; None if unknown.

    It is ``len(data)``, unless the batch size or the number of processes changed in mid-epoch.
    """
    if not saved["running"]:
        return length_of(data)
    kind = _kind(data)
    steps = int(saved["steps"])
    sampler = _sampler(data)
    shares = _shares(data)
    if shares is not None and saved["kind"] == kind:
        used = data.consumed if isinstance(data, Loader) else int(saved["state"]["position"])
        if sampler is not None or data.position == saved["steps"]:
            return steps + shares.steps(used)
    if kind != SAMPLER or sampler is None:
        return length_of(data)
    left = sampler.samples - int(saved["state"]["position"])
    size = _batch_size(data) or 1
    if getattr(data.batch_sampler, "drop_last", False):
        return steps + left // size
    return steps + -(-left // size)


def malformed(where: str, saved: Any) -> list[str]:
    """Return the differences from a position by `save_position`, whatever the data."""
    kinds = {"kind": KIND, "facts": FACTS, "running": FLAG, "steps": COUNT, "workers_running": FLAG}
    problems = wrong(where, saved, {**kinds, **_held_kinds(saved)})
    if problems:
        return problems
    if saved["kind"] in (LOADER, SAMPLER):
        problems += wrong(where, saved, {"state": PLACE})
    if saved["kind"] == ITERATOR:
        problems += wrong(where, saved, {"used": FLAG})
    if saved["kind"] in REPLAYED:
        problems += wrong(where, saved, {"begun": ANY})
    begun = saved.get("begun")
    if begun is not None:
        kinds = {"generators": MAPPING, "workers_running": FLAG}
        problems += wrong(f"{where}.begun", begun, {**kinds, **_held_kinds(begun)})
    made = saved.get("made")
    if made is not None:
        problems += wrong(f"{where}.made", made, {"generators": MAPPING, "parts": HELD})
    return problems


def _held_kinds(saved: Any) -> dict[str, Kind]:
    """Where a saved form has what data holds: older states have only generators of torch."""
    if isinstance(saved, Mapping) and "own" in saved:
        return {"own": STATES}
    return {"parts": HELD}


def _held(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generators and states of a saved form."""
    if "parts" not in saved:
        return {"generators": saved["own"], "states": {}}
    held: dict[str, Any] = saved["parts"]
    return held


def _parts(data: Any, function: Any = None) -> DataParts:
    """The generators and the objects with a state that data holds, but for those of its position."""
    kind = _kind(data)
    if kind == FUNCTION:
        return DataParts([], data)
    return DataParts(data, function, states=kind not in (LOADER, STATEFUL), without=_sampler(data))


def draws_order_at_once(data: Any) -> bool:
    """Whether it is known that data draw the order of an epoch before its first batch: samplers of torch do."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return False
    samplers = (data.sampler, data.batch_sampler)
    return all(each is None or type(each).__module__.startswith(("torch.", "loopkit.")) for each in samplers)


def start_over(data: Any) -> None:
    """Let the loaders in data begin with their epoch 0, unless they were told another."""
    target = data if isinstance(data, Loader) else _sampler(data)
    if target is not None:
        target.start_over()
    DataParts(data, states=not isinstance(data, Loader)).start_over()


def set_epoch(data: Any, epoch: int) -> None:
    """Call ``set_epoch`` of samplers, data sets and loaders that have it, and do not count their epochs themselves."""
    if not isinstance(data, Loader):
        told = is_stream if is_of_nodes(data) else None  # torchdata tells its own samplers
        DataParts(data, states=False).set_epoch(epoch, told)


def _content(tensors: Any) -> str | None:
    """A fingerprint of tensors, by some values of 64 samples; None without any."""
    some = []
    for each in tensors:
        if isinstance(each, Tensor) and each.layout == torch.strided:
            samples = _thinned(each.detach(), 64)
            some.append(_thinned(samples.flatten(), 4096))
    return fact(some) if some else None


def _thinned(tensor: Tensor, most: int) -> Tensor:
    """Every second, third, ... item of a tensor, so that at most so many are left."""
    every = -(-len(tensor) // most) or 1
    return tensor[::every]


def _kind(data: Any) -> str:
    if isinstance(data, Loader):
        return LOADER
    if callable(data) and not hasattr(data, "__iter__"):
        return FUNCTION
    if isinstance(data, DataLoader) and _sampler(data) is not None and _batch_size(data) is not None:
        return SAMPLER
    if callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None)):
        return STATEFUL
    if isinstance(data, Sequence) or (hasattr(data, "__getitem__") and not hasattr(data, "__iter__")):
        return SEQUENCE
    if hasattr(data, "__next__"):
        return ITERATOR
    return ITERABLE


def _name(data: Any) -> str:
    return type(data).__name__


def _sampler(data: Any) -> ResumableSampler | None:
    """The resumable sampler that decides about the order of the samples."""
    if not isinstance(data, DataLoader):
        return None
    for sampler in (getattr(data.batch_sampler, "sampler", None), data.sampler):
        if isinstance(sampler, ResumableSampler):
            return sampler
    return None


def _batch_size(data: DataLoader[Any]) -> int | None:
    """Samples per batch, where they are as many in every batch but the last."""
    if data.batch_size is not None:
        return data.batch_size
    batch_sampler = data.batch_sampler
    if batch_sampler is None:
        return 1
    if not isinstance(batch_sampler, BatchSampler):
        return None
    kind = type(batch_sampler)
    if kind in (BatchSampler, ResumableBatchSampler) or kind.__module__.startswith("torchdata."):
        return batch_sampler.batch_size
    return None


def _samples_used(data: DataLoader[Any], sampler: ResumableSampler, steps: int) -> int:
    since = steps - _steps_before(sampler)
    if sampler.shares is not None:
        return sampler.shares.used(sampler.start, since)
    return sampler.start + since * (_batch_size(data) or 1)


def _steps_before(sampler: ResumableSampler) -> int:
    """The steps of a sampler's epoch that were taken before it was resumed; 0 if it was not."""
    epoch, start, steps = _resumed.get(sampler, (-1, -1, 0))
    if epoch != sampler.epoch or start != sampler.start:
        return 0
    return steps


def indices_of(data: Any, step: int, batch: Any, samples: int) -> Tensor | str:
    """Which samples the batch of the running epoch's step holds; where that is not known, the reason.

    Args:
        data: The data of the epoch.
        step: The index of the step, the last one.
        batch: Its batch.
        samples: How many samples that counts.
    """
    reason = _unknown_order(data)
    if reason:
        return reason
    found = data.indices if isinstance(data, Loader) else _indices_of_sampler(data, step)
    if found is None:
        return UNKNOWN
    counted = _most_samples(batch, samples)
    if counted is None or len(found) == known_samples(batch) or counted >= len(found):
        return found
    return (
        f"its batch counts {counted} samples, and the data made it of {len(found)}, so some were left out. If it has "
        f"{len(found)}, give the loader loader.count_samples = lambda batch: ...; otherwise put the index into each "
        f"sample"
    )


def _most_samples(batch: Any, samples: int) -> int | None:
    """How many samples a batch has at most, as its own function or its parts count; None where nothing tells it.

    A list or tuple may have an item for each sample, such as texts, or images of one size.
    """
    if samples != count_samples(batch):
        return samples
    counts = [len(part) for _, part in parts(batch) if type(part) in (list, tuple)]
    if type(batch) in (list, tuple) and not _are_parts(batch):
        counts.append(len(batch))
    known = known_samples(batch)
    if known is not None:
        counts.append(known)
    return max(counts, default=None)


def _are_parts(batch: Any) -> bool:
    """Whether a list or tuple has a part in each item, as ``default_collate`` makes of pairs, and not a sample."""
    if not any(isinstance(each, Tensor) for each in batch):
        return False
    are_images = all(isinstance(each, Tensor) and each.ndim == IMAGE for each in batch)
    return not are_images


UNKNOWN = (
    "the data does not know its samples: give a loader of loopkit.data, a DataLoader without shuffle=True, or one with "
    "a ResumableSampler"
)
ITERATIONS = ("torch.", "torchdata.", "loopkit.")
"""Modules whose loaders give the batches of their samplers, each once and in their order."""


def _unknown_order(data: Any) -> str:
    """Why a ``DataLoader`` may give other batches than its sampler, or in another order; empty if it does not."""
    if not isinstance(data, DataLoader):
        return ""
    if data.num_workers > 1 and not getattr(data, "in_order", True):
        return (
            f"the data does not know its samples: {_name(data)} has in_order=False, and its workers give batches in "
            f"any order; use in_order=True"
        )
    owner = next(each for each in type(data).__mro__ if "__iter__" in vars(each))
    if not f"{owner.__module__}.".startswith(ITERATIONS):
        return (
            f"the data does not know its samples: {owner.__name__} has its own __iter__, which may give batches in "
            f"another order; use a DataLoader, or put the index into each sample"
        )
    return ""


def _indices_of_sampler(data: Any, step: int) -> Tensor | None:
    """Which samples a step holds of a ``DataLoader`` whose sampler is known; None for other data."""
    sampler = _sampler(data)
    if sampler is None:
        return _in_order(data, step)
    size = _batch_size(data)
    if size is None:
        return None
    return sampler.indices(step - _steps_before(sampler), size)


def _in_order(data: Any, step: int) -> Tensor | None:
    """Which samples a step holds of a ``DataLoader`` that takes them in their order; None for other data."""
    if not isinstance(data, DataLoader):
        return None
    sampler: Any = data.sampler
    if data.batch_sampler is not None:
        sampler = getattr(data.batch_sampler, "sampler", None)
    size = _batch_size(data)
    if type(sampler) is not SequentialSampler or size is None:
        return None
    first = step * size
    return torch.arange(first, min(first + size, len(sampler)))


def _shares(data: Any) -> Shares | None:
    """How processes share the samples of data that keeps its position in an epoch; None if that is not known."""
    if isinstance(data, Loader):
        return data.shares
    sampler = _sampler(data)
    return None if sampler is None else sampler.shares


def _per_step(facts: Mapping[str, Any], state: Mapping[str, Any]) -> int:
    """Samples per step of all processes, as the facts, or the state of a loader, tell them."""
    size = facts.get("batch_size", state.get("batch_size", 1))
    processes = facts.get("processes", 1)
    return int(size) * int(processes)


def _tell_filled_up(data: Any) -> None:
    """Warn if the rest of the epoch cannot be shared out among the processes."""
    shares = _shares(data)
    if shares is None:
        return
    sampler = _sampler(data)
    used = data.consumed if sampler is None else sampler.start
    left = shares.short(used)
    if left:
        warn(
            f"the rest of the epoch of {_name(data)} is {left} of {shares.samples} samples, fewer than the "
            f"{shares.size} processes: samples from the epoch's begin fill up its step"
        )


def _workers_running(data: Any) -> bool:
    """Whether workers that outlive their epoch have been started: if so, the next one draws no seed for them."""
    return _keeps_workers(data) and getattr(data, "_iterator", None) is not None


def _keeps_workers(data: Any) -> bool:
    return isinstance(data, DataLoader) and data.num_workers > 0 and data.persistent_workers


def _start_workers(data: Any) -> None:
    """Start workers that outlive their epoch, as they were when the position was saved."""
    if _keeps_workers(data) and not _workers_running(data):
        before = generators.save()
        iter(data)
        generators.restore(before)


def _parts_with_state(data: Any) -> list[str]:
    """The dataset and samplers of a StatefulDataLoader that have a state which is not torchdata's.

    A stream that is told the epoch has only the state of one iteration.
    """
    samplers = [data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
    is_told_stream = is_stream(data.dataset) and is_told_epochs(data.dataset)
    parts = samplers if is_told_stream else [data.dataset, *samplers]
    names: dict[str, None] = {}
    for part in parts:
        has_state = callable(getattr(part, "state_dict", None))
        if has_state and not type(part).__module__.startswith("torchdata."):
            names[type(part).__name__] = None
    return list(names)


def _check_middle(
    data: Any, kind: str, saved: Mapping[str, Any], here: Mapping[str, Any], changed: list[str], replay: bool
) -> None:
    """Raise why a position in mid-epoch cannot be reached."""
    then = saved["facts"]
    steps = saved["steps"]
    _check_buffer(data)
    if not then.get("in_order", True) or not here.get("in_order", True):
        raise StateError(
            f"{_name(data)} gives batches in the order in which its workers make them (in_order=False): there is no "
            f"position in mid-epoch to resume from. Use in_order=True"
        )
    unsafe = [name for name in changed if name in ("kind", *UNSAFE[kind])]
    is_stream_of_torch = kind == ITERABLE and isinstance(getattr(data, "dataset", None), IterableDataset)
    if is_stream_of_torch and "workers" in changed:
        unsafe.append("workers")  # which samples a worker gives depends on how many there are
    if unsafe:
        listed = "; ".join(_in_words(unsafe, then, here))
        advice = ""
        if "kind" in unsafe and ("processes" in then or "processes" in here):
            advice = (
                "; for positions that fit any number of processes, use loopkit.data.TensorLoader or a DataLoader with "
                "sampler=loopkit.data.ResumableSampler(dataset)"
            )
        raise StateError(
            f"the position in mid-epoch (after {steps} batches) is not one of this {_name(data)}: {listed}. Give the "
            f"data as it was, or resume from a checkpoint that was saved at the end of an epoch{advice}"
        )
    if kind in (ITERATOR, ITERABLE) and not replay:
        raise StateError(
            f"{_name(data)} has no position, and {steps} batches of the epoch were used: use "
            f"loopkit.data.TensorLoader, a DataLoader with sampler=loopkit.data.ResumableSampler(dataset), or "
            f"torchdata's StatefulDataLoader; or let the {steps} batches be made again and passed over, with "
            f"Checkpoint(options=SaveOptions(replay=True))"
        )


def _is_replayed(kind: str, saved: Mapping[str, Any], here: Mapping[str, Any], replay: bool) -> bool:
    """Whether the batches before a position in mid-epoch are made again."""
    if kind in REPLAYED:
        return True
    if saved["kind"] != kind or not saved.get("drew", False) or "state" not in saved["begun"]:
        return False
    then = saved["facts"]
    alike = all(then.get(name) == here.get(name) for name in ("workers", "batch_size", "processes"))
    if not replay or not alike:
        why = "they are others now" if replay else "replay=True would make them again"
        warn(
            f"random numbers were drawn for the batches of the epoch before its position, by workers or by the data, "
            f"and {why}: those that come are not the ones that would have been. Draw by loopkit.data.seeded"
        )
        return False
    return True


def _load(
    data: Any, kind: str, saved: Mapping[str, Any], changed: list[str], parts: DataParts, again: bool
) -> list[str]:
    """Load the states of the data and of the objects in it; returns the other changes."""
    if saved["kind"] != kind:
        return []
    begun = saved.get("begun") or saved
    at = begun if again else saved
    held = begun if again or kind == STATEFUL else saved
    if held["workers_running"] and (again or not saved["running"]):
        _start_workers(data)
    safe: list[str] = []
    if kind == STATEFUL:
        _load_stateful(data, at.get("state"), running=saved["running"])
    else:
        state = at.get("state", saved.get("state"))
        safe += _load_target(data, saved, state, changed)
    if "parts" in held:
        safe += parts.problems(held["parts"])
    parts.load(_held(held))
    if kind == SAMPLER and saved["running"] and not again:
        sampler = _sampler(data)
        assert sampler is not None
        _resumed[sampler] = (sampler.epoch, sampler.start, int(saved["steps"]))
    return safe


def _load_stateful(data: Any, state: Any, *, running: bool) -> None:
    """Load the state of data that has one of its own; without one, it is as it was made."""
    if state is not None:
        _set_epochs(data, state)
        if is_of_nodes(data) and not running:
            end_epoch(data, state)
        else:
            data.load_state_dict(state)
        return
    if is_of_nodes(data):
        return
    names = _parts_with_state(data)
    if names:
        warn(
            f"the state of {' and '.join(names)} in {_name(data)} is not restored between epochs: what depends on the "
            f"epoch there has to be set at epoch_begin, by set_epoch or the like"
        )


def _load_target(data: Any, saved: Mapping[str, Any], state: Any, changed: list[str]) -> list[str]:
    """Load the place of a loader, or of a sampler; returns what has changed of its options."""
    target = data if isinstance(data, Loader) else _sampler(data)
    if target is None or state is None:
        return []
    try:
        target.load_state_dict(state)
    except LoaderError as error:
        if saved["running"]:
            raise StateError(f"the position in mid-epoch cannot be restored: {error}") from error
        target.set_epoch(state["epoch"])
        own = target.state_dict()
        named = ("epoch", "position", "consumed", *changed)
        others = [name for name in {**state, **own} if name not in named]
        return [
            f"{name}: {state.get(name)} before, {own.get(name)} now"
            for name in others
            if state.get(name) != own.get(name)
        ]
    return []


def _set_epochs(data: Any, state: Any) -> None:
    """Set the epoch of samplers in ``torchdata.nodes``, which leave it to a sampler that has a state of its own.

    torchdata's ``StatefulDistributedSampler`` does not save it.
    """
    if not is_of_nodes(data):
        return
    samplers = [node["sampler"] for node in _mappings(data.root, set()) if "sampler" in node]
    epochs = [each["_epoch"] for each in _mappings(state, set()) if "_epoch" in each]
    for sampler, epoch in zip(samplers, epochs, strict=False):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def _mappings(value: Any, seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Mappings within mappings, and the attributes of nodes, by the order of their names: each once."""
    found: Mapping[str, Any] = {}
    if hasattr(value, "get_state") and hasattr(value, "__dict__"):
        found = vars(value)
    elif isinstance(value, Mapping):
        found = value
    if not found or id(value) in seen:
        return
    seen.add(id(value))
    yield found
    if "_epoch" in found:  # what is within is the sampler's own
        return
    for name in sorted(found, key=str):
        yield from _mappings(found[name], seen)


def _state_of(data: Any) -> Any:
    return plain(data.state_dict(), f"{_name(data)}.state_dict()")


def _draws_unseen(data: Any) -> bool:
    """Whether only the data itself knows if it draws: it has a state of its own, and is not of torchdata."""
    return _kind(data) == STATEFUL and not is_stateful_loader(data) and not is_of_nodes(data)


class _FirstBatch:
    """Data with a state of its own, of which the first batch shows whether making it draws random numbers."""

    def __init__(self, data: Any, begun: dict[str, Any]) -> None:
        self._data = data
        self._begun = begun

    def __iter__(self) -> Iterator[Any]:
        before = self._states()
        batches = iter(self._data)
        return itertools.chain(self._first(batches, before), batches)

    def _first(self, batches: Iterator[Any], before: Any) -> Iterator[Any]:
        for batch in batches:
            self._begun["drew"] = self._begun.get("drew", False) or not same(self._states(), before)
            yield batch
            return

    def _states(self) -> Any:
        return [generators.save(), _parts(self._data).saved()["generators"]]
