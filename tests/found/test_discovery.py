"""Plugins by name: what is found, what is imported and when, and what is refused."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import batches, install, make_learner, on

import loopkit
from loopkit import plugins
from loopkit.commands import cli
from loopkit.errors import PluginError
from loopkit.found import discovery
from loopkit.found.discovery import plugin_versions
from loopkit.found.installed import EntryPoint, installed
from loopkit.hooks import implemented
from loopkit.metrics import Accuracy
from loopkit.plugins import ClipGradNorm, GradNorm, LogTo, throttle

ROOT = Path(__file__).parents[2]
COUNTER = """
from loopkit import hookimpl


class Counter:
    provides = "counter"

    def __init__(self, start=0, *, name="counter"):
        if start < 0:
            raise ValueError(f"start is {start}")
        self.count, self.name = start, name

    @hookimpl
    def step_end(self):
        self.count += 1


def counter(start=0):
    return Counter(start)


def nothing():
    return None


number = 3
"""
ENTRY = "[loopkit.plugins]\n{name} = {module}:Counter\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory on the path, whose modules do not outlive the test."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delenv("LOOPKIT_PLUGINS", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def counter(site):
    """An installed plugin ``a_counter``, in a module of the name that is returned."""
    module = "module_of_" + re.sub(r"\W", "_", site.name)
    install(site, "the-counters", ENTRY.format(name="a_counter", module=module), **{module: COUNTER})
    return module


def listed(**wanted):
    """The plugins that are installed beside the project's own, by full name."""
    rows, problems = discovery.plugins()
    return {row.entry_point.full_name: row for row in rows if "loopkit" not in row.entry_point.distribution}, problems


# ------------------------------------------------------------------------------------------------------------- finding


def test_what_is_installed_is_listed_from_metadata(counter):
    rows, problems = listed()
    (row,) = rows.values()
    assert (row.entry_point.name, row.entry_point.distribution, row.entry_point.version) == (
        "a_counter",
        "the-counters",
        "1.0",
    )
    assert (row.others, problems) == ((), [])
    assert counter not in sys.modules


def test_first_line_of_a_plugin_is_read_from_its_source(site, counter):
    def told(value, **modules):
        for name, source in modules.items():
            path = site / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        return discovery.first_line(EntryPoint("loopkit.plugins", "a", value, "a", "1"))

    told(
        "",
        **{
            "told/__init__": "from told.deep import Deep as Same\n1 / 0",
            "told/deep": "class Deep:\n  '''Sees.\n\n  All.'''",
        },
    )
    assert told("told:Same") == told("told.deep:Deep") == "Sees."
    assert told("alone:make", alone="def make():\n    'Makes one.'\n1 / 0") == "Makes one."
    calls = "make = of('name', 1, '''Makes two.\n\n    More.''')\nother = of()\nthird = 'a'\nlast = of(x='b')\n1 / 0"
    assert told("calls:make", calls=calls) == "Makes two."
    assert told("calls:other") == told("calls:third") == told("calls:last") == ""
    for nothing in ("alone:gone", "gone:A", "gone.a:A", "told.gone:A", "told", f"{counter}:counter"):
        assert told(nothing) == ""
    assert told("broken:A", broken="class A\n") == told("zero:A", zero="\0") == ""
    assert not {"told", "told.deep", "alone"} & sys.modules.keys()


def test_first_distribution_on_the_path_counts(site, monkeypatch):
    install(site, "Two.Places", "[loopkit.plugins]\none = m:One\n", version="1.0")
    install(site / "later", "two-places", "[loopkit.plugins]\nother = m:Other\n", version="2.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site), str(site / "later")])
    assert list(listed()[0]) == ["Two.Places:one"]


def test_metadata_of_a_source_tree_are_found(site):
    folder = site / "tree.egg-info"
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: tree\nVersion: 0.3\n")
    (folder / "entry_points.txt").write_text("[loopkit.plugins]\nleaf = tree : Leaf [extra]\n")
    install(site, "tree-of-others", "[loopkit.plugins]\nbranch = tree:Branch\n")
    shadowed = site / "tree_of_others.egg-info"  # sorts before what is installed, and is on the path before it
    shadowed.mkdir()
    (shadowed / "PKG-INFO").write_text("Name: tree-of-others\nVersion: 0.1\n")
    other, row = listed()[0].values()
    assert (other.entry_point.name, other.entry_point.version) == ("branch", "1.0")
    assert (row.entry_point.full_name, row.entry_point.version, row.entry_point.value) == (
        "tree:leaf",
        "0.3",
        "tree:Leaf",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[loopkit.plugins]\n= m:A\ngood = m:Good\n", "line 2: '= m:A' is not name = module:object"),
        ("[loopkit.plugins]\nbad\ngood = m:Good\n", "line 2: 'bad' is not name = module:object"),
        ("[loopkit.plugins]\nbad = m n\ngood = m:Good\n", "line 2: 'bad = m n' is not name"),
        ("[loopkit.plugins]\nbad = ../m:A\ngood = m:Good\n", "line 2: 'bad = ../m:A' is not name"),
        ("[loopkit.plugins]\nb\x1b[2J = m:A\ngood = m:Good\n", r"line 2: 'b\x1b[2J = m:A' is not name"),
        ("[loopkit.plugins]\ngood = m:Good\ngood = m:Bad\n", "line 3: 'good = m:Bad' names 'good' a second time"),
        (
            "[loopkit.plugins]\ngood = m:Good\n[loopkit.commands\nbad = m:A\n",
            "line 3: '[loopkit.commands' is no",
        ),
        ("[loopkit.plugins]\ngood = m:Good\n[loopkit.commands]\ngood = -\n", "line 4: 'good = -' is not name"),
    ],
)
def test_broken_line_is_named_and_the_others_count(text, problem, site):
    install(site, "broken", text)
    rows, problems = listed()
    assert list(rows) == ["broken:good"]
    assert len(problems) == 1
    assert problem in problems[0]
    assert "broken" in problems[0]


def test_what_cannot_be_read_hides_nothing_else(site, counter, monkeypatch):
    (install(site, "blocked") / "entry_points.txt").mkdir()
    install(site, "latin", "[loopkit.plugins]\nnaïve = m:A\n".encode("latin-1"))
    install(site, "foreign", b"[console_scripts]\n\xff = \n[oops\n")
    install(site, "~eftover", "[loopkit.plugins]\nghost = m:A\n").joinpath("METADATA").unlink()
    (site / "single_file-1.0.egg-info").write_text("Name: single\n")
    (site / "archive.zip").write_bytes(b"PK")
    more = [str(site / "archive.zip"), str(site / "missing"), "__editable__.x.finder.__path_hook__", "a\0b", b"bytes"]
    monkeypatch.setattr(sys, "path", [*sys.path, *more])
    rows, problems = listed()
    assert list(rows) == ["the-counters:a_counter"]
    assert [problem.partition(": ")[0] for problem in sorted(problems)] == [
        str(site / "blocked-1.0.dist-info"),
        str(site / "latin-1.0.dist-info"),
    ]
    assert "cannot be read: Is a directory" in sorted(problems)[0]
    assert "is not UTF-8" in sorted(problems)[1]


def test_metadata_without_a_name_are_those_of_their_folder(site):
    install(site, "odd-name", "[loopkit.plugins]\nodd = m:A\n", version="3").joinpath("METADATA").write_bytes(b"\xff\n")
    (row,) = listed()[0].values()
    assert (row.entry_point.distribution, row.entry_point.version) == ("odd_name", "3")


def test_200_distributions_are_listed(site, capsys):
    spec = importlib.util.spec_from_file_location("benchmark_of_discovery", ROOT / "benchmarks" / "discovery.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.install(site, 200)
    assert cli.main(["plugins"]) == 0
    lines = r"^[\w-]*plugin-\d\d\d 1\.\d+\n  plugin_\d\d\d"
    assert len(re.findall(lines, capsys.readouterr().out, re.M)) == 200


AUDIT = """
import sys
from pathlib import Path

site, work = map(Path, sys.argv[1:])
touched = []


def watch(event, arguments):
    if event in ("import", "open", "exec") and "evil" in str(arguments[0]):
        touched.append((event, str(arguments[0])))


sys.addaudithook(watch)
sys.path.append(str(site))
import loopkit
from loopkit.commands import cli
from loopkit.found import discovery
from loopkit.plugins import Checkpoint
from torch import nn
import torch


def metadata_alone():
    return all(event == "open" and ".dist-info" in path for event, path in touched)


for words in (["--help"], ["plugins"], ["plugins", "--help"], ["good"], ["api", "Learner.fit"]):
    assert cli.main(words) == 0, words
assert {event for event, path in touched} == {"open"}, touched  # the listing reads sources, too
touched.clear()
heavy = {"lightning", "matplotlib", "mlflow", "psutil", "pytest", "sklearn", "tensorboardX", "torchmetrics"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
learner = loopkit.Learner(
    nn.Linear(3, 1),
    nn.MSELoss(),
    torch.optim.SGD,
    plugins=["a_counter", {"clip_grad_norm": {"max_norm": 1.0}}, Checkpoint(work)],
)
learner.fit([(torch.zeros(2, 3), torch.zeros(2, 1))], epochs=1)
assert learner.plugins["counter"].count == 1
print(learner.explain(), discovery.plugin_versions(learner.plugins))
for words in (["evil_comand"], ["nothing"]):
    assert cli.main(words) == 2
for wrong in ("evill", "Evil", "good"):
    try:
        loopkit.load_plugin(wrong)
    except loopkit.LoopkitError as error:
        print(error)
    else:
        raise AssertionError(wrong)
assert metadata_alone(), touched
assert not (site / "harm").exists()
try:
    loopkit.load_plugin("evil")
except SystemExit as exit:
    assert exit.__notes__ == ["loopkit: importing evil_module for 'evil' of evil 6.6"]
assert (site / "harm").exists()
assert {"open", "exec"} <= {event for event, path in touched if ".dist-info" not in path}
print("done")
"""


def test_nothing_that_is_not_named_is_imported(tmp_path):
    """Seen by an audit hook: no import and no exec of the other module in the whole life of a run.

    Only the listing opens its file. Nor is anything heavy imported by the commands that list.
    """
    site = tmp_path / "site"
    harm = f"open({str(site / 'harm')!r}, 'w').close()\nraise SystemExit(0)\n"
    groups = ("[loopkit.plugins]\nevil = evil_module:Evil\nevil_too = evil_module:Evil\n"
              "[loopkit.commands]\nevil_command = evil_module:main\n")  # fmt: skip
    install(site, "evil", groups, version="6.6", evil_module=harm)
    good = "def main(words):\n    print('good', words)\n"
    commands = "[loopkit.commands]\ngood = good_command:main\n"
    entry = ENTRY.format(name="a_counter", module="audited_counter")
    install(site, "the-counters", commands + entry, audited_counter=COUNTER, good_command=good)
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, str(site), str(tmp_path / "work")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert "evil" in done.stdout


def test_one_plugin_is_told_of_by_what_it_says_itself(counter, site, capsys):
    install(site, "other", "[loopkit.plugins]\nother = bad_module_of_other:A\n", bad_module_of_other="1 / 0\n")
    described = COUNTER.replace(
        'provides = "counter"', '"""Count steps.\n\n    More.\n    """\n\n    provides = \'counter\''
    )
    described = "from __future__ import annotations\n" + described.replace("start=0, *", "start: int | None = 0, *")
    (site / f"{counter}.py").write_text(described)
    assert cli.main(["plugins", "a_counter"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"'a_counter' of the-counters 1.0: {counter}:Counter",
        "Counter(start: int | None = 0, *, name='counter')",
        "    Count steps.",
        "provides: counter",
        "hooks: step_end",
    ]
    assert counter in sys.modules
    assert "bad_module_of_other" not in sys.modules


def test_one_plugin_that_says_little_is_told_of(counter, site, capsys):
    install(site, "silent", f"[loopkit.plugins]\nquiet = {counter}:counter\n")
    assert cli.main(["plugins", "silent:quiet"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"'quiet' of silent 1.0: {counter}:counter",
        "counter(start=0)",
        "    (it has no docstring)",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a_conuter"], "no plugin called 'a_conuter' is installed (did you mean 'a_counter'?)"),
        (["grad_norm"], "plugin 'grad_norm' may not be loaded: LOOPKIT_PLUGINS allows a_counter."),
    ],
)
def test_one_plugin_that_cannot_be_told_of_is_refused(words, message, counter, monkeypatch, capsys):
    monkeypatch.setenv("LOOPKIT_PLUGINS", "a_counter")
    assert cli.main(["plugins", *words]) == 2
    assert message in capsys.readouterr().err
    assert counter not in sys.modules


def test_list_fits_a_terminal(counter, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["plugins"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, [*lines, last])) <= 80
    assert any(line.startswith("  checkpoint  ") and line.endswith("...") for line in lines)
    assert "`loopkit plugins NAME` describes one, with its options" in [*lines, last]


def test_list_shows_the_first_lines_of_what_ships_whole(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert cli.main(["plugins"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith("...")] == []


# ------------------------------------------------------------------------------------------------------------- loading


def test_load_plugin_imports_the_module_of_the_plugin_alone(counter, site):
    install(site, "other", "[loopkit.plugins]\nother = bad_module_of_other:A\n", bad_module_of_other="1 / 0\n")
    loaded = loopkit.load_plugin("a_counter")
    assert loaded is sys.modules[counter].Counter
    assert "bad_module_of_other" not in sys.modules


def test_load_plugin_of_the_core():
    assert loopkit.load_plugin("clip_grad_norm") is ClipGradNorm
    assert loopkit.load_plugin("loopkit-engine:clip_grad_norm") is ClipGradNorm
    assert loopkit.load_plugin("loopkit:clip_grad_norm") is ClipGradNorm


@pytest.mark.parametrize(
    "name", ["ClipGradNorm", "clip-grad-norm", "Clip_Grad_Norm", "clip_grad_nrom", " clip grad norm"]
)
def test_other_spelling_is_answered_by_the_nearest(name):
    message = rf"no plugin called {name!r} is installed \(did you mean 'clip_grad_norm'\?\): `loopkit plugins` lists"
    with pytest.raises(PluginError, match=message):
        loopkit.load_plugin(name)


@pytest.mark.parametrize("name", ["cost", "loopkit-insight:cost"])
def test_plugin_of_a_distribution_that_is_not_installed_says_where_it_is(name, monkeypatch):
    monkeypatch.setattr(discovery, "installed", lambda: installed([]))
    with pytest.raises(
        PluginError, match=f"the plugin '{name}' is in another distribution: pip install loopkit-insight"
    ):
        make_learner(name)
    with pytest.raises(PluginError, match=r"no plugin called 'Cost' is installed \(did you mean 'cost'\?\)"):
        loopkit.load_plugin("Cost")


@pytest.mark.parametrize("name", ["", ":", "x:", "nothing_like_it", "loopkit:nothing_like_it"])
def test_unknown_name(name):
    with pytest.raises(PluginError, match=r"no plugin called .* is installed: `loopkit plugins` lists the"):
        loopkit.load_plugin(name)
    with pytest.raises(PluginError, match="3 is no name of a plugin"):
        loopkit.load_plugin(3)


def test_wrong_distribution_is_answered_by_the_right_one(counter):
    with pytest.raises(PluginError, match=r"did you mean 'the-counters:a_counter'\?"):
        loopkit.load_plugin("the-counter:a_counter")


@pytest.mark.parametrize("name", ["a_counter", "clip_grad_norm"])
def test_name_that_two_distributions_have_is_refused(name, counter, site):
    install(site, "Zweit", ENTRY.format(name=name, module="never_imported"), version="2.0")
    first = "loopkit-engine" if name == "clip_grad_norm" else "the-counters"
    message = (
        rf"{first} \S+ and Zweit 2.0 both have a plugin called '{name}': write '{first}:{name}' or 'Zweit:{name}', or"
    )
    with pytest.raises(PluginError, match=message):
        loopkit.load_plugin(name)
    assert loopkit.load_plugin(f"{first}:{name}").__name__ in ("Counter", "ClipGradNorm")
    rows = {row.entry_point.full_name: row for row in discovery.plugins()[0]}
    assert rows[f"zweit:{name}".title().replace(name.title(), name)].others == (f"{first}:{name}",)
    assert rows[f"{first}:{name}"].others == (f"Zweit:{name}",)


@pytest.mark.parametrize(("source", "error"), [("1 / 0", ZeroDivisionError), ("import not_there_at_all", ImportError)])
def test_error_of_a_module_passes_and_names_the_distribution(source, error, site):
    install(site, "faulty", "[loopkit.plugins]\nfault = faulty_module:Fault\n", version="0.9", faulty_module=source)
    with pytest.raises(error) as caught:
        loopkit.load_plugin("fault")
    assert caught.value.__notes__ == ["loopkit: importing faulty_module for 'fault' of faulty 0.9"]


def test_entry_point_to_nothing(site):
    install(site, "gone", "[loopkit.plugins]\ngone = gone_module:Countr\n", gone_module=COUNTER)
    with pytest.raises(
        PluginError, match=r"'gone' of gone 1.0: there is no gone_module:Countr \(did you mean 'Counter'"
    ):
        loopkit.load_plugin("gone")


# -------------------------------------------------------------------------------------------------------------- making


def test_make_plugin_takes_objects_names_and_options(counter):
    plugin = GradNorm()
    assert discovery.make_plugin(plugin) is plugin
    assert discovery.make_plugin("a_counter").count == 0
    assert discovery.make_plugin({"a_counter": {"start": 5, "name": "five"}}).name == "five"
    assert discovery.make_plugin({"the-counters:a_counter": {}}).count == 0
    assert discovery.make_plugin({"a_counter": None}).count == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strat": 1},
            r"plugin 'a_counter' of the-counters 1.0 has no option 'strat' \(did you mean 'start'\?\); it tak",
        ),
        ({"other": 1}, r"has no option 'other'; it takes start, name$"),
        ({1: 1}, r"the options of plugin 'a_counter' are \{1: 1\}: give a mapping of their names to values"),
        (["start"], r"the options of plugin 'a_counter' are \['start'\]: give a mapping"),
        (1.0, r"the options of plugin 'a_counter' are 1.0: give a mapping"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, counter):
    with pytest.raises(PluginError, match=message):
        discovery.make_plugin({"a_counter": options})


def test_option_that_is_named_as_the_positional_ones_takes_a_list():
    plugin = discovery.make_plugin({"metrics": {"metrics": [Accuracy()], "top": Accuracy()}})
    assert list(plugin.prototypes) == ["loss", "accuracy", "top"]
    with pytest.raises(
        PluginError, match=r"plugin 'metrics' of loopkit-engine \S+: metrics is Accuracy\(\): it takes a list"
    ):
        discovery.make_plugin({"metrics": {"metrics": Accuracy()}})


def test_option_that_is_missing_is_named():
    with pytest.raises(
        PluginError, match=r"plugin 'clip_grad_norm' of loopkit-engine \S+: missing a required argument: 'max_norm'"
    ):
        discovery.make_plugin("clip_grad_norm")


def test_error_of_a_constructor_passes_and_names_the_plugin(counter):
    with pytest.raises(ValueError, match="start is -1") as caught:
        discovery.make_plugin({"a_counter": {"start": -1}})
    assert caught.value.__notes__ == [
        "loopkit: in the constructor of plugin 'a_counter' of the-counters 1.0, given by name"
    ]


@pytest.mark.parametrize("given", [{}, {"grad_norm": {}, "history": {}}])
def test_mapping_names_one_plugin(given):
    with pytest.raises(PluginError, match=rf"names {len(given)} plugins: give a mapping for each"):
        discovery.make_plugin(given)


def test_factory_is_called_and_must_return_a_plugin(site):
    entries = "".join(f"{name} = made_module:{name}\n" for name in ("counter", "nothing", "number"))
    install(site, "made", f"[loopkit.plugins]\n{entries}class = made_module:Counter.__class__\n", made_module=COUNTER)
    assert discovery.make_plugin({"counter": {"start": 2}}).count == 2
    with pytest.raises(
        PluginError, match=r"'nothing' of made 1.0: made_module:nothing returned None, which has no hooks"
    ):
        discovery.make_plugin("nothing")
    with pytest.raises(
        PluginError, match=r"'number' of made 1.0: made_module:number is 3, neither a class nor a function"
    ):
        discovery.make_plugin("number")


def test_learner_takes_names_and_mappings(counter):
    learner = make_learner("a_counter", {"clip_grad_norm": {"max_norm": 0.5}}, GradNorm())
    assert list(learner.plugins) == ["clip_grad_norm", "counter", "grad_norm"]
    assert learner.plugins["clip_grad_norm"].max_norm == 0.5
    learner.fit(batches(3), epochs=1)
    assert learner.plugins["counter"].count == 3
    learner.replace("counter", {"a_counter": {"start": 7}})
    assert learner.plugins["counter"].count == 7
    learner.remove("grad_norm")
    learner.add("grad_norm", {"a_counter": {"name": "second"}})
    assert list(learner.plugins) == ["clip_grad_norm", "counter", "grad_norm", "second"]


def test_learner_takes_one_mapping_of_all(counter):
    options = {"a_counter": {"start": 1}, "grad_norm": None}
    learner = loopkit.Learner(loopkit.engine.step.step.torch.nn.Linear(1, 1), plugins=options, standard=False)
    assert list(learner.plugins) == ["counter", "grad_norm"]


def test_learner_refuses_a_string_of_plugins():
    with pytest.raises(PluginError, match=r"plugins is 'grad_norm': give a list, plugins=\[\.\.\.\]"):
        loopkit.Learner(loopkit.engine.step.step.torch.nn.Linear(1, 1), plugins="grad_norm")


def test_plugins_are_added_all_or_none(counter):
    learner = make_learner()
    with pytest.raises(PluginError, match="no plugin called 'b_counter' is installed"):
        learner.add("a_counter", "b_counter")
    assert learner.plugins == {}


def test_plugin_by_name_is_bitwise_the_object():
    by_name, by_object = make_learner({"clip_grad_norm": {"max_norm": 0.1}}), make_learner(ClipGradNorm(0.1))
    for learner in (by_name, by_object):
        learner.fit(batches(4), epochs=2)
    assert by_name.model.weight.equal(by_object.model.weight)


def test_object_without_hooks_is_refused():
    class Empty:
        def state_dict(self):
            return {}

    with pytest.raises(PluginError, match=r"plugin 'empty' \(Empty\) has no hooks, so nothing would call it"):
        make_learner(Empty())


# ----------------------------------------------------------------------------------------------------- allow and block


@pytest.mark.parametrize(
    ("value", "works"),
    [
        ("", False),
        (" ", False),
        (",", False),
        ("grad_norm", False),
        ("other:a_counter", False),
        ("a_counter", True),
        ("grad_norm, a_counter", True),
        ("The_Counters:a_counter", True),
    ],
)
def test_allow_list_of_the_environment(value, works, counter, monkeypatch):
    monkeypatch.setenv("LOOPKIT_PLUGINS", value)
    if works:
        assert loopkit.load_plugin("a_counter").__name__ == "Counter"
        return
    for load in (loopkit.load_plugin, discovery.make_plugin, make_learner):
        with pytest.raises(
            PluginError,
            match=r"plugin 'a_counter' may not be loaded: LOOPKIT_PLUGINS allows [a-z:_]+( \(did you mean .*\))?\. ",
        ):
            load("a_counter")
    assert counter not in sys.modules
    assert list(make_learner(GradNorm(), standard=True).plugins)[:2] == ["grad_norm", "history"]  # objects are no names


def test_misspelt_name_in_the_allow_list_is_said_with_the_nearest(counter, monkeypatch):
    monkeypatch.setenv("LOOPKIT_PLUGINS", "grad_norm,a_conuter,zzz")
    with pytest.raises(PluginError, match=r"allows grad_norm, a_conuter \(did you mean 'a_counter'\?\), zzz\. Add"):
        loopkit.load_plugin("a_counter")


def test_allow_list_that_is_given_replaces_that_of_the_environment(counter, monkeypatch):
    monkeypatch.setenv("LOOPKIT_PLUGINS", "")
    assert discovery.make_plugin("a_counter", allow=["a_counter"]).count == 0
    monkeypatch.delenv("LOOPKIT_PLUGINS")
    with pytest.raises(PluginError, match="allows none"):
        discovery.make_plugin("a_counter", allow=())


def test_plugins_that_ship_are_those_that_the_package_imports():
    own = {
        row.entry_point.name: row.entry_point.load()
        for row in discovery.plugins()[0]
        if row.entry_point.distribution == "loopkit-engine"
    }
    public = {name: getattr(plugins, name) for name in plugins.__all__}
    assert set(own.values()) == {cls for cls in public.values() if isinstance(cls, type) and implemented(cls)}
    assert own["clip_grad_norm"] is ClipGradNorm
    assert {row.entry_point.version for row in discovery.plugins()[0] if row.entry_point.name in own} == {
        loopkit.__version__
    }


@pytest.mark.parametrize(
    "name", ["metrics", "ddp", "checkpoint", "clip_grad_norm", "monitor", "save_pretrained", "mlflow"]
)
def test_first_line_of_a_plugin_that_ships_is_that_of_its_docstring(name):
    if name not in {row.entry_point.name for row in discovery.plugins()[0]}:
        pytest.skip(f"{discovery.ELSEWHERE[name]} is not installed")
    doc = inspect.getdoc(loopkit.load_plugin(name))
    assert discovery.first_line(discovery.find(name)) == doc.partition("\n")[0]


# ------------------------------------------------------------------------------------------------------------ versions


def test_plugin_versions_are_those_of_the_distributions(counter, site):
    install(site, f"{counter}_namesake".replace("_", "-"), version="7", **{f"{counter}_namesake": COUNTER})
    namesake = importlib.import_module(f"{counter}_namesake").Counter(name="namesake")
    own = on("step_end", lambda **_: None, "own")
    learner = make_learner("a_counter", namesake, throttle(ClipGradNorm(1.0), every=2), own)
    assert plugin_versions(learner.plugins) == {
        "clip_grad_norm": {"distribution": "loopkit-engine", "version": loopkit.__version__},
        "counter": {"distribution": "the-counters", "version": "1.0"},
        "namesake": {"distribution": f"{counter}_namesake".replace("_", "-"), "version": "7"},
    }


def test_version_of_a_plugin_that_wraps_another_is_that_of_the_other(counter):
    learner = make_learner(throttle(discovery.make_plugin("a_counter"), every=2))
    assert plugin_versions(learner.plugins) == {"counter": {"distribution": "the-counters", "version": "1.0"}}


def test_packages_that_share_a_name_are_told_apart_by_module(site):
    package = site / "shared_namespace_package"
    package.mkdir()
    for part in ("one", "other"):
        (package / f"{part}.py").write_text(COUNTER)
        install(
            site, part, ENTRY.format(name=part, module=f"shared_namespace_package.{part}"), version=f"0.{len(part)}"
        )
    (package / "third.py").write_text(COUNTER)
    third = importlib.import_module("shared_namespace_package.third").Counter(name="third")
    learner = make_learner({"one": {"name": "a"}}, {"other": {"name": "b"}}, third)
    assert plugin_versions(learner.plugins) == {
        "a": {"distribution": "one", "version": "0.3"},
        "b": {"distribution": "other", "version": "0.5"},
    }


def test_nothing_of_torch_is_needed_to_list():
    """The modules themselves: the package's own imports come before them."""
    code = f"""
    import sys, types
    package = types.ModuleType("loopkit")
    package.__path__ = {list(loopkit.__path__)!r}
    sys.modules["loopkit"] = package
    from loopkit.found.discovery import plugins
    assert plugins()[0]
    assert not {{"torch", "numpy", "pluggy", "importlib.metadata"}} & sys.modules.keys()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_installed_looks_where_it_is_told(site, counter):
    assert [each.name for each in installed([str(site)]).of("loopkit.plugins")] == ["a_counter"]
    assert installed([]).entry_points == ()


# --------------------------------------------------------------------------------------- names that are taken for paths


def test_log_to_does_not_take_the_name_of_a_plugin_that_logs_for_a_path(site):
    install(site, "boards", "[loopkit.plugins]\ntensorboard = no_such:board\n")
    with pytest.raises(PluginError, match=r"^LogTo: 'TensorBoard' is the name of a plugin, and no path: "):
        LogTo("runs/a", "TensorBoard")
    assert LogTo("./board").backends[0].path == Path.cwd() / "board/log.jsonl"
    assert LogTo(Path("board")).backends[0].path == Path.cwd() / "board/log.jsonl"
    assert not Path("board").exists()


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_log_to_says_what_to_install_for_a_plugin_that_logs(name, site, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(site)])
    with pytest.raises(
        PluginError, match=f"'{name}' is .* no path: pip install loopkit-{name} .*, and give the learner"
    ):
        LogTo(name)
    install(site, f"loopkit-{name}", f"[loopkit.plugins]\n{name} = no_such:make\n")
    with pytest.raises(PluginError, match=f"'{name}' is .* no path: give the learner that plugin, {{'{name}': "):
        LogTo(name)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_log_to_does_not_take_an_ending_for_a_path(ending):
    with pytest.raises(
        PluginError, match=rf"'{ending}' is no path, but the ending of one: write 'runs/a/log.{ending}'"
    ):
        LogTo(ending)
