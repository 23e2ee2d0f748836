"""What examples/digits.toml names: a model, and scikit-learn's handwritten digits in batches."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from loopkit.data import TensorLoader


def net(hidden: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def train(batch_size: int = 32) -> TensorLoader:
    x, y = digits()
    return TensorLoader(x[:1400], y[:1400], batch_size=batch_size, shuffle=True)


def val(batch_size: int = 200) -> TensorLoader:
    x, y = digits()
    return TensorLoader(x[1400:], y[1400:], batch_size=batch_size)


def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 64) in [0, 1] and labels (1797,), in an order that never changes."""
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order].float() / 16, labels[order]
