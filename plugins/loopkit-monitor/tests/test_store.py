import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from support import Writer, eventually, points, read

from loopkit_monitor import folder as folder_module
from loopkit_monitor import series as series_module
from loopkit_monitor import store as store_module
from loopkit_monitor import views
from loopkit_monitor.store import Store, UnknownRun


@pytest.fixture
def store(tmp_path):
    (tmp_path / "runs").mkdir(exist_ok=True)
    return Store(tmp_path / "runs")


def scan(store):
    store._scanned = -1e9
    return store.poll()


def test_a_log_is_followed_as_it_grows(store, writer):
    writer.begin(seed=3)
    writer.values(3)
    assert [change.data["run"] for change in scan(store)] == ["a"]
    run = store.get("a")
    assert points(run) == read(writer.path)
    assert (run.step, run.status, run.header["seed"]) == (3, "live", 3)
    assert store.poll() == []
    writer.values(2)
    (change,) = store.poll()
    assert [row[0] for row in change.data["series"]["lr"]] == [4, 5]
    assert points(store.get("a")) == read(writer.path)


def test_a_torn_line_waits_for_its_rest(store, writer):
    writer.values(2)
    writer.raw('{"phase": "train", "epoch": 0, "step": 3, "update": 3, "time"')
    scan(store)
    assert len(store.get("a").series["lr"]) == 2
    assert store.poll() == []
    writer.raw(': 1763800000.5, "values": {"lr": 0.5}}\n')
    (change,) = store.poll()
    assert change.data["series"] == {"lr": [(3, 0.5, 1763800000.5)]}


def test_foreign_lines_and_garbage_are_counted(store, writer):
    writer.raw(
        b"\xff\xfe\x00 garbage\n[]\nnull\n\n" + bytes(range(256)).replace(b"\n", b"") + b"\n" + b"x" * 3_000_000 + b"\n"
    )
    writer.values(2)
    writer.raw(os.urandom(100_000).replace(b"{", b"") + b"\n")
    writer.value("x" * 10_000, "nan")
    scan(store)
    run = store.get("a")
    assert len(run.series["lr"]) == 2
    assert np.isnan(run.last["x" * 10_000])
    assert run.foreign >= 5


def test_lines_that_are_too_long_are_left_out(store, writer, monkeypatch):
    monkeypatch.setattr(store_module, "PIECE", 1000)
    monkeypatch.setattr(store_module, "LONGEST_LINE", 4000)
    writer.values(1)
    writer.raw(b'{"name": "' + b"x" * 50_000 + b'"}\n')
    writer.values(30)
    scan(store)
    assert store.get("a").series["lr"].step.tolist() == list(range(1, 32))


def test_a_line_without_an_end_holds_nobody_up(store, writer):
    writer.values(1)
    os.truncate(writer.path, 1 << 40)  # a hole, which takes no room; to read it takes minutes
    scan(store)
    assert store.get("a").series["lr"].step.tolist() == [1]


@pytest.mark.timeout(60)
def test_holes_of_a_sparse_log_are_passed_over(store, writer):
    writer.values(1)
    for number in range(1, 3_000):  # of a gigabyte each
        with open(writer.path, "r+b") as log:
            log.seek(number << 30)
            log.write(b"the end of a line\n")
        if number % 1_000 == 0:
            writer.values(1)
    scan(store)
    assert store.get("a").series["lr"].step.tolist() == [1, 2, 3]


@pytest.mark.parametrize("seed", range(30))
def test_a_log_that_is_cut_back_is_told_of_exactly(store, writer, seed):
    """Whoever applies the changes has what the log has, whatever happened between two polls."""
    order = random.Random(seed)
    writer.begin()
    writer.values(5)
    scan(store)
    seen = points(store.get("a"))
    sizes = [(writer.size, writer.step)]
    for _ in range(30):
        for _ in range(order.randrange(1, 4)):
            if order.random() < 0.3:
                size, writer.step = order.choice(sizes)
                sizes = [each for each in sizes if each[0] <= size]
                writer.cut(size)
                writer.time += 1
                writer.begin(resumed=True)
            writer.values(order.randrange(0, 12), *order.choice([("lr",), ("train/loss", "lr"), ("x", "lr", "lr")]))
            sizes.append((writer.size, writer.step))
        for change in store.poll():
            assert "reload" not in change.data
            if "cut" in change.data:
                seen = {name: [row for row in rows if row[0] <= change.data["cut"]] for name, rows in seen.items()}
            for name, rows in change.data.get("series", {}).items():
                seen.setdefault(name, []).extend(map(list, rows))
        assert {name: rows for name, rows in seen.items() if rows} == read(writer.path) == points(store.get("a"))


@pytest.mark.parametrize("opened", [False, True])
def test_a_log_that_is_cut_back_while_it_is_read_is_read_again(store, writer, monkeypatch, opened):
    monkeypatch.setattr(store_module, "PIECE", 1000)
    read_pieces, left = store_module.pieces, [1]
    writer.begin()
    writer.values(5)
    size = writer.size
    scan(store)
    if opened:
        store.get("a")
    writer.values(100)

    def pieces(file, begin, end):
        for number, piece in enumerate(read_pieces(file, begin, end)):
            yield piece
            if number == 3 and left:
                left.clear()
                writer.cut(size)
                writer.step, writer.time = 5, writer.time + 100
                writer.begin(resumed=True)
                writer.values(200)

    monkeypatch.setattr(store_module, "pieces", pieces)
    if opened:
        store.poll()
    store.get("a")
    assert not left
    store.poll()
    assert points(store.get("a")) == read(writer.path)
    assert store.get("a").foreign == 0


def alternate(writer, passes):
    for _ in range(passes):
        writer.values(2, "acc", "train/loss")
        for _ in range(3):
            writer.value("acc", 100.0, phase="val")
            writer.value("val/loss", 1.0, phase="val")
    writer.value("acc", 0.5, phase="")


def test_phases_that_log_one_name_have_a_curve_each(store, writer, monkeypatch):
    """However many lines are read at once, and also of what comes later."""
    monkeypatch.setattr(store_module, "PIECE", 300)
    alternate(writer, 3)
    scan(store)
    run = store.get("a")
    assert {name: len(each) for name, each in run.series.items()} == {
        "acc": 7,
        "train/loss": 6,
        "val/acc": 9,
        "val/loss": 9,
    }
    assert {name: each.phase for name, each in run.series.items()} == {
        "acc": "train",
        "train/loss": "train",
        "val/acc": "val",
        "val/loss": "val",
    }
    writer.value("acc", 100.0, phase="val")
    (change,) = store.poll()
    assert {name: [row[1] for row in each] for name, each in change.data["series"].items()} == {"val/acc": [100.0]}
    assert (change.data["metrics"]["acc"], change.data["metrics"]["val/acc"]) == (0.5, 100.0)
    alternate(writer, 1)
    store.poll()
    fresh = Store(store.folder.root)
    fresh.poll()
    assert points(store.get("a")) == points(fresh.get("a"))
    assert set(store.get("a").series["val/acc"].value.tolist()) == {100.0}
    assert max(store.get("a").series["acc"].value.tolist()) <= 1.01


def test_many_points_are_told_in_several_changes(store, writer):
    writer.values(1)
    scan(store)
    store.get("a")
    writer.values(3000)
    changes = store.poll()
    assert [sum(map(len, change.data["series"].values())) for change in changes] == [2000, 2000, 2000]
    assert sum(len(change.data["series"].get("lr", ())) for change in changes) == 3000


def test_changes_that_are_not_kept_any_more_are_not_told(store, writer, monkeypatch):
    monkeypatch.setattr(store_module, "RING_POINTS", 50)
    writer.values(1)
    scan(store)
    store.get("a")
    first = store.last_id
    for _ in range(5):
        writer.values(10)
        store.poll()
    assert store.since(first) is None
    assert len(store.since(store.last_id - 1)) == 1
    assert store.since(store.last_id) == []
    assert store.since(store.last_id + 1) is None


def test_a_new_run_in_the_same_folder_begins_anew(store, writer):
    writer.begin()
    writer.values(5)
    scan(store)
    store.get("a")
    writer.path.rename(writer.path.with_name("log-1.jsonl"))
    writer.path.touch()
    writer.step = 0
    writer.time += 100
    writer.begin()
    writer.values(2)
    changes = scan(store)
    (change,) = [each.data for each in changes if "cut" in each.data]
    assert change["cut"] == 0
    assert points(store.get("a")) == read(writer.path)
    assert sorted(store.runs) == ["a", "a/log-1"]
    assert len(store.get("a/log-1").series["lr"]) == 5


def test_a_run_alone_can_be_the_root(store, writer):
    writer.values(1)
    for root in (writer.path.parent, writer.path):
        alone = Store(root)
        alone.poll()
        assert points(alone.get(".")) == read(writer.path)


def test_other_files_of_json_are_no_runs_unless_they_begin_as_one(store, writer):
    writer.values(1)
    (writer.path.parent / "data.jsonl").write_text('{"text": "a"}\n')
    (writer.path.parent / "mine.jsonl").write_text('{"kind":"run","time":1}\n')
    scan(store)
    assert sorted(store.runs) == ["a", "a/mine"]


def test_a_folder_that_vanishes_takes_its_runs_along(store, writer):
    writer.values(1)
    scan(store)
    store.get("a")
    shutil.rmtree(writer.path.parent)
    (change,) = store.poll()
    assert change.data["removed"]
    with pytest.raises(UnknownRun):
        store.get("a")
    shutil.rmtree(store.folder.root)
    assert scan(store) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_log_that_may_not_be_read_waits(store, writer):
    writer.values(1)
    writer.path.chmod(0)
    assert scan(store) == []
    writer.path.chmod(0o600)
    scan(store)
    assert len(store.get("a").series["lr"]) == 1


def test_a_log_that_becomes_a_link_is_not_followed(store, writer, tmp_path):
    writer.values(1)
    scan(store)
    secret = Writer(tmp_path / "secret.jsonl")
    secret.value("secret", 1.0)
    writer.path.unlink()
    writer.path.symlink_to(secret.path)
    changes = scan(store)
    assert "secret" not in json.dumps([change.data for change in changes])
    with pytest.raises(UnknownRun):
        store.get("a")


def test_a_thousand_runs_are_listed(tmp_path, writer):
    writer.begin()
    writer.values(20)
    for index in range(1000):
        (tmp_path / "runs" / f"r{index}").mkdir()
        os.link(writer.path, tmp_path / "runs" / f"r{index}" / "log.jsonl")
    store = Store(tmp_path / "runs")
    store.poll()
    assert len(store.runs) == 1001
    assert store.poll() == []


def test_of_too_many_runs_those_written_to_last_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store_module, "MOST_RUNS", 3)
    writers = [Writer(tmp_path / "runs" / f"{name}" / "log.jsonl") for name in "edcba"]
    for seconds, writer in enumerate(writers[:4]):
        writer.begin()
        os.utime(writer.path, (seconds, seconds))
    writers[4].path.unlink()
    for number in range(5):
        (tmp_path / "runs" / f"data{number}.jsonl").write_text("{}\n")  # they are no runs, and newer
    store = Store(tmp_path / "runs")
    store.poll()
    assert (set(store.runs), store.left_out) == ({"d", "c", "b"}, 1)
    assert "the 3 of 4 runs that were written to last are shown" in capsys.readouterr().err
    writers[4].begin()
    changes = scan(store)
    assert (set(store.runs), store.left_out) == ({"c", "b", "a"}, 2)
    assert [change.data["run"] for change in changes if "removed" in change.data] == ["d"]
    assert capsys.readouterr().err == ""
    assert (views.runs(store)["left_out"], views.runs(store)["searched"]) == (2, True)
    shutil.rmtree(tmp_path / "runs" / "c")
    store.poll()
    scan(store)
    assert (set(store.runs), store.left_out) == ({"d", "b", "a"}, 1)


def test_a_folder_that_is_not_searched_to_its_end_is_told_of(tmp_path, writer, monkeypatch, capsys):
    monkeypatch.setattr(folder_module, "MOST_ENTRIES", 10)
    writer.begin()
    for number in range(20):
        (tmp_path / "runs" / "a" / f"{number}.png").touch()
    store = Store(tmp_path / "runs")
    scan(store)
    scan(store)
    assert capsys.readouterr().err.count("too many files to search them all") == 1
    assert not views.runs(store)["searched"]


def test_a_long_log_is_glanced_at_only_at_its_ends(store, writer, monkeypatch):
    monkeypatch.setattr(store_module, "GLANCE", 2000)
    writer.begin(seed=1)
    writer.values(100)
    writer.begin(seed=2, resumed=True)
    writer.values(100)
    scan(store)
    run = store.runs["a"]
    assert not run.opened
    assert [each["seed"] for each in run.runs] == [1, 2]
    assert (run.step, set(run.last)) == (200, {"lr", "train/loss"})
    writer.values(1000)
    store.poll()
    assert run.step == 1200
    assert points(store.get("a")) == read(writer.path)


@pytest.mark.parametrize("torn", ["", '{"phase": "tr'])
def test_lines_longer_than_a_glance_are_seen(store, writer, monkeypatch, torn):
    monkeypatch.setattr(store_module, "GLANCE", 200)
    writer.begin(seed=1)
    for step in range(1, 20):
        values = {f"norm/{i}": step / 8 for i in range(50)}
        place = {"phase": "train", "epoch": 2, "step": step, "update": step, "time": 1763800000.5}
        writer.raw(json.dumps({**place, "values": values}) + "\n")
    writer.raw(torn)
    scan(store)
    run = store.runs["a"]
    assert not run.opened
    assert (run.step, run.epoch, len(run.last), run.last["norm/7"]) == (19, 2, 50, 19 / 8)


def test_where_the_last_fits_began_is_looked_for_in_some_logs_at_a_time(tmp_path, writer, monkeypatch):
    monkeypatch.setattr(store_module, "GLANCE", 2000)
    monkeypatch.setattr(store_module, "SEARCHED_AT_ONCE", 1)
    writer.begin(seed=1)
    writer.values(10)
    writer.begin(seed=2, resumed=True)
    writer.values(100)
    for name in ("b", "c"):
        shutil.copytree(writer.path.parent, tmp_path / "runs" / name)
    store = Store(tmp_path / "runs")
    for known in range(1, 4):
        changes = store.poll()
        assert [run.header["seed"] for run in store.runs.values()] == [2] * known + [1] * (3 - known)
    assert [change.data["run"] for change in changes] == ["c"]
    assert store.poll() == []


def test_a_fit_that_begins_meanwhile_is_the_last(store, writer, monkeypatch):
    monkeypatch.setattr(store_module, "GLANCE", 2000)
    monkeypatch.setattr(store_module, "SEARCHED_AT_ONCE", 0)
    writer.begin(seed=1)
    writer.begin(seed=2, resumed=True)
    writer.values(100)
    scan(store)
    writer.begin(seed=3, resumed=True)
    store.poll()
    monkeypatch.setattr(store_module, "SEARCHED_AT_ONCE", 1 << 20)
    store.poll()
    assert store.runs["a"].header["seed"] == 3


# --------------------------------------------------------------------------------------------------------------- status


def status(store):
    scan(store)
    return store.runs["a"].status


def test_a_run_that_ended_is_finished_or_crashed(store, writer):
    writer.begin()
    assert status(store) == "live"
    writer.end()
    assert status(store) == "finished"
    writer.begin(resumed=True)
    assert status(store) == "live"
    writer.end(reason="error", error="ValueError: no")
    assert status(store) == "crashed"


def test_a_run_whose_process_is_gone_has_crashed(store, writer):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        writer.line(kind="run", host=socket.gethostname(), pid=process.pid, time=time.time())
        assert status(store) == "live"
        process.kill()
        process.poll()
        eventually(lambda: status(store) == "crashed")  # also while nobody has waited for it
        process.wait()
        assert status(store) == "crashed"
    writer.values(1)  # what it wrote last
    assert status(store) == "crashed"
    writer.values(1)  # it is another one's number
    assert status(store) == "live"


@pytest.mark.parametrize("pid", [-1, 0, 2**31, 2**80, 1.5, "1", None, True, [1]])
def test_a_process_that_cannot_be_is_gone(store, writer, pid):
    writer.line(kind="run", host=socket.gethostname(), pid=pid, time=time.time())
    assert status(store) == "crashed"


def test_a_run_elsewhere_is_silent_after_a_minute(store, writer):
    writer.line(kind="run", host="elsewhere", pid=1, time=1.0)
    assert status(store) == "live"
    store.runs["a"].grown -= 61
    assert status(store) == "silent"
    writer.values(1)
    assert status(store) == "live"


def test_clocks_that_jump_do_not_matter(store, writer):
    writer.begin()
    for seconds in (1e9, -1e9, 1e18, float("1e300")):
        writer.time = seconds
        writer.values(1)
    writer.value("lr", 1.0, time=-5)
    os.utime(writer.path, (4e9, 4e9))
    assert status(store) == "live"
    assert len(store.get("a").series["lr"]) == 5
    os.utime(writer.path, (0, 0))
    assert status(store) == "live"


# --------------------------------------------------------------------------------------------------------------- bounds


@pytest.fixture
def full_disk(monkeypatch):
    """The temporary file has no room."""
    monkeypatch.setattr(series_module, "MOST_SHELVED", 0)


def test_points_beyond_the_memory_are_kept_in_a_file_and_none_is_lost(tmp_path, writer):
    writer.values(5000)
    store = Store(tmp_path / "runs", most_points=1000)
    store.poll()
    writer.values(3000)
    store.poll()
    run = store.get("a")
    assert points(run) == read(writer.path)
    writer.values(2000)
    store.poll()
    assert points(run) == read(writer.path)
    assert sum(series.held for series in run.series.values()) <= 1000
    assert all(series.exact for series in run.series.values())


@pytest.mark.parametrize("step", [1, 7, 20_000])
def test_points_that_are_put_away_together_are_one_part(tmp_path, writer, monkeypatch, step):
    monkeypatch.setattr(store_module, "PIECE", 2000)
    writer.values(3000)
    store = Store(tmp_path / "runs", most_points=20_000 // step)
    store.poll()
    before = store.get("a").series["lr"]
    held = sum(series.held for series in store.get("a").series.values())
    assert store._put_away(store.get("a")) == (held > 0)
    assert len(before.parts) <= -(-6000 // (20_000 // step)) + 1
    assert points(store.get("a")) == read(writer.path)


@pytest.mark.parametrize("waits", [False, True])
def test_reading_ahead_ends_early_while_somebody_waits(tmp_path, writer, monkeypatch, waits):
    monkeypatch.setattr(store_module, "LARGE", 10_000)
    monkeypatch.setattr(store_module, "PIECE", 20_000)
    writer.values(6000)
    store = Store(tmp_path / "runs", ahead=60)
    store.awaited = lambda: waits
    store.poll()
    assert store.behind == waits


@pytest.mark.parametrize("runs", [2, 5])
def test_logs_are_looked_at_now_and_then_while_runs_are_read_ahead(tmp_path, monkeypatch, runs):
    for number in range(runs):
        Writer(tmp_path / f"{number}" / "log.jsonl").values(600)
    monkeypatch.setattr(store_module, "PIECE", 2000)
    looked = []
    update = Store._update
    monkeypatch.setattr(Store, "_update", lambda store, run, now: looked.append(run.id) or update(store, run, now))
    monkeypatch.setattr(store_module, "LOOK_SECONDS", 1000)
    store = Store(tmp_path, ahead=1e-9)
    for _ in range(20):
        store.poll()
    assert store.behind
    assert len(looked) == runs
    while store.behind:
        store.poll()
    Writer(tmp_path / "0" / "log.jsonl").values(1)
    store.poll()
    assert len(looked) == 2 * runs


@pytest.mark.parametrize("layouts", [1, 2, 3])
def test_curves_of_lines_with_other_names_between_them_stay_in_order(tmp_path, writer, layouts):
    for step in range(300):
        writer.step = step
        writer.together({"a": float(step), **{f"b{step % layouts}": -1.0 * step}})
    store = Store(tmp_path / "runs", most_points=10)
    store.poll()
    assert store.get("a").series["a"].step.tolist() == list(range(300))
    assert points(store.get("a")) == read(writer.path)


def test_large_log_is_sampled_until_it_is_read(tmp_path, writer, monkeypatch):
    monkeypatch.setattr(store_module, "LARGE", 10_000)
    monkeypatch.setattr(store_module, "PIECE", 20_000)
    monkeypatch.setattr(store_module, "GLANCE", 4000)
    writer.begin(epochs_from=1)
    writer.values(6000)
    store = Store(tmp_path / "runs", ahead=1e-9)
    store.poll()
    run = store.get("a")
    assert run.sampled
    assert 1000 < len(run.series["lr"]) <= 1500
    assert not views.series(store, "a", ["lr"])["series"]["lr"]["exact"]
    for _ in range(100):
        store.poll()
    assert not store.behind
    assert points(store.get("a")) == read(writer.path)
    assert store.changes[-1].data["reload"]


def test_points_are_bounded_and_extremes_stay(tmp_path, writer, full_disk):
    writer.values(5000)
    writer.value("lr", 99.0)
    writer.values(5000)
    store = Store(tmp_path / "runs", most_points=4000)
    store.poll()
    series = store.get("a").series
    assert sum(map(len, series.values())) <= 4000
    assert series["lr"].total == 10_001
    assert series["lr"].value.max() == 99.0
    writer.values(3000)
    store.poll()
    assert sum(map(len, store.get("a").series.values())) <= 4000
    assert series["lr"].total == 13_001


def test_series_that_are_too_short_to_be_thinned_are_kept(tmp_path, writer, full_disk):
    many = [f"m{number}" for number in range(60)]
    writer.begin()
    writer.values(5, *many)
    other = Writer(tmp_path / "runs" / "b" / "log.jsonl")
    other.values(200)
    store = Store(tmp_path / "runs", most_points=100)
    store.poll()
    assert {len(series) for series in store.get("a").series.values()} == {5}
    store.get("b")
    writer.values(1, many[0])
    store.poll()
    assert sum(map(len, store.runs["a"].series.values())) <= 300
    assert sum(map(len, store.runs["b"].series.values())) <= 10  # they are not kept for those of the other


def test_idle_runs_make_room(tmp_path, writer, full_disk):
    writer.values(100)
    shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    store = Store(tmp_path / "runs", most_points=300)
    store.poll()
    store.get("a").used -= 1000
    store.get("b")
    store.poll()
    assert (store.runs["a"].opened, store.runs["b"].opened) == (False, True)
    assert store.changes[-1].data["reload"]
    assert len(store.get("a").series["lr"]) <= 100


def test_a_file_that_no_folder_has_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no"):
        Store(tmp_path / "none")


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_log_holds_the_views_are_json(tmp_path, writer, seed):
    order = random.Random(seed)
    odd = [
        "null",
        "-1",
        "1e999",
        "[]",
        '""',
        '"nan"',
        "9007199254740992",
        "1e308",
        '"run"',
        '"end"',
        "NaN",
        '"\\ud800"',
    ]
    writer.begin(hyperparameters={"lr": 0.1}, planned={"steps": 5})
    writer.values(10)
    for kind in ("table", "text", "histogram", "hyperparameters"):
        writer.other(f"run/{kind}", kind, text="x", values={"a": 1})
    writer.end()
    lines = writer.path.read_text().split("\n")
    for _ in range(order.randrange(1, 20)):
        index = order.randrange(len(lines) - 1)
        parts = lines[index].split(": ")
        part = order.randrange(len(parts))
        parts[part] = order.choice(odd) + parts[part][max(parts[part].find(","), 0) :]
        lines[index] = ": ".join(parts)
    data = "\n".join(lines).encode()
    store = Store(tmp_path / "runs")
    for some in (data[: order.randrange(len(data))], data, data[order.randrange(len(data)) :]):
        writer.path.write_bytes(some)
        store.poll()
        said = views.run(store, "a")
        names = [each["name"] for each in said["names"]]
        answers = [said, views.runs(store), views.series(store, "a", names)]
        answers += [views.media(store, "a", name) for name in names] + [change.data for change in store.changes]
        for answer in answers:
            json.loads(views.encode(answer), parse_constant=pytest.fail)


# ------------------------------------------------------------------------------------------------------------ real logs


def test_logs_of_real_runs_are_read_and_cut_back(tmp_path):
    import torch
    from torch import nn

    from loopkit import Learner, hookimpl
    from loopkit.logs import Histogram, Image, Table, Text, read_log
    from loopkit.plugins import Checkpoint, LogMetrics, LogTo

    class Kinds:
        @hookimpl
        def phase_end(self, learner):
            learner.log("note", Text("</script>"))
            learner.log("table", Table(("a",), [[1], ["<b>"]]))
            learner.log("weights", Histogram(learner.model.weight.detach()))
            learner.log("picture", Image(torch.zeros(2, 2)))

    def fit(epochs):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]
        saver = Checkpoint(tmp_path / "runs" / "a" / "checkpoints", resume="auto")
        stack = [LogTo(tmp_path / "runs" / "a"), LogMetrics(every=1), Kinds(), saver]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Learner(model, nn.MSELoss(), optimizer, plugins=stack).fit(batches, epochs=epochs)

    fit(1)
    store = Store(tmp_path / "runs")
    store.poll()
    assert store.get("a").status == "finished"
    fit(3)
    store.poll()
    run = store.get("a")
    log = read_log(tmp_path / "runs" / "a")
    assert points(run) == read(log.path)
    assert {name: each.total for name, each in run.references.items()} == {
        name: len(log.of(name)) for name in ("note", "table", "weights", "picture")
    }
    assert store.record(run, "note")["text"] == "</script>"
    assert store.record(run, "note", 99) is None
    assert (run.foreign, run.status, run.step) == (0, "finished", 15)
    assert json.dumps(run.header)


def test_names_of_any_number_and_length_are_bounded(store, writer, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_CHARACTERS", 50_000)
    writer.begin()
    for index in range(20):
        writer.value(f"{index}" + "x" * 9_990, 1.0)
        writer.other(f"{index}" + "y" * 9_990, "text", text="t")
    scan(store)
    assert len(store.runs["a"].last) <= 2
    run = store.get("a")
    assert sum(map(len, [*run.last, *run.references])) <= 50_000
    assert run.foreign >= 30
    before = store.last_id
    for _ in range(30):
        writer.value("0" + "x" * 9_990, 1.0)
        store.poll()
    assert sum(len(json.dumps(change.data)) for change in store.since(before)) < 30 * 11_000


def test_a_header_that_is_too_long_is_left_out(store, writer, monkeypatch):
    monkeypatch.setattr(store_module, "LONGEST_HEADER", 1000)
    writer.begin(config="x" * 2000, seed=1)
    scan(store)
    assert "config" not in store.get("a").header
    assert store.get("a").started > 0
