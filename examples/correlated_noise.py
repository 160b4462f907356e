"""For a computational neuroscientist: noise correlations of units, analytically and by drawing.

python -m examples.correlated_noise
"""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt

import covary
from covary.stochastic import sample_steady
from examples.drawing import BLUE, ORANGE, options, save
from examples.plain_digits import load, train


def main() -> None:
    arguments = options(__doc__)
    torch.manual_seed(0)
    x, y, x_test, _ = load()
    x, x_test = x.flatten(1), x_test.flatten(1)[:4]
    net = covary.mlp([64, 64, 32, 10], activation="relu", noise=0.2, covariance="shared")
    train(net, x, y, 2 if arguments.quick else 30)

    # The stochastic network of the same weights: noise is drawn, and moments are counted.
    drawn = sample_steady(net.eval(), x_test, copies=1024 if arguments.quick else 65536)
    layer = "activation2"  # the second hidden layer, 32 units
    counted = drawn[layer].covariance_matrix

    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharex=True, sharey=True)
    for panel, kind in zip(panels, ("full", "diagonal"), strict=True):
        other = covary.with_covariance(net, kind).eval()
        with torch.no_grad(), covary.record(other) as layers:
            other(x_test)
        computed = layers[layer].covariance_matrix.to(counted.dtype)
        error = (computed - counted).norm() / counted.norm()
        variance = torch.linalg.vector_norm(torch.diagonal(computed - counted, dim1=1, dim2=2))
        variance /= torch.linalg.vector_norm(torch.diagonal(counted, dim1=1, dim2=2))
        print(f"{kind} covariance: error {error:.1%} of all entries, {variance:.1%} of variances")
        off = ~torch.eye(counted.shape[1], dtype=torch.bool)
        panel.plot(counted[:, off].flatten(), computed[:, off].flatten(), ".", color=BLUE, ms=3)
        diagonal = [torch.diagonal(each, dim1=1, dim2=2).flatten() for each in (counted, computed)]
        panel.plot(*diagonal, ".", color=ORANGE, ms=5)
        panel.axline((0, 0), slope=1, color="grey", linewidth=1)
        panel.set_title(f'covariance="{kind}"')
        panel.set_xlabel("drawn")
    panels[0].plot([], [], ".", color=ORANGE, label="variances of units")
    panels[0].plot([], [], ".", color=BLUE, label="covariances of pairs")
    panels[0].legend()
    panels[0].set_ylabel("analytic")
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
