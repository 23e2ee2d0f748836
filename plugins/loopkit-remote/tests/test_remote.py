"""What arrives in a store that fails, what is fetched from it, and that a run goes on from it with the same bits."""

import shutil
import threading
import time
import warnings
from itertools import count
from pathlib import Path

import pytest
import torch
from distributed.processes import run
from engine.life.runs import Killed, at, end, kill, make, same, train, val, whole
from helpers import on
from loopkit_testing import check_plugin
from pages import run_page
from shaky import URL, Shaky, shaky  # noqa: F401 - a fixture

from loopkit import every
from loopkit.checkpoint import listing, verify
from loopkit.checkpoint.manifest import MANIFEST
from loopkit.errors import PluginError
from loopkit.logs import read_log
from loopkit.plugins import DDP, Checkpoint, LogMetrics, LogTo
from loopkit_remote import RemoteError, Upload, download, upload
from loopkit_remote.store import Store
from loopkit_remote.transfer import Mirror

pytestmark = pytest.mark.usefixtures("shaky")
FILES = ("model.safetensors", "state.json", "state.safetensors", "structure.json")


def names(folder=""):
    """What the store holds, by path."""
    return sorted(path.removeprefix("/runs/a/") for path in Shaky.store if path.startswith(f"/runs/a/{folder}"))


def stored():
    """The checkpoints in the store that have a manifest."""
    return [name.split("/")[0] for name in names() if name.endswith(MANIFEST)]


def contents(directory):
    return {p.relative_to(directory): p.read_bytes() for p in directory.rglob("*") if p.is_file() and p.name[0] != "."}


def script(directory, *plugins, again=False, url=URL, **options):
    """The learner of a script that saves, logs, uploads and resumes."""
    options = {"save": every(updates=3), "resume": "auto", **options}
    saving = (Checkpoint(directory, **options), LogTo(directory, directory / "log.csv"), LogMetrics(every=1))
    return make(*saving, Upload(url, wait=20), *plugins, seed=99 if again else 1)


@pytest.fixture
def saved(tmp_path):
    """A directory with two checkpoints and a log."""
    directory = tmp_path / "saved"
    make(Checkpoint(directory), LogTo(directory)).fit(train(), val(), epochs=2)
    return directory


# A run that goes on elsewhere


@pytest.mark.parametrize("place", [{"index": 1, "epochs": 1}, {"phase": "val", "epochs": 2, "index": 0}])
def test_run_that_goes_on_from_the_store_is_bitwise_the_uninterrupted_one(tmp_path, place, capsys):
    kept = script(tmp_path / "whole", url="shaky://runs/b")
    kept.fit(train(), val(), epochs=2)
    with pytest.raises(Killed):
        script(tmp_path / "one", at(kill, **place)).fit(train(), val(), epochs=2)
    shutil.rmtree(tmp_path / "one")
    there = tmp_path / "two"
    learner = script(there, again=True)
    learner.fit(train(), val(), epochs=2)
    newest = stored()[-1]
    assert "fetched 0000" in capsys.readouterr().err
    same(end(learner), whole())
    logged = [read_log(folder).values("train/loss") for folder in (tmp_path / "whole", there)]
    assert logged[0] == logged[1]
    assert not list(there.glob("log-*"))
    assert {name.name for name in listing(there)[0].path.iterdir()} == {*FILES, MANIFEST}
    assert listing(there)[0].path.name == newest


def on_two(rank, directory, url, epochs):
    learner = script(directory, DDP(), url=url, again=rank > 0)
    learner.fit(train(), val(), epochs=epochs)
    return end(learner)["models"]


def test_processes_upload_once_and_go_on_from_the_store(tmp_path):
    url = f"file://{tmp_path / 'store'}"
    kept = run(on_two, 2, tmp_path / "whole", f"file://{tmp_path / 'other'}", 2)
    run(on_two, 2, tmp_path / "one", url, 1)
    found = run(on_two, 2, tmp_path / "two", url, 2)
    for rank in range(2):
        same(found[rank], kept[rank])
    here, there = listing(tmp_path / "two"), listing(tmp_path / "store")
    assert [each.path.name for each in here] == [each.path.name for each in there]


def test_best_checkpoint_comes_along_and_stays_the_best(tmp_path):
    values = iter([3.0, 1.0, 2.0, 4.0, 5.0, 6.0])

    def measured(learner, phase):
        if phase.name == "val":
            learner.metrics["val/loss"] = next(values)

    measuring = on("phase_end", measured, "measuring", writes=("metrics",), before=("checkpoint",))
    learner = script(tmp_path / "one", measuring, save=every(epochs=1), best="val/loss", keep=2)
    learner.fit(train(), val(), epochs=5)
    kept = [each.path.name for each in listing(tmp_path / "one")]
    assert len(kept) == 3
    assert stored() == sorted(kept)
    assert download(URL, tmp_path / "two").name == kept[0]
    assert [each.path.name for each in listing(tmp_path / "two")] == [kept[0], kept[2]]


# A store that fails


def bits(directory, **options):
    learner = script(directory, **options)
    result = learner.fit(train(), val(), epochs=2)
    assert result.reason == "epochs"
    same(end(learner), whole())


def test_store_that_fails_is_tried_again_and_warned_of_once(tmp_path):
    Shaky.fail_at = range(2, 30)
    with pytest.warns(
        UserWarning, match=r"plugin 'upload': cannot \w+ shaky://runs/a.*: ConnectionError: call "
    ) as said:
        bits(tmp_path)
    assert len(said) == 1
    assert stored() == sorted(each.path.name for each in listing(tmp_path))
    there = tmp_path / "there"
    download(URL, there)
    assert contents(there).items() <= contents(tmp_path).items()


def test_every_other_call_that_fails_is_made_again(tmp_path):
    Shaky.fail_at = range(3, 2000, 7)
    with warnings.catch_warnings(action="ignore"):  # by the clock: it is said if a step comes before it is made again
        bits(tmp_path)
    assert Shaky.calls > 30
    assert stored() == sorted(each.path.name for each in listing(tmp_path))


@pytest.mark.parametrize("trouble", ["cut_at", "lost_at", "flipped_at"])
def test_writes_that_do_not_arrive_are_found_and_made_again(saved, tmp_path, trouble):
    setattr(Shaky, trouble, range(1, 40, 3))
    assert len(upload(saved, URL, verify="digest" if trouble == "flipped_at" else "size", tries=50)) == 2
    Shaky.cut_at = Shaky.lost_at = Shaky.flipped_at = ()
    download(URL, tmp_path / "there")
    assert contents(tmp_path / "there").items() <= contents(saved).items()


def test_store_that_hangs_holds_up_no_step_and_the_end_no_longer_than_it_may(tmp_path):
    closing = on("epoch_begin", lambda: setattr(Shaky, "gate", threading.Event()), "closing")
    ending, begin = [], time.monotonic()
    learner = make(Checkpoint(tmp_path, save=every(updates=1)), Upload(URL, wait=0.3), closing)
    learner.add(on("phase_end", lambda: ending.append(time.monotonic()), "ending"))
    with pytest.warns(
        UserWarning,
        match=r"000005-step-4, 00000\d-step-\d of .* was not uploaded within 0.3 s: loopkit_remote.upload\('",
    ):
        learner.fit(train(), epochs=1)
    assert ending[-1] - begin < 15  # a call waits for 20 s
    assert 0.3 <= time.monotonic() - ending[-1] < 5
    gate, Shaky.gate = Shaky.gate, None
    gate.set()
    assert len(upload(tmp_path, URL)) == 2


class Died(KeyboardInterrupt):
    """The process is killed."""


def test_kill_anywhere_in_an_upload_leaves_the_checkpoint_before_it_whole(saved, tmp_path):
    newest, before = listing(saved)
    newest.path.rename(tmp_path / newest.path.name)
    upload(saved, URL)
    kept = dict(Shaky.store)
    (tmp_path / newest.path.name).rename(newest.path)
    (saved / "log.jsonl").write_text((saved / "log.jsonl").read_text() * 2)
    found = []
    for number in count(1):
        Shaky.store.clear()
        Shaky.store.update(kept)
        Shaky.calls, Shaky.fail_at, Shaky.error = 0, {number}, Died
        try:
            upload(saved, URL)
            break
        except Died:
            pass
        Shaky.fail_at = ()
        there = tmp_path / f"there-{number}"
        found.append(download(URL, there).name)
        assert verify(there / found[-1]).number in (newest.number, before.number)
        assert not list(there.glob(".*"))
        assert (there / "log.jsonl").stat().st_size in {(saved / "log.jsonl").stat().st_size // part for part in (1, 2)}
        upload(saved, URL)
        assert stored() == [before.path.name, newest.path.name]
    assert found.count(before.path.name) > 8
    assert found[-1] == newest.path.name


# What is kept


def test_store_keeps_what_the_directory_keeps(tmp_path):
    script(tmp_path, save=every(updates=1), keep=3).fit(train(), val(), epochs=2)
    assert stored() == sorted(each.path.name for each in listing(tmp_path))
    assert len(stored()) == 3
    assert {name.split("/")[0] for name in names()} == {*stored(), "logs"}


def test_left_line_of_a_run_and_half_uploads_are_removed(saved):
    upload(saved, URL)
    (last,) = stored()[1:]
    for name in names(last):
        Shaky.store[f"/runs/a/000007-step-90/{name.split('/')[1]}"] = Shaky.store[f"/runs/a/{name}"]
    Shaky.store["/runs/a/000001-step-1/model.safetensors"] = Shaky.store[f"/runs/a/{last}/model.safetensors"]
    about = saved / last / MANIFEST
    assert about.exists()
    Shaky.store[f"/runs/a/{last}/{MANIFEST}"] = Shaky.store[f"/runs/a/{stored()[0]}/{MANIFEST}"]  # as of another save
    assert upload(saved, URL) == [each.path.name for each in listing(saved)]
    assert {name.split("/")[0] for name in names()} == {*stored(), "logs"}


def test_log_that_has_not_grown_is_not_written_again(saved):
    store = Store(URL)
    mirror = Mirror(saved, store)
    (saved / "media").mkdir()
    (saved / "media" / "a.png").write_bytes(b"1")
    for text in ("", "2", "3", "4"):
        with (saved / "log.jsonl").open("a") as log:
            log.write(text)
        while mirror.bring():
            pass
    assert names("logs") == ["logs/000001/1", "logs/000003.json", "logs/000003/0", "logs/000004.json", "logs/000004/0"]
    Shaky.cut_at = {Shaky.writes + 1}
    (saved / "log.jsonl").write_text("5")
    with pytest.raises(RemoteError, match="has 0 bytes after 1 bytes were written"):
        mirror.bring()
    again = Mirror(saved, store)
    assert again.bring() is False
    assert not again.pending


def test_damaged_checkpoint_or_log_in_the_store_is_passed_over(saved, tmp_path):
    upload(saved, URL)
    newest, before = (each.path.name for each in listing(saved))
    file = Shaky.store[f"/runs/a/{newest}/state.json"]
    file.seek(0)
    file.write(b"x")
    (log,) = (path for path in names("logs") if path.endswith("/0"))
    Shaky.store[f"/runs/a/{log}"].write(b"x")
    with pytest.warns() as said:
        assert download(URL, tmp_path / "there").name == before
    assert [f"{newest} is damaged" in str(said[0].message), "(log.jsonl) is damaged" in str(said[1].message)] == [
        True
    ] * 2
    assert [path.name for path in (tmp_path / "there").iterdir()] == [before]


def test_checkpoint_that_is_damaged_here_is_not_uploaded(saved):
    newest, before = (each.path for each in listing(saved))
    data = (newest / "state.json").read_bytes()
    (newest / "state.json").write_bytes(b"x" + data[1:])
    with pytest.raises(RemoteError, match=r"state.json does not fit its manifest: it is not uploaded"):
        upload(saved, URL)
    mirror = Mirror(saved, Store(URL))
    with pytest.raises(RemoteError):
        mirror.bring()
    assert mirror.bring() is True
    assert stored() == [before.name]
    assert not mirror.pending


def test_download_of_what_is_there_or_of_nothing_fetches_nothing(saved, tmp_path):
    assert download(URL, tmp_path / "there") is None
    upload(saved, URL)
    calls = Shaky.calls
    assert download(URL, saved) == listing(saved)[0].path
    assert Shaky.calls - calls < 10


# Refused


def test_store_of_another_run_is_refused(saved, tmp_path):
    upload(saved, URL)
    with pytest.raises(
        PluginError, match="shaky://runs/a holds checkpoints of another run, the newest 000002-step-8: gi"
    ):
        make(Checkpoint(tmp_path), Upload(URL)).fit(train(), epochs=1)


def test_run_that_would_begin_anew_is_refused_where_the_store_cannot_be_read(saved, tmp_path):
    Shaky.fail_at = range(1, 10)
    with pytest.raises(RemoteError, match=r"There is no checkpoint in .* either, so the run would begin anew: mend"):
        make(Checkpoint(tmp_path / "new", resume="auto"), Upload(URL)).fit(train(), epochs=1)
    Shaky.fail_at = range(Shaky.calls, 10_000)
    learner = make(Checkpoint(saved, resume="auto"), LogTo(saved), Upload(URL, wait=0.05))
    with pytest.warns() as said:
        assert learner.fit(train(), val(), epochs=3).epochs == 3
    assert len(said) == 2


def test_log_that_is_elsewhere_is_named(tmp_path, capsys):
    make(Checkpoint(tmp_path / "a"), LogTo(tmp_path / "b"), Upload(URL)).fit(train(), epochs=1)
    assert f"does not upload {tmp_path / 'b' / 'log.jsonl'}: it takes only logs in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"verify": "crc"}, "verify is 'crc'"),
        ({"wait": -1}, "wait is -1"),
        ({"seconds": True}, "seconds is True"),
        ({"url": "nothing://a"}, "the store nothing://a cannot be used"),
    ],
)
def test_upload_refuses(given, text):
    with pytest.raises(PluginError, match=text):
        Upload(**{"url": URL, **given})


def test_upload_without_a_checkpoint_is_refused():
    with pytest.raises(PluginError, match="has no Checkpoint named 'checkpoint': add Checkpoint"):
        make(Upload(URL)).fit(train(), epochs=1)


def test_password_of_a_url_and_options_are_not_shown():
    shown = repr(Upload("shaky://me:secret@runs/a", storage_options={"key": "hidden"}))
    assert "secret" not in shown
    assert "hidden" not in shown
    assert "shaky://me@runs/a" in shown


@pytest.mark.parametrize("checks", [["declared_access"], pytest.param(None, marks=pytest.mark.slow)])
def test_plugin_keeps_the_contract(tmp_path, checks):
    numbers = count()

    def made():
        number = next(numbers)
        return Upload(f"shaky://contract/{number}"), Checkpoint(tmp_path / str(number), resume="auto")

    check_plugin(made, checks=checks)


def test_readme_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        run_page(Path(__file__).parent.parent / "README.md")
