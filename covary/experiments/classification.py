"""Rows: classifiers, foreign inputs, attacks, and correlations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from covary.experiments import attacked, classifiers, foreign, networks
from covary.experiments.experiment import SCALES, Claim, Experiment, Part, seeds
from covary.experiments.workshop import Network

_SEEDS = {"smoke": 1, "quick": 1, "paper": 3}
# Test samples whose hidden layers' entropies are taken.
_LAYER_SAMPLES = {"smoke": 40, "quick": 500, "paper": 1000}
_NOISE = (
    "Where the text has sigma = 0.2 for all layers, the authors' code has a variance of 0.2 with "
    "pixels in [-1, 1]; that is what is used here (sigma = 0.447). Weight decay is 1e-4 (the text "
    "has 1e-3 in one place and 1e-4 in others), and the learning rate goes down to 0 in the last "
    "tenth of the training, both chosen on held-out training digits. A tenth of the training "
    "digits is held out to watch training with. Covariances are per sample in evaluation, however "
    "training shares them."
)

_HEADS = (
    "At scale quick the convolutions are those of cifar10-relu, trained there, and what is behind "
    "them is trained for 4 epochs."
)


def _parts(make: Callable[[str], Sequence[Part]]) -> dict[str, Sequence[Part]]:
    return {scale: tuple(make(scale)) for scale in SCALES}


def _watch(
    label: str,
    scale: str,
    network: Network,
    *,
    count: int | None = None,
) -> tuple[Part, ...]:
    count = _SEEDS[scale] if count is None else count
    return seeds(label, count, **_watching(scale, network, "full"))


def _watching(scale: str, network: Network, covariance: str) -> dict[str, Any]:
    return {
        "network": network.to_dict(),
        "epochs": list(network.keep),
        "covariance": covariance,
        "samples": _LAYER_SAMPLES[scale],
    }


def _four_panels(
    accuracy: float, r_squared: str, *, published: str = "", label: str = ""
) -> tuple[Claim, ...]:
    """What the paper says of every classifier."""
    claims = _four_panels_of_all(accuracy, r_squared, published)
    return tuple(replace(claim, label=label) for claim in claims)


def _of_shared(claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """The same of networks that are not those of the figure, but of the one about sharing."""
    return tuple(replace(claim, label="shared", published="", ours=True) for claim in claims)


def _four_panels_of_all(accuracy: float, r_squared: str, published: str) -> tuple[Claim, ...]:
    return (
        Claim(
            says="Test accuracy is comparable to an ordinary network's.",
            metric="accuracy",
            published=published or "comparable",
            least=accuracy,
        ),
        Claim(
            says="Misclassified inputs have higher entropy than correctly classified ones.",
            metric="entropy_gap",
            published="higher",
            least=0.0,
        ),
        Claim(
            says="Separability increases with the index of the layer (output minus first layer).",
            metric="separability_rise",
            published="increases",
            least=0.0,
        ),
        Claim(
            says="It does so from layer to layer (rank correlation of separability and index).",
            metric="separability_rank",
            published="increases",
            least=0.8,
        ),
        Claim(
            says="Separability and accuracy are positively correlated through training (R^2 of a "
            "line, negative where it falls).",
            metric="r_squared_if_positive",
            published=f"R^2 = {r_squared}",
            least=0.25,
        ),
    )


def _mnist(scale: str, activation: str) -> Sequence[Part]:
    shared = _watch("shared", scale, networks.mnist(scale, activation, "shared"))
    full = _watch("full", scale, networks.mnist(scale, activation, "full"), count=1)
    return shared if scale == "quick" else (*full, *shared)


def _foreign(scale: str, label: str, covariance: str, count: int) -> tuple[Part, ...]:
    network = networks.mnist(scale, "relu", covariance)
    return seeds(
        label,
        count,
        network=network.to_dict(),
        covariance="full",
        foreign="notmnist",
        samples=200 if scale == "smoke" else 0,
    )


def _ood(scale: str) -> Sequence[Part]:
    shared = _foreign(scale, "shared", "shared", _SEEDS[scale])
    return (*_foreign(scale, "full", "full", 1), *shared) if scale == "paper" else shared


_OOD_CLAIMS = (
    Claim(
        says="Entropy separates misclassified from correctly classified inputs better than MSP and "
        "SE do (lead in separability).",
        metric="lead_wrong_right",
        published="better",
        least=0.0,
        why="The mean knows its errors best: max-softmax is small exactly where two classes are "
        "close, which is where errors are.",
    ),
    Claim(
        says="Entropy separates foreign from correctly classified inputs better than MSP and SE "
        "do (lead in separability).",
        metric="lead_foreign_right",
        published="better",
        least=0.0,
    ),
    Claim(
        says="Entropy separates foreign from misclassified inputs better than MSP and SE do (lead "
        "in separability).",
        metric="lead_foreign_wrong",
        published="better",
        least=0.0,
    ),
    Claim(
        says="Entropy has foreign inputs less certain than misclassified ones (separability).",
        metric="separability_foreign_wrong_entropy",
        published="positive",
        least=0.0,
    ),
    Claim(
        says="MSP has misclassified inputs less certain than foreign ones (negative separability).",
        metric="separability_foreign_wrong_msp",
        published="negative",
        most=0.0,
    ),
)


_AUROC = tuple(
    Claim(
        says=f"AUROC of {words}: {name}.",
        metric=f"auroc_{pair}_{indicator}",
        ours=True,
    )
    for pair, words in (("wrong_right", "errors"), ("foreign_right", "foreign against right"))
    for indicator, name in (("entropy", "entropy"), ("msp", "MSP"), ("se", "SE"))
)


def _fgsm(scale: str) -> Sequence[Part]:
    settings: dict[str, Any] = {
        "network": networks.mnist(scale, "heaviside", "shared").to_dict(),
        "plain": networks.plain(scale).to_dict(),
        "epsilons": [0.0, 0.1] if scale == "smoke" else [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25],
        "samples": {"smoke": 64, "quick": 1000, "paper": 10_000}[scale],
    }
    return seeds("", _SEEDS[scale], **settings)


def _shared_ood(scale: str) -> Sequence[Part]:
    return _foreign(scale, "shared", "shared", _SEEDS[scale])


def _correlation(scale: str) -> Sequence[Part]:
    shared = _with_and_without("shared", scale, _SEEDS[scale], networks.mnist)
    full = _with_and_without("full", scale, 1, networks.mnist)
    return shared if scale == "quick" else (*full, *shared)


def _with_and_without(
    covariance: str, scale: str, count: int, make: Callable[[str, str, str], Network]
) -> tuple[Part, ...]:
    """Networks trained with correlations, that covariance in training, and trained without."""
    settings = {
        "with": _watching(scale, make(scale, "relu", covariance), "full"),
        "without": _watching(scale, make(scale, "relu", "diagonal"), "diagonal"),
    }
    return seeds(covariance, count, **settings)


_CORRELATION_CLAIMS = (
    Claim(
        says="Accuracy is similar without correlations (within 0.005).",
        metric="accuracy_drop",
        published="similar",
        least=-0.005,
        most=0.005,
    ),
    Claim(
        says="Separability is lower without them, on average over the layers (by 0.1 at least).",
        metric="separability_drop_of_layers",
        published="relatively larger decrease",
        least=0.1,
    ),
    Claim(
        says="It is so in the last hidden layer.",
        metric="separability_drop_last_hidden",
        published="relatively larger decrease",
        least=0.1,
    ),
    Claim(
        says="It is so at the output.",
        metric="separability_drop",
        published="relatively larger decrease",
        least=0.1,
    ),
)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="mnist-relu",
        title="Emerging covariance of a ReLU network on MNIST",
        paper="Fig. classifier_all (MNIST)",
        about="784-392-196-96-48-24-10, Adam 5e-4, batch 128, 50 epochs. Label full: one "
        "covariance per sample in training, as in the figure; shared: one per mini-batch, for more "
        f"seeds. {_NOISE}",
        measure=classifiers.measure,
        parts=_parts(lambda scale: _mnist(scale, "relu")),
        claims=(
            *_four_panels(0.975, "0.6803", label="full"),
            *_of_shared(_four_panels(0.975, "")),
        ),
    ),
    Experiment(
        name="mnist-heaviside",
        title="Emerging covariance of a Heaviside network on MNIST",
        paper="Fig. classifier_all_heav (MNIST)",
        about="As mnist-relu, with Heaviside units.",
        measure=classifiers.measure,
        parts=_parts(lambda scale: _mnist(scale, "heaviside")),
        claims=(
            *_four_panels(
                0.97,
                "0.6803 (the caption of the ReLU figure, repeated)",
                published="0.9797 (text on attacks)",
                label="full",
            ),
            *_of_shared(_four_panels(0.97, "")),
        ),
    ),
    Experiment(
        name="mnist-lif",
        title="Emerging covariance of a network of spiking neurons on MNIST",
        paper="Fig. classifier_lif_all",
        about="784-392-96-10 leaky integrate-and-fire neurons with batch norm, Adam 5e-4, weight "
        "decay 1e-4, batch 128, 15 epochs; one covariance per mini-batch in training. The noise "
        "of neurons is not the text's 0.2 but sqrt(L) (V_th - V_res) = 4.47, with which they fire "
        "irregularly, as moments take them to (docs/networks.md).",
        measure=classifiers.measure,
        parts=_parts(lambda scale: _watch("", scale, networks.mnist(scale, "lif", "shared"))),
        claims=_four_panels(0.97, "0.7760"),
    ),
    Experiment(
        name="cifar10-relu",
        title="Emerging covariance of a mixed ReLU network on CIFAR-10",
        paper="Fig. classifier_all (CIFAR-10)",
        about="Ten convolutions of VGG13 as ordinary layers, then moments 64-32-10; crop and flip. "
        "The paper trains 120 epochs; scale quick has 10. One covariance per sample in training.",
        measure=classifiers.measure,
        parts=_parts(lambda scale: _watch("", scale, networks.cifar10(scale, "relu", "full"))),
        claims=_four_panels(0.80, "0.6068"),
    ),
    Experiment(
        name="cifar10-heaviside",
        title="Emerging covariance of a mixed Heaviside network on CIFAR-10",
        paper="Fig. classifier_all_heav (CIFAR-10)",
        about=f"As cifar10-relu, with Heaviside units behind the convolutions. {_HEADS}",
        measure=classifiers.measure,
        parts=_parts(
            lambda scale: _watch("", scale, networks.cifar10(scale, "heaviside", "full", head=True))
        ),
        claims=_four_panels(0.80, "0.6068 (the caption of the ReLU figure, repeated)"),
    ),
    Experiment(
        name="ood-notmnist",
        title="Foreign inputs: digits against letters",
        paper="Fig. ood_attack a, b",
        about="The ReLU networks of mnist-relu look at notMNIST's letters. AUROC is added to the "
        "paper's separability. MSP is one minus the largest softmax probability, so that each "
        "indicator is higher where the network is less sure.",
        measure=foreign.measure,
        parts=_parts(_ood),
        claims=(
            *(replace(claim, label="full") for claim in _OOD_CLAIMS),
            *_of_shared(_OOD_CLAIMS),
            *_AUROC,
        ),
    ),
    Experiment(
        name="fgsm",
        title="Attacks with the gradient's sign",
        paper="Fig. ood_attack c, d",
        about="The Heaviside networks of mnist-heaviside and plain ReLU networks of the same "
        "widths (no noise), attacked by FGSM; epsilon is in parts of a pixel's range, clipped to "
        "it. Beside the paper's three curves, the honest one: what was made on the network as "
        "trained, given to the one without its first noises.",
        measure=attacked.measure,
        parts=_parts(_fgsm),
        claims=(
            Claim(
                says="The network as trained gives in to the attack (accuracy at the largest "
                "epsilon).",
                metric="accuracy_attacked",
                published="susceptible",
                most=0.5,
            ),
            Claim(
                says="Its entropy rises under attack (median, at the epsilon where it is largest).",
                metric="entropy_rise",
                published="rises",
                least=0.0,
            ),
            Claim(
                says="The same at the largest epsilon.",
                metric="entropy_rise_at_last",
                published="rises",
                least=0.0,
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
        name="shared-mnist",
        title="One covariance per mini-batch: MNIST",
        paper="Fig. classifier_all_batch (MNIST)",
        about="The networks of mnist-relu whose label is shared.",
        measure=classifiers.measure,
        parts=_parts(
            lambda scale: _watch("shared", scale, networks.mnist(scale, "relu", "shared"))
        ),
        claims=_four_panels(0.975, "0.4334"),
    ),
    Experiment(
        name="shared-cifar10",
        title="One covariance per mini-batch: CIFAR-10",
        paper="Fig. classifier_all_batch (CIFAR-10)",
        about=f"As cifar10-relu, with one covariance per mini-batch in training. {_HEADS}",
        measure=classifiers.measure,
        parts=_parts(
            lambda scale: _watch("", scale, networks.cifar10(scale, "relu", "shared", head=True))
        ),
        claims=_four_panels(0.80, "0.8994"),
    ),
    Experiment(
        name="shared-ood",
        title="One covariance per mini-batch: foreign inputs",
        paper="Fig. ood_attack_batch a",
        about="As ood-notmnist, networks trained with one covariance per mini-batch. Panel b of "
        "that figure, entropy under attack, is that of fgsm, whose networks were trained so too.",
        measure=foreign.measure,
        parts=_parts(_shared_ood),
        claims=(*_OOD_CLAIMS[1:3], *_AUROC),
    ),
    Experiment(
        name="correlation",
        title="With and without correlations: MNIST",
        paper="Fig. cov_vs_no_cov_all (MNIST)",
        about="The ReLU networks of mnist-relu beside networks trained and evaluated with all "
        "off-diagonal covariances set to zero. Label full: against networks with one covariance "
        "per sample in training, as in the figure; shared: with one per mini-batch, for more "
        "seeds.",
        measure=classifiers.measure_correlations,
        parts=_parts(_correlation),
        claims=(
            *(replace(claim, label="full") for claim in _CORRELATION_CLAIMS),
            *_of_shared(_CORRELATION_CLAIMS),
        ),
    ),
    Experiment(
        name="correlation-cifar10",
        title="With and without correlations: CIFAR-10",
        paper="Fig. cov_vs_no_cov_all (CIFAR-10)",
        about="The mixed network of cifar10-relu (one covariance per sample in training) beside "
        "one trained and evaluated with all off-diagonal covariances set to zero, its convolutions "
        "too. The paper trains 120 epochs; scale quick has 10.",
        measure=classifiers.measure_correlations,
        # How fast each of them learns is the question, so each has convolutions of its own.
        parts=_parts(lambda scale: _with_and_without("full", scale, 1, networks.cifar10)),
        claims=(
            Claim(
                says="The network without correlations learns much slower (accuracy lower on "
                "average over the epochs that were looked at).",
                metric="accuracy_drop_on_the_way",
                published="much slower",
                least=0.005,
            ),
            Claim(
                says="Separability is only slightly lower, on average over the layers (by less "
                "than 0.1).",
                metric="separability_drop_of_layers",
                published="slight decrease",
                least=0.0,
                most=0.1,
            ),
            Claim(
                says="It is so at the output.",
                metric="separability_drop",
                published="slight decrease",
                least=0.0,
                most=0.1,
            ),
        ),
    ),
)
