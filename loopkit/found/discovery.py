"""Plugins by name: the installed ones, the allowed ones, and the import of only the named ones.

A distribution makes a plugin findable by an entry point::

    [project.entry-points."loopkit.plugins"]
    clip_value = "my_package.clip:ClipValue"

What `plugins` lists is read from metadata, and `first_line` from the source. A module is imported when its plugin is
asked for by name.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loopkit.errors import PluginError
from loopkit.found.installed import COMMANDS, PLUGINS, EntryPoint, Installed, installed, normalized

ALLOW = "LOOPKIT_PLUGINS"
"""The environment variable with the names that may be loaded, separated by commas; unset, all may."""
HOMES = {
    "loopkit-callbacks": "ignite_handler lightning_callback",
    "loopkit-control": "at_least deadline stop_on",
    "loopkit-huggingface": "save_pretrained",
    "loopkit-insight": "cost find_syncs log_gradients log_histograms log_predictions log_resources "
    "module_profile peak_memory profile replay_bundle try_validation watch",
    "loopkit-local": "average_parameters",
    "loopkit-mlflow": "mlflow",
    "loopkit-monitor": "monitor report",
    "loopkit-optuna": "optuna_pruning",
    "loopkit-ray": "ray_report",
    "loopkit-recipes": "accumulate asam cut_mix label_smoothing micro_batch mixup sam",
    "loopkit-remote": "upload",
    "loopkit-sharded": "fsdp sharded_checkpoint",
    "loopkit-tensorboard": "tensorboard",
    "loopkit-wandb": "wandb",
    "loopkit-whole-step": "cuda_graph whole_step",
}
"""The plugins of the project's distributions."""
COMMAND_HOMES = {
    "loopkit-files": "eject explain run",
    "loopkit-insight": "replay",
    "loopkit-mlflow": "mlflow",
    "loopkit-monitor": "monitor report runs watch",
    "loopkit-sharded": "sharded",
    "loopkit-testing": "api diff hooks new-backend new-phase new-plugin verify-resume",
}
"""Their subcommands."""


def _by_name(homes: Mapping[str, str]) -> dict[str, str]:
    return {name: home for home, names in homes.items() for name in names.split()}


ELSEWHERE = _by_name(HOMES)
"""Which distribution to install for a plugin, by its name."""
SUBCOMMANDS = _by_name(COMMAND_HOMES)
"""Which distribution to install for a subcommand, by its name."""
LOGS = ("mlflow", "tensorboard", "wandb")
"""Plugins that write a log themselves."""
DEEPEST = 3
"""How many imports are followed to the source of a plugin."""
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Plugin:
    """An installed plugin, from its metadata."""

    entry_point: EntryPoint
    others: tuple[str, ...] = ()
    """The full names of the others that have the same name."""


# -------------------------------------------------------------------------------------------------------------- listing


def plugins(found: Installed | None = None) -> tuple[list[Plugin], list[str]]:
    """All installed plugins, by name, and problems of their metadata, without an import."""
    found = installed() if found is None else found
    entry_points = found.of(PLUGINS)
    rows = []
    for each in entry_points:
        same = [other.full_name for other in entry_points if other.name == each.name]
        others = tuple(name for name in same if name != each.full_name)
        rows.append(Plugin(each, others))
    return rows, list(found.problems)


def first_line(entry_point: EntryPoint) -> str:
    """The first line of an entry point's docstring, from its source; empty if that is unknown.

    It does not import the module. If the name is assigned the result of a call, the text is the call's last string.
    """
    module, _, name = entry_point.value.partition(":")
    for _ in range(DEEPEST):
        tree = _source(module)
        if tree is None:
            return ""
        for node in tree.body:
            text = _text_of(node, name)
            if text is not None:
                return text.partition("\n")[0]
            original = _imported(node, name)
            if original is not None:
                module, name = original
                break
        else:
            return ""
    return ""


def _imported(node: ast.stmt, name: str) -> tuple[str, str] | None:
    """The module and the name from which a statement imports a name; None if it does not."""
    if not isinstance(node, ast.ImportFrom) or node.level:
        return None
    for each in node.names:
        if (each.asname or each.name) == name:
            return node.module or "", each.name
    return None


def _text_of(node: ast.stmt, name: str) -> str | None:
    """The text about a name that a statement defines; empty if it has none, None if it defines another name."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
        return ast.get_docstring(node) or ""
    if not isinstance(node, ast.Assign):
        return None
    targets = [to.id for to in node.targets if isinstance(to, ast.Name)]
    if targets != [name]:
        return None
    given = node.value.args if isinstance(node.value, ast.Call) else []
    texts = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return texts[-1] if texts else ""


def _source(module: str) -> ast.Module | None:
    """The parsed source of a module, without an import of it or of the packages around it."""
    top, *below = module.split(".")
    try:
        spec = find_spec(top)
        if spec is None:
            return None
        file = Path(spec.origin or "")
        for folder in spec.submodule_search_locations or ():
            path = Path(folder, *below)
            files = [each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()]
            if files:
                file = files[0]
                break
        return ast.parse(file.read_bytes())
    except (ImportError, AttributeError, OSError, ValueError, SyntaxError):
        return None


# -------------------------------------------------------------------------------------------------------------- loading


def load_plugin(name: str) -> Callable[..., Any]:
    """The class of an installed plugin, or the function that makes it. Only its module is imported.

    Args:
        name: As ``loopkit plugins`` lists it; ``"distribution:name"`` where several have the same name.

    Raises:
        PluginError: There is no such plugin, there are several, or it may not be loaded (``LOOPKIT_PLUGINS``).

    Example::

        ClipGradNorm = loopkit.load_plugin("clip_grad_norm")
    """
    return _load(find(name))


def make_plugin(given: Any, allow: Collection[str] | None = None) -> Any:
    """Return the plugin that a `Learner` makes of one item of ``plugins=``.

    Args:
        given: A plugin, which is returned; the name of an installed one, which is made without options; or a mapping of
            one name to its options. One that is named as the ``*args`` of the plugin takes a list.
        allow: The only names that may be loaded; by default the names in ``LOOPKIT_PLUGINS``, or all if it is not set.

    Raises:
        PluginError: The name is not known or not allowed, or the options do not fit.

    Example::

        make_plugin({"clip_grad_norm": {"max_norm": 1.0}})
    """
    if isinstance(given, str):
        given = {given: {}}
    elif type(given) is not dict:  # a plugin can be a subclass
        return given
    name, options = _named(given)
    entry_point = find(name, allow)
    factory = _load(entry_point)
    _check_options(entry_point, factory, options)
    try:
        plugin = bound(factory, options)()
    except Exception as error:
        error.add_note(f"loopkit: in the constructor of plugin {entry_point}, given by name")
        raise
    from loopkit.hooks import has_hooks

    if inspect.isclass(plugin) or not has_hooks(plugin):
        raise PluginError(f"plugin {entry_point}: {entry_point.value} returned {plugin!r:.80}, which has no hooks")
    return plugin


def allowed() -> tuple[str, ...] | None:
    """The names in ``LOOPKIT_PLUGINS``; None if it is not set, and any may be loaded."""
    value = os.environ.get(ALLOW)
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    return tuple(filter(None, words))


def find(name: str, allow: Collection[str] | None = None) -> EntryPoint:
    """The one entry point of this name, if it may be loaded.

    Raises:
        PluginError: As for `make_plugin`.
    """
    if not isinstance(name, str):
        raise PluginError(f"{name!r:.80} is no name of a plugin: names are text, such as 'clip_grad_norm'")
    entry_points = installed().of(PLUGINS)
    found = [each for each in entry_points if each.is_called(name)]
    if not found:
        raise _unknown(name, entry_points)
    entry_point = _only(found, "plugin", name)
    allow = allowed() if allow is None else allow
    if allow is not None and not any(entry_point.is_called(word) for word in allow):
        names = ", ".join(word + _misspelt(word, entry_points) for word in allow) or "none"
        raise PluginError(
            f"plugin {name!r} may not be loaded: {ALLOW} allows {names}. Add its name there, or give the plugin itself"
        )
    return entry_point


def _unknown(name: str, entry_points: Sequence[EntryPoint]) -> PluginError:
    home = _home(name)
    if home:
        return PluginError(f"the plugin {name!r} is in another distribution: {how_to_install(home)}")
    close = _nearest(name, entry_points)
    return PluginError(
        f"no plugin called {name!r:.80} is installed{close}: `loopkit plugins` lists the installed ones; "
        f"pip install the distribution that has it"
    )


def load_command(name: str) -> Callable[[Sequence[str]], int | None] | None:
    """The function of a subcommand that a distribution adds; None if it is none that is known.

    Raises:
        PluginError: The distribution that has it is not installed, or several have it.
    """
    entry_points = installed().of(COMMANDS)
    found = [each for each in entry_points if each.is_called(name)]
    if found:
        entry_point = _only(found, "command", name)
        function: Callable[[Sequence[str]], int | None] = entry_point.load()
        if not callable(function):
            raise PluginError(f"command {entry_point}: {entry_point.value} is {function!r:.80}, which cannot be called")
        return function
    if name in SUBCOMMANDS:
        home = SUBCOMMANDS[name]
        raise PluginError(f"loopkit {name} is in the distribution {home}: {how_to_install(home)}")
    return None


def log_plugin(word: str) -> str:
    """A hint if the path of a log is really the name of a plugin that writes one, else an empty string.

    Upper and lower case, ``-`` and ``_`` make no difference.
    """

    def plain(name: str) -> str:
        return re.sub("[-_]", "", name).lower()

    rows, _ = plugins()
    found = {row.entry_point.name for row in rows}
    for name in LOGS:
        if plain(name) != plain(word):
            continue
        first = "" if name in found else f"{how_to_install(ELSEWHERE[name])}, and "
        return (
            f"{word!r} is the name of a plugin, and no path: {first}give the learner that plugin, "
            f"{{{name!r}: {{...}}}}, in a file [plugins.{name}]; a directory of this name is './{word}'"
        )
    return ""


@functools.cache
def origin(module: str) -> tuple[str, str] | None:
    """The distribution that has the plugins of a module, and its version; None if that is not known.

    It is the one with an entry point to the module, or to another of its package, or the one with the name of the
    package. It is looked up once: an imported package stays, whatever is installed meanwhile.
    """
    from loopkit.base.version import DISTRIBUTION, __version__
    from loopkit.found.installed import name_and_version

    package = module.partition(".")[0]
    if package == "loopkit":
        return DISTRIBUTION, __version__
    found = installed()
    entry_points = found.of(PLUGINS)
    of_module = {(e.distribution, e.version) for e in entry_points if e.module == module}
    of_package = {(e.distribution, e.version) for e in entry_points if e.module.partition(".")[0] == package}
    for same in (of_module, of_package):
        if len(same) == 1:
            return same.pop()
    folder = found.distributions.get(normalized(package))
    return None if folder is None else name_and_version(folder)


def plugin_versions(plugins: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The ``"distribution"`` and ``"version"`` that each plugin's class comes from, by the plugin's name.

    Those whose distribution is not known, such as a class of the script itself, are left out.
    """
    from loopkit.plugin import unwrapped

    found = {}
    for name, plugin in plugins.items():
        known = origin(type(unwrapped(plugin)).__module__)
        if known is not None:
            distribution, version = known
            found[name] = {"distribution": distribution, "version": version}
    return found


def how_to_install(home: str) -> str:
    """The command that installs a distribution of the project, for messages."""
    return f"pip install {home} (in a clone: pip install -e plugins/{home})"


def _load(entry_point: EntryPoint) -> Callable[..., Any]:
    factory = entry_point.load()
    if not callable(factory):
        raise PluginError(
            f"plugin {entry_point}: {entry_point.value} is {factory!r:.80}, neither a class nor a function that makes "
            f"the plugin"
        )
    made: Callable[..., Any] = factory
    return made


def _only(found: Sequence[EntryPoint], what: str, name: str) -> EntryPoint:
    if len(found) > 1:
        by = " and ".join(f"{each.distribution} {each.version}" for each in found)
        names = " or ".join(repr(each.full_name) for each in found)
        raise PluginError(f"{by} both have a {what} called {name!r}: write {names}, or uninstall one of them")
    return found[0]


def _misspelt(word: str, entry_points: Sequence[EntryPoint]) -> str:
    """The nearest name, as a hint, if none is called so."""
    if _home(word) or any(each.is_called(word) for each in entry_points):
        return ""
    return _nearest(word, entry_points)


def _home(word: str) -> str:
    """The project's distribution that has a plugin of this name or full name; an empty string if none has."""
    for name, home in ELSEWHERE.items():
        if word in (name, f"{home}:{name}"):
            return home
    return ""


def _nearest(name: str, entry_points: Iterable[EntryPoint]) -> str:
    from loopkit.base.words import nearest
    from loopkit.events import snake_case

    words = list(ELSEWHERE)
    for each in entry_points:
        words += [each.name, each.full_name]
    distribution, colon, short = name.rpartition(":")
    plain = distribution + colon + re.sub(r"\W+", "_", snake_case(short)).strip("_")
    return nearest(plain, words) or nearest(name, words)


def _named(given: dict[Any, Any]) -> tuple[str, Options]:
    """The only name in a mapping, and its options."""
    if len(given) != 1:
        raise PluginError(
            f"{given!r:.120} names {len(given)} plugins: give a mapping for each, "
            f"such as plugins=[{{'clip_grad_norm': {{'max_norm': 1.0}}}}, 'grad_norm']"
        )
    ((name, options),) = given.items()
    options = {} if options is None else options
    if not isinstance(options, Mapping) or not all(isinstance(option, str) for option in options):
        raise PluginError(
            f"the options of plugin {name!r} are {options!r:.80}: give a mapping of their names to values"
        )
    return name, options


def bound(function: Callable[..., Any], options: Options, *positional: Any) -> functools.partial[Any]:
    """The call with options by name; one that is named as the ``*args`` is spread, after all that stands before it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []  # one in C
    spread = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    if spread is None or spread not in options:
        return functools.partial(function, *positional, **options)
    rest = dict(options)
    items = rest.pop(spread)
    before = [p for p in parameters[len(positional) :] if p.kind is p.POSITIONAL_OR_KEYWORD]
    values = [rest.pop(p.name, p.default) for p in before]
    return functools.partial(function, *positional, *values, *items, **rest)


def _check_options(entry_point: EntryPoint, factory: Callable[..., Any], options: Options) -> None:
    """Check that the factory takes these options."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # one in C: it will say so itself
    from loopkit.base.words import nearest

    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    spread = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL]
    takes = [name for name, kind in kinds.items() if kind in by_name]
    takes += spread
    open_ended = inspect.Parameter.VAR_KEYWORD in kinds.values()
    for option in options:
        if option not in takes and not open_ended:
            hint = nearest(option, takes)
            listed = ", ".join(takes) or "none"
            raise PluginError(f"plugin {entry_point} has no option {option!r}{hint}; it takes {listed}")
        if option in spread and not isinstance(options[option], (list, tuple)):
            raise PluginError(f"plugin {entry_point}: {option} is {options[option]!r:.80}: it takes a list")
    call = bound(factory, options)
    try:
        signature.bind(*call.args, **call.keywords)
    except TypeError as error:
        raise PluginError(f"plugin {entry_point}: {error}; its options are {signature}") from error
