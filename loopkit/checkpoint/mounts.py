"""Which file system a path is on: one of this machine's kernel only, or one that other machines may use, too."""

from __future__ import annotations

import os
from pathlib import Path

LOCAL = {
    "bcachefs",
    "btrfs",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "jfs",
    "overlay",
    "ramfs",
    "reiserfs",
    "tmpfs",
    "xfs",
    "zfs",
}
"""File systems whose locks one kernel keeps; all others, such as NFS, FUSE and unknown ones, may have several."""


def is_local(path: Path) -> bool:
    """Whether only the kernel of this machine writes the file system of a path; False if that is not known."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    real = os.path.realpath(path)
    longest = ""
    kind = ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].encode().decode("unicode_escape")  # a blank is written \040
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(longest):  # the last of several at one place is the one that is seen
            longest = point
            kind = rest.split()[0]
    return kind in LOCAL
