"""Plugin: all that a plugin may have, and what can be asked of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from loopkit.errors import PluginError
from loopkit.events import snake_case
from loopkit.hooks import check_declaration, has_hooks, implemented

if TYPE_CHECKING:
    from torch import Tensor

    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.step.step import Step
    from loopkit.learner import Learner
    from loopkit.metrics import Metric
    from loopkit.phases import Phase

Declaration = tuple[str, ...] | Callable[[], tuple[str, ...]]
"""Names, or a method that returns them."""


class Plugin(Protocol):
    """All that a plugin may have besides its hooks.

    A plugin is any object with a method that `loopkit.hookimpl` marks. Everything here is optional; no plugin derives
    from this class. Hooks are in `loopkit.hooks`.
    """

    # To observe

    reads: Declaration
    """State that its hooks read: hooks that change it run before. A hook's own ``@hookimpl(reads=...)`` comes first;
    this is for all others. So it is with ``updates``, ``writes``, ``before`` and ``after``."""
    provides: str
    """Its role, in one word, such as ``"clip"``. Other plugins, ``order``, ``learner.remove`` and ``learner.replace``
    can then refer to the role instead of the name. ``"observer"`` promises that training is the same without it:
    `loopkit eject` leaves it out of the loop that it writes. By default it has no role."""

    # To change something

    updates: Declaration
    """State that its hooks change, starting from the existing value."""
    writes: Declaration
    """State that its hooks create."""
    before: Declaration
    """Plugins, by name or role, that run after it."""
    after: Declaration
    """Plugins, by name or role, that run before it."""
    owns: Declaration
    """State that only one plugin can control in the whole fit, such as ``("optimizer.lr",)``. A second owner raises an
    error."""

    # When an error asks for it

    name: str
    """Its unique name in the learner. Without it, the class's name in snake case."""
    optional: tuple[str, ...]
    """Hooks of events that no phase has to emit. Without it, each of its events must have a phase
    that emits it."""
    per_process: tuple[str, ...]
    """Options that may differ between the processes that train together, such as ``("directory",)``. All others must
    be the same in all of them, and the plugin there, if it declares that it changes anything (``updates``, ``writes``,
    ``owns``, or a replacement), or has this attribute, be it empty. Other plugins may differ or be absent."""
    monitor: str
    """The metric that it goes by, such as ``"val/loss"``. If no phase of a fit has it, the fit raises an error."""
    mode: str | None
    """Whether lower, ``"min"``, or higher, ``"max"``, values of that metric are better; None: the metric's own
    direction. A score with ``"min"`` causes a warning."""
    needs_mode: bool
    """Whether it depends on the direction of the metric. Without it, True."""

    def higher_is_better(self, metric: str) -> bool | None:
        """Whether higher values of one of its metrics are better; None if unknown, or for another plugin's metric."""
        ...

    rows: Sequence[Mapping[str, Any]]
    """The values of each epoch, by name; `Progress` draws them for a plugin that provides ``"history"``."""
    takes_empty: bool
    """Whether batches without samples go to the phases, such as Poisson sampling makes (`Phase.takes_empty`). Without
    it, False."""

    # When a check asks for it

    syncs: tuple[str, ...] | bool
    """Hooks of steps that have to wait for the device; True for all. `loopkit_testing` reports waits in others. By
    default none."""
    volatile: tuple[str, ...]
    """Keys of its state, and names that it logs, whose values two equal runs need not share, such as measured seconds.
    `loopkit_testing` leaves them out. Of a plugin without a state, also attributes that need no saving, as patterns of
    `fnmatch`: the first save names no change of them."""

    # To save its state

    shared: bool
    """Whether several learners may use it, such as a logger or a budget. Without it, a plugin with a ``state_dict``
    belongs to the first learner that uses it: a fit of another one raises, unless its state is as when it was made.
    False makes a plugin without one belong to one learner, too."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state that a checkpoint saves. The engine calls it for ``learner.state_dict()``.

        It can hold None, booleans, numbers, strings, lists, tuples, dicts and tensors. Values of a single epoch are
        better kept in ``epoch.store(self)``, which is saved with the epoch.
        """
        ...

    def load_state_dict(self, state: Any) -> None:
        """Restore the return value of `state_dict`. The engine calls it for ``learner.load_state_dict``."""
        ...

    def reshard(self, states: Sequence[Any], rank: int, size: int) -> Any:
        """This process's share of the states of all processes that saved.

        A plugin has it if its state differs from process to process: the engine then saves each. The engine
        calls it at a load by another number of processes. Without it, one state serves all processes.
        """
        ...

    def reshard_store(self, stores: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """The same as `reshard`, for ``epoch.store(self)`` of each process."""
        ...

    def settle(self, learner: Learner) -> None:
        """Read values still on their way from the device, and raise if they are bad. Called before each save."""
        ...

    def hold_stop(self, learner: Learner, reason: str, by: str) -> bool:
        """Whether it postpones a requested stop, to request it later itself. Called between two steps, for each
        ``learner.stop``."""
        ...

    leaves_out: Declaration
    """Patterns of parameters, as in `loopkit.groups`, that checkpoints leave out while they are frozen. A checkpoint
    holds a fingerprint of each, and loads only into a model that has the same values. Without it, all are saved."""
    unsaved: bool
    """Whether its state has changed without training. A saver looks for it at the end of the fit, and saves
    once more. Without it, False."""

    # When others look for it

    own_updates: bool | str
    """Whether it does its part in phases with ``own_updates = True``, or a line that describes how; a property may
    decide. Without it, only if it has no hook that comes before an update: a fit raises where it does not."""
    removable: bool
    """Whether ``learner.remove`` can remove it. False if it has changed a model for good. Without it, True."""
    agrees_in_steps: bool
    """Whether all processes that it joins make the same steps from the same parameters. Plugins that cancel steps look
    for it: if so, they cancel in all processes or in none. Without it, True."""

    def leave(self, learner: Learner) -> None:
        """Undo its changes, such as a learning rate. `Learner.remove` and `Learner.replace` call it."""
        ...

    def averaged(self, learner: Learner) -> AbstractContextManager[None]:
        """Context in which its weights replace the models' own. For ``learner.evaluate(data, weights=...)``."""
        ...

    def unsynced(self) -> AbstractContextManager[None]:
        """Context in which a forward is not synced over processes. Plugins with an extra forward look for it in the
        plugin that provides ``"sync"``."""
        ...

    def peek(self, phase: str) -> dict[str, Tensor | float]:
        """The values so far of the metrics of a phase's open epoch, by the name of the phase, unread. `Progress` and
        `LogMetrics` ask plugins that provide ``"metrics"``."""
        ...

    def traced_metrics(self, learner: Learner, epoch: Epoch) -> Sequence[Metric] | None:
        """The metrics of an epoch that its ``traced`` hooks feed. A plugin that records steps asks for them; None: the
        hooks have to be called."""
        ...

    def vote(self, hook: str) -> Callable[[Step], Tensor] | None:
        """For a plugin that records steps: a function that checks with tensors whether one of its hooks can be skipped.

        The function returns a scalar. If it is False, the step is undone and repeated with the hook. It may read
        tensors that are attributes of the plugin. None: the hook has to be called in each step.
        """
        ...

    loss_scale: float
    """The factor of the loss, and so of the gradients until its ``update_begin`` divides by it; reading it may wait for
    the device. `ClipGradNorm` looks for it. Without it, 1."""
    norm: Tensor | None
    """The norm of the last gradients. Plugins that log look for it where ``"clip"`` is provided."""
    last: dict[str, Tensor]
    """The norms of the last gradients by name. Plugins that log look for it where ``"norm"`` is provided."""
    directory: Any
    """The directory that it saves to. Commands look for it where ``"checkpoint"`` is provided."""

    def names(self) -> Sequence[str]:
        """The names of the metrics that it makes, as patterns of ``metrics.<name>``. To find which way a metric
        is better, the engine asks plugins that provide ``"metrics"``."""
        ...

    # To tell people

    def explain(self, phase: Phase, hook: str) -> str:
        """The note of ``learner.explain()`` next to one of its hooks; an empty string for none."""
        ...

    def remark(self, phase: Phase, hook: str, plugin: str) -> str:
        """The note of ``learner.explain()`` next to a hook of any plugin; an empty string for none."""
        ...

    def options(self) -> dict[str, Any]:
        """The options it was made with, by the names of its ``__init__``; see `loopkit.base.options.options_of`.

        Define it if the plugin does not keep every option in an attribute with the same name.
        """
        ...


class Average(Protocol):
    """All that a plugin with ``provides = "average"`` has, beside its hooks: other weights than the models' own.

    ``learner.evaluate(data, weights=...)``, `Checkpoint` and `load_best` ask for it; it is checked when it is added.

    Example::

        class Slow:
            name, provides, owns = "slow", "average", ("weights.val",)
    """

    provides: str
    """``"average"``."""
    owns: Declaration
    """The places where it stands: ``("weights",)`` in all epochs that do not train, ``("weights.val",)`` in epochs of a
    phase, and ``()`` in none. `load_best` takes the models' own weights, and its state, where it stands there again."""

    def averaged(self, learner: Learner) -> AbstractContextManager[None]:
        """Context in which its weights replace the models' own, by ``learner.models.weights.replaced``."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """The averaged weights, and the rest of its state."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Resume from the result of `state_dict`; `load_best` calls it outside of a fit.

        If only weights were saved, it gets the state of a new plugin, or ``{}`` if `fresh` cannot make one.
        """
        ...


def unwrapped(plugin: Any) -> Any:
    """The plugin in a plugin that wraps it, as `throttle` does, else itself."""
    return getattr(plugin, "__wrapped__", plugin)


def provided(plugin: Any) -> str:
    """The role that a plugin declares in ``provides``, or an empty string."""
    return getattr(plugin, "provides", "")


def has_a_say(plugin: Any) -> bool:
    """Whether training may be another one without a plugin, by its declarations; see `Plugin.per_process`."""
    own = unwrapped(plugin)
    if hasattr(own, "per_process") or declared(own, "owns", getattr(own, "owns", ())):
        return True
    for hook in implemented(own):
        if hook_states(own, hook, "updates", "writes") - {"*"}:  # which says where in the order it stands
            return True
    return not {"optimizer_step", "take_step"}.isdisjoint(implemented(own))


def changed_options(plugins: Iterable[Any]) -> set[str]:
    """The options of optimizers, such as ``"lr"``, that any of the plugins owns, updates or writes."""
    names: set[str] = set()
    for plugin in plugins:
        own = unwrapped(plugin)
        names.update(declared(own, "owns", getattr(own, "owns", ())))
        for hook in implemented(own):
            names |= hook_states(own, hook, "updates", "writes")
    return {name.removeprefix("optimizer.") for name in names if name.startswith("optimizer.")}


def hook_states(own: Any, hook: str, *labels: str) -> set[str]:
    """The states that a hook declares under these words, such as ``"reads"`` and ``"updates"``."""
    options = getattr(own, hook).loopkit_options
    return {n for label in labels for n in declared(own, label, getattr(options, label) or getattr(own, label, ()))}


def declared(plugin: Any, label: str, declaration: Any) -> tuple[str, ...]:
    """The names of a declaration; a function of the plugin is called."""
    if isinstance(declaration, tuple) and not declaration:
        return ()
    check_declaration(f"plugin {_called(plugin)!r}: {label}", declaration)
    if callable(declaration):
        names = declaration() if inspect.ismethod(declaration) else declaration(plugin)
        check_declaration(f"plugin {_called(plugin)!r}: the result of {label}", names)
        return tuple(names)
    return tuple(declaration)


def _called(plugin: Any) -> str:
    name = getattr(plugin, "name", None)
    return name if isinstance(name, str) else snake_case(type(plugin).__name__)


def plugin_name(plugin: Any) -> str:
    """A plugin's ``name``, else its class's in snake case."""
    if inspect.isclass(plugin):
        raise PluginError(f"{plugin.__name__} is a class; a plugin is an instance: {plugin.__name__}(...)")
    if plugin is None or type(plugin) in (str, list, tuple, set, dict):
        raise PluginError(
            f"{plugin!r} is no plugin: plugins are objects with hooks, such as Learner(plugins=[Metrics()])"
        )
    if not has_hooks(plugin) and (wrapped := _wrapped(plugin)):
        raise PluginError(f"{plugin!r:.80} is no plugin: wrap it, {wrapped}")
    if (name := getattr(plugin, "name", None)) is None:
        name = snake_case(type(plugin).__name__)
    if not isinstance(name, str) or not name or "." in name or not name.isprintable():
        raise PluginError(f"plugin {plugin!r}: its name is {name!r}; a name is printable text without a dot")
    return name


def _wrapped(part: Any) -> str:
    """The plugin that takes what is a part of one: a metric, a scheduler of torch, a schedule; else an empty string."""
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau  # these are not imported before they are needed

    from loopkit.metrics import MetricLike
    from loopkit.schedules import OfLength

    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(part).__mro__}
    if ("loopkit", "Backend") in bases:
        made = type(part).__name__
        raise PluginError(f"{made} is where a log goes, and no plugin: wrap it, LogTo({made}(...))")
    made = f"{type(part).__name__}(...)"
    if isinstance(part, MetricLike):
        return f"Metrics({made})"
    if isinstance(part, ReduceLROnPlateau):
        return "Plateau(monitor=...)"
    if isinstance(part, LRScheduler):
        return f"TorchSchedule({made})"
    if bases & {("lightning", "Callback"), ("pytorch_lightning", "Callback")}:
        return f"loopkit_callbacks.LightningCallback({made})"
    if getattr(part, "__module__", None) == OfLength.__module__:
        return f"Schedule({part.name if isinstance(part, OfLength) else part.__name__})"
    return ""
