"""Neither package is imported before it is needed, nor has to be there."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None  # as if it were not installed
import loopkit_callbacks
from loopkit import LoopkitError
heavy = ("lightning", "pytorch_lightning", "ignite")
assert not [name for name, module in sys.modules.items() if module is not None and name.split(".")[0] in heavy]
try:
    loopkit_callbacks.{make}
except LoopkitError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("missing", "make", "said"),
    [
        (
            ["lightning", "pytorch_lightning"],
            "LightningCallback('Timer')",
            "LightningCallback('Timer') needs Lightning, which is not installed: "
            "pip install 'loopkit-callbacks[lightning]'",
        ),
        (
            ["ignite"],
            "IgniteHandler('TerminateOnNan')",
            "IgniteHandler of TerminateOnNan needs Ignite (pytorch-ignite), which is not installed: "
            "pip install 'loopkit-callbacks[ignite]'",
        ),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(missing, make, said):
    script = SCRIPT.format(missing=missing, make=make)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == (said, "")
