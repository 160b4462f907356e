"""How accurate Gauss-Hermite quadrature is, by activation, nodes and sigma.

    python -m benchmarks.quadrature_accuracy

The worst error over mu in {0, 0.5, 2} and over mean (in standard deviations), variance and gain
(relative), against 20-digit integration.
"""

from __future__ import annotations

from functools import cache

import torch

from benchmarks import tables
from covary import activations
from tests import reference

MEANS = [0.0, 0.5, 2.0]
SIGMAS = [0.1, 0.3, 1.0, 3.0, 10.0]


@cache
def true_moments(name: str, mu: float, sigma: float) -> tuple[float, float, float]:
    mean, variance, gain = reference.integrated(name, mu, sigma**2)
    if name == "heaviside":
        gain = activations.get(name)(torch.tensor([[mu]]), torch.tensor([[sigma**2]])).gain.item()
    return float(mean), float(variance), float(gain)


def error(name: str, smooth: bool, nodes: int, sigma: float) -> float:
    function = activations.get(name).function
    activation = activations.quadrature(function, smooth=smooth, nodes=nodes)
    mu = torch.tensor([MEANS], dtype=torch.float64)
    out = activation(mu, torch.full_like(mu, sigma**2))
    worst = 0.0
    for i, m in enumerate(MEANS):
        mean, variance, gain = true_moments(name, m, sigma)
        found = [value[0, i].item() for value in out]
        if variance < 1e-12:  # a jump far away from the input has no variance to be wrong about
            continue
        worst = max(
            worst,
            abs(found[0] - mean) / variance**0.5,
            abs(found[1] - variance) / variance,
            abs(found[2] - gain) / abs(gain),
        )
    return worst


def main() -> None:
    cases = [(name, True) for name in ("tanh", "sigmoid", "silu", "softplus", "relu")]
    cases.append(("heaviside", False))
    measured = {
        f"{name}, {nodes}": {f"{s:g}": error(name, smooth, nodes, s) for s in SIGMAS}
        for name, smooth in cases
        for nodes in (32, 128)
    }
    command = "python -m benchmarks.quadrature_accuracy"
    tables.publish("quadrature_accuracy", command, None, measured, shown=[tables.quadrature])


if __name__ == "__main__":
    main()
