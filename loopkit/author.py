"""The public face for writers of plugins, log backends and commands; the project's own distributions build on it.

A plugin needs none of it: `loopkit.hookimpl` and plain Python are enough. These are the pieces that make a plugin look
and fail as the standard ones do: options that `explain`, `repr` and `diff` show, errors that name the nearest word, and
helpers for batches, devices and tensors that are spread over processes.
"""

from loopkit.base import devices, generators, sharded
from loopkit.base.batches import count_samples, describe, first_tensor, map_tensors, move, parts
from loopkit.base.notes import add_note, locate, say, shown, warn
from loopkit.base.options import Shown, options_of
from loopkit.base.raw import raw
from loopkit.base.tabular import aligned, count_of_bytes, html, paragraph
from loopkit.base.words import is_count, nearest
from loopkit.engine.compile.order import EVERYTHING, Entry
from loopkit.engine.compile.owners import Owners
from loopkit.engine.life.fit import check_count
from loopkit.found.discovery import bound, find, first_line, load_plugin, plugin_versions, plugins
from loopkit.found.namesake import check as check_namesake
from loopkit.plugin import Average

free = Owners.free
"""Let a plugin be used in another learner, after its state was looked at."""

__all__ = [
    "EVERYTHING",
    "Average",
    "Entry",
    "Shown",
    "add_note",
    "aligned",
    "bound",
    "check_count",
    "check_namesake",
    "count_of_bytes",
    "count_samples",
    "describe",
    "devices",
    "find",
    "first_line",
    "first_tensor",
    "free",
    "generators",
    "html",
    "is_count",
    "load_plugin",
    "locate",
    "map_tensors",
    "move",
    "nearest",
    "options_of",
    "paragraph",
    "parts",
    "plugin_versions",
    "plugins",
    "raw",
    "say",
    "sharded",
    "shown",
    "warn",
]
__dir__ = __all__.copy
