"""The configuration of a run beside its checkpoints."""

from __future__ import annotations

import os
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkit.hooks import hookimpl
from loopkit_files.calls import dotted
from loopkit_files.lines import Place

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit_files.document import Config

__all__ = ["SaveConfig", "differences"]

NAME = "config.toml"
HEADER = "# The configuration of this run, all in all; written by loopkit."


class SaveConfig:
    """Write the configuration as ``config.toml`` beside the checkpoints; warn if a resumed run has another.

    It is written when the first training step has run, so that a start that fails leaves no file. Then the plugin
    removes itself from the learner. A ``config.toml`` from elsewhere is kept.

    Its hooks declare no states: the user did not name it, so it must not change the order of the others. When they
    are called, the state is loaded, and the other hooks of the same event do not matter.

    Args:
        config: The configuration to write.
        directories: The directories of the plugins that save.
    """

    name = "save_config"
    provides = "observer"

    def __init__(self, config: Config, directories: Iterable[str | os.PathLike[str]]) -> None:
        self.config = config
        self.paths = [Path(directory).absolute() / NAME for directory in directories]

    @hookimpl
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Compare, if a run is resumed."""
        if learner.world.rank == 0 and phase.training and learner.progress.steps:
            for path in self.paths:
                _compare(path, self.config)

    @hookimpl
    def step_end(self, learner: Learner, phase: Phase) -> None:
        """Write, once."""
        if phase.training:
            if learner.world.rank == 0:
                for path in self.paths:
                    _write(path, self.config)
            learner.remove(self.name)


def _compare(path: Path, config: Config) -> None:
    """Warn of differences from the configuration in the directory."""
    try:
        saved = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read, nor compared with this run: {error}", stacklevel=3)
        return
    changes = [f"{dotted(place)} {change}" for place, change in differences(saved, config.values)]
    if changes:
        warnings.warn(f"the run resumes with another configuration than {path}: {'; '.join(changes)}", stacklevel=3)


def _write(path: Path, config: Config) -> None:
    """Write the configuration; where that is not possible, such as on a full disk, the run is worth more."""
    from loopkit_files.document import dump

    text = f"{HEADER}\n\n{dump(config)}"
    beside = path.with_name(f".{NAME}.{os.getpid()}")
    try:
        try:
            there = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            there = HEADER
        except ValueError:
            there = ""
        if there == text:
            return
        if not there.startswith(HEADER):
            warnings.warn(f"{path} was not written by loopkit, and is left as it is", stacklevel=3)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(beside, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"{path} cannot be written: {error}. The run continues without it", stacklevel=3)


def differences(one: Any, other: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Where two values differ, and how: ``(("fit", "epochs"), "was 3, is 5")``."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() | other.keys()):
            here = (*place, key)
            if key not in other:
                yield here, "is gone"
            elif key not in one:
                yield here, "is new"
            else:
                yield from differences(one[key], other[key], here)
    elif type(one) is not type(other) or repr(one) != repr(other):  # nan equals itself here, and 1 is not 1.0
        yield place, f"was {one!r:.60}, is {other!r:.60}"
