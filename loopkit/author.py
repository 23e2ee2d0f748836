"""The public face for writers of plugins, log backends and commands; the project's own distributions build on it.

A plugin needs none of it: `loopkit.hookimpl` and plain Python are enough. These are the pieces that make a plugin look
and fail as the standard ones do: options that `explain`, `repr` and `diff` show, errors that name the nearest word, and
helpers for batches, devices and tensors that are spread over processes. Modules are for those who save or log: how a
state becomes files (`bundle`, `encoding`, `tensors`, ...), and what averaging over processes needs (`buckets`).
"""

from loopkit.base import checks, devices, generators, sharded
from loopkit.base.batches import (
    count_samples,
    describe,
    first_tensor,
    hands_on,
    length_of,
    map_tensors,
    move,
    parts,
    wrapped,
)
from loopkit.base.deprecation import deprecated, renamed_options
from loopkit.base.drawing import line_chart
from loopkit.base.notes import add_note, locate, say, shown, warn
from loopkit.base.options import Shown, options_of
from loopkit.base.raw import raw
from loopkit.base.tabular import aligned, count_of_bytes, html, paragraph
from loopkit.base.words import is_count, nearest
from loopkit.checkpoint import bundle, disk, encoding, processes, storage, streams, structure, tensors
from loopkit.checkpoint.failures import JointError, is_passing
from loopkit.checkpoint.lock import Lock
from loopkit.checkpoint.manifest import CHECKPOINT_NAME, MANIFEST, FileInfo, decode_manifest, in_bytes
from loopkit.checkpoint.place import Place
from loopkit.checkpoint.resumption import LOGGED
from loopkit.checkpoint.run_files import RunFiles
from loopkit.checkpoint.weights import SUFFIX
from loopkit.criteria.directions import better, checked_mode, direction, is_better
from loopkit.data import Shares
from loopkit.distributed import buckets
from loopkit.distributed.member import Member
from loopkit.engine.compile.order import EVERYTHING, Entry
from loopkit.engine.compile.owners import Owners
from loopkit.engine.life.limits import check_count
from loopkit.events import snake_case
from loopkit.every import Every
from loopkit.found.discovery import bound, find, first_line, load_plugin, plugin_versions, plugins
from loopkit.found.namesake import check as check_namesake
from loopkit.groups import covers, named_modules, named_parameters, nothing_matches
from loopkit.hooks import PROVIDES, STATES, Hook, Target, concerns, hooks, implemented
from loopkit.learner import no_loss_fn, registry_of
from loopkit.logs import log_file, masking
from loopkit.logs.kinds import CHANNELS
from loopkit.losses import is_sum
from loopkit.metrics import added, as_tensor, classes_axis, count, wide
from loopkit.plugin import Average, Plugin, declared, hook_states, plugin_name, provided, unwrapped
from loopkit.plugins import gradients, late, merging, standard_set
from loopkit.plugins.buffers import Buffers
from loopkit.plugins.log_metrics import learning_rates

free = Owners.free
"""Let a plugin be used in another learner, after its state was looked at."""

__all__ = [
    "CHANNELS",
    "CHECKPOINT_NAME",
    "EVERYTHING",
    "LOGGED",
    "MANIFEST",
    "PROVIDES",
    "STATES",
    "SUFFIX",
    "Average",
    "Buffers",
    "Entry",
    "Every",
    "FileInfo",
    "Hook",
    "JointError",
    "Lock",
    "Member",
    "Place",
    "Plugin",
    "RunFiles",
    "Shares",
    "Shown",
    "Target",
    "add_note",
    "added",
    "aligned",
    "as_tensor",
    "better",
    "bound",
    "buckets",
    "bundle",
    "check_count",
    "check_namesake",
    "checked_mode",
    "checks",
    "classes_axis",
    "concerns",
    "count",
    "count_of_bytes",
    "count_samples",
    "covers",
    "declared",
    "decode_manifest",
    "deprecated",
    "describe",
    "devices",
    "direction",
    "disk",
    "encoding",
    "find",
    "first_line",
    "first_tensor",
    "free",
    "generators",
    "gradients",
    "hands_on",
    "hook_states",
    "hooks",
    "html",
    "implemented",
    "in_bytes",
    "is_better",
    "is_count",
    "is_passing",
    "is_sum",
    "late",
    "learning_rates",
    "length_of",
    "line_chart",
    "load_plugin",
    "locate",
    "log_file",
    "map_tensors",
    "masking",
    "merging",
    "move",
    "named_modules",
    "named_parameters",
    "nearest",
    "no_loss_fn",
    "nothing_matches",
    "options_of",
    "paragraph",
    "parts",
    "plugin_name",
    "plugin_versions",
    "plugins",
    "processes",
    "provided",
    "raw",
    "registry_of",
    "renamed_options",
    "say",
    "sharded",
    "shown",
    "snake_case",
    "standard_set",
    "storage",
    "streams",
    "structure",
    "tensors",
    "unwrapped",
    "warn",
    "wide",
    "wrapped",
]
__dir__ = __all__.copy
