"""Train moment neural networks on bundled digits and see what their covariance knows.

    python examples/digits.py [--activations heaviside relu] [--epochs 100] [--noise 0.2]

Nothing is downloaded. The loss sees the mean alone, and yet the covariance that comes with it is
larger where the network is wrong. The settings were chosen on a part of the training half.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import covary

WIDTHS = [64, 128, 64, 32, 10]
console = Console()


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Half of the 1,797 images (8 x 8 pixels in [-1, 1], flat) to train on, half to test on."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 8 - 1, labels, test_size=0.5, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in parts)
    return x.float(), y, x_test.float(), y_test


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, name: str) -> None:
    """Supervised mean, unsupervised covariance: the loss sees out.mean and nothing else."""
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, weight_decay=1e-3)
    for _ in track(range(epochs), f"Training {name:10}", console=console):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[batch]).mean, y[batch]).backward()
            optimizer.step()


def draw(x: Tensor, y: Tensor, outs: dict[str, covary.Moments], path: Path) -> None:
    """Entropy of right and wrong predictions, and the digits that the first network doubts most."""
    figure = plt.figure(figsize=(11, 4.8), layout="constrained")
    left, right = np.asarray(figure.subfigures(1, 2, width_ratios=[1.2, 1]))
    panels = left.subplots(len(outs), squeeze=False)[:, 0]
    for axes, (name, out) in zip(panels, outs.items(), strict=True):
        entropy, wrong = out.entropy().numpy(), (out.mean.argmax(-1) != y).numpy()
        bins = np.linspace(entropy.min(), entropy.max(), 40)
        for label, color, part in (("right", "tab:orange", ~wrong), ("wrong", "tab:green", wrong)):
            text = f"{label} ({part.sum()})"
            axes.hist(entropy[part], bins, density=True, alpha=0.6, color=color, label=text)
        axes.set(title=f"{name} network", ylabel="density within group")
        axes.legend(title="test predictions")
    panels[-1].set_xlabel("entropy of the output covariance (nats)")
    name, out = next(iter(outs.items()))
    guess = out.mean.argmax(-1)
    right.suptitle(f"Test digits of highest entropy, {name} network (red: wrong)")
    most_doubtful = out.entropy().argsort(descending=True).tolist()
    for i, axes in zip(most_doubtful, right.subplots(3, 4).flat, strict=False):
        axes.imshow(x[i].reshape(8, 8), cmap="gray_r")
        color = "black" if guess[i] == y[i] else "crimson"
        axes.set_title(f"{y[i]}, taken for {guess[i]}", fontsize=9, color=color)
        axes.axis("off")
    figure.savefig(path, dpi=120)


def measure(out: covary.Moments, y: Tensor) -> dict[str, float]:
    """Accuracy, entropies, and how well two scores tell wrong predictions from right ones."""
    wrong = (out.mean.argmax(-1) != y).numpy()
    entropy = out.entropy().numpy()
    doubt = 1 - torch.softmax(out.mean, -1).amax(-1).numpy()
    return {
        "accuracy": 1 - wrong.mean(),
        "entropy, right predictions": float(entropy[~wrong].mean()),
        "entropy, wrong predictions": float(entropy[wrong].mean()),
        "AUROC of wrong against right: entropy": roc_auc_score(wrong, entropy),
        "AUROC of wrong against right: max-softmax": roc_auc_score(wrong, doubt),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = covary.activations.names()
    parser.add_argument(
        "--activations",
        nargs="+",
        default=["heaviside", "relu"],
        choices=names,
        metavar="NAME",
        help=f"of {', '.join(names)}",
    )
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--noise", type=float, default=0.2, help="sigma of every layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for what is made")
    arguments = parser.parse_args()

    x, y, x_test, y_test = load()
    outs = {}
    for name in arguments.activations:
        torch.manual_seed(arguments.seed)
        net = covary.mlp(WIDTHS, activation=name, noise=arguments.noise, covariance="shared")
        train(net, x, y, arguments.epochs, name)
        # Trained with one covariance per mini-batch, looked at with one per sample.
        with torch.no_grad():
            outs[name] = covary.with_covariance(net, "full").eval()(x_test)

    measured = {name: measure(out, y_test) for name, out in outs.items()}
    table = Table(title=f"{len(x_test)} test digits, network {' - '.join(map(str, WIDTHS))}")
    table.add_column("")
    for name in measured:
        table.add_column(name, justify="right")
    for quantity in next(iter(measured.values())):
        table.add_row(quantity, *(f"{numbers[quantity]:.3f}" for numbers in measured.values()))
    console.print(table)

    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(x_test, y_test, outs, arguments.out / "digits.png")
    record = {
        "command": "examples/digits.py",
        "seed": arguments.seed,
        "epochs": arguments.epochs,
        "noise": arguments.noise,
        "test digits": len(x_test),
        "versions": {"covary": covary.__version__, "torch": torch.__version__.split("+")[0]},
        "measured": measured,
    }
    (arguments.out / "digits.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"The picture is {arguments.out / 'digits.png'}, the numbers digits.json there.")


if __name__ == "__main__":
    main()
