"""Rows go back through convolutions of every geometry as autograd takes them back."""

import random

import pytest
import torch
import torch.nn.functional as F

from covary.rules import convolution


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("channels", [1, 3, 16])
def test_rows_go_back_as_by_autograd(seed, channels):
    draw = random.Random(seed)
    step, outputs = draw.choice([1, 2, 2, 3, 4]), draw.choice([1, 4])
    kernel, padding = [[draw.randint(low, 5) for _ in range(2)] for low in (1, 0)]
    size = [draw.randint(max(1, k - 2 * p), 12) for k, p in zip(kernel, padding, strict=True)]
    x = torch.randn(3, channels, *size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(outputs, channels, *kernel, dtype=torch.float64)
    y = F.conv2d(x, weight, None, step, padding)
    rows = torch.randn(2, *y.shape, dtype=torch.float64)
    expected = torch.stack([torch.autograd.grad(y, x, row, retain_graph=True)[0] for row in rows])
    shape = convolution.Geometry(
        tuple(x.shape[1:]), tuple(y.shape[1:]), (step, step), tuple(padding), (1, 1), 1, False
    )
    found = convolution.back(rows, weight, shape)
    torch.testing.assert_close(found, expected)
