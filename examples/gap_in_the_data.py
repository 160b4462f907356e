"""For a researcher of uncertainty: weights that data left open tell where data are missing.

python -m examples.gap_in_the_data
"""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor, nn

import covary
from examples.drawing import BLUE, GREEN, GREY, options, save


def measurements() -> tuple[Tensor, Tensor]:
    """(120, 1) inputs without any between -1 and 1, and noisy values of a sine."""
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-3, -1, 60), torch.linspace(1, 3, 60)])[:, None]
    return x, torch.sin(2 * x) + 0.15 * torch.randn(120, 1)


def trained(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh())
    model.append(nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def draw(out: covary.Moments, at: Tensor, x: Tensor, y: Tensor) -> Figure:
    figure, (band, variance) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(3, 2))
    low, high = ((out.mean + side * out.stddev)[:, 0] for side in (-2, 2))
    band.fill_between(at[:, 0], low, high, color=BLUE, alpha=0.4, linewidth=0)
    band.plot(at, out.mean, color=BLUE)
    band.plot(x, y, ".", color=GREY, ms=3)
    band.set(xlabel="input", ylabel="output", ylim=(-4, 4), title="two deviations, and the data")
    parts = {kind: part[:, 0] for kind, part in out.budget().by_kind().items()}
    colors = {"weights": BLUE, "noise": GREEN}
    for kind, part in parts.items():
        variance.semilogy(at, part, color=colors[kind], label=kind)
    variance.legend(loc="lower center")
    variance.set(xlabel="input", ylabel="variance", title="what it is made of")
    return figure


def main() -> None:
    arguments = options(__doc__)
    x, y = measurements()
    net = covary.posterior.fit(trained(x, y, 100 if arguments.quick else 2000), (x, y))
    at = torch.linspace(-4, 4, 161)[:, None]
    with torch.no_grad():
        out = net(at)
        weights = out.budget().by_kind()["weights"][:, 0].sqrt()
    inside = (at[:, 0].abs() < 1, (at[:, 0].abs() >= 1) & (at[:, 0].abs() <= 3))
    for place, chosen in zip(("in the gap", "where there are data"), inside, strict=True):
        print(f"{place}: deviation by weights {weights[chosen].mean():.2f} on average")
    print(out[80].budget())
    save(draw(out, at, x, y), arguments.figure)


if __name__ == "__main__":
    main()
