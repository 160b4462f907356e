"""Rows: errors and foreign photographs by the library's scores, and by those of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reproduction.experiment import SEEDS, Claim, Experiment, Part, by_scale, seeds
from reproduction.experiments import images, networks
from reproduction.experiments.photographs_measures import measure
from reproduction.workshop import Network

FOREIGN = ("svhn", "cifar100")
# What is fetched by whoever asks for it, and never on the way.
_FETCHED = ("cifar100",)
RESIDUAL, LENET5, VGG13 = "residual", "lenet5", "vgg13"
NETWORKS = (RESIDUAL, LENET5, VGG13)
# Which neighbour counts: that which the authors of KNN take for CIFAR-10.
_K = 50
_EPOCHS = {"smoke": 1, "quick": 20, "paper": 60}
# Of the mixed LeNet5 at scale quick; at scale paper it is that of image-accuracy.
_FEW_EPOCHS = {"smoke": 1, "quick": 8}
# Images of each part: what is held out has to be enough for a fitted score.
_LIMIT = {"smoke": 1500, "quick": 0, "paper": 0}
_LIMIT_SHORT = _LIMIT | {"quick": 10_000}


def label_of(network: str, foreign: str) -> str:
    """What the parts of a network and an OOD set are called."""
    return f"{network}, {foreign}"


def _residual(scale: str) -> dict[str, Any]:
    """The network of plain torch, as data; the workshop finds it by its name."""
    return {
        "name": "residual-cifar10",
        "data": "cifar10",
        "settings": {
            "widths": [4, 8, 8] if scale == "smoke" else [32, 64, 128],
            "epochs": _EPOCHS[scale],
            "batch_size": 128,
            "lr": 4e-3,
            "weight_decay": 1e-2,
            "validation": 0.1,
            "limit": _LIMIT[scale],
        },
    }


def _lenet5(scale: str) -> Network:
    if scale == "paper":
        return images.network(scale, "cifar10", "relu", "full")
    # With one hidden layer training is the same, whatever is known of correlations.
    like = images.network("quick", "cifar10", "relu", "diagonal")
    settings = {**like.settings, "epochs": _FEW_EPOCHS[scale]}
    name = "lenet5-cifar10-relu-short"
    return replace(like, name=name, settings=settings, limit=_LIMIT_SHORT[scale])


def _networks(scale: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield RESIDUAL, {"residual": _residual(scale), "noise": 0.05}
    yield LENET5, {"network": _lenet5(scale).to_dict()}
    if scale != "smoke":
        yield VGG13, {"network": networks.cifar10(scale, "relu", "full").to_dict()}


def _parts(scale: str) -> Iterator[Part]:
    sizes = {
        "smoke": {"samples": 200, "corrupted": 40},
        "quick": {"samples": 10_000, "corrupted": 1000},
        "paper": {"samples": 0, "corrupted": 0},
    }[scale]
    for foreign in FOREIGN if scale != "smoke" else FOREIGN[:1]:
        needs = {"needs": [foreign]} if foreign in _FETCHED else {}
        for name, network in _networks(scale):
            settings = {**network, "foreign": foreign, "k": _K, **sizes, **needs}
            yield from seeds(label_of(name, foreign), SEEDS[scale], **settings)


# How far one AUROC may be behind another for us to call it no worse.
_CLOSE = 0.01
_ENTROPY = (
    "House numbers have less covariance than test images here, and wrong answers hardly more than "
    "right ones, or less. Why was not looked into; images with less contrast have more."
)
_WHY: Mapping[str, str] = {
    "errors entropy": _ENTROPY,
    "foreign entropy": _ENTROPY,
    "foreign expected_max": "By a thousandth more than counts as equal, on a network of 58% "
    "accuracy.",
    "errors fitted_plain": "The density beside the margin says what is strange in an image, and "
    "little about errors (see the density alone, in the table): the price of one score for both.",
    "foreign moments": "The density of plain features knows as much: what tells house numbers is "
    "in the layers, and not in the covariance alone.",
}


def _claims() -> Iterator[Claim]:
    for pair, words in (("errors", "errors"), ("foreign", "foreign images")):
        for name, title in (
            ("entropy", "Entropy"),
            ("expected_max", "The expected max"),
            ("fitted_plain", "The fitted score (plain features)"),
        ):
            yield Claim(
                says=f"{title} tells {words} as well as max-softmax (difference in AUROC; "
                f"{_CLOSE} less counts as equal).",
                metric=f"auroc {pair}, {name}",
                minus=f"auroc {pair}, max_softmax",
                least=-_CLOSE,
                ours=True,
                why=_WHY.get(f"{pair} {name}", ""),
            )
    yield Claim(
        says="The fitted score (plain features) tells foreign images as well as KNN and ViM "
        "(AUROC above the better of the two).",
        metric="auroc foreign, fitted_plain",
        minus=("auroc foreign, knn", "auroc foreign, vim"),
        least=-_CLOSE,
        ours=True,
        why=_WHY.get("foreign others", ""),
    )
    yield Claim(
        says="The covariance adds to the fitted score what counts: with features of moments it "
        "tells foreign images better than with plain ones (difference in AUROC).",
        metric="auroc foreign, fitted",
        minus="auroc foreign, fitted_plain",
        least=0.0,
        ours=True,
        why=_WHY.get("foreign moments", ""),
    )
    yield Claim(
        says="The score that tells corrupted held-out images best is the best on foreign ones, "
        f"too (AUROC above the best; {_CLOSE} less counts as equal).",
        metric="auroc foreign, chosen",
        minus="auroc foreign, best",
        least=-_CLOSE,
        ours=True,
        why=_WHY.get("choice", ""),
    )
    yield Claim(
        says="Scores are in the order in which they tell corrupted images (rank correlation with "
        "foreign ones).",
        metric="rank of corrupted and foreign",
        ours=True,
    )
    for name, title in (("fitted_plain", "the fitted score"), ("knn", "KNN"), ("vim", "ViM")):
        yield Claim(
            says=f"Time of {title}, over that of the conventional pass.",
            metric=f"time, {name}",
            ours=True,
        )
    yield Claim(
        says="Test accuracy, in percent.",
        metric="accuracy",
        ours=True,
    )


_ABOUT = (
    "The paper looks at letters beside digits; this looks at house numbers (SVHN) and CIFAR-100 "
    "beside CIFAR-10, and puts beside entropy what others detect OOD inputs with, on the same "
    "networks and the same images. Networks: a residual network of plain torch (eight layers, 32, "
    "64 and 128 channels, AdamW with one cycle, random crop and flip), which `covary.convert` "
    "gives a covariance (noise 0.05 everywhere, its default); the mixed LeNet5 of image-accuracy, "
    "trained at scale `quick` for eight epochs on 9,000 images; the mixed network of "
    "cifar10-relu. A tenth of the training images is held out. Errors: wrong against right test "
    "images. Foreign: all of the OOD set (10,000 at random at scale `quick`) against all test "
    "images. Energy (Liu et al., 2020): minus the log of the summed exponentials of logits. GEN "
    "(Liu, Lochman and Zach, 2023): the sum of p^g (1 - p)^g, g = 0.1. KNN (Sun et al., 2022): "
    "the distance of penultimate features, of length 1, to their 50th neighbour among the "
    "training images. ViM (Wang et al., 2022): what features have outside of the principal half "
    "of their dimensions, scaled to the largest logits, above the log of the summed exponentials. "
    "The fitted score is that of the library (docs/uncertainty.md): a Gaussian density of some "
    "numbers of each layer, less twice the log-margin; plain: without noise and covariance, all "
    "that the residual network has. Below it are other forms that it could have: the density "
    "alone; in place of the density the distance to the 10th neighbour among held-out images (of "
    "the same numbers), that to the 50th among training images (of penultimate features), or "
    "ViM's residual; all less twice the margin, standardised in the same way. Corrupted: held-out "
    "images with noise, blurred, with less contrast, in larger pixels, in tiles that changed "
    "places, mixed with another one, and negative; against clean ones, which the fits have not "
    "seen (the other half of what is held out), averages over the seven. No score and no constant "
    "was chosen by a look at foreign or test images: constants are those of the authors or of the "
    "library, and others (the 10th neighbour, half of the dimensions, how images are corrupted) "
    "were set before anything was measured. Time: of a pass and the score, 128 images, over the "
    "pass of the conventional network of the same weights, all in turns in one process; memory: "
    "what is kept besides the network."
)

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="ood-photographs",
        about=_ABOUT,
        measure=measure,
        parts=by_scale(_parts),
        claims=tuple(_claims()),
    ),
)
