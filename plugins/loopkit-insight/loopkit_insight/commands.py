"""The subcommands of this distribution: run a failed step again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loopkit.commands import argument, existing, plain, say, standalone

__all__ = ["replay"]


@standalone(
    "replay",
    argument("path", metavar="PATH", type=Path, help="what the note on the error names"),
    argument("target", metavar="SCRIPT.py:FUNCTION", help="a function that returns the learner, as for verify-resume"),
    argument("--debugger", action="store_true", help="start pdb where the error is raised"),
    argument("--no-anomaly", action="store_true", help="run without torch's anomaly detection"),
)
def replay(options: argparse.Namespace) -> int:
    """Run a failed step again from a bundle of the plugin ReplayBundle.

    FUNCTION takes no arguments and returns a Learner made as for the failed run, or (learner, fit) as for
    verify-resume.

    Exit code: 1 if the step fails again, 0 if it does not, 2 if it cannot be run.
    """
    import pdb
    import traceback

    from loopkit.author import storage
    from loopkit.commands import made
    from loopkit.hooks import hookimpl
    from loopkit_insight.replay_bundle import replay as run_again

    class Begun:
        """Whether the step itself failed, or the way there."""

        name = "!replay_begun"
        seen = False

        @hookimpl(writes=("*",))
        def epoch_begin(self) -> None:
            self.seen = True

    path = existing(options.path).absolute()
    recorded = storage.read_manifest(path).about.get("error")
    learner, _ = made(options.target)
    begun = Begun()
    learner.add(begun)
    try:
        run_again(path, learner, anomaly=not options.no_anomaly)
    except Exception as error:
        if not begun.seen:
            raise
        say("".join(traceback.format_exception(error)), sys.stderr, end="")
        if f"{type(error).__name__}: {error}" == recorded:
            say("the step fails again as recorded")
        else:
            say(f"the step fails, but not as recorded: {plain(str(recorded), 1000)}")
        if options.debugger:
            pdb.post_mortem(error.__traceback__)
        return 1
    say(f"the step does not fail; recorded was: {plain(str(recorded), 1000)}")
    return 0
