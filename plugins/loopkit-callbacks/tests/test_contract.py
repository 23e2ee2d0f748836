"""Every supported object keeps the contract of plugins."""

import io

import torch
from loopkit_testing import plugin_contract
from trainers import pl  # imports Lightning, whose warnings it silences

from loopkit.plugins import Metrics
from loopkit_callbacks import IgniteHandler, LightningCallback

MEASURED = [
    f"DeviceStatsMonitor.on_{stage}_batch_{part}/{value}"
    for stage in ("train", "validation")
    for part in ("start", "end")
    for value in ("cpu_percent", "cpu_vm_percent", "cpu_swap_percent")
]


def log(trainer, pl_module, outputs, batch, index):
    pl_module.log("samples", len(batch[0]))


def score(engine):
    return -engine.state.metrics["loss"]


def shown(output):
    return {"loss": output} if isinstance(output, torch.Tensor) else {}


def early_stopping():
    return LightningCallback(pl.callbacks.EarlyStopping("val/loss", patience=1)), Metrics()


def early_stopping_in_training():
    return LightningCallback("EarlyStopping", monitor="train/loss", min_delta=0.5, patience=2), Metrics()


def learning_rate_monitor():
    options = {"log_momentum": True, "log_weight_decay": True, "log_every_n_steps": 1}
    return LightningCallback("LearningRateMonitor", **options)


def timer():
    return LightningCallback("Timer", duration="00:01:00:00")


def device_stats_monitor():
    return LightningCallback(pl.callbacks.DeviceStatsMonitor(), log_every_n_steps=1)


def lambda_callback():
    return LightningCallback(pl.callbacks.LambdaCallback(on_train_batch_end=log))


def ignite_early_stopping():
    return IgniteHandler("EarlyStopping", patience=1, score_function=score), Metrics()


def ignite_terminate_on_nan():
    return IgniteHandler("TerminateOnNan")


def ignite_linear():
    return IgniteHandler("LinearCyclicalScheduler", param_name="lr", start_value=0.1, end_value=0.01, cycle_size=5)


def ignite_pieces():
    pieces = [(0, 0.9), (3, 0.5)]
    return IgniteHandler("PiecewiseLinear", "epoch_started", param_name="momentum", milestones_values=pieces)


def ignite_bar():
    attach = {"output_transform": shown, "metric_names": "all"}
    return IgniteHandler("ProgressBar", attach=attach, file=io.StringIO()), Metrics()


NO_VALIDATION = {"bounded_memory": "this check does not validate, which the plugin warns of"}
test_early_stopping = plugin_contract(early_stopping, name="lightning_callback", skip=NO_VALIDATION)
test_early_stopping_in_training = plugin_contract(early_stopping_in_training, name="lightning_callback")
test_learning_rate_monitor = plugin_contract(learning_rate_monitor, name="lightning_callback")
test_timer = plugin_contract(timer, name="lightning_callback")
test_device_stats_monitor = plugin_contract(device_stats_monitor, name="lightning_callback", volatile=MEASURED)
test_lambda_callback = plugin_contract(lambda_callback, name="lightning_callback")
test_ignite_early_stopping = plugin_contract(ignite_early_stopping, name="ignite_handler", skip=NO_VALIDATION)
test_ignite_terminate_on_nan = plugin_contract(ignite_terminate_on_nan, name="ignite_handler")
test_ignite_linear = plugin_contract(ignite_linear, name="ignite_handler")
test_ignite_pieces = plugin_contract(ignite_pieces, name="ignite_handler")
test_ignite_bar = plugin_contract(ignite_bar, name="ignite_handler")
