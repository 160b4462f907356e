"""Rows: out-of-distribution inputs, and attacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reproduction.experiment import SCALES, SEEDS, Claim, Experiment, Part, by_scale, seeds
from reproduction.experiments import attacked, networks, out_of_distribution
from reproduction.experiments.classification import MEAN_KNOWS, of_full_and_shared
from reproduction.workshop import Network


def _letters(
    scale: str, label: str, count: int, network: Network | None = None
) -> tuple[Part, ...]:
    """Networks that look at letters: if none is given, those of mnist-relu of that label."""
    network = network or networks.mnist(scale, "relu", label)
    return seeds(
        label,
        count,
        network=network.to_dict(),
        covariance="full",
        foreign="notmnist",
        samples=200 if scale == "smoke" else 0,
    )


def _ood(scale: str) -> Sequence[Part]:
    theirs = networks.published("ood", scale, "mnist_ood_demo", "relu", (0.2,) * 6)
    return (
        *_letters(scale, "full", 1),
        *_letters(scale, "shared", SEEDS[scale]),
        *_letters(scale, networks.AUTHORS, 1, theirs),
    )


_ALIKE = (
    "OOD and misclassified inputs have nearly the same entropy, and which of them has more "
    "differs from network to network. The authors' network has OOD inputs less certain. Its depth "
    "and noise are those of ours, so it is training, or its seed, that decides; what of it is not "
    "known, as the weights do not say how they were trained."
)
_PAIRS = (
    ("wrong_right", "misclassified", "correctly classified"),
    ("foreign_right", "OOD", "correctly classified"),
    ("foreign_wrong", "OOD", "misclassified"),
)
_OOD_CLAIMS = (
    *(
        Claim(
            says=f"Entropy has a higher separability of {higher} from {lower} inputs than MSP and "
            "SE have (by how much, over the larger of theirs).",
            metric=f"separability_{pair}_entropy",
            minus=(f"separability_{pair}_msp", f"separability_{pair}_se"),
            published="higher",
            least=0.0,
            noise="around",
            why=MEAN_KNOWS if pair == "wrong_right" else "",
        )
        for pair, higher, lower in _PAIRS
    ),
    Claim(
        says="Entropy has OOD inputs less certain than misclassified ones (separability).",
        metric="separability_foreign_wrong_entropy",
        published="positive",
        least=0.0,
        noise="around",
        why=_ALIKE,
    ),
    *(
        Claim(
            says=f"{name} has misclassified inputs less certain than OOD ones (negative "
            "separability).",
            metric=f"separability_foreign_wrong_{indicator}",
            published="negative",
            most=0.0,
            noise="around",
        )
        for indicator, name in (("msp", "MSP"), ("se", "SE"))
    ),
)
_SCHEDULE = (
    "How the learning rate ends was chosen with a look at such inputs: of one network (seed 0, "
    "shared) trained with a rate that falls as a cosine, entropy had notMNIST's letters as more "
    "certain than digits, so that it was left aside. Other seeds took no part in that."
)
# What the figure of shared covariances shows of the same.
_OOD_BY_ENTROPY = tuple(
    Claim(
        says=f"Entropy has {higher} inputs less certain than {lower} ones (separability).",
        metric=f"separability_{pair}_entropy",
        published="higher",
        least=0.0,
        noise="around",
        why=_ALIKE if pair == "foreign_wrong" else "",
    )
    for pair, higher, lower in _PAIRS
)

# What panel b of that figure shows of the attacked networks of fgsm that were trained so.
_ATTACKED = (
    Claim(
        says="The model is vulnerable to the attack (accuracy at the largest epsilon).",
        metric="accuracy_attacked",
        of="fgsm",
        label=("",),
        published="vulnerable",
        most=0.5,
    ),
    Claim(
        says="Its entropy says so: it rises under attack (median, at the largest epsilon).",
        metric="entropy_rise_at_last",
        of="fgsm",
        label=("",),
        published="increases",
        least=0.0,
    ),
)

_AUROC = tuple(
    Claim(
        says=f"AUROC of {words}: {name}.",
        metric=f"auroc_{pair}_{indicator}",
        ours=True,
    )
    for pair, words in (
        ("wrong_right", "errors"),
        ("foreign_right", "OOD against right"),
        ("foreign_wrong", "OOD against wrong"),
    )
    for indicator, name in (("entropy", "entropy"), ("msp", "MSP"), ("se", "SE"))
)
_AUROC_LEADS = tuple(
    Claim(
        says=f"Entropy is better than MSP as a detector of {words} (difference in AUROC).",
        metric=f"auroc_{pair}_entropy",
        minus=f"auroc_{pair}_msp",
        least=0.0,
        ours=True,
        why=MEAN_KNOWS if pair == "wrong_right" else "",
    )
    for pair, words in (("wrong_right", "errors"), ("foreign_right", "OOD inputs"))
)


def _of(label: str | tuple[str, ...], *claims: Claim) -> tuple[Claim, ...]:
    """These claims, about parts of these labels."""
    return tuple(replace(claim, label=label) for claim in claims)


# Of parts: ours of six layers, whose label is empty or full, and of less, trained in full.
_OURS = ("", "full")
_SMALL = "full, 784-196-48-10"


def _fgsm(scale: str) -> Sequence[Part]:
    size = {"samples": {"smoke": 64, "quick": 1000, "paper": 10_000}[scale]}
    epsilons = [0.0, 0.1] if scale == "smoke" else [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25]
    ours = {**size, "epsilons": epsilons, "plain": networks.plain(scale).to_dict()}
    six = {name: networks.mnist(scale, "heaviside", name) for name in ("shared", "full")}
    small = networks.other(scale, "heaviside", "full", hidden=networks.SMALL, variance=0.4)
    # As their script attacks it, which is not as they trained it; pixels are not clipped there.
    theirs = networks.published(
        "attack", scale, "mnist_attack_demo", "heaviside", (0.1, 0.0, 0.1, 0.1, 0.1, 0.1)
    )
    epsilons_of_theirs = epsilons if scale == "smoke" else _THEIR_EPSILONS
    of_theirs = {**size, "clip": False, "epsilons": epsilons_of_theirs}
    return (
        *seeds("", SEEDS[scale], network=six["shared"].to_dict(), **ours),
        *seeds("full", 1, network=six["full"].to_dict(), **ours),
        *seeds(networks.AUTHORS, 1, network=theirs.to_dict(), **of_theirs),
        *seeds(_SMALL, 1, network=small.to_dict(), **size, epsilons=epsilons),
    )


# 0 to 0.3 of pixels in [-1, 1], in parts of their range.
_THEIR_EPSILONS = [0.0, 0.05, 0.1, 0.15]
_FGSM_CLAIMS = (
    Claim(
        says="The network as trained gives in to the attack (accuracy at the largest epsilon).",
        metric="accuracy_attacked",
        published="susceptible",
        most=0.5,
    ),
    Claim(
        says="So does an ordinary ReLU network.",
        metric="accuracy_ann_attacked",
        published="susceptible",
        most=0.5,
    ),
    Claim(
        says="Its accuracy without an attack.",
        metric="accuracy_ann",
        ours=True,
    ),
    Claim(
        says="The moment network's entropy rises under attack (median, at the largest epsilon).",
        metric="entropy_rise_at_last",
        published="rises",
        least=0.0,
    ),
    Claim(
        says="The same at the epsilon where it is largest.",
        metric="entropy_rise",
        ours=True,
    ),
    Claim(
        says="With sigma_1 = sigma_2 = 0 accuracy does not change under attack.",
        metric="change_under_attack",
        published="unchanged",
        most=0.001,
    ),
    Claim(
        says="That costs little accuracy.",
        metric="drop_of_defence",
        published="0.9797 to 0.9745 (0.0052)",
        most=0.01,
    ),
    Claim(
        says="That network keeps its accuracy when the attack is made on the network as trained "
        "(at the largest epsilon).",
        metric="accuracy_defended_transferred",
        published="not tried",
        least=0.9,
        ours=True,
        why="Without noise the first layers are steps and have no slope: the gradient is hidden, "
        "not the weakness. What fools the trained network fools this one too.",
    ),
)
_WITHOUT_ANN = tuple(each for each in _FGSM_CLAIMS if "_ann" not in each.metric)
_WEAKER = (
    "The largest epsilon of their script is 0.15 of a pixel's range; the bound is one for 0.25. "
    "At 0.15 ours are above it, too."
)


def _of_weaker(claims: Sequence[Claim]) -> list[Claim]:
    """These claims, where the attack is no stronger than that of the authors' script."""
    untested = dict.fromkeys(SCALES, _WEAKER)
    return [
        replace(each, untested=untested) if each.metric == "accuracy_attacked" else each
        for each in claims
    ]


# Of the network that the printed numbers are of, to a thousandth.
_PRINTED = tuple(
    Claim(
        says=f"{of} has the printed accuracy (within 0.001).",
        metric=metric,
        published=f"{printed}",
        least=round(printed - 0.001, 4),
        most=round(printed + 0.001, 4),
    )
    for of, metric, printed in (
        ("The network", "accuracy", 0.9797),
        ("With sigma_1 = sigma_2 = 0 it", "accuracy_defended", 0.9745),
    )
)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="ood-notmnist",
        about="The ReLU networks of mnist-relu look at notMNIST's letters, and so does the "
        "network whose weights the authors published for this figure (label the authors' "
        "network; widths and noise, a variance of 0.2, are the same). AUROC is added to the "
        "paper's separability. MSP is one minus the largest softmax probability, so that each "
        f"indicator is higher where the network is less sure. {_SCHEDULE}",
        measure=out_of_distribution.measure,
        derived=out_of_distribution.derived,
        parts=by_scale(_ood),
        claims=(
            *of_full_and_shared(_OOD_CLAIMS),
            *_of(("full", "shared"), *_AUROC_LEADS, *_AUROC),
            *_of(networks.AUTHORS, *_OOD_CLAIMS, *_AUROC_LEADS),
        ),
    ),
    Experiment(
        name="fgsm",
        about="Heaviside networks and plain ReLU networks of the same widths (no noise), "
        "attacked by FGSM. Accuracies are of all test digits, entropies of the first 1000; "
        "epsilon is in parts of a pixel's range, clipped to it. Beside the paper's three curves, "
        "an honest one: what was made on the network as trained, given to the one without its "
        "first noises. Rows without a label are of the networks of mnist-heaviside that were "
        "trained with one covariance per mini-batch (shared there). The figure is of one trained "
        "with a covariance per sample, as its text does not speak of sharing: ours of that kind "
        "is label full, which takes more than an hour to train, and full, 784-196-48-10 is a "
        "smaller one, trained for 15 epochs with noise of variance 0.4. The authors' network is "
        "that whose weights they published for this figure, attacked as by their script: noise "
        "of variance 0.1, but none in the first hidden layer, 0.5 at the input in training; "
        "pixels are not clipped; epsilon up to 0.15, which is 0.3 of pixels in [-1, 1].",
        proviso="ours were trained with one covariance per mini-batch",
        measure=attacked.measure,
        parts=by_scale(_fgsm),
        claims=(
            *_of(_OURS, *_FGSM_CLAIMS),
            *_of(networks.AUTHORS, *_PRINTED, *_of_weaker(_WITHOUT_ANN)),
            *(replace(each, label=_SMALL, ours=True, published="") for each in _WITHOUT_ANN),
        ),
    ),
    Experiment(
        name="shared-ood",
        about="a: as ood-notmnist, networks trained with one covariance per mini-batch. b: entropy "
        "under attack, of the Heaviside networks of fgsm, which were trained so too. "
        f"{_SCHEDULE}",
        measure=out_of_distribution.measure,
        derived=out_of_distribution.derived,
        parts=by_scale(lambda scale: _letters(scale, "shared", SEEDS[scale])),
        claims=(*_OOD_BY_ENTROPY, *_ATTACKED, *_AUROC_LEADS, *_AUROC),
        beside=("fgsm",),
    ),
)
