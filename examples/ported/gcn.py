"""A graph convolution on scikit-learn's digits: each a node, joined to its neighbours; a hundred labels are known.

Source: Kipf and Welling 2017, "Semi-Supervised Classification with Graph Convolutional Networks", equations 8 to 10.
"""

import torch
from both import digits, train_twice
from loopkit_data import steps
from torch import nn
from torch.nn.functional import cross_entropy

from loopkit import Learner, Phase

NEAR = 8


def graph():
    """Images, labels, the normalized adjacency of the graph, and which ten labels of each digit are known."""
    x, y = digits()
    nearest = torch.cdist(x, x).topk(NEAR, largest=False).indices
    near = torch.zeros(len(x), len(x)).scatter_(1, nearest, 1.0)
    near = near.maximum(near.T)
    scale = near.sum(1).rsqrt()
    known = torch.cat([(y == digit).nonzero().squeeze(1)[:10] for digit in range(10)])
    return x, y, (scale[:, None] * near * scale).to_sparse(), known


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(64, 32), nn.Linear(32, 10), nn.Dropout(0.5)

    def forward(self, x, near):
        return torch.sparse.mm(near, self.second(self.dropout(torch.sparse.mm(near, self.first(x)).relu())))


make = GCN


def data(count=20):
    return graph(), steps(count)


def adam(params):
    return torch.optim.Adam(params, lr=0.02, weight_decay=5e-4)


def by_hand(model, data, epochs):
    (x, y, near, known), train = data
    optimizer = adam(model.parameters())
    for _ in range(epochs * len(train)):
        optimizer.zero_grad()
        cross_entropy(model(x, near)[known], y[known]).backward()
        optimizer.step()


class WholeGraph(Phase):
    name, training, batchless = "train", True, True

    def __init__(self, x, y, near, known):
        super().__init__()
        self.x, self.near, self.known, self.targets = x, near, known, y[known]

    def step(self, learner, step):
        step.outputs, step.targets = learner.model(self.x, self.near)[self.known], self.targets
        step.loss = cross_entropy(step.outputs, step.targets)
        step.backward(step.loss)
        step.update()


def with_loopkit(model, data, epochs, *plugins):
    whole, train = data
    Learner(model, optimizer=adam, phases=[WholeGraph(*whole)], plugins=plugins).fit(train, epochs=epochs)


def main():
    model = train_twice(make, data, by_hand, with_loopkit, epochs=5).eval()
    x, y, near, known = graph()
    right = (model(x, near).argmax(1) == y).float()
    right[known] = 0
    print(f"{right.sum() / (len(y) - len(known)):.3f} of the other images are right, with {len(known)} labels")


if __name__ == "__main__":
    main()
