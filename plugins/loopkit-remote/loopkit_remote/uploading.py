"""The plugin that uploads a run while it trains, and fetches it where another machine resumes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from loopkit.author import Shown, checks, processes, say, unwrapped, warn
from loopkit.checkpoint import listing
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.plugins import Checkpoint, LogTo
from loopkit_remote.store import Changed, RemoteError, Store, Verify
from loopkit_remote.transfer import Mirror, download, pauses, repeated, whole

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.result import FitResult

LOOK = 1.0
"""Seconds between two looks at the directory."""


class Upload(Shown):
    """Upload checkpoints to an object store, and fetch them for a resume.

    A separate thread uploads the files of `Checkpoint`. The newest checkpoint goes first. Its
    manifest is written last, after the sizes in the store were compared, so a process that is killed in the middle of
    an upload leaves the checkpoint before it whole. The store then keeps what the directory keeps, and two checkpoints
    at least. Logs in the directory go along: before each checkpoint, so that it finds its log, and every ``seconds``.

    A store that fails is tried again, after 0.5 s, then twice as long each time, up to 30 s: with one warning, and no
    step waits. It never ends a fit. At the end of the fit the plugin waits ``wait`` seconds for the rest, and warns of
    files that were not uploaded; `loopkit_remote.upload` uploads them later.

    Where ``Checkpoint(resume="auto")`` or ``True`` begins, checkpoints that are newer than those in the directory, the
    best one and the log are fetched first. Without ``resume`` a store that holds checkpoints raises.

    Args:
        url: A folder only for this run, such as ``"s3://bucket/runs/a"``; any that ``fsspec`` knows.
        verify: ``"size"``: compare the sizes after an upload; ``"digest"``: read everything again and compare SHA-256.
        logs: Upload the logs in the directory: ``log.jsonl``, ``log.csv``, files of TensorBoard, media.
        seconds: How often the log is uploaded between two checkpoints, if it has grown.
        wait: Seconds that the end of the fit waits at most.
        storage_options: For the file system, such as credentials.
        checkpoint: The name of the `Checkpoint`, if it has another one.
        name: The plugin's name.

    Raises:
        PluginError: An option is out of range, the URL cannot be used, or the learner has no `Checkpoint`.
        RemoteError: When a fit begins that is to be resumed and has no checkpoint here: the store cannot be read.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[Checkpoint("runs/a", resume="auto"), Upload("s3://bucket/a")])
    """

    provides = "observer"
    volatile = ("_*",)

    def __init__(
        self,
        url: str,
        *,
        verify: Verify = "size",
        logs: bool = True,
        seconds: float = 60.0,
        wait: float = 60.0,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint: str = "checkpoint",
        name: str = "upload",
    ) -> None:
        checks.one_of("Upload", get_args(Verify), verify=verify)
        checks.not_negative("Upload", "seconds", seconds=seconds, wait=wait, infinite=True)
        Store(url, storage_options)  # or it cannot be used
        self._url, self._storage_options = url, storage_options
        self.verify, self.logs, self.seconds, self.wait = verify, logs, seconds, wait
        self.checkpoint, self.name = checkpoint, name
        self._thread: _Thread | None = None
        self._begun = False
        self._said = False
        """There was a warning in this fit that the store fails."""

    def options(self) -> dict[str, Any]:
        """The options it was made with, except secret ones."""
        kept = {"verify": self.verify, "logs": self.logs, "seconds": self.seconds, "wait": self.wait}
        return {"url": str(Store(self._url, self._storage_options)), **kept, "checkpoint": self.checkpoint}

    @hookimpl(before=("checkpoint", "log"))  # and so, turned round, after both in fit_end
    def fit_begin(self, learner: Learner) -> None:
        """Fetch the checkpoint that the run resumes from, and start to upload."""
        saver, self._said = self._saver(learner), False
        refusal: Exception | None = None
        if learner.world.rank == 0:
            try:
                self._fetch(saver)
            except (RemoteError, PluginError) as error:
                refusal = error
        told = learner.world.share(None if refusal is None else str(refusal))
        if refusal is not None:
            raise refusal
        if told is not None:
            raise RemoteError(f"rank 0 could not begin: {told}")
        self._begun = True
        if learner.world.rank == 0:
            self._name_other_logs(learner, saver)
            self._thread = _Thread(self, saver)
            self._thread.start()

    @hookimpl
    def phase_end(self) -> None:
        """Warn of problems in the thread."""
        if self._thread is not None:
            self._warn(self._thread.problem)

    @hookimpl
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Wait for the rest, and warn of files that were not uploaded."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.end(self.wait)
        if left := thread.mirror.pending:
            more = f", and {len(left) - 5} more" if len(left) > 5 else ""
            why = f" ({thread.problem})" if thread.problem else ""
            warn(
                f"plugin {self.name!r}: {', '.join(left[:5])}{more} of {thread.directory} was not uploaded within "
                f"{self.wait:g} s{why}: loopkit_remote.upload({str(thread.directory)!r}, url) brings it"
            )

    def _saver(self, learner: Learner) -> Checkpoint:
        saver = unwrapped(learner.plugins.get(self.checkpoint))
        if not isinstance(saver, Checkpoint):
            raise PluginError(
                f"plugin {self.name!r} uploads what Checkpoint writes, and the learner has no Checkpoint named "
                f"{self.checkpoint!r}: add Checkpoint('runs/a', resume='auto'), or give its name, checkpoint="
            )
        return saver

    def _fetch(self, saver: Checkpoint) -> None:
        """Fetch what is newer in the store; raise for one of another run."""
        if self._begun:  # a second fit with this plugin: what the store holds is its own
            return
        store, here = Store(self._url, self._storage_options), listing(saver.directory)
        resumes = saver.resume == "auto" or saver.resume is True
        try:
            found = [str(manifest.path) for manifest, _ in repeated(partial(whole, store), 3)]
            if found and saver.resume is None and not saver.options()["overwrite"]:
                raise PluginError(
                    f"plugin {self.name!r}: {store} holds checkpoints of another run, the newest {found[0]}: give "
                    f"Checkpoint resume='auto' to resume that run, or give this one its own folder"
                )
            if found and resumes and found[0] not in {each.path.name for each in here}:
                newest = download(
                    self._url, saver.directory, logs=self.logs, tries=3, storage_options=self._storage_options
                )
                if newest is not None:
                    say(f"fetched {newest.name} from {store}")
        except RemoteError as error:
            if resumes and not here:
                raise RemoteError(
                    f"plugin {self.name!r}: {error}. There is no checkpoint in {saver.directory} either, so the run "
                    f"would begin anew: mend the store, or leave this plugin out"
                ) from error
            self._warn(error)

    def _name_other_logs(self, learner: Learner, saver: Checkpoint) -> None:
        logs = [each for each in map(unwrapped, learner.plugins.values()) if isinstance(each, LogTo)]
        for backend in (backend for log in logs for backend in log.backends if self.logs):
            path = getattr(backend, "path", None)
            if path is not None and saver.directory not in path.resolve().parents:
                say(f"plugin {self.name!r} does not upload {path}: it takes only logs in {saver.directory}")

    def _warn(self, problem: Exception | None) -> None:
        if problem is not None and not self._said:
            self._said = True
            warn(f"plugin {self.name!r}: {problem}. It is tried again, and training continues")


class _Thread(threading.Thread):
    """Watches the directory and uploads new files, until it is asked to end and all are uploaded."""

    def __init__(self, plugin: Upload, saver: Checkpoint) -> None:
        super().__init__(name="loopkit-upload", daemon=True)
        self.directory = saver.directory
        self.wake = threading.Event()
        self.problem: Exception | None = None
        """The store's last error."""
        self._ending, self._given_up = False, False
        self._seconds = plugin.seconds
        store = Store(plugin._url, plugin._storage_options, lambda: self._given_up)
        self.mirror = Mirror(self.directory, store, plugin.verify, plugin.logs)

    def end(self, wait: float) -> None:
        """Upload the rest; wait so many seconds at most."""
        self._ending = True
        self.wake.set()
        self.join(wait)
        self._given_up = True
        self.wake.set()

    def run(self) -> None:
        """Upload."""
        processes.give_way()
        next_log, waits, hurried = time.monotonic() + self._seconds, pauses(), False
        while not self._given_up:
            self.wake.clear()
            ending, late = self._ending, time.monotonic() >= next_log
            if ending and not hurried:
                hurried, waits = True, pauses()
            try:
                more = self.mirror.bring(logs=late or ending)
            except Changed as error:
                self.problem, more = error, True
            except Exception as error:
                self.problem, more = error, False
                self._pause(next(waits))
                continue
            else:
                self.problem, waits = None, pauses()
            if late:
                next_log = time.monotonic() + self._seconds
            if more:
                continue
            if ending:
                return
            self.wake.wait(LOOK)

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt; only the end of the fit makes it earlier."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._given_up:
            was = self._ending
            self.wake.wait(left)
            self.wake.clear()
            if self._ending and not was:
                return
