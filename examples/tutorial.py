"""Tutorial: your own data, from a table to predictions. The text is docs/tutorial.md."""

import torch
from sklearn.datasets import load_wine
from torch import nn

from loopkit import Learner, checkpoint, data, metrics, plugins, schedules, seed_everything

seed_everything(0)
table, classes = load_wine(return_X_y=True)
order = torch.randperm(len(table))
x = torch.as_tensor(table, dtype=torch.float32)[order]
y = torch.as_tensor(classes)[order]
x = (x - x[:120].mean(0)) / x[:120].std(0)

train = data.TensorLoader(x[:120], y[:120], batch_size=16, shuffle=True)
val = data.TensorLoader(x[120:150], y[120:150], batch_size=30)
test = data.TensorLoader(x[150:], y[150:], batch_size=28)

def make_model():
    return nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))


learner = Learner(
    make_model(),
    nn.CrossEntropyLoss(),
    lambda params: torch.optim.AdamW(params, lr=0.01),
    plugins=[
        plugins.Metrics(metrics.Accuracy()),
        plugins.Schedule(schedules.warmup(8, then=schedules.cosine())),
        plugins.EarlyStopping("val/loss", patience=5),
        plugins.Checkpoint("runs/wine", best="val/loss", resume="auto"),
    ],
)

result = learner.fit(train, val, epochs=30)
print(result)

checkpoint.load_best(learner, "runs/wine")
print(learner.evaluate(test))
print(learner.predict(test).argmax(1)[:5])

checkpoint.save_weights(learner.model, "wine.safetensors")

from loopkit.checkpoint import load_weights

model = make_model()
load_weights(model, "wine.safetensors")
model.eval()
with torch.no_grad():
    print(model(x[150:155]).softmax(1).argmax(1))

import matplotlib.pyplot as plt

figure, axes = plt.subplots()
for phase, rows in learner.plugins["history"].frame().groupby("phase"):
    axes.plot(rows["epoch"], rows["loss"], label=phase)
axes.set(xlabel="epoch", ylabel="loss")
axes.legend()
figure.savefig("wine.png")
