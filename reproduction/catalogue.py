"""Every experiment, in the order of the paper."""

from __future__ import annotations

import difflib
from dataclasses import replace
from importlib import import_module

from reproduction.experiment import Experiment

# Figures and tables in the order of the paper, and what goes beyond it: where each is there, and
# what the page calls it.
_CONTENTS = {
    "mnist-relu": (
        "Fig. 2, classifier_all (MNIST)",
        "Emerging covariance of a ReLU network on MNIST",
    ),
    "cifar10-relu": (
        "Fig. 2, classifier_all (CIFAR-10)",
        "Emerging covariance of a mixed ReLU network on CIFAR-10",
    ),
    "mnist-lif": (
        "Fig. 3, classifier_lif_all",
        "Emerging covariance of a network of spiking neurons on MNIST",
    ),
    "ood-notmnist": (
        "Fig. 4, ood_attack a, b",
        "Out-of-distribution inputs: digits against letters",
    ),
    "fgsm": ("Fig. 4, ood_attack c, d", "Attacks with the gradient's sign"),
    "uci": (
        "Tables 1 and 4, regression_main and regression",
        "Regression: log-likelihood on small sets",
    ),
    "uci-printed": (
        "Tables 1 and 4, cell by cell",
        "Regression as printed: every cell",
    ),
    "mechanism": ("Fig. 5, interpert", "Entropy and the distance to the boundary"),
    "correlation": ("Fig. 6, cov_vs_no_cov_all (MNIST)", "With and without correlations: MNIST"),
    "correlation-cifar10": (
        "Fig. 6, cov_vs_no_cov_all (CIFAR-10)",
        "With and without correlations: CIFAR-10",
    ),
    "activations": ("Fig. 7, cov_error", "Covariance activations against Monte Carlo"),
    "network-relu": ("Fig. 8, verification1", "The stochastic network behind a ReLU network"),
    "network-heaviside": (
        "Fig. 9, verification2",
        "The stochastic network behind a Heaviside network",
    ),
    "supervision": (
        "Eqs. mean_cov_super and vi_loss",
        "The covariance supervised, and not: SMSC and SMUC",
    ),
    "shared-mnist": (
        "Fig. 10, classifier_all_batch (MNIST)",
        "One covariance per mini-batch: MNIST",
    ),
    "shared-cifar10": (
        "Fig. 10, classifier_all_batch (CIFAR-10)",
        "One covariance per mini-batch: CIFAR-10",
    ),
    "shared-ood": (
        "Fig. 11, ood_attack_batch",
        "One covariance per mini-batch: out-of-distribution inputs and attacks",
    ),
    "uci-shared": (
        "Table 2, regression_batch",
        "Regression with covariances that mini-batches share",
    ),
    "image-accuracy-shared": (
        "Table 3, acc_ll_batch",
        "Accuracy on images with one covariance per mini-batch",
    ),
    "mnist-heaviside": (
        "Fig. 12, classifier_all_heav (MNIST)",
        "Emerging covariance of a Heaviside network on MNIST",
    ),
    "cifar10-heaviside": (
        "Fig. 12, classifier_all_heav (CIFAR-10)",
        "Emerging covariance of a mixed Heaviside network on CIFAR-10",
    ),
    "image-accuracy": ("Table 5, acc_ll", "Accuracy on images, beside other methods"),
    "sensitivity": (
        "Fig. 13, sensi_uncertain_all",
        "Entropy and sensitivity in logistic regression",
    ),
    "theorem-1": ("Theorem rgd, Eq. srgd", "SMUC as Riemannian gradient descent"),
    "theorem-2": ("Theorem mean_var", "Means and variances that a student learns"),
    "theorem-3": ("Theorem cov, Eq. dev_rate", "Covariances in deep networks"),
    "second-order": (
        "Eq. trunc, and Discussion: sufficiency of the second-order approximation",
        "Whether two cumulants are enough",
    ),
    "general-activations": (
        "SI, general activation functions: Eqs. g_abs_g_n, first_appro, usu_cond",
        "From Heaviside units to other activations",
    ),
    "ood-photographs": (
        "Beyond the paper, as Fig. 4",
        "Out-of-distribution inputs: photographs, beside other detectors",
    ),
}
_TOPICS = (
    "classification",
    "covariance_activations",
    "detection",
    "dynamics",
    "general_activations",
    "images",
    "mechanism",
    "photographs",
    "second_order",
    "sensitivity",
    "supervision",
    "theorems",
    "uci",
    "uci_printed",
)
_KNOWN: dict[str, Experiment] = {
    experiment.name: experiment
    for topic in _TOPICS
    for experiment in import_module(f"reproduction.experiments.{topic}").EXPERIMENTS
}
EXPERIMENTS: tuple[Experiment, ...] = tuple(
    replace(_KNOWN[name], paper=paper, title=title) for name, (paper, title) in _CONTENTS.items()
)


def names() -> list[str]:
    """What the command line calls them."""
    return [experiment.name for experiment in EXPERIMENTS]


def get(name: str) -> Experiment:
    """The experiment of that name, or an error that says which there are."""
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    close = difflib.get_close_matches(name.lower(), names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"There is no experiment {name!r}; there are {', '.join(names())}.{hint}")
