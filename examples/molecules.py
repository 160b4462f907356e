"""A real network of science: when is an energy of a molecule a guess?

    pip install -e '.[molecules,report]'
    python -m examples.molecules

ANI-1x predicts energies of molecules from what each atom sees around it. One of its eight networks
gets a relative error of 1% on these features, and covary gives the standard deviation of its energy
in one pass (three draws before it measure variances at activations). It is compared with the true
error (wB97X/6-31G*, by benchmarks/molecule_energies.py) and with the spread of all eight networks,
for molecules at rest and displaced by up to 0.3 Angstrom. Numbers go to
results/benchmarks/molecules.json, a figure to docs/figures/molecules.png.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from scipy.stats import spearmanr

import covary
from benchmarks import results
from covary.nn.fidelity import TrackingWarning
from covary.sources import Relative
from examples.drawing import save
from examples.molecules_network import MEMBERS, Energies

NOISE = 0.01  # the relative error of each feature; taken from the question, not tuned
DRAWS, SEED, KCAL = 24, 0, 627.5095


def measure(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Rank correlations of doubts with errors, and the numbers of every geometry."""
    molecules = [(row["symbols"], torch.tensor(row["positions"])) for row in rows]
    models = [Energies(molecules, member).eval() for member in range(MEMBERS)]
    model = models[0]
    net = covary.convert(model, noise=0, sources={"input": Relative(NOISE)})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)  # variances are measured on this batch
        began = time.perf_counter()
        std = net(model.seen).stddev[:, 0]
        passed = time.perf_counter()
        energies = torch.stack([each(each.seen)[:, 0].double() for each in models])
        ended = time.perf_counter()
        generator = torch.Generator().manual_seed(SEED)
        draws = [net.draw(model.seen, generator=generator)[:, 0].double() for _ in range(DRAWS)]
    truth = torch.tensor([row["energy"] for row in rows], dtype=torch.float64)
    found = {
        "displacement": np.array([row["displacement"] for row in rows]),
        "error": KCAL * (energies[0] + model.alone[:, 0] - truth).abs().numpy(),
        "one network, one pass": KCAL * std.double().numpy(),
        f"one network, {DRAWS} draws": KCAL * torch.stack(draws).std(0).numpy(),
        "spread of eight networks": KCAL * energies.std(0).numpy(),
    }
    ways, eight = [name for name in found if " " in name], found["spread of eight networks"]
    parts = {"all": np.full(len(rows), True)} | {
        f"{size:g} Angstrom": found["displacement"] == size
        for size in np.unique(found["displacement"])
    }
    ranks = {
        part: {
            name: {
                "with the error": float(spearmanr(found[name][some], found["error"][some])[0]),
                "with the spread": float(spearmanr(found[name][some], eight[some])[0]),
            }
            for name in ways
        }
        for part, some in parts.items()
    }
    seconds = {"moments": passed - began, "eight networks": ended - passed}
    return {"geometries": len(rows), "ranks": ranks, "seconds": seconds}, found


def picture(found: dict[str, np.ndarray]) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True)
    for panel, name in zip(
        panels, ("one network, one pass", "spread of eight networks"), strict=True
    ):
        for size in np.unique(found["displacement"]):
            some = found["displacement"] == size
            label = f"displaced by {size:g} Å"
            panel.loglog(found[name][some], found["error"][some], "o", ms=4, alpha=0.7, label=label)
        panel.set_xlabel(f"{name} (kcal/mol)")
        panel.set_title(f"rank correlation {spearmanr(found[name], found['error'])[0]:.2f}")
    panels[0].set_ylabel("true error of one network (kcal/mol)")
    panels[0].legend(fontsize=8)
    return figure


def main() -> None:
    measured, found = measure(results.load("molecule_energies")["geometries"])
    results.save("molecules", "python -m examples.molecules", SEED, measured)
    save(picture(found), results.ROOT / "docs" / "figures" / "molecules.png")
    for part, ways in measured["ranks"].items():
        for name, ranks in ways.items():
            shown = ", ".join(f"{what} {value:.2f}" for what, value in ranks.items())
            print(f"{part}, {name}: rank correlation {shown}")


if __name__ == "__main__":
    main()
