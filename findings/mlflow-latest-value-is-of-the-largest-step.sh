#!/usr/bin/env bash
# mlflow 3.17.2: a run's value of a metric is the one of the largest step, not the one that was logged last.
#
# Guess: run.data.metrics, which tables and searches show, has the value of the last call of log_metric. Seen: it has
# the one of the largest step, and of two values of one step and millisecond the larger one, whatever came last.
#
# Why a training loop cares: a run that died at step 100 and is resumed from a checkpoint at step 60 shows the loss of
# the dead process until it passes step 100, and for ever if it stops before. A search for the best run, as by
# order_by=["metrics.loss"], compares values that the run does not have any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q mlflow==3.17.2
env/bin/python -W ignore - 2> /dev/null <<'END'
from importlib.metadata import version

import mlflow
from mlflow.entities import Metric

mlflow.set_tracking_uri("sqlite:///mlflow.db")
client = mlflow.MlflowClient()
with mlflow.start_run() as run:
    mlflow.log_metric("loss", 0.9, step=100)  # the process dies after this
with mlflow.start_run(run_id=run.info.run_id):
    mlflow.log_metric("loss", 0.4, step=70)  # and is resumed from step 60
    for value in (0.3, 0.2):
        client.log_batch(run.info.run_id, [Metric("error", value, 1000, 5)])
last = client.get_metric_history(run.info.run_id, "loss")[-1].value
shown = client.get_run(run.info.run_id).data.metrics
assert shown == {"loss": 0.9, "error": 0.3}, shown
print(f"mlflow {version('mlflow')}: the last values are {last} and 0.2; the run shows {shown['loss']} and {shown['error']}")
END
