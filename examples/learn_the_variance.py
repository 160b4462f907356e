"""For a researcher of uncertainty: train the mean alone, or the covariance with it.

python -m examples.learn_the_variance
"""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt

import covary
from examples.drawing import BLUE, GREY, options, save


def measured(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (count, 1) in [-2, 2] and targets whose spread grows from left to right."""
    x = torch.empty(count, 1).uniform_(-2, 2)
    return x, torch.sin(2 * x) + (0.05 + 0.15 * (x + 2)) * torch.randn(count, 1)


def main() -> None:
    arguments = options(__doc__)
    torch.manual_seed(0)
    x, y = measured(400)
    x_test, y_test = measured(2000)
    grid = torch.linspace(-2, 2, 200)[:, None]

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for panel, likelihood in zip(panels, (False, True), strict=True):
        net = covary.mlp([1, 64, 64, 1], activation="relu", noise=0.1)
        optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
        for _ in range(20 if arguments.quick else 600):
            if likelihood:
                with covary.supervise_covariance():  # SMSC: gradients reach the covariance, too
                    out = net(x)
                loss = -out.distribution().log_prob(y).mean()
            else:  # SMUC: the covariance follows from the noise and the weights
                loss = (net(x).mean - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        net.eval()
        with torch.no_grad():
            drawn, test = net(grid), net(x_test)
        inside = ((y_test - test.mean).abs() <= 2 * test.stddev).float().mean()
        name = "mean and covariance (SMSC)" if likelihood else "mean alone (SMUC)"
        print(f"{name}: {inside:.0%} of test targets within two standard deviations")
        mean, wide = drawn.mean[:, 0], 2 * drawn.stddev[:, 0]
        panel.plot(x, y, ".", color=GREY, markersize=3, label="training data")
        panel.plot(grid, mean, color=BLUE, label="mean")
        panel.fill_between(
            grid[:, 0], mean - wide, mean + wide, color=BLUE, alpha=0.25, label="two deviations"
        )
        panel.set_title(f"{name}: {inside:.0%} inside")
        panel.set_xlabel("x")
    panels[0].set_ylabel("y")
    panels[0].legend(fontsize=8)
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
