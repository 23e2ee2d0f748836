"""Storage of checkpoints: atomic writing, verified reading, listing, rotation, locking and probing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import stat
import threading

import pytest
from faults.forked import call_forked, dead_pid, other
from faults.shims import Shim, failing

from loopkit.checkpoint import disk, storage, strict_json
from loopkit.checkpoint.manifest import FORMAT, MANIFEST_DEPTH, MANIFEST_LIMIT, FileInfo, Listing
from loopkit.checkpoint.processes import status
from loopkit.checkpoint.streams import INLINE, PIECE, Hasher
from loopkit.errors import CheckpointError, CorruptCheckpointError, FormatVersionError, LoopkitError, StateError

FILES = {"model.bin": b"m" * 10_000, "small.txt": b"hello", "empty": b""}


def save(directory, files=None, label="", **about):
    files = FILES if files is None else files
    return storage.write(directory, {name: [data] for name, data in files.items()}, about, label=label)


def names(directory):
    return sorted(os.listdir(directory))


def forge(path, **changes):
    """Give a checkpoint a manifest with other content and a digest that fits."""
    said = json.loads((path / "manifest.json").read_bytes())
    del said["sha256"]
    rest = strict_json.render({**said, **changes}, sort=True)[1:]
    data = b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + b'",' + rest
    (path / "manifest.json").write_bytes(data)


@pytest.fixture
def shim(monkeypatch):
    """Puts a shim in place of the operating system."""
    return lambda system: monkeypatch.setattr(disk, "system", system)


# ---------------------------------------------------------------------------------------------- writing and reading


def test_write_gives_back_the_same_bytes(tmp_path):
    manifest = save(tmp_path, epoch=3)
    again = storage.verify(tmp_path / "000001")
    assert again == manifest
    assert {name: storage.read_file(again, name) for name in again.files} == FILES
    assert again.about == {"epoch": 3}
    assert again.format == FORMAT == 1


def test_write_takes_chunks_of_every_kind_and_size(tmp_path):
    big = os.urandom(2 * PIECE + 12_345)
    numbers = memoryview(bytes(range(64))).cast("I")
    chunks = [b"", b"a", bytearray(b"bc"), numbers, memoryview(big), memoryview(b"").cast("B"), b"z" * INLINE]
    manifest = storage.write(tmp_path, {"x": chunks}, {})
    expected = b"abc" + bytes(range(64)) + big + b"z" * INLINE
    assert storage.read_file(manifest, "x") == expected
    assert manifest.files["x"] == FileInfo(len(expected), hashlib.sha256(expected).hexdigest())


def test_write_lets_the_giver_reuse_a_chunk_once_the_next_is_asked_for(tmp_path):
    def chunks():
        buffer = bytearray(3 * PIECE)
        for i in range(4):
            buffer[:] = bytes([i]) * len(buffer)
            yield buffer

    manifest = storage.write(tmp_path, {"x": chunks()}, {})
    storage.verify(manifest.path)


def test_write_goes_on_after_short_writes(tmp_path, shim):
    def act(n, name, arguments, proceed):
        if name == "write":
            return os.write(arguments[0], arguments[1][: max(1, len(arguments[1]) // 3)])
        return proceed()

    shim(Shim(act))
    manifest = save(tmp_path)
    assert storage.read_file(storage.verify(manifest.path), "model.bin") == FILES["model.bin"]


def test_write_that_gets_nothing_out_is_an_error_not_a_loop(tmp_path, shim):
    shim(Shim(lambda n, name, arguments, proceed: 0 if name == "write" else proceed()))
    with pytest.raises(CheckpointError, match="EIO"):
        save(tmp_path)


def test_write_numbers_above_the_highest_name_that_is_there(tmp_path):
    assert save(tmp_path).path.name == "000001"
    (tmp_path / "000041-broken").mkdir()
    assert save(tmp_path, label="best").path.name == "000042-best"
    (tmp_path / "999999").mkdir()
    assert save(tmp_path).path.name == "1000000"
    assert [manifest.number for manifest in storage.listing(tmp_path)] == [1_000_000, 42, 1]


@pytest.mark.parametrize("label", ["a/b", "a b", "..\0", "é", "x" * 101, "a\n"])
def test_write_refuses_labels_that_are_no_file_names(tmp_path, label):
    with pytest.raises(CheckpointError, match="label"):
        save(tmp_path, label=label)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/x", ".hidden", "manifest.json", "a\0b", "é", "x" * 300])
def test_write_refuses_bad_file_names(tmp_path, name):
    with pytest.raises(CheckpointError, match="name of a file"):
        save(tmp_path, {name: b"x"})
    assert names(tmp_path) == []


@pytest.mark.parametrize("about", [{"x": (1, 2)}, {1: 2}, {"x": float("nan")}, {"x": object()}, {"x": b"y"}])
def test_write_refuses_an_about_that_is_no_plain_json(tmp_path, about):
    with pytest.raises(StateError, match="JSON"):
        storage.write(tmp_path, {}, about)
    assert names(tmp_path) == []


def test_about_is_nested_as_deep_as_it_can_be_read_again_and_no_deeper(tmp_path):
    deep: list[object] = []
    for _ in range(MANIFEST_DEPTH - 3):  # the manifest, the about and the innermost list are levels, too
        deep = [deep]
    assert storage.read_manifest(save(tmp_path, x=deep).path).about == {"x": deep}
    with pytest.raises(StateError, match="no plain JSON: nested"):
        save(tmp_path, x=[deep])


def test_write_refuses_an_about_that_could_not_be_read_again(tmp_path):
    with pytest.raises(StateError, match="bytes"):
        storage.write(tmp_path, {}, {"x": "y" * MANIFEST_LIMIT})


def test_write_removes_its_traces_and_passes_on_an_error_of_the_giver(tmp_path):
    def chunks():
        yield b"x"
        raise KeyError("mine")

    save(tmp_path)
    with pytest.raises(KeyError, match="mine"):
        storage.write(tmp_path, {"x": chunks()}, {})
    assert names(tmp_path) == ["000001"]


def test_write_that_is_interrupted_removes_its_traces_and_ends_its_threads(tmp_path):
    def chunks():
        yield bytes(2 * PIECE)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.write(tmp_path, {"x": chunks()}, {})
    assert names(tmp_path) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("loopkit-")] == []


def test_write_chains_the_error_of_the_system_and_names_path_errno_and_fix(tmp_path, shim):
    shim(Shim(lambda n, name, arguments, proceed: failing(0, errno.ENOSPC).open() if name == "write" else proceed()))
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.errno == errno.ENOSPC
    for part in ("model.bin", "ENOSPC", "No space left on device", "Free some space"):
        assert part in str(caught.value)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_write_gives_the_modes_of_the_umask(tmp_path, umask):
    def modes():
        os.umask(umask)
        path = save(tmp_path / "deep" / "er").path
        return [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, path / "manifest.json", path / "empty")]

    directory, file = 0o777 & ~umask, 0o666 & ~umask
    assert call_forked(modes) == [directory, directory, file, file]


def test_write_syncs_everything_before_the_rename_and_the_parent_after(tmp_path, shim):
    calls, paths = [], {}

    def act(n, name, arguments, proceed):
        result = proceed()
        if name == "open":
            paths[result] = arguments[0].name
        if name in ("fsync", "rename"):
            calls.append((name, paths[arguments[0]] if name == "fsync" else arguments[1].name))
        return result

    shim(Shim(act))
    save(tmp_path, {"a": b"1", "b": b"2"}, label="x")
    temporary = calls[3][1]
    assert temporary.startswith(".tmp-")
    assert calls == [
        *(("fsync", name) for name in ("a", "b", "manifest.json", temporary)),
        ("rename", "000001-x"),
        ("fsync", tmp_path.name),
    ]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_write_works_where_directories_cannot_be_synced(tmp_path, shim, number):
    def act(n, name, arguments, proceed):
        if name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode):
            raise OSError(number, "no")
        return proceed()

    shim(Shim(act))
    save(tmp_path)
    storage.verify(tmp_path / "000001")


def test_write_takes_back_the_rename_when_it_cannot_be_made_durable(tmp_path, shim):
    save(tmp_path)
    renamed = []

    def act(n, name, arguments, proceed):
        if name == "rename":
            renamed.append(n)
        if name == "fsync" and renamed:
            raise OSError(errno.EIO, "no")
        return proceed()

    shim(Shim(act))
    with pytest.raises(CheckpointError, match="EIO"):
        save(tmp_path)
    assert names(tmp_path) == ["000001"]


def test_write_closes_every_file_it_opens(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        manifest = save(tmp_path)
    storage.verify(manifest.path)
    storage.remove([manifest.path])
    assert len(os.listdir("/proc/self/fd")) == before


def test_hasher_equals_hashlib_for_pieces_of_any_size():
    data = os.urandom(3_000_000)
    with Hasher() as hasher:
        at = 0
        for size in (1, INLINE - 1, INLINE, 1_000_000, 7, 500_000, 10_000_000):
            hasher.update(memoryview(data)[at : at + size])
            at += size
        assert hasher.hexdigest() == hashlib.sha256(data).hexdigest()


def test_reader_gives_the_file_in_parts_and_knows_its_end(tmp_path):
    manifest = save(tmp_path, {"x": bytes(range(100))})
    with storage.open_file(manifest, "x") as reader:
        assert reader.size == 100
        first, rest = bytearray(30), bytearray(70)
        reader.readinto(memoryview(first))
        reader.readinto(memoryview(rest))
        with pytest.raises(CorruptCheckpointError, match=r"x is asked for 1 bytes at byte 100 of 100"):
            reader.readinto(bytearray(1))
        reader.finish()
    assert first + rest == bytes(range(100))


def test_reader_finish_refuses_bytes_that_were_not_read(tmp_path):
    manifest = save(tmp_path, {"x": bytes(100)})
    with storage.open_file(manifest, "x") as reader:
        reader.readinto(bytearray(60))
        with pytest.raises(CorruptCheckpointError, match="40 bytes after the end"):
            reader.finish()


def test_reader_names_file_and_both_digests_of_a_changed_file(tmp_path):
    manifest = save(tmp_path)
    (manifest.path / "small.txt").write_bytes(b"jello")
    with pytest.raises(CorruptCheckpointError) as caught:
        storage.read_file(manifest, "small.txt")
    for part in ("small.txt", hashlib.sha256(b"hello").hexdigest(), hashlib.sha256(b"jello").hexdigest(), "5 bytes"):
        assert part in str(caught.value)


def test_reader_notices_a_file_cut_while_it_reads(tmp_path):
    manifest = save(tmp_path)
    with storage.open_file(manifest, "model.bin") as reader:
        reader.readinto(bytearray(100))
        os.truncate(manifest.path / "model.bin", 50)
        with pytest.raises(CorruptCheckpointError, match=r"model\.bin became shorter"):
            reader.readinto(bytearray(9_900))


def test_read_file_refuses_more_than_its_limit(tmp_path):
    manifest = save(tmp_path)
    assert storage.read_file(manifest, "small.txt", limit=5) == b"hello"
    with pytest.raises(CheckpointError, match="5 bytes, more than the 4"):
        storage.read_file(manifest, "small.txt", limit=4)


def test_open_file_offers_the_nearest_name(tmp_path):
    manifest = save(tmp_path)
    with pytest.raises(CheckpointError, match=r"did you mean 'model\.bin'"), storage.open_file(manifest, "modle.bin"):
        pass


# ---------------------------------------------------------------------------------------------- the manifest


def test_manifest_is_plain_json_with_its_own_digest(tmp_path):
    save(tmp_path, {"x": b"hello"}, epoch=2)
    data = (tmp_path / "000001" / "manifest.json").read_bytes()
    said = json.loads(data)
    assert said.pop("sha256") == hashlib.sha256(data[77:]).hexdigest()
    x = {"size": 5, "sha256": hashlib.sha256(b"hello").hexdigest()}
    assert said == {"about": {"epoch": 2}, "files": {"x": x}, "format": 1, "number": 1}


def test_manifest_is_shown_in_a_few_lines(tmp_path):
    about = {
        "reason": "epoch",
        "time": "2024-01-01T00:00:00Z",
        "progress": {"epochs": 2, "steps": 20, "updates": 10},
        "metrics": {"train/loss": "0.123456789", "val/loss": "nan"},
        "plugins": {"history": "loopkit.plugins.history.History"},
    }
    manifest = save(tmp_path, {"a": b"x" * 1024, "b": b"y" * 512}, **about)
    assert (
        repr(manifest)
        == str(manifest)
        == (
            f"checkpoint {manifest.path}\n"
            "  2 epochs, 20 steps, epoch, 2024-01-01T00:00:00Z\n"
            "  train/loss 0.123457, val/loss nan\n"
            "  2 files, 1.5 KiB"
        )
    )


@pytest.mark.parametrize("said", [None, 3, "text", [], {"a\nb": "c\x1bd"}])
def test_manifest_is_shown_whatever_the_writer_said(said, tmp_path):
    manifest = save(tmp_path, {"a": b"x"}, progress=said, metrics=said)
    lines = repr(manifest).splitlines()
    assert (lines[0], lines[-1]) == (f"checkpoint {manifest.path}", "  1 file, 1 B")
    assert all(line.isprintable() for line in lines)


def test_manifest_of_a_newer_format_says_both_versions(tmp_path):
    path = save(tmp_path).path
    forge(path, format=7, more="things")
    with pytest.raises(FormatVersionError, match=r"format 7.* format 1"):
        storage.read_manifest(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 0},
        {"format": True},
        {"format": "1"},
        {"number": 0},
        {"number": 1.0},
        {"about": []},
        {"files": []},
        {"files": {"x": 1}},
        {"files": {"x": {"size": -1, "sha256": "0" * 64}}},
        {"files": {"x": {"size": 1, "sha256": "G" * 64}}},
        {"files": {"x": {"size": 1, "sha256": "0" * 64, "more": 1}}},
        {"more": 1},
    ],
)
def test_manifest_with_a_right_digest_and_wrong_content_is_refused(tmp_path, changes):
    path = save(tmp_path).path
    forge(path, **changes)
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is no manifest"):
        storage.read_manifest(path)


def test_manifest_in_another_form_is_refused_even_with_a_right_digest(tmp_path):
    path = save(tmp_path).path
    rest = (path / "manifest.json").read_bytes()[77:].replace(b",", b", ")
    digest = hashlib.sha256(rest).hexdigest().encode()
    (path / "manifest.json").write_bytes(b'{"sha256":"' + digest + b'",' + rest)
    with pytest.raises(CorruptCheckpointError, match="canonical"):
        storage.read_manifest(path)


def test_manifest_missing_is_said(tmp_path):
    path = save(tmp_path).path
    (path / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is missing"):
        storage.read_manifest(path)


def test_manifest_of_a_missing_checkpoint_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="ENOENT"):
        storage.read_manifest(tmp_path / "000007")


def test_manifest_can_be_read_below_another_name(tmp_path):
    manifest = save(tmp_path)
    manifest.path.rename(tmp_path / "mine")
    assert storage.verify(tmp_path / "mine").number == 1


def test_extra_files_are_refused_but_hidden_ones_ignored(tmp_path):
    path = save(tmp_path).path
    (path / ".nfs000123").write_bytes(b"left by a file server")
    storage.verify(path)
    (path / "notes.txt").write_bytes(b"?")
    with pytest.raises(CorruptCheckpointError, match=r"notes\.txt"):
        storage.read_manifest(path)


# ---------------------------------------------------------------------------------------------- listing and rotation


def test_listing_is_newest_first_and_by_number_not_by_name(tmp_path):
    for label in ("z", "a", "m"):
        save(tmp_path, label=label)
    assert [manifest.path.name for manifest in storage.listing(tmp_path)] == ["000003-m", "000002-a", "000001-z"]


def test_listing_and_verify_take_a_path_as_text(tmp_path):
    manifest = save(tmp_path)
    assert storage.listing(str(tmp_path)) == [manifest]
    assert storage.verify(str(manifest.path)) == manifest


def test_listing_ignores_names_that_are_not_ours(tmp_path):
    save(tmp_path)
    for name in ("notes", "00002", "0000002", "000000", "000002 copy", ".tmp-x", "-000002", "٠٠٠٠٠٢"):
        (tmp_path / name).mkdir()
    listing = storage.listing(tmp_path)
    assert [manifest.number for manifest in listing] == [1]
    assert listing.problems == {}


def test_listing_of_a_missing_directory_is_empty(tmp_path):
    assert storage.listing(tmp_path / "none") == []


def test_listing_of_a_file_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="ENOTDIR"):
        storage.listing(tmp_path / "file")


def test_listing_puts_what_does_not_verify_into_problems(tmp_path):
    for _ in range(4):
        save(tmp_path)
    (tmp_path / "000004" / "model.bin").unlink()
    (tmp_path / "000003" / "manifest.json").write_bytes(b"junk")
    (tmp_path / "000002").rename(tmp_path / "000009")
    (tmp_path / "000010").touch()
    (tmp_path / "000011").symlink_to(tmp_path / "000001")
    listing = storage.listing(tmp_path)
    assert [manifest.number for manifest in listing] == [1]
    assert [path.name for path in listing.problems] == ["000011", "000010", "000009", "000004", "000003"]
    expected = ("a link", "a file", "renamed", "model.bin is missing", "manifest.json has changed")
    for part, error in zip(expected, listing.problems.values(), strict=True):
        assert part in str(error)


def test_listing_passes_over_a_checkpoint_removed_meanwhile(tmp_path, shim):
    save(tmp_path), save(tmp_path)

    def act(n, name, arguments, proceed):
        if name == "lstat" and arguments[0].name == "000002":
            arguments[0].rename(tmp_path / "gone")
        return proceed()

    shim(Shim(act))
    listing = storage.listing(tmp_path)
    assert [manifest.number for manifest in listing] == [1]
    assert listing.problems == {}


@pytest.mark.parametrize(
    ("last", "protected", "kept"),
    [
        (1, [], [5, 4]),
        (2, [], [5, 4]),
        (3, [], [5, 4, 3]),
        (9, [], [5, 4, 3, 2, 1]),
        (1, [2], [5, 2]),
        (2, [1], [5, 4, 1]),
        (1, [5], [5, 4]),
    ],
)
def test_keep_leaves_the_newest_the_protected_and_at_least_two(tmp_path, last, protected, kept):
    manifests = [save(tmp_path) for _ in range(5)]
    paths = {manifests[number - 1].path for number in protected}
    removed = storage.keep(storage.listing(tmp_path), last, paths)
    assert removed == [m.path for m in reversed(manifests) if m.number not in kept]


def test_keep_neither_counts_nor_removes_what_does_not_verify(tmp_path):
    for _ in range(4):
        save(tmp_path)
    (tmp_path / "000004" / "small.txt").unlink()
    (tmp_path / "000001" / "small.txt").unlink()
    assert storage.keep(storage.listing(tmp_path), 1) == []


def test_keep_of_none_is_refused():
    with pytest.raises(CheckpointError, match="at least 1"):
        storage.keep(Listing(), 0)


def test_remove_hides_a_checkpoint_before_it_deletes(tmp_path, shim):
    save(tmp_path), save(tmp_path)
    seen = []

    def act(n, name, arguments, proceed):
        if name in ("unlink", "rmdir"):
            shim(disk.System())
            listing = storage.listing(tmp_path)
            seen.append(([m.number for m in listing], len(listing.problems)))
            shim(system)
        return proceed()

    system = Shim(act)
    shim(system)
    storage.remove([tmp_path / "000001"])
    assert seen == [([2], 0)] * 5
    assert names(tmp_path) == ["000002"]


def test_remove_does_not_follow_links(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()
    path = save(tmp_path).path
    (path / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "000009").symlink_to(tmp_path / "outside")
    storage.remove([path, tmp_path / "000009", tmp_path / "missing"])
    assert names(tmp_path) == ["outside"]
    assert names(tmp_path / "outside") == ["precious"]


def test_remover_removes_off_the_thread_and_raises_at_close(tmp_path, shim):
    threads = []

    def act(n, name, arguments, proceed):
        threads.append(threading.current_thread())
        if name == "rename" and arguments[0].name == "000002":
            raise OSError(errno.EACCES, "no")
        return proceed()

    for _ in range(3):
        save(tmp_path)
    shim(Shim(act))
    remover = storage.Remover()
    remover.remove([tmp_path / "000001", tmp_path / "000002", tmp_path / "000003"])
    with pytest.raises(CheckpointError, match=r"remove .*000002: EACCES"):
        remover.close()
    remover.close()
    assert names(tmp_path) == ["000002"]
    assert threading.current_thread() not in threads


def left_behind(directory, owner):
    """Names of leftovers of a process, which are put into the directory."""
    for kind in ("tmp", "old"):
        path = directory / f".{kind}-{owner.token}-0123abcd"
        path.mkdir()
        (path / "half").write_bytes(b"x")
    (directory / f".tmp-{owner.token}-01").write_bytes(b"a file")


def test_clean_removes_leftovers_of_the_dead_and_of_this_process(tmp_path):
    left_behind(tmp_path, other(pid=dead_pid()))
    left_behind(tmp_path, other(pid=os.getpid(), started=1))  # a younger process has this number now
    left_behind(tmp_path, other())
    disk.clean(tmp_path)
    assert names(tmp_path) == []


def test_clean_leaves_the_living_other_hosts_and_foreign_names(tmp_path):
    parent = os.getppid()
    left_behind(tmp_path, other(pid=parent, started=status(parent)[1]))
    left_behind(tmp_path, other(host="elsewhere", pid=dead_pid()))
    left_behind(tmp_path, other(machine="00000000", pid=dead_pid()))
    (tmp_path / ".tmp-mine").mkdir()
    before = names(tmp_path)
    disk.clean(tmp_path)
    assert names(tmp_path) == before
    disk.clean(tmp_path, everything=True)
    assert names(tmp_path) == [".tmp-mine"]


def test_clean_leaves_a_write_in_flight_in_another_thread(tmp_path):
    def chunks():
        disk.clean(tmp_path, everything=True)
        yield b"x"

    storage.verify(storage.write(tmp_path, {"x": chunks()}, {}).path)


def test_clean_warns_of_what_it_cannot_remove_and_write_goes_on(tmp_path, shim):
    left_behind(tmp_path, other())
    shim(Shim(lambda n, name, arguments, proceed: failing(0, errno.EPERM).open() if name == "unlink" else proceed()))
    with pytest.warns(RuntimeWarning, match="EPERM"):
        save(tmp_path)
    storage.verify(tmp_path / "000001")


# ---------------------------------------------------------------------------------------------- the probe


def test_probe_makes_the_directory_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage.probe("a/b") == tmp_path / "a" / "b"
    assert names(tmp_path / "a" / "b") == []


def test_probe_says_that_the_path_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is a file, not a directory"):
        storage.probe(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"ENOTDIR|is a file"):
        storage.probe(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "permission"),
        (errno.EROFS, "read-only"),
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "quota"),
    ],
)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename", "unlink"])
def test_probe_says_what_is_refused_and_leaves_nothing(tmp_path, shim, number, fix, call):
    done = []

    def act(n, name, arguments, proceed):
        if name == call and not done:
            done.append(n)
            raise OSError(number, os.strerror(number))
        return proceed()

    shim(Shim(act))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: {errno.errorcode[number]}.*{fix}"):
        storage.probe(tmp_path)
    assert names(tmp_path) == []


def test_probe_says_that_a_missing_directory_cannot_be_made(tmp_path, shim):
    shim(Shim(lambda n, name, arguments, proceed: failing(0, errno.EACCES).open() if name == "mkdir" else proceed()))
    with pytest.raises(CheckpointError, match=r"cannot make .*new: EACCES"):
        storage.probe(tmp_path / "new")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
def test_probe_without_permission_says_so(tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            pytest.skip(f"another user cannot reach {parent}")

    def attempt():
        os.setgid(65534), os.setuid(65534)
        try:
            storage.probe(tmp_path)
        except LoopkitError as error:
            return str(error)

    assert "EACCES" in call_forked(attempt)


def test_error_of_another_process_keeps_number_and_file():
    error = pickle.loads(pickle.dumps(CheckpointError(errno.EIO, "io", "model.bin")))
    assert (error.errno, error.filename) == (errno.EIO, "model.bin")
    assert str(error) == str(CheckpointError(errno.EIO, "io", "model.bin"))


def test_error_with_a_text_keeps_its_number():
    error = CheckpointError("cannot write it")
    error.errno = errno.ENOSPC
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.errno) == ("cannot write it", errno.ENOSPC)
