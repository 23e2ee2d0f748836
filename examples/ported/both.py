"""What the programs beside this file share: data, and the comparison of a loop by hand with the same in loopkit."""

import torch


def digits():
    """scikit-learn's images of digits, in a random order: pixels ``(1797, 64)`` from 0 to 1, and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels)[order]


def tensors(model):
    """All parameters and buffers of a model, or of a mapping of models."""
    models = model.values() if isinstance(model, dict) else [model]
    return [tensor for each in models for tensor in each.state_dict().values()]


def same_bits(model, other):
    return all(map(torch.equal, tensors(model), tensors(other)))


def train_twice(make, data, by_hand, with_loopkit, epochs):
    """Train from the same weights and random numbers, by hand and with loopkit; returns the latter's model."""
    trained = []
    for train in (by_hand, with_loopkit):
        torch.manual_seed(0)
        model = make()
        train(model, data(), epochs)
        trained.append(model)
    print("the same bits:", same_bits(*trained))
    return trained[1]
