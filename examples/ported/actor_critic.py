"""Actor and critic on a pole and cart: a step of the fit is five moves of 32 poles, which go on in the next step.

Source: Mnih et al. 2016, "Asynchronous Methods for Deep Reinforcement Learning", algorithm S3, without the threads.
"""

import torch
from both import train_twice
from cart_pole import begin, move
from loopkit_data import steps
from torch import nn
from torch.distributions import Categorical

from loopkit import Learner, Phase
from loopkit.metrics import Mean
from loopkit.plugins import ClipGradNorm, Metrics

GAMMA = 0.98


def five_moves(actor, critic, state):
    """The loss, where the poles are then, and who fell."""
    logs, values, entropies, ends = [], [], [], []
    for _ in range(5):
        policy = Categorical(logits=actor(state))
        action = policy.sample()
        logs.append(policy.log_prob(action))
        values.append(critic(state).squeeze(1))
        entropies.append(policy.entropy())
        moved, fallen = move(state, action)
        state = torch.where(fallen[:, None], begin(32), moved)
        ends.append(fallen)
    target, targets = critic(state).squeeze(1).detach(), []
    for fallen in reversed(ends):
        target = torch.where(fallen, 0.0, 1.0 + GAMMA * target)
        targets.insert(0, target)
    gain, entropy = torch.stack(targets) - torch.stack(values), torch.stack(entropies).mean()
    loss = gain.square().mean() - (torch.stack(logs) * gain.detach()).mean() - 0.01 * entropy
    return loss, state, torch.stack(ends)


def make():
    return {
        name: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, n)) for name, n in (("actor", 2), ("critic", 1))
    }


def data(count=100):
    return steps(count)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def by_hand(nets, data, epochs):
    params = [p for net in nets.values() for p in net.parameters()]
    optimizer, state = adam(params), begin(32)
    for _ in range(epochs * len(data)):
        loss, state, _ = five_moves(nets["actor"], nets["critic"], state)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()


class ActorCritic(Phase):
    name, training, batchless = "train", True, True
    saved = ("state",)

    def __init__(self):
        super().__init__()
        self.state = begin(32)

    def step(self, learner, step):
        step.loss, self.state, falls = five_moves(learner.models["actor"], learner.models["critic"], self.state)
        step.falls = falls.float().mean()
        step.backward(step.loss)
        step.update()


def with_loopkit(nets, data, epochs, *plugins):
    own = [ClipGradNorm(1.0), Metrics(Mean("falls"))]
    Learner(nets, optimizer=adam, phases=[ActorCritic()], plugins=[*own, *plugins]).fit(data, epochs=epochs)


def main():
    nets, state, falls = train_twice(make, data, by_hand, with_loopkit, epochs=6), begin(32), []
    for _ in range(100):
        _, state, fallen = five_moves(nets["actor"], nets["critic"], state)
        falls.append(fallen.float().mean())
    print(f"falls in a thousand moves: {1000 * torch.stack(falls).mean():.1f}")


if __name__ == "__main__":
    main()
