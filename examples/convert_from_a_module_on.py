"""For whoever wants doubt about features, not pixels: moments from a later module on.

python -m examples.convert_from_a_module_on
"""

from __future__ import annotations

import argparse

import torch

import covary
from examples.plain_digits import trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    arguments = parser.parse_args()

    model, x, _, x_test, _ = trained(arguments.epochs)

    inputs = {"digits": x_test, "noise": torch.rand(len(x_test), 1, 8, 8)}
    for start in (None, "head"):
        net = covary.convert(model, noise=0.1, start=start)
        covary.track(net, x)
        place = "the input" if start is None else f"module {start!r}"
        with torch.no_grad():
            for name, images in inputs.items():
                entropy = net(images).entropy()
                print(f"noise from {place} on, {name}: median entropy {entropy.median():.2f} nats")


if __name__ == "__main__":
    main()
