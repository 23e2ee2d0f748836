"""A small transformer encoder on scikit-learn's digits: a row of pixels is a token, and their mean is classified."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from loopkit import Learner, data, metrics, plugins
from loopkit.schedules import cosine, warmup

torch.manual_seed(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
order = torch.randperm(len(images))
x, y = images[order].float().reshape(-1, 8, 8) / 8 - 1, labels[order]
train = data.TensorLoader(x[:1400], y[:1400], batch_size=50, shuffle=True)
val = data.TensorLoader(x[1400:], y[1400:], batch_size=397)


class Encoder(nn.Module):
    def __init__(self, width=48, heads=4, layers=2):
        super().__init__()
        self.embed, self.places = nn.Linear(8, width), nn.Parameter(torch.randn(8, width) / 10)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, rows):
        return self.head(self.layers(self.embed(rows) + self.places).mean(1))


learner = Learner(
    Encoder(),
    nn.CrossEntropyLoss(label_smoothing=0.1),
    lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05),
    plugins=[
        plugins.ClipGradNorm(1.0),
        plugins.Metrics(metrics.Accuracy()),
        plugins.Schedule(warmup(50, then=cosine())),
    ],
)
result = learner.fit(train, val, epochs=20)
print(result)

assert result.metrics["val/accuracy"] > 0.96, "the encoder should be right about more than 96 % of held-out images"
