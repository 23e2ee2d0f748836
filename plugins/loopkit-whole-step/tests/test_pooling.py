"""Max pooling along the batch, against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from loopkit_whole_step import private
from loopkit_whole_step.pooling import TURNED, max_pool2d, max_pool2d_backward

aten = torch.ops.aten


def ties(*shape):
    """Images in which the largest number of a window is there more than once."""
    torch.manual_seed(0)
    return torch.randint(-2, 3, shape).float()


SIZES = {
    "halves": ((2, 2), (2, 2), (0, 0), (1, 1), False),
    "overlap": ((3, 3), (2, 2), (1, 1), (1, 1), False),
    "odd": ((3, 2), (2, 3), (1, 0), (1, 1), True),
    "dilated": ((2, 2), (1, 2), (0, 0), (2, 1), False),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("turn", [False, True], ids=["contiguous", "channels_last"])
def test_pooling_is_pytorchs_bit_for_bit(sizes, turn):
    layout = torch.channels_last if turn else torch.contiguous_format
    images = ties(9, 5, 13, 12).to(memory_format=layout)
    values, indices = aten.max_pool2d_with_indices(images, *sizes)
    found = max_pool2d(images, *sizes)
    assert torch.equal(found[0], values)
    assert torch.equal(found[1], indices)
    grad = torch.randint(-9, 9, values.shape).float()  # whose sums are exact in any order
    made = max_pool2d_backward(grad, images, *sizes, found[1])
    assert torch.equal(made, aten.max_pool2d_with_indices_backward(grad, images, *sizes, indices))


def test_not_a_number_goes_where_pytorch_lets_it_go():
    images = ties(8, 3, 4, 4)
    images[1, 2, 0, 1] = images[1, 2, 1, 0] = torch.nan
    for found, own in zip(max_pool2d(images, (2, 2)), aten.max_pool2d_with_indices(images, (2, 2)), strict=True):
        assert torch.equal(found.nan_to_num(7), own.nan_to_num(7))


@pytest.mark.parametrize(("channels", "samples", "turned"), [(6, 8, True), (6, 4, False), (16, 8, False)])
def test_few_channels_of_many_samples_are_pooled_along_the_batch(channels, samples, turned):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(1, channels, 3), nn.ReLU(), nn.MaxPool2d(2))
    params = tuple(layers.parameters())
    images = torch.randn(samples, 1, 10, 10)

    def step(*given):
        outputs = torch.func.functional_call(
            layers, dict(zip(dict(layers.named_parameters()), given, strict=True)), images
        )
        return [outputs, *torch.autograd.grad(outputs.square().sum(), given)]

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*params)
    expected = step(*params)
    compiled = private.inductor(graph, [p.detach() for p in params])
    assert [node.target in TURNED.values() for node in graph.graph.nodes].count(True) == 2 * turned
    for value, own in zip(compiled(*(p.detach() for p in params)), expected, strict=True):
        torch.testing.assert_close(value, own)
