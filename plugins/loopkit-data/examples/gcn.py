"""A graph convolution on scikit-learn's digits: each a node, joined to its neighbours; a hundred labels are known."""

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import nn
from torch.nn.functional import cross_entropy

from loopkit import Learner, Phase
from loopkit_data import steps

images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
near = torch.from_numpy(kneighbors_graph(images, 8, include_self=True).toarray()).float()
near = near.maximum(near.T)
scale = near.sum(1).rsqrt()
graph = (scale[:, None] * near * scale).to_sparse()
order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
known = torch.cat([order[y[order] == digit][:10] for digit in range(10)])
hidden = torch.ones(len(y), dtype=torch.bool).index_fill(0, known, False)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(64, 32), nn.Linear(32, 10), nn.Dropout(0.5)

    def forward(self, x):
        return torch.sparse.mm(graph, self.second(self.dropout(torch.sparse.mm(graph, self.first(x)).relu())))


class WholeGraph(Phase):
    name, training, batchless = "train", True, True

    def step(self, learner, step):
        step.outputs, step.targets = learner.model(x)[known], y[known]
        step.loss = cross_entropy(step.outputs, step.targets)
        step.backward(step.loss)
        step.update()


def make():
    torch.manual_seed(0)
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    return Learner(model, optimizer=optimizer, phases=[WholeGraph()])


def data():
    return steps(20)


if __name__ == "__main__":
    learner = make()
    learner.fit(data(), epochs=5)
    print(f"accuracy {(learner.predict(x).argmax(1) == y)[hidden].float().mean():.3f}")
