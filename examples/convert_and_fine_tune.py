"""For a researcher of uncertainty: fine-tune a converted network on its mean, with noise.

python -m examples.convert_and_fine_tune
"""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt

import covary
from covary.uncertainty import metrics
from covary.uncertainty.scores import change_probability
from examples.drawing import BLUE, ORANGE, options, save
from examples.plain_digits import train, trained


def main() -> None:
    arguments = options(__doc__)
    epochs = 2 if arguments.quick else 10
    noises = (0.1, 0.3) if arguments.quick else (0.05, 0.1, 0.2, 0.3, 0.4)
    accuracy: dict[str, list[float]] = {"converted": [], "fine-tuned": []}
    auroc: dict[str, list[float]] = {"converted": [], "fine-tuned": []}
    for noise in noises:
        model, x, y, x_test, y_test = trained(epochs)
        net = covary.convert(model, noise=noise)
        for stage in accuracy:
            if stage == "fine-tuned":
                train(net, x, y, epochs)  # the ordinary loop, on the mean (SMUC)
            fidelity = covary.track(net, x)  # warns if variances are far from those of draws
            with torch.no_grad():
                out = net(x_test)
                doubt = change_probability(out)  # that noise changes the predicted class
            wrong = out.mean.argmax(1) != y_test
            accuracy[stage].append(100 * (1 - wrong.float().mean().item()))
            auroc[stage].append(metrics.auroc(doubt[wrong], doubt[~wrong]))
            print(
                f"noise {noise:.2f}, {stage:10}: {accuracy[stage][-1]:.1f}% right, "
                f"AUROC {auroc[stage][-1]:.3f}, variances {1 / fidelity.ratio:.2f} of draws'"
            )

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4))
    for panel, values, name in (
        (panels[0], accuracy, "right predictions (%)"),
        (panels[1], auroc, "AUROC of errors, change probability"),
    ):
        for stage, color in (("converted", ORANGE), ("fine-tuned", BLUE)):
            panel.plot(noises, values[stage], "o-", color=color, label=stage)
        panel.set_xlabel("noise (standard deviation)")
        panel.set_ylabel(name)
    panels[0].legend()
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
