"""The page, as people use it: in a real browser, beside a real training."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import SECONDS, Server, Writer, eventually, read

from loopkit_monitor import views
from loopkit_monitor.page import embed
from loopkit_monitor.store import Store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright: pip install playwright")
expect = playwright.expect

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TABS = ("metrics", "updates", "system", "parameters", "plan", "model", "checkpoints", "media", "messages")
TIMEOUT = 10_000
MARKUP = (
    "<script>pwned=1</script>",
    "</script><script>pwned=1</script>",
    "<ScRiPt >pwned=1</sCrIpT >",
    "<script src=data:,pwned=1></script>",
    "<script type=module>pwned=1</script>",
    "<img src=x onerror=pwned=1>",
    "<img/src=x/onerror=pwned=1//",
    "<svg onload=pwned=1>",
    "<svg><script>pwned=1</script></svg>",
    "<svg><animate onbegin=pwned=1 attributeName=x dur=1s>",
    "<body onload=pwned=1>",
    "<input autofocus onfocus=pwned=1>",
    "<details open ontoggle=pwned=1>",
    "<video><source onerror=pwned=1></video>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<iframe src=javascript:parent.pwned=1></iframe>",
    "<object data=javascript:pwned=1></object>",
    "<embed src=javascript:pwned=1>",
    "<a href=javascript:pwned=1>x</a>",
    "<form action=javascript:pwned=1><button autofocus>x</form>",
    "<meta http-equiv=refresh content='0;url=javascript:pwned=1'>",
    "<base href=//elsewhere.invalid/>",
    "<link rel=stylesheet href=//elsewhere.invalid/x.css>",
    "<style>*{display:none}</style>",
    "<style>@import '//elsewhere.invalid/x.css';</style>",
    "<template><script>pwned=1</script></template>",
    "<noscript><p title='</noscript><img src=x onerror=pwned=1>'>",
    "<math><mtext><table><mglyph><style><img src=x onerror=pwned=1>",
    "<!--<script>",
    "--><script>pwned=1</script>",
    "]]><script>pwned=1</script>",
    '"><script>pwned=1</script>',
    "'><script>pwned=1</script>",
    "' onmouseover=pwned=1 x='",
    "javascript:pwned=1",
    "\u2028pwned=1//",
    "\\u003cscript\\u003epwned=1\\u003c/script\\u003e",
    "&lt;script&gt;pwned=1&lt;/script&gt;",
    "{{constructor.constructor('pwned=1')()}}",
    "${pwned=1}`;pwned=1//",
)


@pytest.fixture(scope="module")  # its event loop runs as long; other tests have their own
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """Open pages; an error in one of them, or a breach of its policy, fails the test."""
    contexts, wrong = [], []

    def heard(message):
        if message.type == "error" and "Content Security Policy" in message.text:
            wrong.append(message.text)

    def open_page(address, hash="", width=1200, height=800, ready="main > *", **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", heard)
        page.on("dialog", lambda dialog: wrong.append(dialog.message) or dialog.dismiss())
        page.goto(address)
        page.wait_for_selector(ready, state="attached")
        if hash:
            page.goto(f"{page.url.partition('#')[0]}#{hash}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def train():
    """Start trainings in processes of their own."""
    started = []

    def start(folder, epochs):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("trainer.py")), str(folder), str(epochs)]
        started.append(subprocess.Popen(command, env=environment))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(SECONDS)


def curve(page, id, name):
    """A curve as the page has it."""
    script = "async ([id, name]) => (await import('/static/app.js')).data.curve(id, name) ?? null"
    return page.evaluate(script, [id, name])


def text(page, selector):
    return page.locator(selector).first.text_content()


def two_runs(root, steps=200):
    for name, lr in (("one", 0.1), ("two", 0.2)):
        writer = Writer(root / name / "log.jsonl")
        writer.begin(hyperparameters={"lr": lr, "same": 1}, planned={"steps": steps})
        writer.values(steps, "train/loss", "val/loss", "lr", "grad_norm", "resources/cpu", "run/time_left")
        writer.end()


def drag(page, begin=0.3, end=0.6):
    """Zoom into a part of the first chart."""
    box = page.locator(".layer").first.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], y, steps=4)
    page.mouse.up()
    return box


def test_values_move_within_a_second_while_it_trains(tmp_path, serve, visit, train):
    train(tmp_path / "runs" / "a", 40)
    eventually((tmp_path / "runs" / "a" / "log.jsonl").exists)
    page = visit(serve(tmp_path / "runs").address, "/run/a/metrics")
    expect(page.locator(".chip")).to_have_text("live", timeout=TIMEOUT)
    eventually(lambda: (curve(page, "a", "train/loss/step") or {}).get("step"))
    before, since = text(page, ".facts dd"), time.monotonic()
    eventually(lambda: text(page, ".facts dd") != before)
    assert time.monotonic() - since < 1.0
    points = len(curve(page, "a", "train/loss/step")["step"])
    eventually(lambda: len(curve(page, "a", "train/loss/step")["step"]) > points)


def test_killed_run_is_marked_and_goes_on_as_one_curve(tmp_path, serve, visit, train):
    folder = tmp_path / "runs" / "a"
    trainer = train(folder, 6)
    eventually((folder / "log.jsonl").exists)
    page = visit(serve(tmp_path / "runs").address, "/run/a/metrics")
    expect(page.locator(".chart canvas").first).to_be_visible(timeout=TIMEOUT)
    eventually(lambda: len((curve(page, "a", "train/loss/step") or {"step": []})["step"]) > 50)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(SECONDS)
    expect(page.locator(".chip")).to_have_text("crashed", timeout=TIMEOUT)
    expect(page.locator(".trouble")).to_contain_text("was killed", timeout=TIMEOUT)

    assert train(folder, 6).wait(SECONDS) == 0
    expect(page.locator(".chip")).to_have_text("finished", timeout=TIMEOUT)
    expect(page.locator(".trouble")).to_have_text("")
    rows = read(folder / "log.jsonl")["train/loss/step"]
    assert [row[0] for row in rows] == list(range(1, 151))
    eventually(lambda: len(curve(page, "a", "train/loss/step")["step"]) == len(rows), 5)
    shown = curve(page, "a", "train/loss/step")
    assert [list(row) for row in zip(shown["step"], shown["value"], shown["time"], strict=True)] == rows
    expect(page.locator(".facts")).to_contain_text("with pauses")
    page.reload()
    expect(page.locator(".chip")).to_have_text("finished", timeout=TIMEOUT)
    expect(page.locator(".chart canvas").first).to_be_visible()
    eventually(lambda: (curve(page, "a", "train/loss/step") or {}).get("value") == shown["value"])


def test_page_goes_on_when_the_server_is_back(tmp_path, visit):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    writer.values(5, "train/loss")
    words = ("--token-file", str(tmp_path / "token"))
    server = Server(tmp_path / "runs", *words)
    try:
        page = visit(server.address, "/run/a/metrics")
        eventually(lambda: (curve(page, "a", "train/loss") or {}).get("step"))
        server.end()
        expect(page.locator(".banner")).to_contain_text("The server is gone", timeout=TIMEOUT)
        writer.values(5, "train/loss", "train/later")
        server = Server(tmp_path / "runs", *words, "--port", str(server.port))
        expect(page.locator(".state")).to_have_text("connected", timeout=TIMEOUT)
        expect(page.locator(".banner")).to_be_hidden()
        eventually(lambda: len((curve(page, "a", "train/loss") or {"step": []})["step"]) == 10)
        expect(page.locator(".chart-title", has_text="later")).to_be_visible(timeout=TIMEOUT)
    finally:
        server.end()


def test_colors_follow_the_system_and_the_switch(tmp_path, serve, visit):
    two_runs(tmp_path / "runs", 3)
    page = visit(serve(tmp_path / "runs").address, color_scheme="dark")

    def background():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark = background()
    page.keyboard.press("t")
    light = background()
    assert dark != light
    page.reload()
    page.wait_for_selector("main > *")
    assert background() == light
    page.keyboard.press("t")
    assert background() == dark


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run with markup in everything that a log can name or say."""
    root = tmp_path_factory.mktemp("hostile")
    writer = Writer(root / "bad" / "log.jsonl")
    about = {bad: bad for bad in MARKUP}
    writer.begin(hyperparameters=about, argv=MARKUP, seed=MARKUP[0], planned={"steps": 9}, config=about, **about)
    for bad in MARKUP:
        writer.values(2, f"train/{bad}", f"{bad}/loss", bad, f"lr/{bad}", f"resources/{bad}")
        writer.other("run/checkpoint", "text", text=bad)
        writer.other("run/warning", "text", text=bad)
        writer.other(f"note {bad}", "text", text=bad)
        writer.other(f"rows {bad}", "table", columns=[bad], rows=[[bad]])
        writer.other(f"bars {bad}", "histogram", counts=[1.0, 2.0], edges=[0.0, 1.0, 2.0])
        writer.other(f"file {bad}", "file", path=bad, file=bad)
        writer.other(f"picture {bad}", "image", caption=bad, file=f"media/{bad}")
    plan = ("phase", "hook", "plugin", "access", "reasons")
    writer.other("run/plan", "table", columns=plan, rows=[[bad] * 5 for bad in MARKUP])
    cost = ("phase", "hook", "plugin", "calls", "seconds")
    writer.other("run/cost", "table", columns=cost, rows=[[bad, bad, bad, 1, 0.5] for bad in MARKUP])
    modules = [{"name": bad, "type": bad, "parameters": {bad: [2]}} for bad in MARKUP]
    writer.other("run/model", "graph", modules=[{"name": "", "type": "Net", "parameters": {}}, *modules])
    profile = ("module", "type", "forward seconds")
    writer.other("run/module_profile", "table", columns=profile, rows=[[bad, bad, 0.1] for bad in MARKUP])
    writer.end(reason="error", error="\n".join(MARKUP), message=MARKUP[0], by=MARKUP[1])
    folder = root / MARKUP[5].replace("/", "")
    folder.mkdir()
    shutil.copy(writer.path, folder / "log.jsonl")
    return root


def check_hostile(page, base):
    """All tabs show the markup as text."""
    for tab in TABS:
        page.goto(f"{base}#/run/bad/{tab}")
        expect(page.locator(f"#tab-{tab}[aria-selected=true]")).to_be_visible(timeout=TIMEOUT)
        expect(page.locator("#content")).not_to_have_text("", timeout=TIMEOUT)
        if tab in ("updates", "system"):  # one chart for many names, which stand in the box at the cursor
            page.locator(".chart canvas.layer").first.hover()
        elif tab != "media":  # it has cards for some of it only
            shown = page.locator("#content").evaluate("element => element.textContent")
            assert [bad for bad in MARKUP if bad.split("/")[-1].strip() not in shown] == [], tab
        for card in page.locator(".card").all()[:12]:
            card.scroll_into_view_if_needed()
        page.wait_for_timeout(50)
        assert page.evaluate("typeof pwned") == "undefined", tab
        foreign = "iframe, object, embed, base, template, main script, main style, main form, main link, main video"
        assert page.locator(foreign).count() == 0, tab


def test_text_of_a_log_is_never_markup(hostile, serve, visit):
    page = visit(serve(hostile).address)
    check_hostile(page, page.url.partition("#")[0])


def embedded(root):
    """All that a store has, as `embed` takes it."""
    store = Store(root)
    store.poll()
    data = {"runs": views.runs(store), "details": {}, "series": {}, "media": {}, "files": {}}
    for id in list(store.runs):
        detail = data["details"][id] = views.run(store, id)
        names = [each["name"] for each in detail["names"]]
        data["series"][id] = views.series(store, id, names)["series"]
        data["media"][id] = {name: views.media(store, id, name) for name in names}
    return data


def test_embedded_page_opens_from_a_disk_and_asks_for_nothing(tmp_path, hostile, visit):
    two_runs(tmp_path / "runs")
    shutil.copytree(hostile, tmp_path / "runs", dirs_exist_ok=True)
    file = tmp_path / "report.html"
    file.write_bytes(embed(embedded(tmp_path / "runs")))
    page = visit(file.as_uri())
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    for tab in TABS:
        page.goto(f"{file.as_uri()}#/run/one/{tab}?with=two")
        expect(page.locator(f"#tab-{tab}[aria-selected=true]")).to_be_visible(timeout=TIMEOUT)
    page.goto(f"{file.as_uri()}#/run/one/metrics")
    expect(page.locator(".chart canvas").first).to_be_visible(timeout=TIMEOUT)
    page.wait_for_timeout(300)
    drag(page)
    expect(page.locator("#all")).to_be_visible()
    check_hostile(page, file.as_uri())
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_embedded_page_of_one_run_opens_it(tmp_path, visit):
    two_runs(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "two")
    file = tmp_path / "report.html"
    file.write_bytes(embed(embedded(tmp_path / "runs")))
    page = visit(file.as_uri())
    expect(page.locator("h1")).to_have_text("one")
    assert json.loads(text(page, "#loopkit-data"))["runs"]["runs"][0]["id"] == "one"


def test_page_fits_a_phone(shared_runs, visit):
    page = visit(shared_runs.address, width=360, height=740)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for tab in TABS:
        page.goto(f"{page.url.partition('#')[0]}#/run/one/{tab}?with=two")
        expect(page.locator(f"#tab-{tab}[aria-selected=true]")).to_be_in_viewport(timeout=TIMEOUT)
        assert page.evaluate("document.documentElement.scrollWidth") == 360, tab
        assert (
            page.evaluate("(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)(document.querySelector('main'))")
            == 0
        )


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("phone")
    two_runs(root)
    server = Server(root)
    yield server
    server.end()


def test_run_that_is_not_there_is_told(shared_runs, visit):
    page = visit(shared_runs.address, "/run/nobody/metrics")
    expect(page.locator("main .empty")).to_contain_text("There is no such run", timeout=TIMEOUT)
