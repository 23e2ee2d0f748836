"""``loopkit api``, ``loopkit diff`` and ``loopkit verify-resume``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from loopkit.commands import JSON, argument, existing, say, say_json, standalone


@standalone(
    "verify-resume",
    argument("target", metavar="SCRIPT.py:FUNCTION", help="a function that returns a learner's fit"),
    argument("--kill-at", metavar="STEP", type=int, nargs="+", default=[], help="steps to kill at (default: a few)"),
    argument("--signal", choices=("KILL", "TERM"), default="KILL", help="how to kill (default: KILL)"),
    argument("--epochs", metavar="N", type=int, help="epochs of the fit, instead of the function's"),
    argument(
        "--ignore",
        metavar="KEY",
        action="append",
        default=["seconds"],
        help="leave out what has this key in a state, as 'seconds' always is: measured times (may be given again)",
    ),
    argument("--timeout", metavar="SECONDS", type=float, default=600.0, help="for each process (default: 600)"),
)
def verify_resume(options: argparse.Namespace) -> int:
    """Prove that a run with its plugins resumes exactly: kill it, resume it, and compare every bit.

    FUNCTION takes no arguments and makes a new Learner. It returns its fit, not yet called:

        def make_learner():
            learner = Learner(model(), nn.MSELoss(), sgd, plugins=[MyPlugin()], seed=0)
            return functools.partial(learner.fit, train, val, epochs=3)

    or the learner with the arguments of its fit: return learner, {"train": train, "val": val, "epochs": 3}

    The script runs as by `python SCRIPT.py`, but is not __main__. The fit runs whole, twice, and is then killed at
    each STEP and resumed, each time in its own process. A checkpoint is saved at every update, in a temporary
    directory; the learner's own plugin for checkpoints is left out. On a difference, the first plugin whose state
    differs is named.

    Exit code: 0 if every bit of the final states is the same, 1 if not, 2 if the run fails by itself.
    """
    from loopkit_testing.verify_resume import verify_resume as outcomes

    problems = 0
    for outcome in outcomes(
        options.target,
        kill_at=options.kill_at,
        signal_name=options.signal,
        epochs=options.epochs,
        ignore=options.ignore,
        timeout=options.timeout,
    ):
        say(str(outcome))
        problems += bool(outcome.problem)
    say("NOT VERIFIED: this run does not resume exactly" if problems else "verified: this run resumes exactly")
    return 1 if problems else 0


@standalone(
    "api",
    argument("name", metavar="NAME", nargs="?", default="", help="a module, class, function or method, such as fit"),
    JSON,
)
def show_api(options: argparse.Namespace) -> int:
    """Print the public API: signatures and first lines of all of it, or the whole docstring of NAME.

    NAME is a path or the end of one: loopkit.plugins, ClipGradNorm, Learner.fit.

    Exit code: 0, or 2 if NAME is unknown.
    """
    from loopkit_testing.reference import chosen, shown

    if options.json:
        say_json([asdict(item) for item in chosen(options.name)])
    else:
        say(shown(options.name).strip("\n"))
    return 0


@standalone(
    "diff",
    argument("one", metavar="A", type=Path, help="a checkpoint, or a directory of them, of which the newest is taken"),
    argument("other", metavar="B", type=Path, help="likewise"),
    argument("--all", action="store_true", help="list every difference, not only the first"),
    argument(
        "--ignore",
        metavar="KEY",
        action="append",
        default=[],
        help="leave out what has this key, at any depth; 'seconds' are measured times (may be given again)",
    ),
)
def diff(options: argparse.Namespace) -> int:
    """Compare two saved states bit by bit: the first difference, and how many there are in each part.

    Exit code: 0 if they are equal, 1 if they differ, 2 if one cannot be read.
    """
    from loopkit.author import bundle
    from loopkit_testing.diff import count, differences

    manifests = [bundle.find(existing(path).absolute()) for path in (options.one, options.other)]
    one, other = map(bundle.read_state, manifests)
    found = differences(one, other, ignore=options.ignore)
    if not found:
        say("equal in every bit")
        return 0
    for difference in found if options.all else found[:1]:
        say(str(difference))
    counts = ", ".join(f"{part} {number:,}" for part, number in count(found).items())
    say(f"{len(found):,} item{'s differ' if len(found) > 1 else ' differs'}: {counts}")
    return 1
