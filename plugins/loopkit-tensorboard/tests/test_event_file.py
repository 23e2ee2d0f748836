"""Event files, read back by TensorBoard's own loader."""

import resource

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboardX.proto.event_pb2 import Event

from loopkit_tensorboard.event_file import EventFile, whole


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.out.tfevents.1"


def written(path, *steps):
    file = EventFile(path)
    sizes = []
    for step in steps:
        file.append([Event(wall_time=1.5, step=step, file_version="x" * step).SerializeToString()])
        sizes.append(file.size)
    file.close()
    return sizes


def steps(path):
    return [event.step for event in LegacyEventFileLoader(str(path)).Load()]


def test_tensorboard_reads_what_was_appended(path):
    written(path, 1, 2, 1000)
    assert [(e.wall_time, e.step, e.file_version) for e in LegacyEventFileLoader(str(path)).Load()] == [
        (1.5, step, "x" * step) for step in (1, 2, 1000)
    ]


def test_the_size_is_that_of_the_file(path):
    assert written(path, 1, 2, 3)[-1] == path.stat().st_size


def test_a_file_that_exists_is_not_written_to(path):
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        EventFile(path)
    assert path.read_bytes() == b"mine"


def test_closing_twice_is_closing_once(path):
    file = EventFile(path)
    file.close()
    file.close()


def test_whole_records_are_told_from_torn_ones(path):
    sizes = written(path, 1, 2, 3)
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        assert whole(path, len(data)) == max([0, *(size for size in sizes if size <= length)])


def test_whole_records_end_before_the_limit(path):
    sizes = written(path, 1, 2, 3)
    assert [whole(path, limit) for limit in (sizes[1] - 1, sizes[1], sizes[1] + 1)] == [sizes[0], sizes[1], sizes[1]]


@pytest.mark.parametrize("part", ["length", "checksum of the length", "data", "checksum of the data"])
def test_a_flipped_bit_ends_what_is_whole(path, part):
    sizes = written(path, 1, 2, 3)
    data = bytearray(path.read_bytes())
    offset = {"length": 0, "checksum of the length": 8, "data": 14, "checksum of the data": sizes[1] - sizes[0] - 1}
    data[sizes[0] + offset[part]] ^= 1
    path.write_bytes(data)
    assert whole(path, len(data)) == sizes[0]


def test_a_full_disk_leaves_whole_records(path):
    file = EventFile(path)
    file.append([Event(step=1).SerializeToString()])
    size = file.size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.append([Event(step=2).SerializeToString(), Event(step=3).SerializeToString()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == size == file.size
    file.append([Event(step=4).SerializeToString()])
    file.close()
    assert steps(path) == [1, 4]
