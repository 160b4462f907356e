"""For an engineer with a trained CNN: noise on pixels, or on the features that they give.

python -m examples.convert_from_a_module_on
"""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt

import covary
from examples.drawing import BLUE, ORANGE, options, save
from examples.plain_digits import trained


def main() -> None:
    arguments = options(__doc__)
    model, x, _, x_test, _ = trained(2 if arguments.quick else 15)
    inputs = {"digits": (x_test, BLUE), "random pixels": (torch.rand(len(x_test), 1, 8, 8), ORANGE)}

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4))
    for panel, start in zip(panels, (None, "head"), strict=True):
        net = covary.convert(model, noise=0.1, start=start)
        covary.track(net, x)
        place = "the input" if start is None else f"module {start!r}"
        with torch.no_grad():
            found = {name: net(images).entropy() for name, (images, _) in inputs.items()}
        bins = torch.linspace(*torch.cat([*found.values()]).aminmax(), 40)
        for name, entropy in found.items():
            print(f"noise from {place} on, {name}: median entropy {entropy.median():.2f} nats")
            panel.hist(entropy, bins=bins, alpha=0.6, color=inputs[name][1], label=name)
        panel.set_title(f"noise from {place} on")
        panel.set_xlabel("entropy of the output (nats)")
        panel.locator_params(axis="x", nbins=6)
    panels[0].set_ylabel("images")
    panels[0].legend()
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
