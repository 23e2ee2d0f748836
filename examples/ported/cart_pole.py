"""Many poles on carts, balanced at once: an environment in tensors."""

import torch

LIMIT = 100
"""Steps after which an episode ends."""


def begin(count):
    """States ``(count, 4)``: position, speed, angle, angular speed."""
    return torch.rand(count, 4) / 10 - 0.05


def move(state, action):
    """Push left (0) or right (1) for a fiftieth of a second; returns the states and which poles have fallen."""
    x, v, angle, w = state.unbind(1)
    force = 20.0 * action - 10
    push = (force + 0.05 * w**2 * angle.sin()) / 1.1
    turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    pull = push - 0.05 * turn * angle.cos() / 1.1
    state = torch.stack([x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * w, w + 0.02 * turn], 1)
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)
