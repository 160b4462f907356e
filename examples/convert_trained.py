"""For an engineer with a trained network: error bars for its outputs, without training it again.

python -m examples.convert_trained
"""

from __future__ import annotations

import argparse

import torch

import covary
from examples.plain_digits import trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--noise", type=float, default=0.05)
    arguments = parser.parse_args()

    model, x, _, x_test, y_test = trained(arguments.epochs)

    net = covary.convert(model, noise=arguments.noise)
    covary.track(net, x)
    print(net)

    with torch.no_grad():
        out = net(x_test)
        # How many standard deviations the best class leads the second by.
        best = out.mean.topk(2).indices
        rows = torch.zeros(len(x_test), 1, 10)
        rows.scatter_(2, best[:, None, :1], 1.0).scatter_(2, best[:, None, 1:], -1.0)
        lead = out.project(rows)
        distance = (lead.mean / lead.stddev)[:, 0]
    right = out.mean.argmax(1) == y_test
    print(f"\n{len(y_test)} test digits, {right.float().mean():.1%} right")
    for name, some in (("right", right), ("wrong", ~right)):
        print(f"  {name}: the decision is {distance[some].median():.1f} deviations from changing")
    print(f"\nagainst draws, {covary.verify(net, x_test[:8], draws=1600)}")


if __name__ == "__main__":
    main()
