"""REINFORCE on a pole and cart: a step of the fit is one episode of each of 32 poles."""

import torch
from cart_pole import LIMIT, begin, move
from torch import nn
from torch.distributions import Categorical

from loopkit import Learner, Phase
from loopkit.metrics import Mean
from loopkit.plugins import ClipGradNorm, Metrics
from loopkit_data import episodes


class Reinforce(Phase):
    name, training, batchless = "train", True, True
    saved = ("baseline",)

    def __init__(self):
        super().__init__()
        self.baseline = 0.0

    def step(self, learner, step):
        state, alive, logs, lives = begin(32), torch.ones(32), [], []
        for _ in range(LIMIT):
            policy = Categorical(logits=learner.model(state))
            action = policy.sample()
            state, fallen = move(state, action)
            logs.append(policy.log_prob(action) * alive)
            lives.append(alive)
            alive = alive * ~fallen
            if not alive.any():
                break
        lives = torch.stack(lives)
        returns = lives.flip(0).cumsum(0).flip(0)  # rewards of 1 from here on
        step.length = lives.sum(0).mean()
        self.baseline = 0.9 * self.baseline + 0.1 * float(returns.sum() / lives.sum())
        step.loss = -(torch.stack(logs) * (returns - self.baseline)).sum() / lives.sum()
        step.backward(step.loss)
        step.update()


def make():
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    plugins = [ClipGradNorm(1.0), Metrics(Mean("length"))]
    return Learner(policy, optimizer=optimizer, plugins=plugins, phases=[Reinforce()])


def data():
    return episodes(10)


if __name__ == "__main__":
    result = make().fit(data(), epochs=8)
    print(f"steps before a pole falls: {result.metrics['train/length']:.0f} of {LIMIT}")
