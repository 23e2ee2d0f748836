"""The page, as people use it: in a real browser, beside a real training."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

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

    def open_page(address, hash="", width=1200, height=800, ready="[role=option]", **options):
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
    box = page.locator(".u-over").first.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], y, steps=4)
    page.mouse.up()
    return box


# ----------------------------------------------------------------------------------------------------------- a training


def test_values_move_within_a_second_while_it_trains(tmp_path, serve, visit, train):
    train(tmp_path / "runs" / "a", 40)
    eventually((tmp_path / "runs" / "a" / "log.jsonl").exists)
    page = visit(serve(tmp_path / "runs").address, "/run/a/metrics")
    expect(page.locator(".chip")).to_have_text("live", timeout=TIMEOUT)
    expect(page.locator(".keys .value").first).not_to_have_text("", timeout=TIMEOUT)
    for selector in (".facts dd", ".keys .value", "[role=option] .step"):
        before, since = text(page, selector), time.monotonic()
        eventually(lambda selector=selector, before=before: text(page, selector) != before)
        assert time.monotonic() - since < 1.0, selector


def test_curves_of_several_answers_have_every_point_once(tmp_path, serve, visit):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    names = [f"{'metric' * 10}/{index}" for index in range(20)]  # more than one address can hold
    writer.begin()
    writer.values(3, *names)
    server = serve(tmp_path / "runs")
    page = visit(server.address)
    asked = []

    def grow(route):
        """The log goes on between two answers."""
        asked.append(route.request.url)
        if len(asked) > 1:
            writer.values(1, *names)
            eventually(lambda: server.get("/api/run", id="a")["step"] == writer.step)
        route.continue_()

    page.route("**/api/series?*", grow)
    page.goto(f"{page.url.partition('#')[0]}#/run/a/metrics")
    page.locator("[role=tab]").first.wait_for()
    page.evaluate("async (names) => { await (await import('/static/app.js')).data.need('a', names); }", names)
    eventually(lambda: page.wait_for_timeout(20) or len(asked) > 1)
    eventually(lambda: all((curve(page, "a", name) or {}).get("step") for name in names))
    writer.values(1, *names)  # what comes after all of it
    rows = read(writer.path)

    def steps():
        return {name: curve(page, "a", name)["step"] for name in names}

    eventually(lambda: all(found[-1:] == [writer.step] for found in steps().values()))
    assert steps() == {name: [row[0] for row in rows[name]] for name in names}


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
    expect(page.locator("[role=option] .status[data-status=crashed]")).to_be_visible()

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
        expect(page.locator(".keys .value").first).not_to_have_text("", timeout=TIMEOUT)
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


@pytest.mark.parametrize("answered", ["before", "after"])
def test_points_that_come_while_a_curve_is_asked_for_are_there_once(tmp_path, serve, visit, answered):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    writer.values(10, "train/loss")
    page = visit(serve(tmp_path / "runs").address)
    held = []

    def hold(route):
        held.append((route, route.fetch() if answered == "before" else None))

    page.route("**/api/series?*", hold)
    page.goto(page.url + "#/run/a/metrics")
    eventually(lambda: page.wait_for_timeout(20) or held)
    writer.values(5, "train/loss")
    expect(page.locator(".facts dd").first).to_have_text("15", timeout=TIMEOUT)  # the change has come
    for route, answer in held:
        if answer is None:
            route.continue_()
        else:
            route.fulfill(response=answer)
    eventually(lambda: page.wait_for_timeout(20) or not curve(page, "a", "train/loss").get("waiting"))
    assert curve(page, "a", "train/loss")["step"] == list(range(1, 16))


def test_nothing_is_said_of_the_runs_before_they_are_there(tmp_path, serve, visit):
    two_runs(tmp_path / "runs", 3)
    page = visit(serve(tmp_path / "runs").address)
    held = []
    page.route("**/api/runs*", lambda route: held.append(route))
    page.reload()
    expect(page.locator(".state")).to_have_text("loading")
    expect(page.locator(".find .muted")).to_have_text("")
    eventually(lambda: page.wait_for_timeout(20) or held)
    held[0].continue_()
    expect(page.locator(".find .muted")).to_have_text("2 runs", timeout=TIMEOUT)
    expect(page.locator(".state")).to_have_text("connected", timeout=TIMEOUT)


def test_runs_that_are_left_out_are_told_of(tmp_path, serve, visit):
    def answer(route):
        said = route.fetch()
        route.fulfill(response=said, json={**said.json(), **about})

    about = {}
    two_runs(tmp_path / "runs", 3)
    page = visit(serve(tmp_path / "runs").address)
    page.route("**/api/runs*", answer)
    for about["left_out"], about["searched"], shown in (
        (7198, True, "2 of 7,200 runs"),
        (0, False, "2 of 2+ runs"),
        (0, True, "2 runs"),
    ):
        page.reload()
        expect(page.locator(".find .muted")).to_have_text(shown, timeout=TIMEOUT)


def test_new_run_shows_up(tmp_path, serve, visit):
    (tmp_path / "runs").mkdir()
    page = visit(serve(tmp_path / "runs").address, ready=".empty")
    expect(page.locator(".empty")).to_contain_text("No runs yet")
    writer = Writer(tmp_path / "runs" / "new" / "log.jsonl")
    writer.begin()
    writer.values(3)
    expect(page.locator("[role=option]")).to_have_count(1, timeout=TIMEOUT)
    expect(page.locator(".empty")).to_be_hidden()


# --------------------------------------------------------------------------------------------------------------- charts


def test_zoom_asks_for_more_points_and_double_click_shows_all(tmp_path, serve, visit):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    writer.values(20_000, "train/loss")
    writer.end()
    page = visit(serve(tmp_path / "runs").address)
    page.goto(page.url + "#/run/a/metrics")
    expect(page.locator(".keys .value").first).not_to_have_text("", timeout=TIMEOUT)
    assert len(curve(page, "a", "train/loss")["step"]) <= 1600
    with page.expect_response(lambda answer: "/api/series" in answer.url and "from=" in answer.url) as asked:
        box = drag(page)
    found = asked.value.json()["series"]["train/loss"]
    assert 5_000 < found["step"][0] < 6_000
    assert 12_000 < found["step"][-1] < 13_000
    expect(page.locator("#all")).to_be_visible()
    page.mouse.move(box["x"] + 1, box["y"] + 50)
    expect(page.locator(".where").first).to_contain_text("step ")
    assert 5_500 < int(text(page, ".where").removeprefix("step ").replace(",", "")) < 6_500
    page.mouse.dblclick(box["x"] + 100, box["y"] + 50)
    expect(page.locator("#all")).to_be_hidden()
    page.mouse.move(box["x"] + 1, box["y"] + 50)
    eventually(lambda: int(text(page, ".where").removeprefix("step ").replace(",", "")) < 200, 5)


def test_values_under_the_pointer_are_those_of_the_log(tmp_path, serve, visit):
    two_runs(tmp_path / "runs", 200)
    page = visit(serve(tmp_path / "runs").address, "/run/one/metrics")
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    expect(page.locator(".where").first).to_contain_text("step ")
    step = int(text(page, ".where").removeprefix("step "))
    values = [row[1] for row in read(tmp_path / "runs" / "one" / "log.jsonl")["train/loss"]]
    assert abs(float(text(page, ".keys .value")) - values[step - 1]) < 1e-4


def test_smoothing_and_log_scale_change_what_is_drawn(tmp_path, serve, visit):
    two_runs(tmp_path / "runs")
    page = visit(serve(tmp_path / "runs").address, "/run/one/metrics")
    expect(page.locator(".keys .value").first).not_to_have_text("", timeout=TIMEOUT)

    def drawn():
        return page.evaluate("document.querySelector('.chart canvas').toDataURL()")

    plain, value = drawn(), text(page, ".keys .value")
    page.locator("#smooth").fill("0.9")
    eventually(lambda: drawn() != plain)
    assert text(page, ".keys .value") != value
    smooth = drawn()
    page.keyboard.press("l")
    eventually(lambda: drawn() not in (plain, smooth))
    expect(page.locator("#log")).to_be_checked()


def test_each_curve_has_its_place(tmp_path, serve, visit):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    gpus = ("resources/gpu0", "resources/gpu1", "resources/gpu0_memory")
    figures = ("run/time_left", "run/throughput/steps_per_second")
    updates = ("run/lr", "lr", "lr/head", "run/loss_scale", "run/skipped_updates", "grad_norm", "grad_norm/stem")
    of_passes = ("train/loss_scale", "train/skipped", "final/val/loss")
    writer.values(3, "train/loss", "val/loss", "train/loss/step", "accuracy", *gpus, *figures, *updates, *of_passes)
    page = visit(serve(tmp_path / "runs").address, "/run/a/metrics")

    def charts():
        return [
            (chart.locator(".chart-title").text_content(), chart.locator(".label").all_text_contents())
            for chart in page.locator(".chart").all()
        ]

    expect(page.locator(".chart").first).to_be_visible(timeout=TIMEOUT)
    loss = ("loss", ["train", "val"])
    steps = ("loss within the epoch", ["train each step"])
    assert charts() == [loss, ("accuracy", ["accuracy"]), steps]
    page.get_by_role("tab", name="Updates").click()
    expect(page.locator(".chart-title", has_text="Loss scale")).to_be_visible()
    found = dict(charts())
    assert found["Learning rate"] == ["lr", "head"]
    assert found["Gradient norm"] == ["grad norm", "stem"]
    assert found["Loss scale"] == ["train"]
    names = {"Learning rate", "Gradient norm", "Loss scale", "Skipped updates", "Skipped updates of an epoch"}
    assert set(found) == names
    page.get_by_role("tab", name="System").click()
    expect(page.locator(".chart-title", has_text="GPU memory")).to_be_visible()
    found = dict(charts())
    assert found["GPU"] == ["gpu0", "gpu1"]
    assert set(found) == {"GPU", "GPU memory", "Time left", "Steps a second"}


def test_undefined_values_are_shown_and_hide_nothing(tmp_path, serve, visit):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    for step, value in enumerate([1.0, 0.5, "nan", 0.25, "inf"], 1):
        writer.value("train/loss", value, step=step, update=step)
    page = visit(serve(tmp_path / "runs").address, "/run/a/metrics")
    expect(page.locator(".keys .value").first).to_have_text("inf", timeout=TIMEOUT)
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    expect(page.locator(".keys .value").first).to_have_text("nan")
    page.mouse.move(box["x"] + box["width"] * 0.26, box["y"] + 20)
    expect(page.locator(".keys .value").first).to_have_text("0.5000")


def test_two_runs_are_laid_over_each_other(tmp_path, serve, visit):
    two_runs(tmp_path / "runs")
    page = visit(serve(tmp_path / "runs").address, "/run/one/metrics")
    page.locator("[role=option][data-run=two]").focus()
    page.keyboard.press("x")
    chart = page.locator(".chart").first
    expect(chart.locator(".legend th")).to_have_text(["train", "val", "one", "two"], timeout=TIMEOUT)
    keys = chart.locator(".legend td button")
    expect(chart.locator(".legend td .label")).to_have_text(["one: train", "one: val", "two: train", "two: val"])
    expect(page.locator(".keys .value").nth(1)).not_to_have_text("")
    pressed = {"val": "true false true false", "two": "true false false false"}  # a click hides what is shown of them
    for name, expected in pressed.items():
        chart.locator(".legend th").get_by_text(name).click()
        assert [key.get_attribute("aria-pressed") for key in keys.all()] == expected.split()
    assert page.url.endswith("?with=two")
    page.get_by_role("tab", name="Parameters").click()
    expect(page.locator("tr.differs td")).to_have_text(["lr", "0.1000", "0.2000"])
    page.get_by_role("button", name="Take two away").click()
    expect(page.locator(".laid-run")).to_have_count(0)


def test_a_run_that_ended_before_has_no_value_under_the_pointer(tmp_path, serve, visit):
    for name, steps in (("long", 200), ("short", 50)):
        writer = Writer(tmp_path / "runs" / name / "log.jsonl")
        writer.begin()
        writer.values(steps, "train/loss")
        writer.end()
    page = visit(serve(tmp_path / "runs").address, "/run/long/metrics?with=short")
    expect(page.locator(".keys .value").nth(1)).not_to_have_text("", timeout=TIMEOUT)
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20)
    expect(page.locator(".keys .value").nth(1)).to_have_text("\u2013")
    expect(page.locator(".keys .value").first).not_to_have_text("\u2013")
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 20)
    expect(page.locator(".keys .value").nth(1)).not_to_have_text("\u2013")


def test_epochs_are_laid_out_by_their_steps(tmp_path, serve, visit):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    for step in range(1, 11):
        writer.together({"train/loss/step": step}, step=step, epoch=step // 5)  # five steps an epoch
    writer.end()
    page = visit(serve(tmp_path / "runs").address, "/run/a/metrics")
    expect(page.locator(".chart canvas").first).to_be_visible(timeout=TIMEOUT)
    page.get_by_label("Horizontal axis").select_option("epoch")
    page.locator(".chart").first.focus()
    for _ in range(20):  # a key that comes before the chart is drawn anew is lost
        page.keyboard.press("Escape")
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(200)
        if page.locator(".where").first.inner_text():
            break
    expect(page.locator(".where").first).to_have_text("epoch 1.200")
    page.mouse.move(0, 0)
    page.evaluate("document.querySelector('.chart').scrollIntoView()")
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 20)
    expect(page.locator(".where").first).to_have_text("epoch 2")


def saved(page, form):
    """What a chart is saved as."""
    page.get_by_label("More of loss").click()
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Save as {form}").click()
    return Path(download.value.path()).read_bytes(), download.value.suggested_filename


@pytest.mark.parametrize("report", [False, True])
def test_chart_is_enlarged_and_saved(tmp_path, serve, visit, report):
    two_runs(tmp_path / "runs", 30)
    file = tmp_path / "report.html"
    if report:
        file.write_bytes(embed(embedded(tmp_path / "runs")))
    page = visit(file.as_uri() if report else serve(tmp_path / "runs").address, "/run/one/metrics?with=two")
    expect(page.locator(".chart canvas").first).to_be_visible(timeout=TIMEOUT)
    expect(page.locator(".keys .value").nth(1)).not_to_have_text("", timeout=TIMEOUT)
    page.get_by_label("More of loss").click()
    page.get_by_role("button", name="Enlarge").click()
    assert page.locator(".u-over").first.bounding_box()["height"] > 400
    rows, name = saved(page, "CSV")
    assert name == "loss.csv"
    lines = rows.decode().splitlines()
    assert lines[0] == "run,name,step,value"
    logged = read(tmp_path / "runs" / "one" / "log.jsonl")["train/loss"]
    assert [float(line.split(",")[3]) for line in lines if line.startswith("one,train/loss,")] == [
        row[1] for row in logged
    ]
    drawn, name = saved(page, "SVG")
    assert name == "loss.svg"
    tree = ElementTree.fromstring(drawn)
    paths = [each.get("d") for each in tree.iter("{http://www.w3.org/2000/svg}path")]
    assert [path.count("L") for path in paths] == [29] * 4
    said = [each.text for each in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"loss", "step", "0", "30", "one: train", "two: val"} <= set(said)
    picture, name = saved(page, "PNG")
    assert (name, picture[:8]) == ("loss.png", b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000


def test_saved_table_runs_no_formula(shared_runs, visit):
    page = visit(shared_runs.address)
    script = "async (rows) => (await import('/static/export.js')).csv(rows)"
    rows = [["=1+1", "-x", -0.5, 'a"b', "c,d", "@e", None]]
    assert page.evaluate(script, rows) == '\'=1+1,\'-x,-0.5,"a""b","c,d",\'@e,\r\n'


def test_legend_of_eight_runs_is_smaller_than_the_plot(tmp_path, serve, visit):
    names = [f"run-{number}" for number in range(8)]
    for name in names:
        writer = Writer(tmp_path / "runs" / name / "log.jsonl")
        writer.begin()
        writer.values(5, "train/loss", "val/loss")
        writer.end()
    rest = "&".join(f"with={name}" for name in names[1:])
    page = visit(serve(tmp_path / "runs").address, f"/run/{names[0]}/metrics?{rest}")
    expect(page.locator(".legend tbody tr")).to_have_count(8, timeout=TIMEOUT)
    assert page.locator(".legend").first.bounding_box()["height"] < page.locator(".plot").first.bounding_box()["height"]


def test_buttons_of_runs_tell_them_apart(shared_runs, visit):
    page = visit(shared_runs.address, "/run/one/metrics?with=two")
    expect(page.locator(".chart canvas").first).to_be_visible(timeout=TIMEOUT)
    names = page.evaluate(
        "[...document.querySelectorAll('main button, main summary, main a, aside button')]"
        ".filter(each => each.checkVisibility() && !each.closest('.chart'))"
        ".map(each => each.getAttribute('aria-label') ?? each.textContent.trim())"
    )
    assert [name for name in names if not name or names.count(name) > 1] == []
    for chart in page.locator(".chart").all():
        inside = chart.locator("button").evaluate_all(
            "all => all.filter(each => each.checkVisibility()).map(each => each.innerText || each.textContent)"
        )
        assert len(inside) == len(set(inside))


# --------------------------------------------------------------------------------------------------------------- tables


def test_checkpoints_tell_which_is_best_and_which_are_there(tmp_path, serve, visit):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    columns = ("path", "reason", "monitor", "mode", "value", "epoch", "step")

    def row(number, reason, *metric):
        cells = (f"/c/00000{number}", reason, *(metric or (None, None, None)), number, 10 * number)
        writer.other("run/checkpoint", "table", columns=columns, rows=[cells])

    row(1, "epoch", "val/accuracy", "max", 0.5)
    row(2, "epoch", "val/accuracy", "max", 0.9)
    row(1, "removed")
    row(3, "epoch", "val/accuracy", "max", 0.9)
    row(4, "end")
    page = visit(serve(tmp_path / "runs").address, "/run/a/checkpoints")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(4, timeout=TIMEOUT)
    expect(rows.locator("visible=true")).to_have_count(3)
    page.get_by_text("show removed (1)").click()
    expect(rows.locator("visible=true")).to_have_count(4)
    row(5, "end")
    expect(rows.locator("visible=true")).to_have_count(5, timeout=TIMEOUT)  # it stays open
    shown = [[cell.text_content() for cell in each.locator("td").all()][:6] for each in rows.all()]
    assert shown == [
        ["50", "5", "\u2013", "\u2013", "end", "000005"],
        ["40", "4", "\u2013", "\u2013", "end", "000004"],
        ["30", "3", "val/accuracy (max)", "0.9000", "epoch", "000003"],
        ["20", "2", "val/accuracy (max)", "0.9000", "epoch best", "000002"],
        ["10", "1", "val/accuracy (max)", "0.5000", "epoch", "removed"],
    ]
    expect(page.locator(".section")).to_have_text("Checkpoints4 kept of 5 saved, the latest first")
    expect(page.locator("#tab-checkpoints .count")).to_have_text("5")


def test_matrix_is_shaded_and_a_table_is_not(tmp_path, serve, visit):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    writer.other("val/confusion_matrix", "table", columns=["", "cat", "dog"], rows=[["cat", 8, 2], ["dog", 0, 4]])
    writer.other("val/worst", "table", columns=["sample", "loss"], rows=[[3, 0.5], [4, 0.25]])
    page = visit(serve(tmp_path / "runs").address, "/run/a/media")
    cells = page.get_by_role("region", name="val/confusion_matrix").locator("td.heat")
    expect(cells).to_have_text(["8", "2", "0", "4"], timeout=TIMEOUT)
    assert [cell.evaluate("each => each.style.getPropertyValue('--heat')") for cell in cells.all()] == [
        *("1", "0.25", "0", "0.5")
    ]
    expect(page.get_by_role("region", name="val/worst").locator("td")).to_have_count(4)
    expect(page.get_by_role("region", name="val/worst").locator("td.heat")).to_have_count(0)


def test_table_whose_first_column_rises_is_drawn_as_curves(tmp_path, serve, visit):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    rows = [[at / 10, 1 - at / 20, "nan" if at < 3 else 1 - at / 10] for at in range(11)]
    writer.other("val/precision_recall", "table", columns=["recall", "cat", "dog"], rows=rows)
    page = visit(serve(tmp_path / "runs").address, "/run/a/media")
    drawn = page.get_by_role("img", name="val/precision_recall: cat, dog over recall")
    expect(drawn.locator("path")).to_have_count(2, timeout=TIMEOUT)
    cat, dog = (path.get_attribute("d") for path in drawn.locator("path").all())
    assert (cat.count("L"), dog.count("M"), dog.count("L")) == (10, 1, 7)
    stroke = "each => getComputedStyle(each).stroke"
    assert drawn.locator("path").first.evaluate(stroke) != drawn.locator("path").last.evaluate(stroke)
    page.get_by_text("Numbers").click()
    expect(page.get_by_role("region", name="val/precision_recall").locator("tbody tr")).to_have_count(11)


def test_hyperparameters_stand_before_options_of_plugins_and_results(tmp_path, serve, visit):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin(hyperparameters={"width": 8, "plugins.ema.decay": 0.9})
    writer.values(3, "train/loss", "train/loss/step", "lr")
    writer.end()
    page = visit(serve(tmp_path / "runs").address, "/run/a/parameters")
    tables = page.locator(".table tbody")
    expect(tables.nth(2)).to_be_visible(timeout=TIMEOUT)
    names = [each.locator("td:first-child").all_text_contents() for each in tables.all()[:3]]
    assert names == [["width"], ["plugins.ema.decay"], ["train/loss"]]


# ------------------------------------------------------------------------------------------------------------- keyboard


def test_page_is_used_by_keyboard(tmp_path, serve, visit):
    two_runs(tmp_path / "runs")
    page = visit(serve(tmp_path / "runs").address)

    def focused(script):
        return page.evaluate(f"document.activeElement.{script}")

    page.keyboard.press("/")
    assert focused("id") == "search"
    page.keyboard.type("tw")
    expect(page.locator("[role=option]")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator("[role=option]")).to_have_count(2)
    page.keyboard.press("/")
    page.keyboard.press("ArrowDown")
    first = focused("dataset.run")
    page.keyboard.press("ArrowDown")
    second = focused("dataset.run")
    assert {first, second} == {"one", "two"}
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(second, timeout=TIMEOUT)
    page.keyboard.press("]")
    expect(page.get_by_role("tab", selected=True)).to_have_text("Updates")
    page.keyboard.press("[")
    expect(page.get_by_role("tab", selected=True)).to_have_text("Metrics")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()
    page.get_by_role("tab", selected=True).focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", selected=True)).to_be_focused()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(focused("className") or focused("id") or focused("tagName"))
    assert "chart" in reached
    page.locator(".chart").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".where").first).to_contain_text("step 1")
    page.keyboard.press("+")
    expect(page.locator("#all")).to_be_visible()
    page.keyboard.press("0")
    expect(page.locator("#all")).to_be_hidden()


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
    page.wait_for_selector("[role=option]")
    assert background() == light
    page.keyboard.press("t")
    assert background() == dark


# --------------------------------------------------------------------------------------------------------- text is data


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
        shown = page.locator("#content").evaluate("element => element.textContent")
        if tab != "media":  # where there are cards for some of it alone
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


# --------------------------------------------------------------------------------------------------------- as one file


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
    expect(page.locator(".keys .value").first).not_to_have_text("", timeout=TIMEOUT)
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


# ---------------------------------------------------------------------------------------------------------------- phone


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


def test_table_and_scatter_fit_a_phone(shared_runs, visit):
    page = visit(shared_runs.address, "/table", width=360, height=740)
    page.get_by_text("Scatter").click()
    expect(page.locator(".dots a")).to_have_count(2, timeout=TIMEOUT)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("(main => main.scrollWidth - main.clientWidth)(document.querySelector('main'))") == 0


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


# ------------------------------------------------------------------------------------------------------------ the table


def sweep(root, rates=(0.3, 0.1, 0.2)):
    """Runs whose loss is lowest in the middle, and whose accuracy is highest there."""
    for number, lr in enumerate(rates):
        writer = Writer(root / f"run-{number}" / "log.jsonl")
        writer.begin(hyperparameters={"lr": lr, "same": 1, "kind": "ab"[number % 2]})
        for loss in (1.0, lr, 2.0):
            writer.step += 1
            writer.together({"val/loss": loss, "val/accuracy": 1 - loss / 4, "train/loss": loss})
        writer.end()


def cells(page, place):
    return page.locator(f".overview tbody td:nth-child({place})").all_text_contents()


def test_table_shows_the_best_values_and_the_parameters_that_differ(tmp_path, serve, visit):
    sweep(tmp_path / "runs")
    page = visit(serve(tmp_path / "runs").address, "/table", ready=".find")
    heads = page.locator(".overview th .sort:first-child")
    expect(heads).to_have_text(["run", "state", "step", "val/accuracy", "val/loss", "kind", "lr"])
    assert cells(page, 5) == ["0.9250", "0.9750", "0.9500"]  # the highest; the latest is 0.5
    assert cells(page, 6) == ["0.3000", "0.1000", "0.2000"]
    page.get_by_label("val/loss: lowest. Change").click()
    assert cells(page, 6) == ["2", "2", "2"]
    page.get_by_label("Only what differs").uncheck()
    expect(heads).to_have_text(["run", "state", "step", "val/accuracy", "val/loss", "kind", "lr", "same"])
    page.get_by_text("Columns").click()
    page.get_by_label("train/loss").check()
    expect(page.locator(".overview th .sort:first-child")).to_contain_text(["train/loss"])


def test_table_is_sorted_and_filtered_and_all_that_it_shows_are_compared(tmp_path, serve, visit):
    sweep(tmp_path / "runs")
    page = visit(serve(tmp_path / "runs").address, "/table", ready=".find")
    sort = page.get_by_role("button", name="lr", exact=True)
    sort.click()
    assert cells(page, 2) == ["run-1", "run-2", "run-0"]
    sort.press("Enter")
    assert cells(page, 2) == ["run-0", "run-2", "run-1"]
    for wanted, found in (
        ("kind=a", ["run-0", "run-2"]),
        ("lr<0.25 kind=a", ["run-2"]),
        ("loss<0.15", ["run-1"]),
        ("x", []),
    ):
        page.get_by_label("Filter the table").fill(wanted)
        assert cells(page, 2) == found
    page.get_by_label("Filter the table").fill("lr>0.15")
    page.get_by_label("Select all shown").check()
    page.get_by_role("button", name="Compare 2").click()
    expect(page.locator(".laid-run")).to_contain_text(["run-0", "run-2"])


def test_scatter_shows_the_runs_of_the_table(tmp_path, serve, visit):
    sweep(tmp_path / "runs", rates=(0.001, 0.1, 0.01))
    page = visit(serve(tmp_path / "runs").address, "/table", ready=".find")
    page.get_by_text("Scatter").click()
    page.get_by_label("Across").select_option(label="lr")
    page.get_by_label("Up").select_option(label="val/loss")
    dots = page.locator(".dots a")
    expect(dots).to_have_count(3)
    expect(page.locator(".dots")).to_contain_text("lr, log scale")
    places = {dot.get_attribute("aria-label"): float(dot.locator("circle").get_attribute("cx")) for dot in dots.all()}
    low, middle, high = (
        places[f"run-{at}: lr {lr}, val/loss {lr}"] for at, lr in ((0, "0.001000"), (2, "0.01000"), (1, "0.1000"))
    )
    assert abs((low + high) / 2 - middle) < 0.01
    page.get_by_label("Filter the table").fill("kind=b")
    expect(dots).to_have_count(1)
    page.get_by_label("Across").select_option(label="kind")
    expect(dots).to_have_attribute("aria-label", "run-1: kind b, val/loss 0.1000")
    dots.click()
    expect(page.locator("h1")).to_have_text("run-1", timeout=TIMEOUT)


@pytest.mark.clock
def test_a_thousand_runs_of_fifty_parameters_sort_in_a_tenth_of_a_second(tmp_path, visit):
    names = [f"run-{number}" for number in range(1000)]
    parameters = [{f"p{at}": (number * (at + 7919)) % 997 / 10 for at in range(50)} for number in range(1000)]
    brief = {"status": "finished", "step": 5, "epoch": 1, "updated": 9.0, "started": 1.0, "metrics": {"val/loss": 0.5}}
    runs = [{"id": name, "name": name, **brief} for name in names]
    details = {
        name: {**run, "hyperparameters": given, "best": {"val/loss": [given["p0"], 9.0]}, "names": [], "epochs": []}
        for name, run, given in zip(names, runs, parameters, strict=True)
    }
    file = tmp_path / "report.html"
    file.write_bytes(embed({"runs": {"runs": runs, "seq": "a.1"}, "details": details, "series": {}}))
    page = visit(file.as_uri(), "/table", ready=".find")
    expect(page.locator(".overview .tools .muted")).to_have_text("1,000 of 1,000 runs", timeout=TIMEOUT)
    expect(page.locator(".overview th")).to_have_count(55, timeout=TIMEOUT)
    script = """key => { const begin = performance.now(); document.querySelector(`[data-key="${key}"]`).click();
        document.querySelector('.overview table').getBoundingClientRect(); return performance.now() - begin; }"""
    took = [page.evaluate(script, f"parameter p{at}") for at in (3, 4, 5)]
    assert cells(page, 5 + 5)[:2] == ["0", "0"]  # p5, the lowest first
    assert min(took) < 100, took
    page.locator(".overview tbody tr").last.scroll_into_view_if_needed()
    eventually(lambda: page.locator(".overview tbody tr").count() > 100)
