"""A study on real digits: the learning rate and the width, with trials pruned that fall behind."""

from functools import partial

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

from loopkit import Learner, data, metrics, plugins
from loopkit_optuna import OptunaPruning

images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
x, y = images[order].float() / 16, labels[order]


def objective(trial: optuna.Trial) -> float:
    """The accuracy after ten epochs."""
    torch.manual_seed(0)
    width = trial.suggest_categorical("width", [16, 64, 256])
    optimizer = partial(torch.optim.SGD, lr=trial.suggest_float("lr", 1e-4, 1.0, log=True), momentum=0.9)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    train = data.TensorLoader(x[:1400], y[:1400], batch_size=32, shuffle=True)
    val = data.TensorLoader(x[1400:], y[1400:], batch_size=200)
    used = [plugins.Metrics(metrics.Accuracy()), OptunaPruning(trial, "val/accuracy"), plugins.StopOnNonFinite()]
    return (
        Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=used, standard=False)
        .fit(train, val, epochs=10)
        .metrics["val/accuracy"]
    )


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2),
    )
    study.optimize(objective, n_trials=12, catch=(ArithmeticError,))
    for trial in study.trials:
        last = max(trial.intermediate_values, default=0)
        print(f"trial {trial.number:2}  {trial.state.name.lower():8}  epochs {last:2}  {trial.params}")
    print(f"best: {study.best_value:.4f} with {study.best_params}")
