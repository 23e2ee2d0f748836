"""roots: the parts of a learner that the witness looks at: its models, loss, optimizers, phases and plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from loopkit.engine.kept.extras import in_words
from loopkit.engine.kept.optimizers import own_generators
from loopkit.engine.kept.witness.data_roots import root_of_data
from loopkit.engine.kept.witness.forgotten import OWN
from loopkit.engine.kept.witness.functions import held_in_code, methods_of
from loopkit.engine.kept.witness.libraries import is_shipped
from loopkit.engine.kept.witness.looks import Leave, Scope, is_learner_of
from loopkit.engine.kept.witness.root import Root
from loopkit.engine.kept.witness.set_at_begin import is_set_at_begin
from loopkit.engine.kept.witness.torch_hooks import Hook, hooks_of_all, hooks_of_module, hooks_of_optimizer
from loopkit.engine.kept.witness.walk import Found, has_attributes
from loopkit.plugin import declared

if TYPE_CHECKING:
    from loopkit.phases import Phase

OF_TORCH = ("defaults", "state", "param_groups", "found_inf", "grad_scale")
"""Attributes that torch gives an optimizer, beside those that begin with an underscore."""
OF_A_PHASE = "Give the class saved = ({0}), or state_dict and load_state_dict; for a cache, volatile = ({0})"
OF_A_PLUGIN = "Give the class state_dict and load_state_dict; for a display or a cache, volatile = ({0})"
OF_A_STATE = "Put it into its state_dict and load_state_dict; for a display or a cache, volatile = ({0})"
OF_AN_OPTIMIZER = "Keep it in its param_groups, or in its state"
OF_A_MODULE = (
    "Keep it in a buffer (register_buffer), or give the class get_extra_state and set_extra_state; for a cache, "
    "volatile = ({0})"
)
OF_A_LOSS = "Keep it in a buffer of a loss that is a module; for a cache, give its class volatile = ({0})"
OF_A_HOOK = (
    "Keep it in a plugin with state_dict and load_state_dict, or in a buffer of the module; for a display or a cache, "
    "let the hook be an object whose class has volatile = ({0})"
)
WITH_FUNCTIONS = Scope(held_by=held_in_code, methods_of=methods_of)
"""How far phases, plugins and hooks are looked into, and a loss that is no module."""


class RootsOfLearner:
    """The roots of a learner.

    Args:
        models: Its modules by name.
        optimizers: Its optimizers by name.
        plugins: Its plugins by name, without their wrappers.
        loss_fn: Its loss function.
        extras: The modules that the loss function, phases and plugins hold, by their owners.
        phases: Its phases (`loopkit.phases.Phase`), and others that it has run.
        kept: Objects in these that are saved otherwise.
        switched: Returns the attributes of an optimizer, by its name, that are saved with its mode.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        plugins: Mapping[str, Any],
        loss_fn: Any,
        extras: Mapping[str, nn.Module],
        phases: Iterable[Any],
        kept: Iterable[Any] = (),
        switched: Callable[[str], Iterable[str]] = lambda name: (),
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self._plugins = plugins
        self._loss_fn = loss_fn
        self._extras = extras
        self._phases = list(phases)
        self._switched = switched
        owned: list[Any] = [*models.values(), *optimizers.values(), *plugins.values(), loss_fn, *self._phases]
        owned += kept
        for optimizer in optimizers.values():
            owned += _parts_of(optimizer)
        for plugin in plugins.values():
            if _saves_all(plugin):
                owned += _containers(plugin)
        self._owned = {id(each) for each in owned}

    def __iter__(self) -> Iterator[Root]:
        for name, model in self._models.items():
            yield Root(f"model {name!r}", model, OF_A_MODULE, self._leave(), self._written())
        for name, extra in self._extras.items():
            yield self._of_extra(name, extra)
        if not isinstance(self._loss_fn, nn.Module):
            leave = _without_modules(self._leave())
            yield Root("the loss function", self._loss_fn, OF_A_LOSS, leave, scope=WITH_FUNCTIONS)
        for name, optimizer in self._optimizers.items():
            if not _is_of_torch(optimizer) and type(optimizer).state_dict is Optimizer.state_dict:
                yield self._of_optimizer(name, optimizer)
        yield from map(self._of_phase, self._phases)
        for name, plugin in self._plugins.items():
            if not _saves_all(plugin):
                yield self._of_plugin(name, plugin)
        for owner, hook in self._hooks():
            if id(hook.function) not in self._owned:
                leave = _without_modules(self._leave())
                name = f"{hook.name} in {owner}" if owner else hook.name
                yield Root(name, hook.function, OF_A_HOOK, leave, scope=WITH_FUNCTIONS)

    def _of_extra(self, name: str, extra: nn.Module) -> Root:
        shown = in_words(name)
        if extra is not self._loss_fn:
            shown = f"a module of {shown}"
        return Root(shown, extra, OF_A_MODULE, self._leave())

    def _of_optimizer(self, name: str, optimizer: Optimizer) -> Root:
        drawn = [path for path, _ in own_generators(optimizer)]
        saved = (*OF_TORCH, *self._switched(name), *drawn)
        leave = self._leave(optimizer, saved, "_")
        return Root(f"optimizer {name!r}", optimizer, OF_AN_OPTIMIZER, leave)

    def _of_phase(self, phase: Phase) -> Root:
        name = f"phase {phase.name!r}"
        if not phase.saves_names:
            return Root(name, phase, OF_A_STATE, self._leave(), scope=OWN, state=("phases", phase.name))
        leave = _without_modules(self._leave(phase, phase.saved))
        return Root(name, phase, OF_A_PHASE, leave, scope=WITH_FUNCTIONS)

    def _of_plugin(self, name: str, plugin: Any) -> Root:
        if has_state(plugin):
            return Root(f"plugin {name!r}", plugin, OF_A_STATE, self._leave(), scope=OWN, state=("plugins", name))
        without = _without_modules if is_shipped(plugin) else self._without_saved_modules
        leave = self._without_set_at_begin(without(self._leave()), "train")
        return Root(f"plugin {name!r}", plugin, OF_A_PLUGIN, leave, scope=WITH_FUNCTIONS)

    def _hooks(self) -> Iterator[tuple[str, Hook]]:
        """The hooks of torch that hang on modules, parameters and optimizers, with the owners of these."""
        for name, model in self._models.items():
            yield from ((f"model {name!r}", hook) for hook in hooks_of_module(model))
        for name, extra in self._extras.items():
            yield from ((in_words(name), hook) for hook in hooks_of_module(extra))
        for name, optimizer in self._optimizers.items():
            yield from ((f"optimizer {name!r}", hook) for hook in hooks_of_optimizer(optimizer))
        yield from (("", hook) for hook in hooks_of_all())

    def of_data(self, phase: str, data: Any) -> Root:
        """Return the root of the data of a phase, or of the function that makes it."""
        root = root_of_data(phase, data, self._owned, self._models)
        if not self._trains(phase):
            return root
        leave = self._without_set_at_begin(root.leave, phase)
        return Root(root.name, root.object, root.cure, leave, scope=root.scope)

    def _without_saved_modules(self, leave: Leave) -> Leave:
        """Also leave out modules all of whose tensors are saved; others are held by functions."""

        def left(found: Found) -> bool:
            module = found.value
            if leave(found) or not isinstance(module, nn.Module):
                return leave(found)
            saved = {id(each) for each in self.saved()}
            return all(id(each) in saved for each in (*module.parameters(), *module.buffers()))

        return left

    def _trains(self, phase: str) -> bool:
        return any(each.name == phase and each.training for each in self._phases)

    def _without_set_at_begin(self, leave: Leave, phase: str) -> Leave:
        """Also leave out attributes of data that a plugin sets anew when an epoch of a training phase begins."""
        plugins = self._plugins.values()
        return lambda found: leave(found) or is_set_at_begin(found, plugins, phase)

    def _written(self) -> frozenset[str]:
        """The attributes of modules that a plugin with a state owns, such as ``p`` of ``model.p.dropout``."""
        owned: list[str] = []
        for plugin in self._plugins.values():
            if has_state(plugin):
                owned += declared(plugin, "owns", getattr(plugin, "owns", ()))
        return frozenset(name.split(".")[1] for name in owned if name.startswith("model."))

    def saved(self) -> Iterator[Tensor]:
        """The parameters and buffers of its modules, and the states of its optimizers."""
        for model in (*self._models.values(), *self._extras.values()):
            yield from model.parameters()
            yield from model.buffers()
        for optimizer in self._optimizers.values():
            yield from _moments(optimizer)

    def _leave(self, root: Any = None, names: Iterable[str] = (), prefix: str = " ") -> Leave:
        """Return the objects to leave out: other roots, and attributes of the root with these names or this prefix."""
        left = frozenset(names)

        def leave(found: Found) -> bool:
            if id(found.value) in self._owned or is_learner_of(found.value, self._models):
                return True
            return found.owner is root and (found.key in left or str(found.key).startswith(prefix))

        return leave


def _without_modules(leave: Leave) -> Leave:
    """Also leave out modules, which are roots of their own."""
    return lambda found: isinstance(found.value, nn.Module) or leave(found)


def has_state(plugin: Any) -> bool:
    """Whether a plugin has a state, which is saved under its name."""
    return callable(getattr(plugin, "state_dict", None))


def _saves_all(plugin: Any) -> bool:
    """Whether the state of a plugin holds all that it keeps: the tests of the distributions show that."""
    return has_state(plugin) and is_shipped(plugin)


def _containers(plugin: Any) -> Iterator[Any]:
    """Yield the containers that are attributes of a plugin."""
    if has_attributes(plugin):
        yield from (each for each in vars(plugin).values() if isinstance(each, (list, dict, set)))


def _parts_of(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the state and the groups of an optimizer, which a state holds."""
    state = getattr(optimizer, "state", None)
    if state is not None:
        yield state
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None:
        yield groups
    if isinstance(groups, list):
        yield from groups


def _moments(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors in the state of an optimizer."""
    states = getattr(optimizer, "state", None)
    if not isinstance(states, Mapping):
        return
    for state in states.values():
        if isinstance(state, dict):
            yield from (each for each in state.values() if isinstance(each, Tensor))


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.")
