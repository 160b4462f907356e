"""For an engineer with a trained CNN: find inputs unlike the training data, with no conversion.

python -m examples.score_any_network
"""

from __future__ import annotations

import time

import numpy as np
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_sample_images
from torch import Tensor

from covary.uncertainty import fit, metrics
from examples.drawing import BLUE, ORANGE, options, save
from examples.plain_digits import trained


def patches(count: int) -> Tensor:
    """(count, 1, 8, 8) grey pieces of two photographs, each stretched to [0, 1]."""
    random = np.random.default_rng(0)
    photographs = [image.mean(2) for image in load_sample_images().images]
    found = []
    for number in range(count):
        image = photographs[number % 2]
        row, column = random.integers(image.shape[0] - 32), random.integers(image.shape[1] - 32)
        piece = image[row : row + 32, column : column + 32].reshape(8, 4, 8, 4).mean((1, 3))
        found.append((piece - piece.min()) / max(np.ptp(piece), 1.0))
    return torch.tensor(np.array(found), dtype=torch.float32)[:, None]


def main() -> None:
    arguments = options(__doc__)
    model, _, _, held_out, _ = trained(2 if arguments.quick else 15)
    held_out, digits = held_out[::2], held_out[1::2]  # half to fit the score, half to test it

    start = time.perf_counter()
    score = fit(model, held_out)  # the CNN as it is; no labels, no inputs of another kind
    spent = 1000 * (time.perf_counter() - start)
    print(f"fitted to {len(held_out)} held-out digits in {spent:.0f} ms")

    others = {
        "pieces of photographs": patches(len(digits)),
        "digits upside down": digits.flip(2, 3),
        "black and white swapped": 1 - digits,
    }
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.4))
    for panel, (name, images) in zip(panels, others.items(), strict=True):
        both = torch.cat([digits, images])
        with torch.no_grad():
            unsure = 1 - model(both).softmax(1).amax(1)
        is_other = np.arange(len(both)) >= len(digits)
        values = {"max-softmax": unsure.numpy(), "fitted score": score(model, both).numpy()}
        auroc = {
            key: metrics.auroc(each[is_other], each[~is_other]) for key, each in values.items()
        }
        print(f"AUROC, {name}: " + ", ".join(f"{key} {each:.3f}" for key, each in auroc.items()))
        for key, color in zip(values, (ORANGE, BLUE), strict=True):
            limits = np.unique(values[key])
            caught = [(values[key][is_other] >= limit).mean() for limit in limits]
            alarms = [(values[key][~is_other] >= limit).mean() for limit in limits]
            panel.plot(alarms, caught, color=color, label=f"{key}, AUROC {auroc[key]:.2f}")
        panel.set_title(name)
        panel.set_xlabel("digits flagged")
        panel.legend(fontsize=8, loc="lower right")
    panels[0].set_ylabel("other inputs flagged")
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
