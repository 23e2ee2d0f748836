"""Parameters that are not trained, and modules that stay in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from loopkit.base import checks
from loopkit.base.options import Shown
from loopkit.errors import PluginError
from loopkit.groups import covers, named_modules, named_parameters, nothing_matches
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class Freeze(Shown):
    """Train a part of the parameters only: the others get ``requires_grad = False``.

    Batch norm whose own parameters are all frozen (or which has none and is covered by a pattern) is kept in eval mode
    in training phases, so that its running statistics stay as well. Dropout still drops (`EvalMode` stops
    it). A parameter that had ``requires_grad = False`` before is never thawed. It owns ``trainable.<pattern>``, so
    another owner of the same parameters raises. So does a training epoch in which anything else has thawed one.

    ``learner.remove("freeze")`` trains again what it froze.

    The optimizer may hold frozen parameters: without a gradient they do not change, not by weight
    decay or momentum either. Its state for them begins when they are thawed.

    Args:
        patterns: Patterns of parameter or module names, as in `loopkit.groups`: ``"encoder"``, ``"*.bias"``; with
            several models ``"generator.encoder"``. Or mappings of patterns to the epoch in which they are thawed:
            ``{"encoder.layer3": 2}`` is frozen in the first two training epochs that ``learner.progress`` counts.
        thaw_at: The epoch in which patterns without one are thawed; None for never.
        norms: Keep frozen batch norm in eval mode.
        saved: False: checkpoints leave out what is frozen, and hold a fingerprint of it. They load only into models
            with the same frozen weights, such as the pretrained ones.
        name: The plugin's name.

    Raises:
        PluginError: A pattern has no match, an epoch is no whole number from 0, or something else has thawed a
            parameter.

    Example::

        freeze = Freeze("encoder", {"encoder.layer4": 2})
        learner = Learner(model, loss_fn, make_optimizer, plugins=[freeze])
        freeze.thaw("encoder.layer3")
    """

    provides = "freeze"

    def __init__(
        self,
        *patterns: str | Mapping[str, int],
        thaw_at: int | None = None,
        norms: bool = True,
        saved: bool = True,
        name: str = "freeze",
    ) -> None:
        self.name = name
        self.saved = saved
        self.thaw_at = thaw_at
        self.patterns = patterns
        self.norms = norms
        self.covered: list[str] = []
        """All patterns, without the epochs."""
        self.epochs: dict[str, int] = {}
        """The epoch in which a pattern is thawed."""
        for given in patterns:
            if isinstance(given, str) and thaw_at is not None:
                given = {given: thaw_at}
            if isinstance(given, Mapping):
                epochs: dict[str, Any] = {f"the epoch of {pattern!r}": epoch for pattern, epoch in given.items()}
                checks.whole("Freeze", 0, **epochs)
                self.epochs.update(given)
            self.covered += [given] if isinstance(given, str) else given
        if not self.covered:
            raise PluginError("Freeze: give patterns of the parameters to freeze, such as Freeze('encoder')")
        self._models: dict[str, nn.Module] = {}
        self.names: dict[nn.Parameter, list[str]] = {}
        """The parameters that it froze, also thawed ones, with all names."""
        self._thawed: list[str] = []
        self._evals: list[nn.Module] = []
        """The modules in eval mode for the running epoch."""
        self._state: dict[str, Any] | None = None

    @hookimpl(updates=("params",), before=("compile", "sync"))
    def setup_model(self, learner: Learner, name: str, model: nn.Module) -> nn.Module:
        """Freeze."""
        self._models = learner.models
        names = [path for path, _ in named_parameters(self._models)]
        for pattern in self.covered:
            self._check(pattern, names)
        paths: dict[nn.Parameter, list[str]] = {}
        for path, parameter in named_parameters(self._models):
            paths.setdefault(parameter, []).append(path)
        for parameter in learner.models[name].parameters():
            covered = any(covers(pattern, path) for pattern in self.covered for path in paths[parameter])
            if covered and parameter.requires_grad and not self._is_thawed(paths[parameter]):
                self.names[parameter] = paths[parameter]
                _freeze(parameter)
        if self._state is not None and name == list(self._models)[-1]:
            self.load_state_dict(self._state)
        return model

    def leave(self, learner: Learner) -> None:
        """Train its frozen parameters again; parameters frozen before stay frozen."""
        for parameter in self.names:
            parameter.requires_grad = True
        for module in self._evals:
            module.train()
        self.names = {}
        self._evals = []

    def owns(self) -> tuple[str, ...]:
        """Whether the parameters that its patterns cover are trained."""
        return tuple(f"trainable.{pattern}" for pattern in self.covered)

    def leaves_out(self) -> tuple[str, ...]:
        """The patterns of parameters that checkpoints leave out while they are frozen."""
        return () if self.saved else tuple(self.covered)

    def _check(self, pattern: str, names: list[str]) -> None:
        if not any(covers(pattern, path) for path in names):
            raise PluginError(f"plugin {self.name!r}: pattern {nothing_matches(pattern, names)}")

    @hookimpl(updates=("model",))
    @contextmanager
    def epoch_context(self, learner: Learner, phase: Phase) -> Iterator[None]:
        """Thaw what is due, and keep frozen batch norm in eval mode; the engine restores the modes."""
        outer = self._evals
        self._evals = []
        try:
            if phase.training:
                self._begin_training(learner)
            yield
            if phase.training:
                self._check_frozen()
        finally:
            self._evals = outer

    def _begin_training(self, learner: Learner) -> None:
        for pattern, due in self.epochs.items():
            if learner.progress.epochs >= due and pattern not in self._thawed:
                self.thaw(pattern)
        self._evals = [module for module in self._frozen_norms() if module.training]
        for module in self._evals:
            module.train(False)
        self._check_frozen()

    def _check_frozen(self) -> None:
        """Raise if another plugin or the script has thawed a frozen parameter."""
        for parameter, paths in self.names.items():
            if parameter.requires_grad and not self._is_thawed(paths):
                raise PluginError(
                    f"plugin {self.name!r} keeps parameter {paths[0]!r} frozen, and something else has set its "
                    f"requires_grad = True: take it out of the patterns, or call thaw({paths[0]!r}) of the plugin"
                )

    def _frozen_norms(self) -> list[nn.Module]:
        """The frozen layers with running statistics."""
        found: dict[nn.Module, list[str]] = {}
        for path, module in named_modules(self._models) if self.norms else ():
            if isinstance(module, _NormBase):
                found.setdefault(module, []).append(path)
        return [module for module, paths in found.items() if self._is_frozen_norm(module, paths)]

    def _is_frozen_norm(self, module: nn.Module, paths: list[str]) -> bool:
        own = list(module.parameters(recurse=False))
        if own:
            return all(p in self.names and not p.requires_grad for p in own)
        covered = any(covers(pattern, path) for pattern in self.covered for path in paths)
        return covered and not self._is_thawed(paths)

    def freeze(self, pattern: str) -> None:
        """Train no longer what a pattern covers of the parameters that were thawed; batch norm from the next epoch on.

        Raises:
            PluginError: The pattern covers no parameter that the plugin freezes.
        """
        found = [p for p, paths in self.names.items() if any(covers(pattern, path) for path in paths)]
        if not found:
            raise PluginError(
                f"plugin {self.name!r}: {pattern!r} covers none of {', '.join(self.covered)}, which it freezes; "
                f"Freeze({{{pattern!r}: 0}}) trains it at first"
            )
        self._thawed.append(f"!{pattern}")
        for parameter in found:
            _freeze(parameter)

    def _is_thawed(self, paths: list[str]) -> bool:
        """Whether what has these names was thawed, and not frozen again since."""
        for pattern in reversed(self._thawed):
            if any(covers(pattern.removeprefix("!"), path) for path in paths):
                return not pattern.startswith("!")
        return False

    def thaw(self, pattern: str) -> None:
        """Train again what a pattern covers, from now on.

        Raises:
            PluginError: The pattern has no match.
        """
        self._check(pattern, [path for path, _ in named_parameters(self._models)])
        self._thawed.append(pattern)
        for parameter, paths in self.names.items():
            if any(covers(pattern, path) for path in paths):
                parameter.requires_grad = True
        frozen = self._frozen_norms() if self._evals else []
        for module in [module for module in self._evals if module not in frozen]:  # eval mode was for this epoch
            module.train()
            self._evals.remove(module)

    def is_frozen(self, path: str) -> bool:
        """Whether none of the parameters that a path (or a pattern) covers is trained.

        Raises:
            PluginError: It has no match.
        """
        found = list(named_parameters(self._models))
        self._check(path, [name for name, _ in found])
        return not any(parameter.requires_grad for name, parameter in found if covers(path, name))

    def state_dict(self) -> dict[str, Any]:
        """The names of the frozen parameters, and the patterns that were thawed."""
        frozen = [paths[0] for parameter, paths in self.names.items() if not parameter.requires_grad]
        return {"frozen": frozen, "thawed": list(self._thawed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Freeze and thaw so that what is frozen is what was.

        Raises:
            PluginError: The plugin does not freeze a parameter of the state.
        """
        if not self._models:
            self._state = state
            return
        unknown = set(state["frozen"]) - {path for paths in self.names.values() for path in paths}
        if unknown:
            raise PluginError(
                f"plugin {self.name!r}: the state's frozen parameters {', '.join(sorted(unknown)[:5])} are not "
                f"frozen by its patterns ({', '.join(self.covered)})"
            )
        self._state = None
        self._thawed = list(state["thawed"])
        for parameter, paths in self.names.items():
            if any(path in state["frozen"] for path in paths):
                _freeze(parameter)
            else:
                parameter.requires_grad = True


def _freeze(parameter: nn.Parameter) -> None:
    parameter.requires_grad = False  # by assignment, which lazy ones allow
    parameter.grad = None  # else an optimizer would go on with it


class EvalMode(Shown):
    """Keep modules, and all below them, in eval mode during training phases.

    Dropout, batch norm and others do as they do in a validation. Their parameters are trained all the same, unless
    `Freeze` freezes them. Around the epoch the engine keeps and restores the modes.

    Args:
        patterns: Patterns of module names, as in `loopkit.groups`: ``"encoder"``, ``"*.dropout"``.
        name: The plugin's name.

    Raises:
        PluginError: A pattern has no match.

    Example::

        EvalMode("encoder")
    """

    provides = "eval_mode"

    def __init__(self, *patterns: str, name: str = "eval_mode") -> None:
        if not patterns:
            raise PluginError("EvalMode: give patterns of modules, such as EvalMode('encoder')")
        self.name = name
        self.patterns = patterns

    @hookimpl
    def setup_model(self, learner: Learner, model: nn.Module) -> nn.Module:
        """Check the patterns."""
        names = [path for path, _ in named_modules(learner.models) if path]
        for pattern in self.patterns:
            if not any(covers(pattern, path) for path in ("", *names)):
                raise PluginError(f"plugin {self.name!r}: pattern {nothing_matches(pattern, names)}")
        return model

    @hookimpl(updates=("model",))
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Put the modules in eval mode."""
        if phase.training:
            for path, module in named_modules(learner.models):
                if any(covers(pattern, path) for pattern in self.patterns):
                    learner.models.put_in_eval(module)
