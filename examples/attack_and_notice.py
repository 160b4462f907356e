"""For a researcher of uncertainty: does a network under attack notice that it is attacked?

python -m examples.attack_and_notice
"""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt

import covary
from covary import attacks
from covary.uncertainty import metrics, scores
from examples.drawing import BLUE, GREEN, ORANGE, options, save
from examples.plain_digits import load, train


def main() -> None:
    arguments = options(__doc__)
    torch.manual_seed(0)
    x, y, x_test, y_test = load()
    x, x_test = x.flatten(1), x_test.flatten(1)
    net = covary.mlp([64, 64, 32, 10], activation="relu", noise=0.2, covariance="shared")
    train(net, x, y, 2 if arguments.quick else 30)
    net = covary.with_covariance(net, "full").eval()

    strengths = (0.0, 0.1, 0.2) if arguments.quick else (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
    found: dict[str, list[float]] = {"accuracy": [], "entropy": [], "max-softmax": []}
    with torch.no_grad():
        clean = net(x_test)
    for epsilon in strengths:
        moved = attacks.pgd(net, x_test, y_test, epsilon, steps=10, bounds=(0, 1))
        with torch.no_grad():
            out = net(moved)
        found["accuracy"].append((out.mean.argmax(1) == y_test).float().mean().item())
        found["entropy"].append(metrics.auroc(out.entropy(), clean.entropy()))
        found["max-softmax"].append(
            metrics.auroc(scores.max_softmax(out), scores.max_softmax(clean))
        )
        print(
            f"epsilon {epsilon:.2f}: accuracy {found['accuracy'][-1]:.2f}, AUROC by entropy "
            f"{found['entropy'][-1]:.2f}, by max-softmax {found['max-softmax'][-1]:.2f}"
        )

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True)
    left.plot(strengths, found["accuracy"], "o-", color=GREEN)
    left.set_ylabel("accuracy under attack (PGD)")
    left.set_ylim(0, 1)
    for name, color in (("entropy", BLUE), ("max-softmax", ORANGE)):
        right.plot(strengths, found[name], "o-", color=color, label=name)
    right.axhline(0.5, color="grey", linestyle=":", label="chance")
    right.set_ylabel("AUROC, attacked against clean")
    right.set_ylim(0, 1)
    right.legend()
    for panel in (left, right):
        panel.set_xlabel("largest change of a pixel (range 0 to 1)")
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
