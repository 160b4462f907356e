"""For a researcher: fine-tune a converted network on its mean, and watch the covariance follow.

python -m examples.convert_and_fine_tune
"""

from __future__ import annotations

import argparse

import torch

import covary
from examples.plain_digits import train, trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--noise", type=float, default=0.1)
    arguments = parser.parse_args()

    model, x, y, x_test, y_test = trained(arguments.epochs)

    net = covary.convert(model, noise=arguments.noise)
    for stage in ("converted", "fine-tuned"):
        if stage == "fine-tuned":
            train(net, x, y, arguments.epochs)  # the ordinary loop, on the mean (SMUC)
        covary.track(net, x)
        with torch.no_grad():
            out = net(x_test)
        right = out.mean.argmax(1) == y_test
        deviation = out.stddev.mean(1)
        print(
            f"{stage}: {right.float().mean():.1%} right at noise {arguments.noise}; average "
            f"deviation {deviation[right].mean():.2f} where right, "
            f"{deviation[~right].mean():.2f} where wrong"
        )


if __name__ == "__main__":
    main()
