"""The documentation: its code runs and prints what the pages show, and its lists are those of the code."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import io
import os
import random
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import batches, make_learner, on
from pages import EXACT, SHAPE, WRAPPED, Block, agrees, blocks, run_page

from loopkit import Event, Learner
from loopkit.engine.step.step import Step
from loopkit.hooks import Hook, hooks

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "api"
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent != GENERATED)]
READMES = sorted((ROOT / "plugins").glob("*/README.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONG = {
    *("autoencoder.py", "contrastive.py", "feedback.py", "lenet.py", "residual_net.py", "transformer.py"),
}
"""Examples that take too long for the default run: that takes their first steps, and to their ends they are slow."""


@pytest.fixture
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory; events, seeds and settings made by a page do not outlive its test."""
    monkeypatch.chdir(tmp_path)
    own = {hook: event for hook, event in Event.by_hook.items() if event.__module__ == "loopkit.events"}
    monkeypatch.setattr(Event, "by_hook", own)
    rng, python_rng, threads = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    deterministic, environment = torch.are_deterministic_algorithms_enabled(), dict(os.environ)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield tmp_path
    torch.set_rng_state(rng)
    random.setstate(python_rng)
    torch.set_num_threads(threads)
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports much, even to no effect
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    for name in set(os.environ) - set(environment):
        del os.environ[name]


@functools.cache
def run_example(name: str) -> str:
    """Run an example as a program; returns what it prints."""
    path, out = str(ROOT / "examples" / name), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [path])
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


def anchors(page: str) -> set[str]:
    """The headings of a page as links name them."""
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"(?m)^#+ (.+)$", page)}


# Pages and examples


def distributions_of(page: Path) -> set[str]:
    """The packages of distributions that the code of a page imports."""
    code = "\n".join(block.text for block in blocks(page.read_text()) if block.language == "python")
    return set(re.findall(r"^ *(?:from|import) (loopkit_\w+)", code, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_code_runs_and_prints_what_the_page_shows(page: Path, isolated: Path) -> None:
    for package in sorted(distributions_of(page)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    run_page(page)


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_page_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    dead = []
    for link, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            dead.append(f"{link}#{anchor}")
    assert dead == []


STANDARD = {"TrainingPhase": {"ForwardBegin", "LossBegin"}, "ValidationPhase": {"ForwardBegin", "LossBegin"}}
"""The events that the steps of the standard phases emit themselves."""


def unemitted(code: str) -> Iterator[str]:
    """The events that a phase with a whole step of its own lists in ``emits``, and does not emit."""
    for cls in [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef)]:
        names = {getattr(each.targets[0], "id", ""): each.value for each in cls.body if isinstance(each, ast.Assign)}
        steps = [each for each in cls.body if isinstance(each, ast.FunctionDef) and each.name == "step"]
        if "emits" not in names or not steps or "super().step(" in ast.unparse(steps[0]):
            continue
        words = set(re.findall(r"\w+", ast.unparse(names["emits"])))
        listed = {word for word in words if word.endswith(("Begin", "End")) and not word.startswith(("Back", "Update"))}
        listed = listed.union(*(STANDARD[word] for word in words & STANDARD.keys()))
        for event in sorted(listed - set(re.findall(r"step\.emit\((\w+)\)", ast.unparse(cls)))):
            yield f"{cls.name}: {event}"


PORTED = sorted((ROOT / "examples").rglob("*.py"))


@pytest.mark.parametrize("page", [*PAGES, *READMES, *PORTED], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_page_phases_emit_the_events_that_they_list(page: Path) -> None:
    text = page.read_text()
    codes = [text] if page.suffix == ".py" else [each.text for each in blocks(text) if each.language == "python"]
    assert [found for code in codes for found in unemitted(code)] == []


@pytest.mark.parametrize(
    "example", [pytest.param(e.name, marks=[pytest.mark.slow] if e.name in LONG else []) for e in EXAMPLES]
)
def test_example_runs(example: str, isolated: Path) -> None:
    run_example(example)


class Begun(Exception):
    """The first steps are taken."""


@pytest.mark.parametrize("example", sorted(LONG))
def test_long_example_begins(example: str, isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Learner.fit

    def stop(step: Step, **given: Any) -> None:
        if step.index == 1:
            raise Begun

    def begin(learner: Learner, *args: Any, **options: Any) -> None:
        learner.add(on("step_end", stop))
        fit(learner, *args, **options)

    monkeypatch.setattr(Learner, "fit", begin)
    with pytest.raises(Begun):
        run_example(example)


SHOWN = [
    pytest.param(block, match[1], id=f"{page.name}-{match[1]}")
    for page in PAGES
    for block in blocks(page.read_text())
    if (match := re.fullmatch(r"output: examples/(\w+\.py)", block.comment))
]


@pytest.mark.parametrize(("block", "example"), SHOWN)
def test_example_output_has_the_shape_that_the_page_shows(block: Block, example: str, isolated: Path) -> None:
    printed = run_example(example)
    assert agrees(block.text, printed, SHAPE), printed


def test_readme_shows_the_output_of_digits() -> None:
    if not any("README.md" in str(param.id) and "digits.py" in str(param.id) for param in SHOWN):
        pytest.skip("the README has no block after <!-- output: examples/digits.py -->")


README = (ROOT / "README.md").read_text()
SECTIONS = dict(re.findall(r"(?ms)^## ([^\n]+)\n+(.*?)\n*(?=^## |\Z)", README))
LINK = re.compile(r"\]\([^)]+\)")


def test_readme_has_150_lines_at_most() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("section", SECTIONS)
def test_readme_section_has_15_lines_at_most_and_one_link(section: str) -> None:
    text = SECTIONS[section]
    assert len([line for line in text.splitlines() if line.strip()]) <= 15  # ruff sets blank ones into the code
    if section != "More":  # a list of links
        assert len(LINK.findall(text)) == 1


def test_readme_first_screen_trains_in_twelve_lines_with_a_stack_and_a_rate() -> None:
    assert list(SECTIONS)[:4] == ["Install", "Train", "Have a loop already?", "Not for you if"]
    top = README[: README.index("## ")]
    assert top.count("\n- **") == 5
    assert top.count("![") == 1
    (program,) = (block.text for block in blocks(SECTIONS["Train"]) if block.language == "python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 12
    assert "lr=" in program
    assert program.count("plugins.") >= 4


# The machinery above


def test_page_with_other_output_fails(isolated: Path) -> None:
    page = isolated / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:6: it printed\s+1"):
        run_page(page)


def test_page_with_an_error_fails_at_its_line(isolated: Path) -> None:
    page = isolated / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(page)
    assert caught.traceback[-1].lineno + 1 == 5  # pytest counts from 0


def test_page_blocks_share_a_namespace(isolated: Path) -> None:
    page = isolated / "page.md"
    page.write_text("```python\nx = 1\n```\n```python\nprint(x)\n```\n<!-- output -->\n```text\n1\n```\n")
    run_page(page)


def test_page_block_with_no_run_is_not_run(isolated: Path) -> None:
    page = isolated / "page.md"
    page.write_text("<!-- no-run: needs two machines -->\n```python\n1 / 0\n```\n")
    run_page(page)


def test_page_block_with_no_run_needs_a_reason(isolated: Path) -> None:
    page = isolated / "page.md"
    page.write_text("<!-- no-run: -->\n```python\n1 / 0\n```\n")
    with pytest.raises(AssertionError, match="no-run without a reason"):
        run_page(page)


def test_page_block_in_an_unknown_language_fails(isolated: Path) -> None:
    page = isolated / "page.md"
    page.write_text("```py\n1 / 0\n```\n")
    with pytest.raises(AssertionError, match="a block in 'py'"):
        run_page(page)


@pytest.mark.parametrize(
    ("shown", "printed", "how", "expected"),
    [
        ("a\nb", "a\nb\n", EXACT, True),
        ("a b", "a\nb\n", EXACT, False),
        ("a b", "a\nb\n", WRAPPED, True),
        ("a c", "a\nb\n", WRAPPED, False),
        ("loss 0.5  time 0.4 s", "loss 0.25  time 3:05", SHAPE, True),
        ("loss 0.5", "accuracy 0.5", SHAPE, False),
        ("epoch 1/9\n...\nend", "epoch 1/9\nepoch 2/9\nepoch 3/9\nend\n", SHAPE, True),
        ("epoch 1/9\n...\nend", "epoch 1/9\nepoch 2/9\n", SHAPE, False),
        ("epoch 1/9", "epoch 1/9\nepoch 2/9\n", SHAPE, False),
    ],
)
def test_output_agrees(shown: str, printed: str, how: str, expected: bool) -> None:
    assert agrees(shown, printed, how) is expected


# Lists that must be those of the code

HOOKS_PAGE = (ROOT / "docs" / "hooks.md").read_text()


def own_hooks() -> list[Hook]:
    """The hooks of loopkit itself: other test modules define events too."""
    own = {event.hook for event in Event.by_hook.values() if event.__module__ == "loopkit.events"}
    return [hook for hook in hooks().values() if hook.name not in Event.by_hook or hook.name in own]


def sections(page: str, level: int = 2) -> dict[str, str]:
    """The text under each heading of a level, by heading."""
    page = re.sub(r"(?ms)^```.*?^```$", "", page)
    parts = re.split(rf"^(#{{1,{level}}} .+)$", page, flags=re.MULTILINE)
    mark = "#" * level + " "
    heads = zip(parts[1::2], parts[2::2], strict=True)
    return {head.removeprefix(mark): text for head, text in heads if head.startswith(mark)}


def script(name: str) -> Any:
    """A script of the documentation, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hooks_page_headings_are_the_signatures_of_the_hooks() -> None:
    expected = [f"{hook.name}({', '.join(hook.arguments)})" for hook in own_hooks()]
    assert list(sections(HOOKS_PAGE, 3)) == expected
    assert re.findall(r"(?m)^# (.*)", re.sub(r"(?ms)^```.*?^```$", "", HOOKS_PAGE)) == [
        "Hooks reference (callback events)"
    ]


@pytest.mark.parametrize("label", ["When.", "Available.", "May change."])
def test_hooks_page_says_the_same_things_of_every_hook(label: str) -> None:
    missing = [
        heading for heading, text in sections(HOOKS_PAGE, 3).items() if not re.search(rf"\*\*{label}\*\* \S", text)
    ]
    assert missing == []


def test_hooks_page_map_holds_every_hook() -> None:
    loop_map = next(block.text for block in blocks(HOOKS_PAGE) if block.language == "text")
    assert sorted(re.findall(r"^[^#\n]*?\b([a-z]+_[a-z]+)\b", loop_map, re.MULTILINE)) == sorted(
        hook.name for hook in own_hooks()
    )


def test_hooks_page_map_has_the_order_in_which_a_fit_calls_them() -> None:
    listened = ["fit_begin", "epoch_begin", "epoch_end", "phase_end", "fit_end"]
    plugins = [on(hook, lambda hook=hook, **_: seen.append(hook), hook) for hook in listened]
    plugins.append(on("setup_data", lambda data, **_: (seen.append("setup_data"), data)[1], "setup_data"))
    plugins.append(on("setup_model", lambda model, **_: (seen.append("setup_model"), model)[1], "setup_model"))
    seen: list[str] = []
    make_learner(*plugins).fit(batches(1), epochs=1)
    loop_map = next(block.text for block in blocks(HOOKS_PAGE) if block.language == "text")
    order = re.findall(r"^[^#\n]*?\b([a-z]+_[a-z]+)\b", loop_map, re.MULTILINE)
    assert seen == [hook for hook in order if hook in seen]


def test_plugins_page_lists_the_distributions_and_the_names_of_their_plugins() -> None:
    text = sections((ROOT / "docs" / "plugins.md").read_text())["Distributions"]
    rows = re.findall(
        r"^\| \[([\w-]+)\]\(.*?\) \|.*?\| (.*?) \| `pip install .*-e '?plugins/([\w-]+).*` \|$", text, re.MULTILINE
    )
    listed = {name: re.findall(r"`(\w+)`", names) for name, names, _ in rows}
    made = {}
    for readme in (ROOT / "plugins").glob("*/README.md"):
        project = tomllib.loads(readme.with_name("pyproject.toml").read_text())["project"]
        made[project["name"]] = list(project.get("entry-points", {}).get("loopkit.plugins", {}))
    assert listed == made
    assert all(name == installed for name, _, installed in rows)


@pytest.mark.parametrize("name", ["make_hooks_tables", "make_plugins_table", "make_ported_lines"])
def test_tables_of_a_page_are_up_to_date(name: str) -> None:
    made = script(name)
    page = made.PAGE.read_text()
    assert page == made.updated(page), f"run: python docs/{name}.py"
