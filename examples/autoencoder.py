"""A convolutional autoencoder that removes noise from scikit-learn's digits, against PCA with codes of equal size."""

import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import nn

from loopkit import Learner, data, plugins
from loopkit.schedules import one_cycle

CODE = 8

torch.manual_seed(0)
images = torch.as_tensor(load_digits().images).float().unsqueeze(1) / 16
images = images[torch.randperm(len(images))]


def add_noise(batch, generator):
    """Inputs are noisy, targets are not."""
    return batch + 0.2 * torch.randn(batch.shape, generator=generator), batch


train = data.TensorLoader(images[:1400], batch_size=50, shuffle=True).map(add_noise, seed=1)
noisy, clean = add_noise(images[1400:], torch.Generator().manual_seed(2))
val = data.TensorLoader(noisy, clean, batch_size=397)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, CODE),
    nn.Linear(CODE, 64 * 4 * 4), nn.ReLU(),
    nn.Unflatten(1, (64, 4, 4)),
    nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.ReLU(),
    nn.Conv2d(32, 1, 3, padding=1), nn.Sigmoid(),
)  # fmt: skip
learner = Learner(
    model,
    nn.MSELoss(),
    lambda params: torch.optim.Adam(params, lr=3e-3),
    plugins=[plugins.Schedule(one_cycle())],
)
result = learner.fit(train, val, epochs=20)
print(result)

pca = PCA(CODE).fit(images[:1400].flatten(1))
restored = torch.as_tensor(pca.inverse_transform(pca.transform(noisy.flatten(1)))).view_as(clean)
of_pca, of_noise = nn.functional.mse_loss(restored, clean).item(), nn.functional.mse_loss(noisy, clean).item()
own = result.metrics["val/loss"]
print(f"mean squared error on held-out images: noisy {of_noise:.4f}, PCA {of_pca:.4f}, autoencoder {own:.4f}")
assert own < 0.8 * of_pca, "the autoencoder should restore images better than PCA with a code of the same size"
