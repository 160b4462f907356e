"""The methods of a comparison by name: which networks each needs, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from covary.compare import laplace
from covary.compare.methods import (
    AveragedClassifier,
    Classifier,
    FittedClassifier,
    GaussianRegressor,
    Method,
    MomentClassifier,
    calibrated_classifier,
    calibrated_regressor,
)
from covary.compare.networks import DropoutSamples, Members, Spread
from covary.compare.workshop import Workshop
from covary.files import read_tensors, write_tensors
from covary.uncertainty import fit, scores
from covary.uncertainty.calibration import Mixture

_MOMENT_SCORES = {"entropy": scores.entropy, "max_softmax": scores.max_softmax}


@dataclass(frozen=True)
class Group:
    """Methods that share their networks.

    Attributes:
        make: from a workshop to the methods.
        trains: the kind of network it trains, by the workshop's names ("mnn" is the run).
        is_ensemble: whether it trains several of them.
    """

    make: Callable[[Workshop], list[Method]]
    trains: str
    is_ensemble: bool = False

    def networks(self, shop: Workshop) -> int:
        """How many networks it trains."""
        return shop.settings.members if self.is_ensemble else 1


def groups(task: str, methods: Sequence[str] = ()) -> Mapping[str, Group]:
    """The groups of these names and the moment network's, in the order of the table; or all."""
    check_methods(methods, task)
    wanted = ("mnn", *methods) if methods else _GROUPS[task]
    return {name: group for name, group in _GROUPS[task].items() if name in wanted}


def method_names(task: str) -> list[str]:
    """What ``compare`` can compare with, for this task."""
    return list(_GROUPS[task])


def check_methods(methods: Sequence[str], task: str | None = None) -> None:
    """Refuse a name that no group has, for this task or for any."""
    tasks = _GROUPS if task is None else {task: _GROUPS[task]}
    unknown = [name for name in methods if not any(name in known for known in tasks.values())]
    if unknown:
        known = [f"for {task} there are {', '.join(names)}" for task, names in tasks.items()]
        raise ValueError(f"Unknown method {unknown[0]!r}; {'; '.join(known)}.")


def _moment_classifiers(shop: Workshop) -> list[Method]:
    net = shop.moment_network()
    method = MomentClassifier(
        "MNN", "Moment neural network, one covariance per sample.", net, scores=_MOMENT_SCORES
    )
    return [method, *_fitted(method, net, shop), *_calibrated(method, shop)]


def _plain_classifiers(shop: Workshop) -> list[Method]:
    net = shop.network("plain")
    method = AveragedClassifier("plain", "Conventional network of the same widths.", Members([net]))
    return [method, *_fitted(method, net, shop), *_calibrated(method, shop)]


def _dropout_classifiers(shop: Workshop) -> list[Method]:
    draws, description = _dropout(shop)
    method = AveragedClassifier("MC dropout", description, draws)
    return [method, *_calibrated(method, shop)]


def _ensemble_classifiers(shop: Workshop) -> list[Method]:
    members = shop.settings.members
    nets = [shop.network("plain", member) for member in range(members)]
    description = f"Average of {members} conventional networks of other seeds."
    method = AveragedClassifier("deep ensemble", description, Members(nets))
    return [method, *_calibrated(method, shop)]


def _laplace_classifiers(shop: Workshop) -> list[Method]:
    net = shop.network("plain")
    held_out = shop.x_held_out, shop.y_held_out
    net = _bayesian(net, shop, lambda: laplace.fit_classifier(net, shop.x, held_out))
    return [
        MomentClassifier(
            "last-layer Laplace",
            "The conventional network with a Gaussian posterior of its last weights, the prior's "
            "precision chosen on held-out data.",
            net,
            scores={"expected_max": scores.expected_max},
            expected=True,
        )
    ]


def _moment_regressors(shop: Workshop) -> list[Method]:
    description = "Moment neural network, its variance as it comes."
    return _with_calibrated(GaussianRegressor("MNN", description, shop.moment_network()), shop)


def _plain_regressors(shop: Workshop) -> list[Method]:
    net = Spread(Members([shop.network("plain")]))
    description = (
        "Conventional network of the same widths, and one variance for all, by held-out data."
    )
    name = "plain, constant variance"
    # As it is, a single network has no variance, and so predicts no target.
    _, calibrated = _with_calibrated(GaussianRegressor(name, description, net), shop)
    return [GaussianRegressor(name, description, calibrated.module)]


def _dropout_regressors(shop: Workshop) -> list[Method]:
    draws, description = _dropout(shop)
    description += " Their spread is the variance."
    return _with_calibrated(GaussianRegressor("MC dropout", description, Spread(draws)), shop)


def _gaussian_regressors(shop: Workshop) -> list[Method]:
    description = "Conventional network with a mean and a variance, by their likelihood."
    net = shop.network("gaussian")
    return _with_calibrated(GaussianRegressor("mean and variance", description, net), shop)


def _ensemble_regressors(shop: Workshop) -> list[Method]:
    members = shop.settings.members
    nets = [shop.network("gaussian", member) for member in range(members)]
    description = f"Mixture of {members} networks with a mean and a variance, of other seeds."
    return _with_calibrated(GaussianRegressor("deep ensemble", description, Mixture(nets)), shop)


def _supervised_regressors(shop: Workshop) -> list[Method]:
    description = "Moment neural network, mean and covariance trained by their likelihood."
    net = shop.network("smsc")
    return _with_calibrated(GaussianRegressor("MNN, SMSC", description, net), shop)


def _laplace_regressors(shop: Workshop) -> list[Method]:
    net = shop.network("plain")
    net = _bayesian(net, shop, lambda: laplace.fit_regressor(net, shop.x, shop.y))
    description = (
        "Bayesian linear regression on the conventional network's last features, noise and prior "
        "by marginal likelihood."
    )
    return _with_calibrated(GaussianRegressor("last-layer Laplace", description, net), shop)


def _dropout(shop: Workshop) -> tuple[DropoutSamples, str]:
    settings = shop.settings
    net = shop.network("dropout")
    draws = DropoutSamples(net, settings.samples, seed=shop.config.training.seed)
    rate, samples = f"{settings.dropout:g}", settings.samples
    return draws, f"Average of {samples} dropout masks, probability {rate} at each hidden layer."


def _bayesian(
    net: nn.Sequential, shop: Workshop, make: Callable[[], nn.Sequential]
) -> nn.Sequential:
    """The network with a Bayesian last layer, kept beside the network and found there again."""
    path = shop.folder("plain", 0) / "laplace.safetensors"
    if path.exists():
        return laplace.with_head(net, read_tensors(path)[0]).to(shop.device)
    found = make()
    write_tensors(path, laplace.head_state(found))
    return found.to(shop.device)


def _calibrated(method: Classifier, shop: Workshop) -> list[Method]:
    return [calibrated_classifier(method, shop.x_held_out, shop.y_held_out)]


def _with_calibrated(method: GaussianRegressor, shop: Workshop) -> list[Method]:
    return [method, calibrated_regressor(method, shop.x_held_out, shop.y_held_out)]


def _fitted(method: Classifier, net: nn.Sequential, shop: Workshop) -> list[Method]:
    try:
        score = fit(net, shop.x_held_out.to(shop.device), classify=True)
    except ValueError as error:  # too few held-out rows, or a layer without any variance
        shop.note(f"{method.name} has no fitted score. {error}")
        return []
    return [FittedClassifier(method.name, method.description, net, score)]


_CLASSIFICATION = {
    "mnn": Group(_moment_classifiers, "mnn"),
    "plain": Group(_plain_classifiers, "plain"),
    "dropout": Group(_dropout_classifiers, "dropout"),
    "ensemble": Group(_ensemble_classifiers, "plain", is_ensemble=True),
    "laplace": Group(_laplace_classifiers, "plain"),
}
_REGRESSION = {
    "mnn": Group(_moment_regressors, "mnn"),
    "plain": Group(_plain_regressors, "plain"),
    "dropout": Group(_dropout_regressors, "dropout"),
    "gaussian": Group(_gaussian_regressors, "gaussian"),
    "ensemble": Group(_ensemble_regressors, "gaussian", is_ensemble=True),
    "smsc": Group(_supervised_regressors, "smsc"),
    "laplace": Group(_laplace_regressors, "plain"),
}
_GROUPS = {"classification": _CLASSIFICATION, "regression": _REGRESSION}
