"""The best of sixty runs, and why: the workspace as a person uses it, in a real browser."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from support import Server, eventually
from test_browser import CHROMIUM, FLAGS, TIMEOUT, expect, playwright
from walk import write_runs

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
PICTURES = os.environ.get("LOOPKIT_PICTURES")
"""A folder for pictures of the walk; none are taken without."""


@pytest.fixture(scope="module")
def sixty(tmp_path_factory):
    root = tmp_path_factory.mktemp("sixty") / "runs"
    best = write_runs(root)
    server = Server(root)
    server.root, server.best = root, best
    yield server
    server.end()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def opened(browser, sixty):
    """The page of all tests, and what went wrong in it."""
    wrong = []
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    made = context.new_page()
    made.set_default_timeout(TIMEOUT)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    eventually(lambda: not sixty.get("/api/rows", since=10**9)["behind"])
    made.goto(sixty.address)
    yield made, wrong
    context.close()


@pytest.fixture
def page(opened):
    """The workspace as it is at first; an error in it, or a breach of its policy, fails the test."""
    made, wrong = opened
    wrong.clear()
    made.mouse.move(0, 0)
    made.evaluate("location.hash = '#/?q=-'; location.hash = '#/'")
    expect(made.get_by_label("Filter the runs")).to_have_value("", timeout=TIMEOUT)
    expect(made.locator("tbody tr[data-run]").first).to_be_visible(timeout=TIMEOUT)
    yield made
    assert wrong == []


@pytest.fixture(scope="session")
def axe():
    """The script of axe-core, from a package that npm installs."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm, which gets axe-core")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([npm, "pack", "--silent", "axe-core@4"], cwd=folder, capture_output=True, timeout=240)
        packed = list(Path(folder).glob("axe-core-*.tgz"))
        if done.returncode or not packed:
            pytest.skip("npm does not get axe-core")
        shutil.unpack_archive(packed[0], folder)
        yield (Path(folder) / "package" / "axe.min.js").read_text()


def go(page, hash):
    page.evaluate("hash => { location.hash = hash; }", hash)
    page.wait_for_timeout(250)


def picture(page, name):
    if PICTURES:
        page.wait_for_timeout(600)
        page.screenshot(path=Path(PICTURES) / f"{name}.png")


def names(page):
    return page.locator("tbody tr[data-run] th a").all_text_contents()


def test_best_of_sixty_runs_is_found_with_the_page(page, sixty):
    assert page.locator(".bar-of-tools .muted").text_content() == "51 runs"
    assert names(page)[0] == "live"
    page.locator("[data-key='m:val/dice']").click()  # declared: the highest first
    assert names(page)[0] == sixty.best
    assert page.locator("tbody tr[data-run]").first.locator("td.best").count() >= 1
    picture(page, "monitor-runs")
    page.get_by_label("Filter the runs").fill("dice>=0.9 state=finished !seed")
    shown = names(page)
    assert shown[0] == sixty.best
    assert 2 < len(shown) < 15
    page.get_by_role("tab", name="Settings").click()
    expect(page.locator(".sides").nth(1)).to_contain_text("width", timeout=TIMEOUT)
    assert page.locator(".sides").nth(1).locator("tbody th").first.text_content() == "lr"
    picture(page, "monitor-settings")
    address = page.url
    page.reload()
    expect(page.get_by_role("tab", name="Settings")).to_have_attribute("aria-selected", "true", timeout=TIMEOUT)
    assert page.url == address
    eventually(lambda: page.wait_for_timeout(50) or names(page) == shown)
    page.locator("tbody tr[data-run] th a").first.click()
    expect(page.locator("h1")).to_have_text(sixty.best, timeout=TIMEOUT)
    page.get_by_role("link", name="All runs").click()
    eventually(lambda: page.wait_for_timeout(50) or names(page) == shown)


def test_one_click_on_the_eye_shows_and_hides_a_run(page):
    page.get_by_role("button", name="None", exact=True).click()
    expect(page.locator(".eye[aria-pressed=true]")).to_have_count(0)
    page.get_by_label("Show seed-03 in the charts").click()
    page.get_by_label("Show seed-04 in the charts").click()
    expect(page.locator(".eye[aria-pressed=true]")).to_have_count(2)
    expect(page.locator(".chart canvas").first).to_be_visible(timeout=TIMEOUT)
    assert "on=seed-03" in page.url
    page.get_by_label("Show seed-03 in the charts").click()
    expect(page.locator(".eye[aria-pressed=true]")).to_have_count(1)
    page.get_by_role("button", name="All", exact=True).click()
    expect(page.locator(".eyes span")).to_have_text("51 shown")


def test_seeds_are_grouped_with_a_band_and_the_address_keeps_it(page):
    page.get_by_label("Filter the runs").fill("seed-")
    page.get_by_label("Group by").select_option(label="lr")
    expect(page.locator("tr.group")).to_have_count(2)
    expect(page.locator("tr.group").first).to_contain_text("5 runs")
    expect(page.locator("tr.group").first).to_contain_text("\u00b1")
    picture(page, "monitor-seeds")
    page.reload()
    expect(page.locator("tr.group")).to_have_count(2, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("setting", "values"),
    [("lr", ["0.003", "0.03"]), ("width", ["16", "64", "256"]), ("seed", [str(seed) for seed in range(10)])],
)
def test_groups_are_in_the_order_of_their_numbers(page, setting, values):
    page.get_by_label("Filter the runs").fill("seed-")
    page.get_by_label("Group by").select_option(label=setting)
    expect(page.locator("tr.group")).to_have_count(len(values))
    assert [text.partition(",")[0] for text in page.locator("tr.group th").all_text_contents()] == values
    expect(page.locator(".eyes span")).to_have_text("10 shown")
    page.get_by_label("Group by").select_option(label="no")
    expect(page.locator(".eyes span")).to_have_text("8 shown")


def test_each_of_the_first_runs_has_a_color_of_its_own(page):
    shown = page.locator(".eye[aria-pressed=true]")
    colors = shown.evaluate_all("eyes => eyes.map((eye) => getComputedStyle(eye.firstChild).backgroundColor)")
    assert len(colors) == len(set(colors)) == 8


def test_groups_are_in_the_order_of_the_sorted_metric(page):
    go(page, "#/?q=seed-&group=p:lr&show=all&sort=m:val/loss")
    for ways, order in ((1, ["0.003", "0.03"]), (2, ["0.03", "0.003"])):
        expect(page.locator("tr.group")).to_have_count(2)
        assert [text.partition(",")[0] for text in page.locator("tr.group th").all_text_contents()] == order, ways
        page.locator("[data-key='m:val/loss']").click()


def colors(page):
    """The color of each shown run, by its name."""
    dots = "eyes => eyes.map((eye) => [eye.getAttribute('aria-label'), eye.style.getPropertyValue('--run')])"
    return dict(page.locator(".eye[aria-pressed=true]").evaluate_all(dots))


@pytest.mark.parametrize("number", [2, 4])
def test_few_runs_have_the_first_colors(page, number):
    page.get_by_label("Filter the runs").fill(" | ".join(f"resume-0{at}" for at in range(5, 5 + number)))
    expect(page.locator(".eyes span")).to_have_text(f"{number} shown")
    assert sorted(colors(page).values()) == [f"var(--s{at})" for at in range(number)]


def test_runs_keep_their_colors_when_others_are_hidden_and_shown(page):
    before = colors(page)
    hidden, *_ = before
    page.get_by_label(hidden).click()
    expect(page.locator(".eyes span")).to_have_text("7 shown")
    assert colors(page) == {name: color for name, color in before.items() if name != hidden}
    page.get_by_label("Show resume-01 in the charts").click()
    expect(page.locator(".eyes span")).to_have_text("8 shown")
    chosen = colors(page)
    assert chosen["Show resume-01 in the charts"] == before[hidden]
    page.reload()
    expect(page.locator(".eyes span")).to_have_text("8 shown", timeout=TIMEOUT)
    assert colors(page) == chosen


def heads(page):
    return page.locator("thead .sort:not(.mode)").all_text_contents()


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", ["lr", "width", "seed", "model.parameters"]),
        ("width=64", ["lr", "seed"]),
        ("seed=3", ["lr", "width", "model.parameters"]),
    ],
)
def test_settings_that_differ_between_the_listed_runs_come_first(page, text, settings):
    page.get_by_label("Filter the runs").fill(text)
    expect(page.locator("thead")).to_contain_text("lr")
    assert heads(page)[4 : 5 + len(settings)] == [*settings, "duration"]


@pytest.mark.parametrize(("text", "path"), [("live | seed-01", ["now", None]), ("live", [None]), ("seed", [None] * 10)])
def test_folders_are_shown_where_runs_are_in_several(page, text, path):
    page.get_by_label("Filter the runs").fill(text)
    expect(page.locator("tbody tr[data-run]")).to_have_count(len(path))
    rows = "rows => rows.map((row) => row.querySelector('.path')?.textContent || null)"
    assert page.locator("tbody tr[data-run]").evaluate_all(rows) == path


def test_pointer_on_a_row_or_a_curve_shows_one_run_above_the_others(page):
    drawn = "canvas => canvas.toDataURL()"
    page.get_by_role("tab", name="Charts").hover()
    canvas = page.locator(".chart canvas").first
    expect(canvas).to_be_visible(timeout=TIMEOUT)
    page.wait_for_timeout(500)
    before = canvas.evaluate(drawn)
    page.locator("tbody tr.on").nth(2).hover()
    eventually(lambda: page.wait_for_timeout(50) or canvas.evaluate(drawn) != before)
    layer = page.locator(".layer").nth(1)
    box = layer.bounding_box()
    for height in range(20, int(box["height"]) - 40, 10):  # somewhere there is a curve
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + height)
        if page.locator("tr.pointed").count():
            break
    expect(page.locator("tr.pointed")).to_have_count(1)
    page.mouse.move(700, 20)
    expect(page.locator("tr.pointed")).to_have_count(0)
    eventually(lambda: page.wait_for_timeout(50) or canvas.evaluate(drawn) == before)


def test_one_run_is_shown_alone_and_the_others_come_back(page):
    eye = page.get_by_label("Show media-05 in the charts")
    for press in (lambda: eye.click(modifiers=["Alt"]), lambda: eye.focus() or page.keyboard.press("o")):
        press()
        expect(page.locator(".eyes span")).to_have_text("1 shown")
        press()
        expect(page.locator(".eyes span")).to_have_text("8 shown")


def test_vertical_range_of_a_chart_is_chosen_and_kept_in_the_address(page):
    more = page.get_by_role("button", name="More of dice", exact=True)
    more.click()
    box = page.locator(".popover:visible").bounding_box()
    pane = page.locator(".right").bounding_box()
    assert box["x"] + box["width"] <= pane["x"] + pane["width"] - 8
    page.get_by_label("Lowest value shown").fill("0.9")
    page.get_by_label("Highest value shown").fill("0.95")
    page.get_by_role("button", name="Set", exact=True).click()
    assert "tall=metrics+dice+0%3D0.9..0.95" in page.url
    page.reload()
    more.click(timeout=TIMEOUT)
    expect(page.get_by_label("Highest value shown")).to_have_value("0.95", timeout=TIMEOUT)
    page.get_by_role("button", name="Without outliers").click()
    assert "tall=metrics+dice+0%3D0.9..0.95" not in page.url
    more.click()
    page.locator(".popover:visible").get_by_role("button", name="All", exact=True).click()
    assert "tall=" not in page.url


def test_table_takes_the_whole_page_and_says_how_far_the_best_is(page):
    page.get_by_role("button", name="Only the table").click()
    expect(page.locator(".right")).to_be_hidden()
    assert page.locator(".left").bounding_box()["width"] > 1400
    page.locator("[data-key='m:val/dice']").click()
    second = page.locator("tbody tr[data-run]").nth(1).locator("td.number").first
    assert second.get_attribute("title").endswith(" below the best")
    page.get_by_role("button", name="With charts").click()
    expect(page.locator(".right")).to_be_visible()


def test_hyperparameters_are_copied_as_json(browser, sixty):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    try:
        page = context.new_page()
        page.goto(sixty.address)
        go(page, "#/run/seed-01/parameters")
        page.get_by_role("button", name="Copy as JSON").click(timeout=TIMEOUT)
        expect(page.get_by_role("button", name="Copied")).to_be_visible(timeout=TIMEOUT)
        assert json.loads(page.evaluate("navigator.clipboard.readText()"))["lr"] == 0.03
    finally:
        context.close()


@pytest.mark.parametrize("name", ["val/samples", "val/confusion"])
def test_small_media_are_large_enough_to_see(page, name):
    page.get_by_label("Filter the runs").fill("media-")
    page.get_by_role("tab", name="Media").click()
    page.get_by_label("Name", exact=True).select_option(name)
    item = page.locator(".media-grid img, .media-grid table").first
    expect(item).to_be_visible(timeout=TIMEOUT)
    assert item.bounding_box()["width"] >= 96


@pytest.mark.parametrize(("view", "half"), [("charts", ".left"), ("scatter", ".right"), ("settings", ".right")])
def test_link_to_a_view_shows_it_on_a_phone(browser, sixty, view, half):
    context = browser.new_context(viewport={"width": 390, "height": 844})
    try:
        page = context.new_page()
        page.goto(f"{sixty.address}#/?view={view}")
        expect(page.locator(half)).to_be_visible(timeout=TIMEOUT)
        expect(page.locator({".left": ".right", ".right": ".left"}[half])).to_be_hidden()
    finally:
        context.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr<=", "has no value"),
        ("(a", "not closed"),
        ("a)", "comes too early"),
        ('"a', "has no end"),
        ("lr<abc", "is no number"),
        ("| a", "where a word"),
        ("nothing=1", "No run has nothing"),
    ],
)
def test_filter_says_what_it_does_not_understand(page, text, said):
    page.get_by_label("Filter the runs").fill(text)
    expect(page.locator("#filter-said")).to_contain_text(said)
    page.keyboard.press("Escape")
    expect(page.locator("#filter-said")).to_be_hidden()


FILTERS = {
    "lr<=0.01": "lr <= 0.01",
    "lr <= 0.01": "lr <= 0.01",
    "width!=16": "width != 16",
    "width = 16 | width = 64": "width in (16, 64)",
    "width=16 or width=64": "width in (16, 64)",
    "not width=16 and seed=3": "width != 16 and seed == 3",
    "!(width=16 | seed>2) lr>0.001": "not (width == 16 or seed > 2) and lr > 0.001",
    "-seed width=256": "'seed' not in name and width == 256",
    "state=crashed": "'crash' in name",
    '"seed-0" width=16': "'seed-0' in name and width == 16",
    "name~resume": "'resume' in name",
}


@pytest.mark.parametrize("text", FILTERS)
def test_filter_chooses_runs(page, text):
    page.get_by_label("Filter the runs").fill(text)
    known = page.evaluate(
        "async () => [...(await import('/static/app.js')).data.runs.values()].filter(r => !r.notes.archived)"
        ".map(r => ({name: r.name, ...r.hyperparameters}))"
    )
    wanted = {
        run["name"]
        for run in known
        if eval(FILTERS[text], {}, {key: run[key] for key in ("name", "lr", "width", "seed")})
    }
    assert set(names(page)) == wanted
    assert wanted


def test_views_compare_the_shown_runs(page):
    go(page, "#/?view=scatter")
    expect(page.locator(".drawn circle")).to_have_count(51, timeout=TIMEOUT)
    expect(page.locator(".drawn")).to_contain_text("log scale")
    labels = page.locator(".drawn text").all_text_contents()
    assert {"0.001", "0.01", "0.1"} <= set(labels)
    picture(page, "monitor-scatter")
    go(page, "#/?view=parallel&brush=m:val/dice:0.9:1")
    expect(page.locator("polyline.in").first).to_be_visible(timeout=TIMEOUT)
    assert len(names(page)) == page.locator("polyline.in").count() < 51
    picture(page, "monitor-parallel")
    go(page, "#/?view=media&q=media&show=none&on=media-01&on=media-02&media=val%2Fconfusion")
    expect(page.locator(".matrix").first).to_contain_text("predicted", timeout=TIMEOUT)
    expect(page.locator(".matrix")).to_have_count(6)
    page.get_by_role("checkbox", name="Shares of each row").first.check()
    expect(page.locator(".matrix").last).to_contain_text("%", timeout=TIMEOUT)
    picture(page, "monitor-compared-media")
    go(page, "#/?view=media&q=media&show=none&on=media-01&media=remarks")
    expect(page.locator(".markdown strong").first).to_have_text("good", timeout=TIMEOUT)
    go(page, "#/?view=media&q=media&show=none&on=media-01&media=weights")
    expect(page.locator("rect.cell").first).to_be_attached(timeout=TIMEOUT)
    picture(page, "monitor-histograms")


def test_notes_tags_and_archive_are_kept_beside_the_run(page, sixty):
    log = (sixty.root / "seed-05" / "log.jsonl").read_bytes()
    go(page, "#/run/seed-05/metrics")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Name", exact=True).fill("my seed")
    page.get_by_label("Tags, with commas between them").fill("paper, good")
    page.get_by_label("Note").fill("**why**: luck")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("h1")).to_have_text("my seed", timeout=TIMEOUT)
    expect(page.locator(".note strong")).to_have_text("why")
    go(page, "#/?q=tag%3Dpaper")
    assert names(page) == ["my seed"]
    go(page, "#/run/seed-05/metrics")
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Archive").click()
    go(page, "#/?q=tag%3Dpaper")
    expect(page.locator(".empty").first).to_contain_text("No run matches")
    page.get_by_label("archived").check()
    assert names(page) == ["my seed"]
    assert (sixty.root / "seed-05" / "log.jsonl").read_bytes() == log
    (sixty.root / "seed-05" / "monitor.json").unlink()


def test_escape_and_a_click_elsewhere_close_what_is_open(page):
    for close in (lambda: page.keyboard.press("Escape"), lambda: page.mouse.click(900, 880)):
        for button in ("Columns", "More of loss"):
            page.get_by_role("button", name=button, exact=True).click()
            expect(page.locator(".popover:visible")).to_have_count(1)
            close()
            expect(page.locator(".popover:visible")).to_have_count(0)


def test_columns_have_own_settings_first_and_options_of_plugins_folded(page):
    page.get_by_role("button", name="Columns").click()
    expect(page.locator(".popover h4").first).to_have_text("Settings")
    expect(page.locator(".popover summary")).to_have_text("Options of plugins (15)")
    page.locator(".popover").get_by_role("checkbox", name="commit").check()
    expect(page.locator("thead")).to_contain_text("commit")
    page.locator(".popover").get_by_label("seed", exact=True).uncheck()
    assert "seed" not in page.locator("thead").text_content().split()
    assert "col=" in page.url


def test_values_are_in_a_box_at_the_cursor_and_zoom_is_shared(page):
    go(page, "#/?show=none&on=seed-01&on=seed-02")
    layer = page.locator(".layer").first
    expect(layer).to_be_visible(timeout=TIMEOUT)
    page.wait_for_timeout(400)
    box = layer.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    expect(page.locator(".values:visible")).to_contain_text("seed-01")
    picture(page, "monitor-workspace")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page.get_by_role("button", name="Show all")).to_be_visible()
    assert "zoom=" in page.url
    page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + 60)
    expect(page.get_by_role("button", name="Show all")).to_be_hidden()


def test_crash_is_told_with_epochs_from_one(page):
    go(page, "#/run/crash-01/metrics")
    expect(page.locator(".trouble")).to_contain_text("In epoch 4, after 77 training steps", timeout=TIMEOUT)
    expect(page.locator(".facts")).to_contain_text("4 / 8")
    picture(page, "monitor-crash")


PAGES = [
    "#/",
    "#/?view=scatter",
    "#/?view=parallel",
    "#/?view=settings",
    "#/?view=media&q=media",
    "#/?q=nothing-at-all",
]
PAGES += [f"#/run/media-01/{tab}" for tab in ("metrics", "parameters", "plan", "checkpoints", "media", "messages")]
PAGES += ["#/run/crash-01/metrics", "#/run/none/metrics"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_have_no_violation_of_accessibility(browser, sixty, axe, scheme):
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto(sixty.address)
    page.wait_for_timeout(1500)
    page.evaluate(axe)
    found = {}
    options = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa', 'best-practice']}"
    if scheme == "dark":  # only the colors are others
        options = "{runOnly: {type: 'rule', values: ['color-contrast']}}"
    for hash in PAGES:
        go(page, hash)
        page.wait_for_timeout(500)
        said = page.evaluate(
            f"axe.run(document, {options}).then(r => r.violations"
            ".map(v => [v.id, v.nodes.slice(0, 3).map(n => n.html)]))"
        )
        found.update({f"{hash} {rule}": nodes for rule, nodes in said})
    context.close()
    assert found == {}


def test_two_runs_are_compared_on_a_phone(browser, sixty):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = context.new_page()
    page.goto(sixty.address)
    expect(page.locator("tbody tr[data-run]").first).to_be_visible(timeout=TIMEOUT)
    page.get_by_role("button", name="None", exact=True).click()
    for name in ("seed-08", "seed-09"):
        page.get_by_label("Filter the runs").fill(name)
        page.get_by_label(f"Show {name} in the charts").click()
    page.get_by_label("Filter the runs").fill("seed-0")
    picture(page, "monitor-phone")
    page.get_by_role("button", name="Charts", exact=True).click()
    expect(page.locator(".chart canvas").first).to_be_visible(timeout=TIMEOUT)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    picture(page, "monitor-phone-charts")
    page.get_by_role("tab", name="Settings").click()
    expect(page.locator(".sides").first).to_contain_text("seed-09", timeout=TIMEOUT)
    context.close()
