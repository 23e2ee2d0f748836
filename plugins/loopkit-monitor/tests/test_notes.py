"""What people note about runs."""

import hashlib
import json
import os

import pytest
from support import Writer

from loopkit_monitor import views
from loopkit_monitor.notes import NotesError
from loopkit_monitor.store import Store, UnknownRun


@pytest.fixture
def store(tmp_path, writer):
    writer.begin()
    writer.values(3)
    made = Store(tmp_path / "runs")
    made.poll()
    return made


def test_notes_are_kept_beside_the_log_and_the_log_stays(tmp_path, writer, store):
    before = hashlib.sha256(writer.path.read_bytes()).hexdigest()
    said = views.note(
        store, "a", {"name": "the best", "note": "*why*", "tags": ["good", "good", " x "], "archived": True}
    )
    assert said["notes"] == {"name": "the best", "note": "*why*", "tags": ["good", "x"], "archived": True}
    assert hashlib.sha256(writer.path.read_bytes()).hexdigest() == before
    assert json.loads((tmp_path / "runs/a/monitor.json").read_text())["name"] == "the best"
    again = Store(tmp_path / "runs")
    again.poll()
    (row,) = views.rows(again)["rows"]
    assert (row["id"], row["name"], row["notes"]) == ("a", "the best", said["notes"])


def test_logs_of_one_folder_have_notes_of_their_own(tmp_path, writer, store):
    other = Writer(tmp_path / "runs" / "a" / "log-1.jsonl")
    other.begin()
    store._scanned = -10
    store.poll()
    store.note("a/log-1", {"tags": ["old"]})
    assert store.runs["a"].notes.tags == ()
    assert (tmp_path / "runs/a/log-1.monitor.json").exists()


def test_a_note_is_a_change_that_others_hear_of(store):
    last = store.last_id
    store.note("a", {"archived": True})
    assert [change.data["run"] for change in store.since(last)] == ["a"]
    assert [row["id"] for row in views.rows(store, last)["rows"]] == ["a"]
    assert views.rows(store, store.last_id)["rows"] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 1},
        {"name": "x" * 201},
        {"tags": "a"},
        {"tags": ["x" * 61]},
        {"archived": 1},
        {"path": "x"},
        {"note": None},
    ],
)
def test_what_is_no_note_raises(store, changes):
    with pytest.raises(NotesError, match="texts"):
        store.note("a", changes)
    with pytest.raises(UnknownRun):
        store.note("none", {})


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"name": 5}', b"\xff", b'{"tags": {}}'])
def test_file_that_holds_no_notes_is_none(tmp_path, writer, content):
    writer.begin()
    (writer.path.parent / "monitor.json").write_bytes(content)
    store = Store(tmp_path / "runs")
    store.poll()
    assert store.runs["a"].notes.name == ""


def test_notes_go_through_no_link(tmp_path, writer, store):
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    (writer.path.parent / "monitor.json").symlink_to(outside)
    store.note("a", {"name": "x"})
    assert outside.read_text() == "{}"
    assert not (writer.path.parent / "monitor.json").is_symlink()


def post(server, body, path="/api/note", **headers):
    import http.client

    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    own = {"Cookie": server.cookie, "Origin": f"http://{server.host}:{server.port}", "Content-Type": "application/json"}
    connection.request("POST", path, body, {**own, **headers})
    answer = connection.getresponse()
    status = answer.status, answer.read()
    connection.close()
    return status


def test_page_writes_notes_and_nobody_else(tmp_path, serve, writer):
    writer.begin()
    server = serve(tmp_path / "runs")
    body = json.dumps({"id": "a", "changes": {"name": "x"}})
    for wrong in (
        {"Origin": "http://elsewhere.invalid"},
        {"Cookie": ""},
        {"Content-Type": "text/plain"},
        {"Host": "elsewhere.invalid"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert post(server, body, **wrong)[0] in (401, 403, 415), wrong
    assert post(server, body, path="/api/run")[0] == 405
    assert post(server, "x" * (65 << 10))[0] == 413
    assert not (tmp_path / "runs/a/monitor.json").exists()
    assert post(server, body)[0] == 200
    assert server.get("/api/rows")["rows"][0]["name"] == "x"
    for wrong in ("", "[]", '{"id": "a"}', '{"id": "a", "changes": {"tags": 5}}', '{"id": 5, "changes": {}}'):
        assert post(server, wrong)[0] == 400
    assert post(server, '{"id": "b", "changes": {}}')[0] == 404


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_cannot_be_written_is_an_answer_in_words(tmp_path, serve, writer):
    writer.begin()
    server = serve(tmp_path / "runs")
    writer.path.parent.chmod(0o555)
    assert post(server, '{"id": "a", "changes": {"name": "x"}}')[0] == 409
