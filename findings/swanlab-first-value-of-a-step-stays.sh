#!/usr/bin/env bash
# swanlab 0.10.3: of two values with one name and one step, the first stays; the second is left out without a message.
#
# Guess: the second value takes the place of the first one, as in a row of Weights & Biases. Seen: the run's file has
# the first one only, and nothing is printed.
#
# Why a training loop cares: a validation at a step where one was logged already, such as the last one of a fit after
# a scheduled one, a corrected value, or the first steps of a second fit that counts from 0 again: none of it is in
# the log. A resumed run that logs equal values again is not harmed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q swanlab==0.10.3
env/bin/python -W ignore - <<'END'
import contextlib
import io
from importlib.metadata import version
from pathlib import Path

import swanlab
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader

swanlab.init(project="p", mode="offline", logdir="log")
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
    swanlab.log({"val/loss": 2.0}, step=7)
    swanlab.log({"val/loss": 1.0}, step=7)
    swanlab.log({"val/loss": 0.5}, step=8)
swanlab.finish()
reader = DataStoreReader()
reader.open(next(Path("log").glob("run-*/*.swanlab")))
records = [Record.FromString(data) for data in reader]
found = [(each.scalar.step, each.scalar.value.number) for each in records if each.HasField("scalar")]
assert found == [(7, 2.0), (8, 0.5)] and not said.getvalue(), (found, said.getvalue())
print(f"swanlab {version('swanlab')}: 2.0 and then 1.0 at step 7, 0.5 at step 8; the file has {found}")
END
