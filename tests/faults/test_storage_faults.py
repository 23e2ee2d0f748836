"""Checkpoints survive what can go wrong below them: kills, loss of power, decay, full disks, hostile content."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess

import pytest

from faults.forked import call_forked, forked
from faults.shims import Shim, failing
from loopkit.checkpoint import disk, storage, strict_json
from loopkit.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT
from loopkit.errors import CheckpointError, CorruptCheckpointError

OLD = {"model.bin": b"o" * 9_000, "state.json": b"old"}
NEW = {"model.bin": b"n" * 9_000, "state.json": b"new"}


def save(directory, files):
    """Write a checkpoint of these files, each in two chunks."""
    chunks = {name: [data[: len(data) // 2], data[len(data) // 2 :]] for name, data in files.items()}
    return storage.write(directory, chunks, {})


def newest(directory):
    """The files of the newest checkpoint of a listing, every one verified; None if there is none."""
    listing = storage.listing(directory)
    if not listing:
        return None
    manifest = storage.verify(listing[0].path)
    return {name: storage.read_file(manifest, name) for name in manifest.files}


def hidden(directory):
    return [name for name in os.listdir(directory) if name.startswith(".")]


def calls_of(function):
    """The names of the calls that a function makes."""
    made = []

    def act(n, name, arguments, proceed):
        made.append(name)
        return proceed()

    with replaced(Shim(act)):
        function()
    return made


class replaced:
    """Puts a shim in place of the operating system for a while."""

    def __init__(self, system):
        self.system = system

    def __enter__(self):
        disk.system = self.system

    def __exit__(self, *error):
        disk.system = disk.System()


# ---------------------------------------------------------------------------------------------- kills


def test_save_killed_at_any_call_leaves_the_old_or_the_new_checkpoint(tmp_path):
    save(tmp_path / "count", OLD)
    made = calls_of(lambda: save(tmp_path / "count", NEW))
    assert {"write", "fsync", "rename", "mkdir", "close"} <= set(made)
    moments = [(n, "before") for n in range(len(made))]
    moments += [(n, "during") for n, name in enumerate(made) if name == "write"] + [(len(made) - 1, "after")]
    seen = []
    for n, moment in moments:
        directory = tmp_path / f"{n}-{moment}"
        save(directory, OLD)

        def act(count, name, arguments, proceed, n=n, moment=moment):
            if count != n:
                return proceed()
            if moment == "during":
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif moment == "after":
                proceed()
            return os.kill(os.getpid(), signal.SIGKILL)

        def child(directory=directory, act=act):
            disk.system = Shim(act)
            save(directory, NEW)

        assert forked(child).code == -signal.SIGKILL
        seen.append(newest(directory))
        assert seen[-1] in (OLD, NEW), (n, moment, made[n])
        assert storage.listing(directory).problems == {}
        save(directory, NEW)
        assert hidden(directory) == [], (n, moment, made[n])
        assert newest(directory) == NEW
    renamed = made.index("rename")
    assert [files == NEW for files in seen[: len(made)]] == [n > renamed for n in range(len(made))]


def test_removal_killed_at_any_call_never_lists_half_a_checkpoint(tmp_path):
    save(tmp_path / "count", OLD)
    made = calls_of(lambda: storage.remove([tmp_path / "count" / "000001"]))
    for n in range(len(made)):
        directory = tmp_path / str(n)
        for files in (OLD, NEW):
            save(directory, files)

        def act(count, name, arguments, proceed, n=n):
            return os.kill(os.getpid(), signal.SIGKILL) if count == n else proceed()

        def child(directory=directory, act=act):
            disk.system = Shim(act)
            storage.remove([directory / "000001"])

        assert forked(child).code == -signal.SIGKILL
        assert storage.listing(directory).problems == {}
        assert newest(directory) == NEW
        disk.clean(directory)
        assert hidden(directory) == []


# ---------------------------------------------------------------------------------------------- loss of power


class Node:
    """A file or a directory as the disk knows it, and as the running system sees it.

    A file: ``durable`` bytes since its last sync, ``now`` what was written. A directory: ``durable`` entries by name,
    and ``pending`` changes since its last sync, each a mapping of names to nodes (None: removed).
    """

    def __init__(self, is_directory):
        self.is_directory = is_directory
        self.durable = {} if is_directory else b""
        self.now = {} if is_directory else b""
        self.pending = []

    def change(self, changes):
        self.pending.append(changes)
        self.now = applied(self.now, [changes])

    def sync(self):
        self.durable, self.pending = self.now, []


def applied(entries, changes):
    entries = dict(entries)
    for change in changes:
        entries.update(change)
    return {name: node for name, node in entries.items() if node is not None}


class Disk(Shim):
    """Makes every call, keeps what would survive, and calls ``failed`` after each; the sync ``lost`` has no effect."""

    moments = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")

    def __init__(self, root, failed):
        super().__init__(self.follow)
        self.root, self.failed, self.lost = root, failed, None
        self.nodes = {}
        self.tree = Node(True)
        self.syncs = 0

    def node(self, path):
        node = self.tree
        for part in path.relative_to(self.root).parts:
            node = node.now[part]
        return node

    def follow(self, n, name, arguments, proceed):
        result = proceed()
        path = arguments[0] if not isinstance(arguments[0], int) else None
        if name == "open" and path.is_relative_to(self.root):
            if arguments[1] & os.O_CREAT:
                self.node(path.parent).change({path.name: Node(False)})
            self.nodes[result] = self.node(path)
        elif name == "write":
            self.nodes[arguments[0]].now += bytes(arguments[1][:result])
        elif name == "fsync" and arguments[0] in self.nodes:
            if self.syncs != self.lost:
                self.nodes[arguments[0]].sync()
            self.syncs += 1
        elif name == "mkdir":
            self.node(path.parent).change({path.name: Node(True)})
        elif name in ("unlink", "rmdir"):
            self.node(path.parent).change({path.name: None})
        elif name == "rename":
            self.node(path.parent).change({path.name: None, arguments[1].name: self.node(path)})
        elif name == "close":
            self.nodes.pop(arguments[0], None)
        if name in self.moments:
            self.failed(self)
        return result


def all_nodes(node):
    """A node and all below it that may survive."""
    yield node
    if node.is_directory:
        below = [*node.durable.values(), *(child for change in node.pending for child in change.values() if child)]
        for child in {id(child): child for child in below}.values():
            yield from all_nodes(child)


def contents(node):
    """What a file may hold after the loss of power."""
    if node.now == node.durable:
        return [node.now]
    size = len(node.now)
    return [node.durable, node.now, b"", node.now[: size // 2], bytes(size)]


def survivors(tree, rng, tries):
    """Ways in which the power may fail: which changes of directories survive, and which content of files."""
    nodes = list({id(node): node for node in all_nodes(tree)}.values())
    changes = [(id(node), i) for node in nodes if node.is_directory for i in range(len(node.pending))]
    files = [node for node in nodes if not node.is_directory]
    options = {id(node): contents(node) for node in files}
    whole = {id(node): node.now for node in files}
    chosen = [(set(changes), whole), (set(), {key: choice[0] for key, choice in options.items()})]
    chosen += [(set(changes) - {change}, whole) for change in changes] + [({change}, whole) for change in changes]
    chosen += [(set(changes), {**whole, key: content}) for key, choice in options.items() for content in choice[2:]]
    if len(chosen) > 2:
        for _ in range(tries):
            subset = {change for change in changes if rng.random() < 0.7}
            chosen.append((subset, {key: rng.choice(choice) for key, choice in options.items()}))
    return [way for i, way in enumerate(chosen) if way not in chosen[:i]]


def restore(node, path, survived, content):
    """Put what survived onto a real disk."""
    if not node.is_directory:
        path.write_bytes(content[id(node)])
        return
    path.mkdir()
    kept = [change for i, change in enumerate(node.pending) if (id(node), i) in survived]
    for name, child in applied(node.durable, kept).items():
        restore(child, path / name, survived, content)


def fail_power(tmp_path, act, allowed, final, old=(OLD,), lost=None, tries=4):
    """Run ``act(directory)``, let the power fail after each of its calls, and see what survives each way."""
    root = tmp_path / "root"
    root.mkdir()
    directory = root / "runs" / "checkpoints"
    trial = tmp_path / "trial"
    rng = random.Random(0)

    def check(watched, expected=None):
        for survived, content in survivors(watched.tree, rng, tries):
            restore(watched.tree, trial, survived, content)
            at = trial / "runs" / "checkpoints"
            found = newest(at)
            assert found in (allowed if expected is None else [expected]), (
                f"{found and found['state.json']!r} after {watched.count} calls"
            )
            assert storage.listing(at).problems == {}, "an unreadable checkpoint is listed"
            shutil.rmtree(trial)

    def guarded(watched):
        with replaced(disk.System()):
            check(watched)
        disk.system = watched

    watched = Disk(root, lambda watched: None)
    with replaced(watched):
        for files in old:
            save(directory, files)
    for node in all_nodes(watched.tree):
        node.sync()
    watched.failed, watched.lost, watched.syncs = guarded, lost, 0
    if lost is not None:
        watched.moments = ("rename", "unlink")  # where a lost sync shows; it also shows at the end
    with replaced(watched):
        act(directory)
    check(watched, final)
    return watched.syncs


SAVES_SYNC = 5  # two files, the manifest, the new directory, the directory above
FIRST_SYNC = 7  # and the two directories that are made for it
REMOVALS_SYNC = 1


def test_power_loss_at_any_call_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path):
    assert fail_power(tmp_path, lambda directory: save(directory, NEW), [OLD, NEW], NEW) == SAVES_SYNC


def test_power_loss_at_any_call_of_the_first_save_leaves_none_or_the_new_checkpoint(tmp_path):
    assert fail_power(tmp_path, lambda directory: save(directory, NEW), [None, NEW], NEW, old=()) == FIRST_SYNC


def test_power_loss_at_any_call_of_a_removal_leaves_no_half_checkpoint(tmp_path):
    def act(directory):
        storage.remove([directory / "000001"])

    assert fail_power(tmp_path, act, [NEW], NEW, old=(OLD, NEW)) == REMOVALS_SYNC


@pytest.mark.slow
def test_power_loss_in_many_more_ways(tmp_path):
    fail_power(tmp_path, lambda directory: save(directory, NEW), [OLD, NEW], NEW, tries=500)


@pytest.mark.parametrize("lost", range(SAVES_SYNC))
def test_power_loss_shows_that_every_sync_of_a_save_is_needed(tmp_path, lost):
    with pytest.raises((AssertionError, CorruptCheckpointError)):
        fail_power(tmp_path, lambda directory: save(directory, NEW), [OLD, NEW], NEW, lost=lost)


@pytest.mark.parametrize("lost", range(FIRST_SYNC))
def test_power_loss_shows_that_every_sync_of_the_first_save_is_needed(tmp_path, lost):
    with pytest.raises((AssertionError, CorruptCheckpointError)):
        fail_power(tmp_path, lambda directory: save(directory, NEW), [None, NEW], NEW, old=(), lost=lost)


def test_power_loss_shows_that_the_sync_of_a_removal_is_needed(tmp_path):
    def act(directory):
        storage.remove([directory / "000001"])

    with pytest.raises(AssertionError, match="unreadable"):
        fail_power(tmp_path, act, [NEW], NEW, old=(OLD, NEW), lost=0)


# ---------------------------------------------------------------------------------------------- decay


def refused(path, file):
    """Whether verifying says that this file is corrupt, with a digest."""
    with pytest.raises(CorruptCheckpointError) as caught:
        storage.verify(path)
    assert file in str(caught.value)
    assert "SHA-256" in str(caught.value)


def test_corruption_every_cut_of_a_file_is_named_and_the_older_checkpoint_is_left(tmp_path):
    save(tmp_path, OLD)
    path = save(tmp_path, NEW).path
    for name in (*NEW, MANIFEST):
        data = (path / name).read_bytes()
        edges = {0, 1, len(data) // 2, len(data) - 1, *range(4096, len(data), 4096), *range(4095, len(data), 4096)}
        for size in sorted(edges):
            (path / name).write_bytes(data[:size])
            refused(path, name)
            assert newest(tmp_path) == OLD
        (path / name).write_bytes(data + b"\0")
        refused(path, name)
        (path / name).write_bytes(data)
    assert newest(tmp_path) == NEW


def flip_bits(path, count):
    rng = random.Random(1)
    files = {name: (path / name).read_bytes() for name in (*NEW, MANIFEST)}
    for _ in range(count):
        name = rng.choice(list(files))
        data = bytearray(files[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(data)
        refused(path, name)
        (path / name).write_bytes(files[name])
    storage.verify(path)


def test_corruption_of_single_bits_is_named(tmp_path):
    flip_bits(save(tmp_path, NEW).path, 100)


@pytest.mark.slow
def test_corruption_of_two_thousand_single_bits_is_named(tmp_path):
    flip_bits(save(tmp_path, NEW).path, 2_000)


def test_corruption_of_every_byte_of_the_manifest_is_named(tmp_path):
    path = save(tmp_path, {"a": b"1"}).path
    data = (path / MANIFEST).read_bytes()
    for i in range(len(data) + 1):
        forms = [data[:i] + extra + data[i:] for extra in (b" ", b"0", b"\n")]
        if i < len(data):
            forms += [data[:i] + data[i + 1 :], data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]]
            forms += [data[:i] + bytes([data[i] ^ 0x20]) + data[i + 1 :]]
        for form in forms:
            if form != data:
                (path / MANIFEST).write_bytes(form)
                with pytest.raises(CorruptCheckpointError, match=r"manifest\.json .*SHA-256 is [0-9a-f]{64}"):
                    storage.read_manifest(path)


def test_corruption_by_swapped_junk_and_extra_files_is_named(tmp_path):
    save(tmp_path, OLD)
    files = {"a": b"1" * 100, "b": b"2" * 100}
    path = save(tmp_path, files).path
    (path / "a").rename(path / "c")
    (path / "b").rename(path / "a")
    (path / "c").rename(path / "b")
    refused(path, "a")
    (path / "a").write_bytes(os.urandom(100))
    refused(path, "a")
    shutil.copy(path.with_name("000001") / MANIFEST, path / MANIFEST)
    with pytest.raises(CorruptCheckpointError, match="000002 was renamed, or its files exchanged"):
        storage.verify(path)
    assert newest(tmp_path) == OLD


# ---------------------------------------------------------------------------------------------- full disks, faults


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_error_at_any_call_of_a_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path, number):
    save(tmp_path / "count", OLD)
    made = calls_of(lambda: save(tmp_path / "count", NEW))
    for n in range(len(made)):
        directory = tmp_path / str(n)
        save(directory, OLD)
        with replaced(failing(n, number)), pytest.raises(CheckpointError) as caught:
            save(directory, NEW)
        assert errno.errorcode[number] in str(caught.value), made[n]
        assert str(directory) in str(caught.value)
        assert caught.value.__cause__.errno == caught.value.errno == number
        assert os.listdir(directory) == ["000001"], made[n]
        assert newest(directory) == OLD


def test_error_that_lasts_leaves_a_leftover_that_the_next_save_removes(tmp_path):
    save(tmp_path, OLD)
    broken = []

    def act(n, name, arguments, proceed):
        if broken or name == "fsync":
            broken.append(n)
            raise OSError(errno.EIO, "no")
        return proceed()

    with replaced(Shim(act)), pytest.raises(CheckpointError, match="EIO") as caught:
        save(tmp_path, NEW)
    assert any("could not be removed" in note for note in caught.value.__notes__)
    assert len(hidden(tmp_path)) == 1
    assert newest(tmp_path) == OLD
    save(tmp_path, NEW)
    assert sorted(os.listdir(tmp_path)) == ["000001", "000002"]


def test_error_of_a_limit_on_the_size_of_files_is_said(tmp_path):
    save(tmp_path, OLD)

    def child():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
        try:
            save(tmp_path, NEW)
        except CheckpointError as error:
            return str(error)

    message = call_forked(child)
    assert "model.bin: EFBIG" in message
    assert "ulimit -f" in message
    assert os.listdir(tmp_path) == ["000001"]
    assert newest(tmp_path) == OLD


def test_error_of_a_full_disk_is_said(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted")
    try:
        directory = place / "checkpoints"
        save(directory, OLD)
        with pytest.raises(CheckpointError, match=r"big: ENOSPC.*Free some space"):
            storage.write(directory, {"big": [bytes(100_000)]}, {})
        assert os.listdir(directory) == ["000001"]
        assert newest(directory) == OLD
        (place / "filler").write_bytes(bytes(os.statvfs(place).f_bavail * 4096))
        with pytest.raises(CheckpointError, match="ENOSPC"):
            storage.probe(directory)
        assert os.listdir(directory) == ["000001"]
    finally:
        subprocess.run(["umount", str(place)], check=True)


# ---------------------------------------------------------------------------------------------- hostile content


def forge(path, files):
    """A manifest with a right digest that names these files."""
    said = {"about": {}, "files": files, "format": 1, "number": 1}
    rest = strict_json.render(said, sort=True)[1:]
    digest = hashlib.sha256(rest).hexdigest().encode()
    (path / MANIFEST).write_bytes(b'{"sha256":"' + digest + b'",' + rest)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0b", "manifest.json", "\n"]
)
def test_hostile_names_in_a_manifest_are_refused(tmp_path, name):
    path = save(tmp_path, OLD).path
    forge(path, {name: {"size": 1, "sha256": "0" * 64}})
    with pytest.raises(CorruptCheckpointError, match="name of a file"):
        storage.read_manifest(path)


def replace_by(path, kind):
    target = path.with_name("target")
    if path.is_dir():
        path.rename(target)
    else:
        path.unlink()
    if kind == "link":
        path.symlink_to(target if target.exists() else "/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to(path)


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "endless"])
@pytest.mark.parametrize("name", ["model.bin", "manifest.json"])
def test_hostile_things_in_place_of_files_are_refused_at_once(tmp_path, name, kind):
    manifest = save(tmp_path, OLD)
    replace_by(manifest.path / name, kind)

    def attempt():
        for read in (storage.read_manifest, storage.verify):
            with pytest.raises(CorruptCheckpointError, match=name):
                read(manifest.path)
        if name == "model.bin":
            with pytest.raises(CorruptCheckpointError, match=name):
                storage.read_file(manifest, name)
        assert list(storage.listing(tmp_path).problems) == [manifest.path]

    call_forked(attempt)


@pytest.mark.parametrize("kind", ["link", "pipe", "endless"])
def test_hostile_things_in_place_of_a_checkpoint_are_refused_at_once(tmp_path, kind):
    manifest = save(tmp_path, OLD)
    replace_by(manifest.path, kind)

    def attempt():
        with pytest.raises(CheckpointError, match="000001"):
            storage.verify(manifest.path)
        assert list(storage.listing(tmp_path).problems) == [manifest.path]

    call_forked(attempt)


@pytest.mark.parametrize("form", ["sparse", "deep", "wide", "digits"])
def test_hostile_manifests_of_any_size_are_refused(tmp_path, form):
    path = save(tmp_path, OLD).path
    room = MANIFEST_LIMIT - 1_000
    rest = {
        "sparse": b"",
        "deep": b'"about":' + b"[" * room,
        "wide": b'"about":{},"files":{"x":[' + b"[]," * (room // 3) + b'[]]},"format":1,"number":1}',
        "digits": b'"about":{},"files":{},"format":1,"number":' + b"9" * room + b"}",
    }[form]
    digest = hashlib.sha256(rest).hexdigest().encode()
    with open(path / MANIFEST, "wb") as file:
        file.write(b'{"sha256":"' + digest + b'",' + rest)
        if form == "sparse":
            file.truncate(1 << 40)

    def attempt():
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
            storage.read_manifest(path)

    call_forked(attempt)  # which may take a minute; it takes less than a second
