import os

import pytest

from loopkit_monitor import folder as folder_module
from loopkit_monitor.folder import Folder

TRAVERSALS = [
    "../secret", "a/../../secret", "/etc/passwd", "..", ".", "", "a/..", "a//log.jsonl", "./a/log.jsonl",
    "a/./log.jsonl",
    "a/log.jsonl/", "//etc/passwd", "a/../a/log.jsonl", "..\\secret", "a\\log.jsonl", "a/log.jsonl\0.png", "~/secret",
    "link/log.jsonl", "a/link.png", "a/out.png", "pipe", "a", "file:///etc/passwd", "%2e%2e/secret", "....//secret",
    "a/log.jsonl/..", "/proc/self/environ", "../runs/a/log.jsonl", "\u2025/secret", "..%00/secret",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    runs = tmp_path / "runs"
    (runs / "a").mkdir(parents=True)
    (runs / "a" / "log.jsonl").write_text("{}\n")
    (tmp_path / "secret").write_text("secret")
    (runs / "link").symlink_to(runs / "a")
    (runs / "a" / "link.png").symlink_to(runs / "a" / "log.jsonl")
    (runs / "a" / "out.png").symlink_to(tmp_path / "secret")
    os.mkfifo(runs / "pipe")
    return Folder(runs)


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_path_leads_out_or_over_a_link(folder, path):
    with pytest.raises(OSError):  # noqa: PT011  whichever the system gives
        folder.open(path)


def test_a_file_below_is_opened_also_when_the_root_is_a_link(folder, tmp_path):
    (tmp_path / "elsewhere").symlink_to(folder.root)
    file = Folder(tmp_path / "elsewhere").open("a/log.jsonl")
    assert os.read(file, 10) == b"{}\n"
    os.close(file)


def test_logs_are_found_but_none_behind_links(folder):
    (folder.root / "b" / "c").mkdir(parents=True)
    (folder.root / "b" / "c" / "log.jsonl").touch()
    (folder.root / "b" / "media").mkdir()
    (folder.root / "b" / "media" / "log.jsonl").touch()
    (folder.root / "b" / "other.jsonl").symlink_to(folder.root / "a" / "log.jsonl")
    assert sorted(folder.logs()) == ["a/log.jsonl", "b/c/log.jsonl"]


def test_a_folder_that_is_gone_has_no_logs(folder, tmp_path):
    folder.root.rename(tmp_path / "gone")
    assert list(folder.logs()) == []


def test_a_folder_of_very_many_files_hides_no_logs_of_others(folder, monkeypatch):
    monkeypatch.setattr(folder_module, "MOST_ENTRIES", 200)
    for name in ("0", "zdata", "a/data"):
        (folder.root / name).mkdir()
        for number in range(300):
            (folder.root / name / f"{number}.png").touch()
    for number in range(5):
        (folder.root / "more" / f"{number}").mkdir(parents=True)
        (folder.root / "more" / f"{number}" / "log.jsonl").touch()
    assert sorted(folder.logs()) == ["a/log.jsonl", *(f"more/{number}/log.jsonl" for number in range(5))]
    assert not folder.searched


def test_a_search_that_ends_within_a_part_says_so(folder, monkeypatch):
    monkeypatch.setattr(folder_module, "MOST_ENTRIES", 25)
    monkeypatch.setattr(folder_module, "PARTS", 2)
    for number in range(100):
        (folder.root / "a" / f"{number}.png").touch()
    list(folder.logs())
    assert not folder.searched


def test_a_folder_that_is_searched_in_parts_has_all_of_its_logs(folder, monkeypatch):
    monkeypatch.setattr(folder_module, "MOST_ENTRIES", 400)
    for number in range(100):
        (folder.root / f"{number}.jsonl").touch()
        (folder.root / f"r{number}").mkdir()
        (folder.root / f"r{number}" / "log.jsonl").touch()
    assert len(list(folder.logs())) == 201
    assert folder.searched
