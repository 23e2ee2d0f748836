"""A language model of words, with truncated backpropagation through time: its state goes on from step to step.

The text is read in 20 places at once, 20 words a step. The learning rate is a quarter of what it was whenever the loss
on held-out text did not fall. Source: Zaremba, Sutskever, Vinyals 2014, "Recurrent Neural Network Regularization".
"""

import math
import re
from collections import Counter
from pydoc_data import topics

import torch
from both import train_twice
from torch import nn
from torch.nn.functional import cross_entropy

from loopkit import Learner, TrainingPhase, ValidationPhase
from loopkit.data import TensorLoader
from loopkit.plugins import ClipGradNorm, Plateau

PLACES, LENGTH, WORDS, WIDTH = 20, 20, 1000, 100


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.lstm, self.dropout = nn.LSTM(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, words, state):
        hidden, state = self.lstm(self.dropout(self.embedding(words)), state)
        return self.head(self.dropout(hidden)), state


make = Network


def tokens():
    words = re.findall(r"\w+|[^\w\s]", "\n".join(topics.topics.values()).lower())
    known = {word: index for index, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))}
    return torch.tensor([known.get(word, WORDS - 1) for word in words])


def reading(part):
    """Batches ``(inputs, targets)``, of shape (length, places); each goes on where the one before ended."""
    columns = part.view(PLACES, -1).T
    return TensorLoader(columns[:-1], columns[1:], batch_size=LENGTH)


def data(steps=200):
    text, size = tokens(), PLACES * (LENGTH * steps + 1)
    return reading(text[:size]), reading(text[-PLACES * (LENGTH * 10 + 1) :])


def loss_fn(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def sgd(params):
    return torch.optim.SGD(params, lr=20.0)


def by_hand(model, data, epochs):
    train, val = data
    optimizer, best = sgd(model.parameters()), math.inf
    for _ in range(epochs):
        state = None
        for inputs, targets in train:
            optimizer.zero_grad()
            outputs, state = model(inputs, state)
            state = [each.detach() for each in state]
            loss_fn(outputs, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
        model.eval()
        state, total = None, 0.0
        with torch.no_grad():
            for inputs, targets in val:
                outputs, state = model(inputs, state)
                total += loss_fn(outputs, targets).item()
        model.train()
        if total >= best:
            optimizer.param_groups[0]["lr"] /= 4
        best = min(best, total)


class Recurrent:
    saved = ("state",)
    state = None

    def step(self, learner, step):
        if step.index == 0:
            self.state = None
        super().step(learner, step)

    def forward(self, learner, inputs):
        outputs, state = learner.model(inputs, self.state)
        self.state = [each.detach() for each in state]
        return outputs


class Train(Recurrent, TrainingPhase):
    pass


class Validate(Recurrent, ValidationPhase):
    pass


def with_loopkit(model, data, epochs, *plugins):
    own = [ClipGradNorm(0.25), Plateau("val/loss", factor=0.25, patience=0, threshold=0.0)]
    learner = Learner(model, loss_fn, sgd, phases=[Train(), Validate()], plugins=[*own, *plugins])
    learner.fit(*data, epochs=epochs)


def main():
    model, (train, val) = train_twice(make, data, by_hand, with_loopkit, epochs=4).eval(), data()
    (inputs, targets), shares = val.tensors, (train.tensors[0].flatten().bincount(minlength=WORDS) + 1).float()
    with torch.no_grad():
        own = loss_fn(model(inputs, None)[0], targets).exp()
    of_shares = (-(shares / shares.sum()).log()[targets].mean()).exp()
    print(f"perplexity: {of_shares:.0f} by how common a word is, {own:.0f} of the LSTM")


if __name__ == "__main__":
    main()
