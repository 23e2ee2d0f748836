"""Tables as text."""

from __future__ import annotations

import pytest

from loopkit.base.tabular import aligned, count_of_bytes


def test_aligned_puts_numbers_to_the_right():
    rows = [("a", 1, 0.5, "12.3 MB"), ("longer", 12345, None, "1 B")]
    assert aligned(("name", "count", "part", "size"), rows).splitlines() == [
        "name     count  part     size",
        "a            1   0.5  12.3 MB",
        "longer  12,345            1 B",
    ]


def test_aligned_without_rows_is_the_columns():
    assert aligned(("a", "b"), []) == "a  b"


def test_aligned_cuts_the_widest_texts():
    lines = aligned(("name", "count"), [("x" * 70 + "y" * 70, 1)], width=40).splitlines()
    assert max(map(len, lines)) == 40
    assert lines[1].startswith("xxxx")
    assert "xx…yy" in lines[1]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (12_345_678, "12.3 MB"), (5 * 10**12, "5 TB")],
)
def test_count_of_bytes(count, text):
    assert count_of_bytes(count) == text


def test_aligned_cuts_a_list_that_was_cut_after_a_word():
    assert aligned(["a" * 12, "b"], [["c" * 12, "val/loss 0.25 val/f1 0.5 ..."]], width=32).endswith(
        "  val/loss 0.25 ..."
    )
