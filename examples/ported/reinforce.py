"""REINFORCE on a pole and cart: a step of the fit is one episode of each of 32 poles.

Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
"""

import torch
from both import train_twice
from cart_pole import LIMIT, begin, move
from loopkit_data import episodes
from torch import nn
from torch.distributions import Categorical

from loopkit import Learner, Phase
from loopkit.metrics import Mean
from loopkit.plugins import ClipGradNorm, Metrics


def episodes_of(policy):
    """Logarithms of what was chosen, returns, and who was alive, ``(moves, poles)`` each."""
    state, alive, logs, lives = begin(32), torch.ones(32), [], []
    for _ in range(LIMIT):
        choice = Categorical(logits=policy(state))
        action = choice.sample()
        state, fallen = move(state, action)
        logs.append(choice.log_prob(action) * alive)
        lives.append(alive)
        alive = alive * ~fallen
        if not alive.any():
            break
    lives = torch.stack(lives)
    return torch.stack(logs), lives.flip(0).cumsum(0).flip(0), lives  # rewards of 1 from here on


def make():
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


def data(steps=10):
    return episodes(steps)


def adam(params):
    return torch.optim.Adam(params, lr=0.02)


def by_hand(policy, data, epochs):
    optimizer, baseline = adam(policy.parameters()), 0.0
    for _ in range(epochs * len(data)):
        logs, returns, lives = episodes_of(policy)
        baseline = 0.9 * baseline + 0.1 * float(returns.sum() / lives.sum())
        optimizer.zero_grad()
        loss = -(logs * (returns - baseline)).sum() / lives.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


class Reinforce(Phase):
    name, training, batchless = "train", True, True
    saved = ("baseline",)
    baseline = 0.0

    def step(self, learner, step):
        logs, returns, lives = episodes_of(learner.model)
        step.length = lives.sum(0).mean()
        self.baseline = 0.9 * self.baseline + 0.1 * float(returns.sum() / lives.sum())
        step.loss = -(logs * (returns - self.baseline)).sum() / lives.sum()
        step.backward(step.loss)
        step.update()


def with_loopkit(policy, data, epochs, *plugins):
    own = [ClipGradNorm(1.0), Metrics(Mean("length"))]
    Learner(policy, optimizer=adam, phases=[Reinforce()], plugins=[*own, *plugins]).fit(data, epochs=epochs)


def main():
    policy = train_twice(make, data, by_hand, with_loopkit, epochs=8)
    print(f"steps before a pole falls: {episodes_of(policy)[2].sum(0).mean():.0f} of {LIMIT}")


if __name__ == "__main__":
    main()
