"""Models: modules, their wrappers, their optimizers, and Weights: the replacements of their own weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from loopkit.base.batches import describe
from loopkit.base.named import Named
from loopkit.base.notes import locate
from loopkit.base.sharded import is_sharded
from loopkit.base.words import nearest
from loopkit.engine.compile.refusals import check_trainable
from loopkit.engine.kept.compiled import compiled_in_place
from loopkit.engine.kept.extras import Extras, Owner
from loopkit.engine.kept.measured import Measured
from loopkit.engine.kept.modes import Modes
from loopkit.engine.kept.optimizers import GENERATORS, OptimizerPart, is_of_torch, is_optimizer
from loopkit.engine.life.module_modes import ModuleModes, has_own_train, switch_tree, write
from loopkit.engine.life.routing import ForwardWrapper
from loopkit.engine.step.autocast_cache import AutocastCache
from loopkit.errors import PhaseError, PluginError
from loopkit.groups import params_of

if TYPE_CHECKING:
    from loopkit.engine.compile.registry import Registry

Factory = Callable[[Any], torch.optim.Optimizer]
Optimizers = torch.optim.Optimizer | Factory


class Models(Named[nn.Module]):
    """The modules by name, routed through what plugins wrap around them, and their optimizers.

    Args:
        given: A module, or a mapping of named modules.
    """

    def __init__(self, given: nn.Module | Mapping[str, nn.Module]) -> None:
        mapping = isinstance(given, Mapping) and not isinstance(given, nn.Module)
        super().__init__("model", given if mapping else {"model": given})  # type: ignore[arg-type]
        for name, module in self.items():
            if not isinstance(module, nn.Module):
                raise PhaseError(f"model {name!r} is {module!r}: it must be an instance of torch.nn.Module")
            self[name] = compiled_in_place(module)
        self.module_modes = ModuleModes(self.with_extras)
        """Which modules are in train and eval mode."""
        self.module_modes.meet(self.values())
        self.optimizer: Any = None
        """The optimizer, or the mapping of them, as it was given."""
        self.optimizers: dict[str, torch.optim.Optimizer] = Named("optimizer")
        self.weights = Weights()
        self.measured = Measured(self)
        """The weights that the metrics of phases were measured with, where a saver keeps them."""
        self.modes = Modes({})
        """The optimizers whose ``train()`` and ``eval()`` are called."""
        self.casts = AutocastCache()
        self.aside = False
        """Whether a forward now is a plugin's own, in `Learner.aside`: hooks of modules leave it out."""
        self.extras = Extras(self)
        """The modules of the loss function, of phases and of plugins."""
        self._known: dict[nn.Parameter, str] = {}
        """The parameters when the optimizers came, or an epoch last began, with their names."""
        self._routes: dict[str, ForwardWrapper] = {}
        self._wrapped: set[str] = set()

    def as_given(self, given: nn.Module | Mapping[str, nn.Module]) -> nn.Module | Mapping[str, nn.Module]:
        """Return the model or mapping that was given, with modules that were taken out of wrappers in their place."""
        if isinstance(given, nn.Module) or not isinstance(given, Mapping):
            return self["model"]
        return given if all(self[name] is module for name, module in given.items()) else dict(self)

    def with_extras(self) -> dict[str, nn.Module]:
        """The models, and the modules of the loss function, of phases and of plugins, which are trained beside them.

        Those are under ``"loss function"``, ``"phase <name>"`` and ``"plugin <name>"``; each owner's are in one module.
        """
        return {**self, **self.extras.modules}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter with its name: of a single model by its path, of others after the name of the model."""
        for prefix, module in self._prefixed():
            for path, p in module.named_parameters():
                yield f"{prefix}{path}", p

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every buffer with its name, as in `named_parameters`."""
        for prefix, module in self._prefixed():
            for path, buffer in module.named_buffers():
                yield f"{prefix}{path}", buffer

    def _prefixed_models(self) -> Iterator[tuple[str, nn.Module]]:
        for name, model in self.items():
            yield f"{name}." if len(self) > 1 else "", model

    def _prefixed(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self._prefixed_models()
        for name, extra in self.extras.modules.items():
            yield f"{name}.", extra

    def find_extras(self, owners: Iterable[Owner]) -> None:
        """Look for the modules of these owners, and decide which modules stay in eval mode."""
        trained = {id(p) for each in self.optimizers.values() for p in params_of(each)}
        self.extras.find(owners, trained)
        self.module_modes.decide(trained, [*self._prefixed_models(), *self.extras.parts()])

    def set_module_modes(self, training: bool) -> list[tuple[nn.Module, bool]]:
        """Put the modules in train or eval mode; returns the mode in which each was.

        In train mode, modules that the user had put into eval mode before stay there.
        """
        modules = self._modules()
        if training:
            self._note_parameters(modules)
        return self.module_modes.switch(training, modules)

    def evaluated(self, exact: Callable[[], bool]) -> AbstractContextManager[None]:
        """Inside, modules with their own ``train`` are in eval mode; see `ModuleModes.evaluated`."""
        return self.module_modes.evaluated(partial(self.weights.replaced, is_form=True), exact)

    def restore_module_modes(self, modes: list[tuple[nn.Module, bool]]) -> None:
        """Put modules back in the modes that `set_module_modes` returned."""
        if not has_own_train(module for module, _ in modes):
            write(modes)
            return
        want = dict(modes)
        for top in self.with_extras().values():
            switch_tree(top, want)

    def take_measured(self, phase: str) -> None:
        """Copy what stands in the weights' place now, in the form in which modules are trained."""
        with self.weights.in_training_form():
            self.measured.take(phase)

    def put_in_eval(self, module: nn.Module) -> None:
        """Put a module and its parts in eval mode."""
        switch_tree(module, dict.fromkeys(module.modules(), False), keep=True)

    @contextmanager
    def in_train_mode(self, module: nn.Module) -> Iterator[None]:
        """Inside, a module and its parts are in train mode."""
        before = {each: each.training for each in module.modules()}
        switch_tree(module, dict.fromkeys(before, True), keep=True)
        try:
            yield
        finally:
            switch_tree(module, before)

    def _modules(self) -> list[nn.Module]:
        """Every module of every model; ``modules()`` of torch takes several times as long, at each epoch."""
        found = list(dict.fromkeys(self.with_extras().values()))
        seen = set(found)
        for module in found:
            for child in module._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    found.append(child)
        return found

    def device(self) -> str:
        """Where the first parameter is, in words."""
        return next((str(p.device) for p in self.parameters()), "no parameters")

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter of every model."""
        for model in self.values():
            yield from model.parameters()

    def described(self) -> list[str]:
        """The models, their parameters and the optimizers, in words for people."""
        made = [each for each in dict.fromkeys(self.parameters()) if not is_lazy(each)]
        parts = [
            type(model).__name__ if len(self) == 1 else f"{name} {type(model).__name__}" for name, model in self.items()
        ]
        parts.append(f"{sum(each.numel() for each in made):,} parameters")
        for optimizer in self.optimizers.values():
            rates = sorted({float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None})
            ends = dict.fromkeys(f"{rate:.3g}" for rate in rates[:1] + rates[-1:])
            parts.append(" lr ".join(filter(None, [type(optimizer).__name__, " to ".join(ends)])))
        return parts

    # Plugins around the modules

    def has_wrapper_of(self, plugin: str) -> bool:
        """Whether a plugin has put a wrapper around a module, so that it cannot be taken out."""
        return plugin in self._wrapped

    def wrappers(self) -> dict[str, nn.Module]:
        """The module that is called in the place of each wrapped one."""
        return {name: route.wrapper for name, route in self._routes.items()}

    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Inside, calls reach the modules directly."""
        wrappers = self.wrappers()
        for name, route in self._routes.items():
            route.wrapper = self[name]
        try:
            yield
        finally:
            for name, wrapper in wrappers.items():
                self._routes[name].wrapper = wrapper

    def put_back(self, wrappers: Mapping[str, nn.Module], plugins: Iterable[str]) -> None:
        """Take back what `set_up` of these plugins did."""
        self._wrapped -= set(plugins)
        for name, route in list(self._routes.items()):
            if name in wrappers:
                route.wrapper = wrappers[name]
            else:
                self._routes.pop(name).undo()

    def set_up(self, registry: Registry, plugins: Iterable[str]) -> None:
        """Run the ``setup_model`` of these plugins on every module, and route calls through what wraps it."""
        check_trainable(registry.plugins, self)
        for impl in registry.ordered("setup_model"):
            if impl.entry.plugin not in plugins:
                continue
            for name, module in self.items():
                top = self._routes[name].wrapper if name in self._routes else module
                wrapper = registry.call(impl, name=name, model=top)
                if not isinstance(wrapper, nn.Module):
                    raise PluginError(
                        f"plugin {impl.entry.plugin!r}: setup_model returned {describe(wrapper)}, not a module"
                    )
                if wrapper is module or wrapper is top:
                    continue
                self._wrapped.add(impl.entry.plugin)
                if name in self._routes:
                    self._routes[name].wrapper = wrapper
                else:
                    self._routes[name] = ForwardWrapper(module, wrapper)

    # Optimizers

    def set_optimizers(self, given: Optimizers | Mapping[str, Optimizers] | None) -> None:
        """Take optimizers, or make them by their factories."""
        if given is None:
            return
        if is_optimizer(given) or not isinstance(given, Mapping):
            self.optimizer = self._make_optimizer("optimizer", given, False)
            self.optimizers = Named("optimizer", {"optimizer": self.optimizer})
        else:
            made = {name: self._make_optimizer(name, each, True) for name, each in given.items()}
            self.optimizers = Named("optimizer", made)
            self.optimizer = self.optimizers
        self.modes = Modes(self.optimizers, self.modes.wanted, self.modes.owner)
        self._note_parameters(self._modules())

    def set_up_optimizers(self, registry: Registry, plugins: Iterable[str]) -> None:
        """Run the ``setup_optimizer`` of these plugins on every optimizer, and put what it returns in its place."""
        for impl in registry.ordered("setup_optimizer"):
            if impl.entry.plugin not in plugins:
                continue
            for name, optimizer in self.optimizers.items():
                made = registry.call(impl, name=name, optimizer=optimizer)
                if not is_optimizer(made):
                    raise PluginError(
                        f"plugin {impl.entry.plugin!r}: setup_optimizer returned {describe(made)}, not an optimizer"
                    )
                if made is not optimizer:
                    self._wrapped.add(impl.entry.plugin)
                    self.put_optimizers({**self.optimizers, name: made})

    def put_optimizers(self, optimizers: dict[str, torch.optim.Optimizer]) -> None:
        """Replace optimizers by name."""
        single = self.optimizer is not self.optimizers  # one object where a mapping was given
        self.optimizers = Named("optimizer", optimizers)
        self.optimizer = next(iter(optimizers.values()), None) if single else self.optimizers
        self.modes = Modes(optimizers, self.modes.wanted, self.modes.owner)

    def own_optimizer_states(self) -> dict[str, Any]:
        """Copies of all that optimizers of other packages than torch keep, which may be in their parameter groups."""
        parts = [OptimizerPart(name, each) for name, each in self.optimizers.items() if not is_of_torch(each)]
        return {part.name: copy.deepcopy(part.saved()) for part in parts}

    def put_optimizers_back(self, states: Mapping[str, Any], keep: Collection[str]) -> None:
        """Put optimizers back into states from `own_optimizer_states`.

        Args:
            states: By name.
            keep: Options of parameter groups that stay as they are, such as a rate that a plugin changes.
        """
        for name, state in states.items():
            saved = copy.deepcopy(state)
            saved.pop(GENERATORS, None)  # what was drawn stays drawn, as with the global ones
            for group, now in zip(saved["param_groups"], self.optimizers[name].param_groups, strict=True):
                group.update({key: now[key] for key in keep if key in now})
            OptimizerPart(name, self.optimizers[name]).load(saved)

    def _note_parameters(self, modules: Iterable[nn.Module]) -> None:
        """Note the models' parameters; raise if an optimizer trains one that was replaced since the last time.

        Raises:
            PhaseError: It does.
        """
        known = self._known
        if {p for module in modules for p in module._parameters.values()} - {None} == known.keys():
            return
        here: dict[nn.Parameter, str] = {}
        for name, p in self.named_parameters():
            here.setdefault(p, name)
        self._known = here
        if not (gone := known.keys() - here.keys()):
            return
        for optimizer in self.optimizers.values():
            for p in params_of(optimizer):
                if p in gone and not is_sharded(p):
                    self._known = known  # so that the next call raises again
                    raise PhaseError(
                        f"parameter {known[p]!r} was replaced after the optimizer had taken it: the old one is "
                        f"trained, the new one is used and saved. Change it in place, with torch.no_grad(): "
                        f"p.copy_(new), or replace it before Learner(...), and give a factory: "
                        f"optimizer=lambda params: ..."
                    )

    def _make_optimizer(self, name: str, given: Optimizers, named: bool) -> torch.optim.Optimizer:
        if is_optimizer(given):
            return given
        if isinstance(given, nn.Module):
            raise PhaseError(
                f"optimizer {name!r} is the module {type(given).__name__}: the order is "
                f"Learner(model, loss_fn, optimizer)"
            )
        if not callable(given):
            raise PhaseError(f"optimizer {name!r} is {given!r}: give an optimizer, or a function params -> optimizer")
        if named and name not in self:
            raise PhaseError(
                f"optimizer {name!r} is a factory, but no model has that name{nearest(name, self)}; "
                f"the models are {', '.join(self)}"
            )
        models = [self[name]] if named else self.values()
        try:
            made = given([p for model in models for p in model.parameters()])
        except Exception as error:
            trace = error.__traceback__
            if isinstance(error, TypeError) and trace is not None and trace.tb_next is None:
                raise PhaseError(
                    f"the factory of optimizer {name!r} is called with the parameters, and cannot be: {error}. Give "
                    f"a function of them, such as lambda params: torch.optim.AdamW(params, lr=1e-3)"
                ) from error
            locate(error, f"the factory of optimizer {name!r} raised this")
            raise
        if not is_optimizer(made):
            raise PhaseError(f"the factory of optimizer {name!r} returned {made!r}: it must return a torch optimizer")
        return made


class Replacement(NamedTuple):
    """Something that stands in the weights' place."""

    by: str
    put: Callable[[], None]
    away: Callable[[], None]
    is_form: bool = False
    """Whether it is the evaluation form of modules, of the weights that are in place below it."""


class Weights:
    """The stack of things in the place of the models' own weights, put away from the top by whoever saves.

    There are: other weights, such as a plugin's average (``by`` is the plugin); weights in an optimizer's evaluation
    form (``by`` is ``"optimizer.eval"``); weights in another layout (``by`` is empty); and a module's evaluation form,
    such as a merged adapter (``is_form``).
    """

    def __init__(self) -> None:
        self.stack: list[Replacement] = []
        """The lowest first."""
        self._set_aside: list[list[Replacement]] = []
        """The stand-ins that `own` has removed, to be restored."""

    @property
    def by(self) -> str:
        """The plugin, or ``"optimizer.eval"``, whose weights stand in place of the models' own; empty if they do."""
        for each in reversed(self.stack):
            if each.by:
                return each.by
        return ""

    @contextmanager
    def replaced(
        self, put: Callable[[], None], away: Callable[[], None], by: str = "", is_form: bool = False
    ) -> Iterator[None]:
        """Inside, something stands in the weights' place.

        Args:
            put: Puts it there.
            away: Puts the weights back.
            by: The plugin whose weights these are; empty if the models' own weights stay, in another form.
            is_form: Whether it is the evaluation form of modules.
        """
        entry = Replacement(by, put, away, is_form)
        put()
        self.stack.append(entry)
        try:
            yield
        finally:
            for held in self._set_aside:  # it is left inside of `own`, and has been put away
                held[:] = [each for each in held if each is not entry]
            if any(each is entry for each in self.stack):
                self._take_out(entry)

    def _take_out(self, entry: Replacement) -> None:
        at = next(i for i, each in enumerate(self.stack) if each is entry)
        above = self.stack[at + 1 :]  # of contexts that are left out of turn, such as those of a generator
        for each in reversed(above):
            each.away()
        entry.away()
        del self.stack[at]
        for each in above:
            each.put()

    @contextmanager
    def in_training_form(self) -> Iterator[None]:
        """Inside, replaced weights are in the form in which modules are trained."""
        forms: list[Replacement] = []
        while self.stack and self.stack[-1].is_form:
            forms.append(self.stack.pop())
            forms[-1].away()
        try:
            yield
        finally:
            for each in reversed(forms):
                each.put()
                self.stack.append(each)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Inside, the models hold their own weights, as they are trained and saved."""
        away, self.stack = self.stack, []
        for each in reversed(away):
            each.away()
        self._set_aside.append(away)
        try:
            yield
        finally:
            self._set_aside = [held for held in self._set_aside if held is not away]
            for each in away:
                each.put()
            self.stack = away
