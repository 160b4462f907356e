"""Rows: out-of-distribution inputs, and attacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduction.experiment import SEEDS, Claim, Experiment, Part, by_scale, seeds
from reproduction.experiments import attacked, networks, out_of_distribution
from reproduction.experiments.classification import MEAN_KNOWS, SHARED_TOO, of_full_and_shared


def _letters(scale: str, covariance: str, count: int) -> tuple[Part, ...]:
    network = networks.mnist(scale, "relu", covariance)
    return seeds(
        covariance,
        count,
        network=network.to_dict(),
        covariance="full",
        foreign="notmnist",
        samples=200 if scale == "smoke" else 0,
    )


def _ood(scale: str) -> Sequence[Part]:
    return (*_letters(scale, "full", 1), *_letters(scale, "shared", SEEDS[scale]))


_ALIKE = (
    "OOD and misclassified inputs have nearly the same entropy, and which of them has more "
    "differs from network to network."
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

# What panel b of that figure shows of the attacked networks of fgsm.
_ATTACKED = (
    Claim(
        says="The model is vulnerable to the attack (accuracy at the largest epsilon).",
        metric="accuracy_attacked",
        of="fgsm",
        published="vulnerable",
        most=0.5,
    ),
    Claim(
        says="Its entropy says so: it rises under attack (median, at the largest epsilon).",
        metric="entropy_rise_at_last",
        of="fgsm",
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


def _fgsm(scale: str) -> Sequence[Part]:
    settings: dict[str, Any] = {
        "network": networks.mnist(scale, "heaviside", "shared").to_dict(),
        "plain": networks.plain(scale).to_dict(),
        "epsilons": [0.0, 0.1] if scale == "smoke" else [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25],
        "samples": {"smoke": 64, "quick": 1000, "paper": 10_000}[scale],
    }
    return seeds("", SEEDS[scale], **settings)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="ood-notmnist",
        about="The ReLU networks of mnist-relu look at notMNIST's letters. AUROC is added to the "
        "paper's separability. MSP is one minus the largest softmax probability, so that each "
        f"indicator is higher where the network is less sure. {_SCHEDULE}",
        measure=out_of_distribution.measure,
        derived=out_of_distribution.derived,
        parts=by_scale(_ood),
        claims=(*of_full_and_shared(_OOD_CLAIMS), *_AUROC_LEADS, *_AUROC),
    ),
    Experiment(
        name="fgsm",
        about="The Heaviside networks of mnist-heaviside that were trained with one covariance per "
        "mini-batch (label shared there) and plain ReLU networks of the same widths (no noise), "
        "attacked by FGSM. Accuracies are of all test digits, entropies of the first 1000; epsilon "
        "is in parts of a pixel's range, clipped to it. Beside the paper's three curves, an honest "
        "one: what was made on the network as trained, given to the one without its first noises.",
        proviso=SHARED_TOO,
        measure=attacked.measure,
        parts=by_scale(_fgsm),
        claims=(
            Claim(
                says="The network as trained gives in to the attack (accuracy at the largest "
                "epsilon).",
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
                says="The moment network's entropy rises under attack (median, at the largest "
                "epsilon).",
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
                says="That network keeps its accuracy when the attack is made on the network as "
                "trained (at the largest epsilon).",
                metric="accuracy_defended_transferred",
                published="not tried",
                least=0.9,
                ours=True,
                why="Without noise the first layers are steps and have no slope: the gradient is "
                "hidden, not the weakness. What fools the trained network fools this one too.",
            ),
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
