"""Actor and critic on a pole and cart: a step of the fit is five moves of 32 poles, which go on in the next step."""

import torch
from cart_pole import begin, move
from torch import nn
from torch.distributions import Categorical

from loopkit import Learner, Phase
from loopkit.metrics import Mean
from loopkit.plugins import ClipGradNorm, Metrics
from loopkit_data import steps

GAMMA = 0.98


class ActorCritic(Phase):
    name, training, batchless = "train", True, True
    saved = ("state",)

    def __init__(self):
        super().__init__()
        self.state = begin(32)

    def step(self, learner, step):
        actor, critic = learner.models["actor"], learner.models["critic"]
        logs, values, entropies, ends = [], [], [], []
        for _ in range(5):
            policy = Categorical(logits=actor(self.state))
            action = policy.sample()
            logs.append(policy.log_prob(action))
            values.append(critic(self.state).squeeze(1))
            entropies.append(policy.entropy())
            state, fallen = move(self.state, action)
            self.state = torch.where(fallen[:, None], begin(32), state)
            ends.append(fallen)
        target, targets = critic(self.state).squeeze(1).detach(), []
        for fallen in reversed(ends):
            target = torch.where(fallen, 0.0, 1.0 + GAMMA * target)
            targets.insert(0, target)
        gain = torch.stack(targets) - torch.stack(values)
        step.falls = torch.stack(ends).float().mean()
        step.loss = (
            gain.square().mean() - (torch.stack(logs) * gain.detach()).mean() - 0.01 * torch.stack(entropies).mean()
        )
        step.backward(step.loss)
        step.update()


def make():
    torch.manual_seed(0)
    nets = {
        name: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, n)) for name, n in (("actor", 2), ("critic", 1))
    }
    optimizer = torch.optim.Adam([p for net in nets.values() for p in net.parameters()], lr=0.01)
    plugins = [ClipGradNorm(1.0), Metrics(Mean("falls"))]
    return Learner(nets, optimizer=optimizer, plugins=plugins, phases=[ActorCritic()])


def data():
    return steps(100)


if __name__ == "__main__":
    result = make().fit(data(), epochs=6)
    print(f"falls in a thousand moves: {1000 * result.metrics['train/falls']:.1f}")
