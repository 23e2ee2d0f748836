"""ModuleModes: the train and eval modes of modules, and the weights of modules that work in ``train`` and ``eval``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from loopkit.base import sharded
from loopkit.base.words import some
from loopkit.engine.kept.swapped import MISSING, Swapped

Modes = list[tuple[nn.Module, bool]]
Replaced = Callable[[Callable[[], None], Callable[[], None]], AbstractContextManager[None]]


class ModuleModes:
    """The modes of all modules of a learner.

    Modules that are in eval mode when they are first seen stay so in training, unless an optimizer trains the model and
    all of it is in eval mode. A module whose class has its own ``train``, such as one that merges an adapter into
    its weights in eval mode, is switched by calling it, and only where its mode changes.

    Args:
        modules: Returns the models, and the modules beside them, by name.
    """

    def __init__(self, modules: Callable[[], Mapping[str, nn.Module]]) -> None:
        self._modules = modules
        self._first: dict[nn.Module, bool] = {}
        """The mode in which each module was first seen."""
        self._evals: dict[nn.Module, str] = {}
        """The modules that stay in eval mode in training, with their names."""
        self._asleep: dict[str, nn.Module] = {}
        """The models that are trained, and were in eval mode as a whole: they are put into train mode."""
        self._asked: set[nn.Module] = set()
        """Modules with their own ``train`` that was called for a first training epoch."""
        self.kept = ""
        """A sentence on parts that stay in eval mode; empty without any."""

    # Which modules stay

    def meet(self, modules: Iterable[nn.Module]) -> None:
        """Note the modes of modules that are new."""
        for module in modules:
            for each in module.modules():
                self._first.setdefault(each, each.training)

    def decide(self, trained: Collection[int], prefixes: Iterable[tuple[str, nn.Module]]) -> None:
        """Decide which modules stay in eval mode in training.

        Args:
            trained: The ids of the parameters that optimizers train.
            prefixes: All models, with the beginnings of the names of their modules.
        """
        self._evals = {}
        self._asleep = {}
        said: list[str] = []
        for prefix, model in prefixes:
            self.meet([model])
            named = [(path, each) for path, each in model.named_modules() if not self._first[each]]
            is_trained = not trained or any(id(p) in trained for p in model.parameters())
            if is_trained and trained and len(named) == len(list(model.modules())):
                self._asleep[prefix] = model
                continue
            self._evals.update((each, f"{prefix}{path}") for path, each in named)
            if is_trained:
                said += [f"{prefix}{path}" for path, each in named if not list(each.children())]
        self.kept = _kept(said)
        for name, model in list(self._asleep.items()):
            is_shared = any(each in self._evals for each in model.modules())
            if is_shared:
                del self._asleep[name]

    def say_kept(self, say: Callable[[str], None]) -> None:
        """Print which modules stay in eval mode."""
        if self.kept:
            say(self.kept)

    def wake(self, say: Callable[[str], None]) -> None:
        """Put models that are trained, and are in eval mode as a whole, into train mode; for good, with one line."""
        for name, model in self._asleep.items():
            if any(each.training for each in model.modules()):
                continue
            switch_tree(model, dict.fromkeys(model.modules(), True))
            called = f"model {name.removesuffix('.')!r}" if name else "the model"
            say(
                f"{called} was in eval mode when the learner was made, and is put into train mode: an optimizer "
                f"trains it (model.train() before Learner(...) leaves this line out)"
            )
        self._asleep = {}

    # Switching

    def switch(self, training: bool, modules: list[nn.Module]) -> Modes:
        """Put modules in the mode of a phase; returns the modes in which they were.

        Modules with their own ``train`` are left as they are for a phase that does not train: `evaluated` puts them
        in eval mode, when the weights stand in their place.
        """
        evals = self._evals if training else {}
        if not has_own_train(modules):
            modes = [(module, module.training) for module in modules]
            write([(each, training and each not in evals) for each in modules])
            return modes
        tops = list(self._modules().values())
        if training:
            self._ask(tops)
        modes = [(module, module.training) for module in modules]
        if training:
            for top in tops:
                switch_tree(top, {each: each not in evals for each in top.modules()}, keep=True)
        else:
            own = set(_own_subtrees(tops))
            write([(each, False) for each in modules if each not in own])
        return modes

    def _ask(self, tops: Iterable[nn.Module]) -> None:
        """Call the ``train`` of modules once for the first training epoch, if it may keep norms in eval mode."""
        for module in _own_tops(tops):
            whole = all(each.training for each in module.modules())
            norms = any(isinstance(each, _NormBase) for each in module.modules())
            if whole and norms and module not in self._asked and module not in self._evals:
                module.train(True)
            self._asked.add(module)

    @contextmanager
    def evaluated(self, replaced: Replaced, exact: Callable[[], bool]) -> Iterator[None]:
        """Inside, modules with their own ``train`` are in eval mode, each in its evaluation form.

        The training form is kept aside, for whoever saves inside.

        Args:
            replaced: `Weights.replaced` of the models.
            exact: Whether the weights are to be at the end what they were, bit for bit. Else they are what ``train()``
                makes of them, as in a loop by hand.
        """
        tops = list(self._modules().values())
        before = [(module, module.training) for module in _own_subtrees(tops)]
        if not any(training for _, training in before):
            yield
            return
        form = _Form([module for module, training in before if training])
        for top in _own_tops(tops):
            switch_tree(top, dict.fromkeys(top.modules(), False), keep=True)
        form.compare()
        try:
            with replaced(form.enter, form.exchange):
                yield
        finally:
            form.exchange()  # the evaluation form, which `train` takes back
            for top in _own_tops(tops):
                switch_tree(top, dict(before))
            if exact():
                form.restore()

    @contextmanager
    def in_training_form(self) -> Iterator[None]:
        """Inside, weights can be loaded: modules in their evaluation form are in train mode, and in eval mode after it.

        Modules that stay in eval mode in training are saved, and so loaded, in that form.
        """
        modes = []
        for module in _own_tops(self._modules().values()):
            if not module.training and module not in self._evals:
                before = {each: each.training for each in module.modules()}
                modes.append((module, before))
        for module, was in modes:
            switch_tree(module, {each: each not in self._evals for each in was})
        asleep = {each for model in self._asleep.values() for each in model.modules()}
        try:
            yield
        finally:
            for module, was in modes:
                if module not in asleep:  # else it is put into train mode anyway
                    switch_tree(module, was)


class _Form(Swapped):
    """The training form of modules, kept while they are in their evaluation form.

    Args:
        modules: The modules, before they are switched.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._holders = [held for each in modules for held in (each._parameters, each._buffers, vars(each))]
        """Where modules keep tensors, and attributes such as whether an adapter is merged."""
        self._before = [dict(holder) for holder in self._holders]
        self._copies: dict[int, Tensor] = {}
        for held in self._before:
            for tensor in held.values():
                if isinstance(tensor, Tensor) and id(tensor) not in self._copies:
                    self._copies[id(tensor)] = tensor.detach().clone()
        self._is_first = True

    @torch.no_grad()
    def compare(self) -> None:
        """Look for changes that the switch has made, and forget the rest."""
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for holder, before in zip(self._holders, self._before, strict=True):
            for key in {**before, **holder}.keys() - {"training"}:
                was = before.get(key, MISSING)
                now = holder.get(key, MISSING)
                if was is not now:
                    self.cells.append((holder, key, was))
                if not isinstance(was, Tensor):
                    continue
                copied = self._copies[id(was)]
                if not _same(was, copied):
                    pairs[id(was)] = was, copied
        self.pairs = list(pairs.values())
        self._copies = {}
        self._before = []

    def enter(self) -> None:
        """Put the evaluation form in place; it is there the first time."""
        if not self._is_first:
            self.exchange()
        self._is_first = False

    @torch.no_grad()
    def restore(self) -> None:
        """Put the training form back, bit for bit, into modules that are in train mode again."""
        for tensor, kept in self.pairs:
            if tensor.shape == kept.shape:
                sharded.part(tensor).detach().copy_(sharded.part(kept))


def has_own_train(modules: Iterable[nn.Module]) -> bool:
    """Whether a module works in ``train`` and ``eval``: its class, or itself, has its own ``train``."""
    plain = nn.Module.train
    for module in modules:  # noqa: SIM110 - each epoch asks, and `any` takes twice as long
        if type(module).train is not plain or "train" in module.__dict__:
            return True
    return False


def switch_tree(module: nn.Module, want: Mapping[nn.Module, bool], keep: bool = False) -> None:
    """Put a module and its parts in modes, by calling ``train`` where a class has its own, and only where it changes.

    Args:
        module: The module.
        want: The mode of each part; others stay.
        keep: Leave parts as they are if a ``train`` has set another mode.
    """
    if not has_own_train(module.modules()):
        write([(each, want.get(each, each.training)) for each in module.modules()])
        return
    goal = want.get(module, module.training)
    if not has_own_train([module]):
        write([(module, goal)])
    elif module.training is not goal:
        _call_train(module, goal, want)
        if keep:
            _put_back(module, goal, want)
            return
    elif keep and goal:
        _put_back(module, goal, want)
        return
    for child in module.children():
        switch_tree(child, want, keep)


def _call_train(module: nn.Module, goal: bool, want: Mapping[nn.Module, bool]) -> None:
    """Call ``train`` of a module; it does not reach the parts that have their mode already."""
    stay = [
        part
        for part in module.modules()
        if part is not module and has_own_train([part]) and want.get(part, part.training) is part.training
    ]
    with ExitStack() as stack:
        for part in stay:
            stack.enter_context(_left_out(part))
        module.train(goal)


@contextmanager
def _left_out(part: nn.Module) -> Iterator[None]:
    """Inside, ``train`` of a module that holds this one does not reach it."""
    attributes = vars(part)
    own = attributes.get("train", MISSING)
    attributes["train"] = lambda mode=True: part
    try:
        yield
    finally:
        del attributes["train"]
        if own is not MISSING:
            attributes["train"] = own


def _put_back(module: nn.Module, goal: bool, want: Mapping[nn.Module, bool]) -> None:
    """Put parts that are to be in another mode than the module into it again."""
    for part in module.modules():
        if part is not module and want.get(part, goal) is not goal and part.training is goal:
            switch_tree(part, {each: want.get(each, goal) for each in part.modules()})


def write(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Write the modes of modules, which is all that torch's own ``train`` does."""
    for module, training in modes:
        if module.training is not training:
            if type(module).__setattr__ is nn.Module.__setattr__ and "training" in vars(module):
                vars(module)["training"] = training  # what assigning comes to, in a twentieth of the time
            else:
                module.training = training


def _own_tops(tops: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost modules with their own ``train``."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()
    level = list(tops)
    for module in level:
        if module in seen:
            continue
        seen.add(module)
        if has_own_train([module]):
            found.append(module)
            seen |= set(module.modules())
        else:
            level += [child for child in module.children() if child not in seen]
    return found


def _own_subtrees(tops: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules with their own ``train``, and their parts."""
    return list(dict.fromkeys(each for top in _own_tops(tops) for each in top.modules()))


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(sharded.part(one), sharded.part(other))  # host sync: at a validation's begin


def _kept(names: list[str]) -> str:
    said = (
        f"{some(names)} had been put into eval mode when the learner was made, and stay so in training; "
        f"model.train() before Learner(...) if that is not meant"
    )
    return said if names else ""
