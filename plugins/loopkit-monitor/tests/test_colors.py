"""The colors of curves can be told apart by all eyes, in both themes."""

import itertools
import re
from pathlib import Path

import pytest
from colors import EYES, ciede2000, contrast, lab, seen

import loopkit_monitor

STYLES = (Path(loopkit_monitor.__file__).parent / "static" / "app.css").read_text()
BLOCKS = re.findall(r":root[^{]*\{([^}]*)\}", STYLES)
LIGHT, DARK, CHOSEN = (dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block)) for block in BLOCKS)
THEMES = {"light": LIGHT, "dark": DARK}


def test_dark_colors_are_the_same_however_they_are_chosen():
    assert DARK == CHOSEN


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("eyes", EYES)
def test_first_eight_colors_are_ten_apart(theme, eyes):
    colors = [lab(seen(THEMES[theme][f"s{at}"], eyes)) for at in range(8)]
    assert min(ciede2000(one, other) for one, other in itertools.combinations(colors, 2)) >= 10


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("ground", ["panel", "page"])
def test_colors_stand_out_from_the_ground(theme, ground):
    assert min(contrast(THEMES[theme][f"s{at}"], THEMES[theme][ground]) for at in range(8)) >= 3


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, -1, 2), (50, 0, 0), 2.3669),
        ((50, 2.49, -0.001), (50, -2.49, 0.0011), 7.2195),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_difference_is_that_of_the_published_pairs(one, other, difference):
    assert abs(ciede2000(one, other) - difference) < 1e-4
