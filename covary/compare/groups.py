"""The methods of a comparison by name: which networks each needs, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from covary import convert, posterior
from covary.compare import laplace
from covary.compare.methods import (
    Method,
    Rule,
    TableMethod,
    by_average,
    by_density,
    by_expectation,
    by_mean,
    by_points,
    by_targets,
    calibrated,
)
from covary.compare.networks import DropoutSamples, MemberMoments, Members, without_masks
from covary.compare.table_models import TABLE_MODELS, TableModel
from covary.compare.trained_networks import TrainedNetworks
from covary.files import read_tensors, write_tensors
from covary.moments import Moments
from covary.runs.row_model import RowModel, row_model
from covary.training.checkpoint import load_weights
from covary.uncertainty import fit, scores
from covary.uncertainty.calibration import Mixture
from covary.uncertainty.predictive import Floats, Predictive

_MASKS = "Average of {samples} dropout masks, probability {dropout:g} at each hidden layer."
_NO_MASKS = "The network of MC dropout; its moments under all masks, of which none is drawn."


@dataclass(frozen=True)
class Group:
    """Methods that share their networks.

    Attributes:
        trains: the kind of network, by the names of ``KINDS`` ("mnn" is the run).
        name: of the method as it comes.
        description: what it does; may name settings of the comparison in braces.
        rule: how it predicts.
        network: what it predicts with.
        forms: in which it appears: ``own`` (as it comes), ``fitted`` (with a score of all layers),
            ``calibrated``, and of tables ``distribution`` (what ``covary predict`` gives).
        is_ensemble: whether it trains several of these networks.
    """

    trains: str
    name: str
    description: str
    rule: Rule
    network: Callable[[TrainedNetworks], nn.Module]
    forms: tuple[str, ...] = ("own", "calibrated")
    is_ensemble: bool = False

    def networks(self, nets: TrainedNetworks) -> int:
        """How many networks it trains."""
        return nets.settings.members if self.is_ensemble else 1

    def seconds(self, nets: TrainedNetworks) -> float:
        """How long its networks took to train."""
        return nets.seconds(self.trains, self.networks(nets))

    def make(self, nets: TrainedNetworks) -> Iterator[Method | TableMethod]:
        """Its methods, trained."""
        description = self.description.format(**vars(nets.settings))
        method = Method(self.name, description, self.network(nets), self.rule)
        if "own" in self.forms:
            yield method
        if "fitted" in self.forms:
            yield from _fitted(method, nets)
        if "calibrated" in self.forms:
            better = calibrated(method, nets.x_held_out, nets.y_held_out)
            is_alone = self.forms == ("calibrated",)
            yield replace(better, name=self.name, description=description) if is_alone else better
        if "distribution" in self.forms and not nets.dataset.is_image:
            yield _distribution(self.name, nets)


@dataclass(frozen=True)
class TableGroup:
    """A model that is fitted to a table, and trains no network.

    Attributes:
        name: in ``TABLE_MODELS``.
        model: what that has of it.
    """

    name: str
    model: TableModel

    def seconds(self, nets: TrainedNetworks) -> float:
        """How long it took to fit."""
        return nets.table_models(self.name)[1]

    def make(self, nets: TrainedNetworks) -> Iterator[TableMethod]:
        """Its method, fitted."""
        models, _ = nets.table_models(self.name)
        n, most = len(nets.dataset.x), self.model.rows
        if most is not None and n > most:
            nets.note(f"{self.model.title} takes {most:,} of {n:,} training rows, at random.")
        classes = nets.config.model.outputs if nets.classify else 0
        yield TableMethod(self.model.title, self.model.description, models, classes)


def groups(
    task: str, methods: Sequence[str] = (), *, is_table: bool
) -> Mapping[str, Group | TableGroup]:
    """The groups of these names and the moment network's, in the order of the table; or all."""
    known = _known(task, is_table)
    _check(methods, {task: known})
    wanted = ("mnn", *methods) if methods else known
    return {name: group for name, group in known.items() if name in wanted}


def missing(wanted: Mapping[str, Group | TableGroup]) -> dict[str, str]:
    """Those groups that need a library which is not installed, with a sentence on how to."""
    needs = {
        name: group.model.library for name, group in wanted.items() if isinstance(group, TableGroup)
    }
    return {
        name: f"{name} is left out, as it needs {library}: pip install 'covary[compare]'"
        for name, library in needs.items()
        if library and find_spec(library) is None
    }


def method_names(task: str, *, is_table: bool = True) -> list[str]:
    """What ``compare`` can compare with, for this task, on a table or on images."""
    return list(_known(task, is_table))


def _known(task: str, is_table: bool) -> dict[str, Group | TableGroup]:
    models = TABLE_MODELS[task] if is_table else {}
    return {**_GROUPS[task], **{name: TableGroup(name, model) for name, model in models.items()}}


def check_methods(methods: Sequence[str]) -> None:
    """Refuse a name that no group has for any task."""
    _check(methods, {task: _known(task, True) for task in _GROUPS})


def _check(methods: Sequence[str], tasks: Mapping[str, Mapping[str, object]]) -> None:
    unknown = [name for name in methods if not any(name in known for known in tasks.values())]
    if unknown:
        known = [f"for {task} there are {', '.join(names)}" for task, names in tasks.items()]
        for_tables = any(unknown[0] in models for models in TABLE_MODELS.values())
        why = "; others are for tables" if for_tables else ""
        raise ValueError(f"Unknown method {unknown[0]!r}; {'; '.join(known)}{why}.")


def _fitted(method: Method, nets: TrainedNetworks) -> Iterator[Method]:
    """The method with a score of all layers, if one can be fitted."""
    module = method.module
    net = module.nets[0] if isinstance(module, Members) else module
    try:
        score = fit(net, nets.x_held_out.to(nets.device), classify=True)
    except ValueError as error:  # too few held-out rows, or a layer without any variance
        nets.note(f"{method.name} has no fitted score. {error}")
        return
    said = f"{method.description} Score: density of its layers, fitted to held-out data."
    yield Method(f"{method.name}, fitted", said, net, partial(by_density, score=score))


@dataclass(frozen=True, eq=False)
class _OfTarget:
    """A run's distributions of one of its targets, as a model of a table."""

    model: RowModel
    column: int

    def distribution(self, x: Floats) -> Predictive:
        """Of the target of each row of inputs (n, d)."""
        return self.model.distribution(torch.from_numpy(x)).of_target(self.column)


def _distribution(name: str, nets: TrainedNetworks) -> TableMethod:
    """What ``covary predict`` gives."""
    model = row_model(nets.run)
    models = [_OfTarget(model, column) for column in range(nets.config.model.outputs)]
    said = "What covary predict gives: distributions by errors on rows that were not trained on."
    return TableMethod(f"{name}, distribution", said, models, 0, model.seconds)


def _masks(nets: TrainedNetworks) -> DropoutSamples:
    net = nets.network("dropout")
    return DropoutSamples(net, nets.settings.samples, seed=nets.config.training.seed)


def _without_masks(nets: TrainedNetworks) -> nn.Module:
    return without_masks(nets.network("dropout"), nets.x.to(nets.device))


def _bayesian(nets: TrainedNetworks) -> nn.Sequential:
    """The network with a Bayesian last layer, kept beside the network and found there again."""
    net, path = nets.network("plain"), nets.folder("plain", 0) / "last-layer.safetensors"
    if not path.exists():
        if nets.classify:
            fitted = laplace.fit_classifier(net, nets.x, (nets.x_held_out, nets.y_held_out))
        else:
            fitted = laplace.fit_regressor(net, nets.x, nets.y)
        write_tensors(path, laplace.head_state(fitted))
    return laplace.with_head(net, read_tensors(path)[0]).to(nets.device)


def _of_all_weights(
    nets: TrainedNetworks,
    kind: str = "plain",
    probabilities: Callable[[Moments], Tensor] = scores.expected_softmax,
) -> nn.Module:
    """The network with a posterior of all its weights, kept beside it and found there again."""
    net, path = nets.network(kind), nets.folder(kind, 0) / "posterior.safetensors"
    if path.exists():
        converted = convert(net, noise=0.0)
        load_weights(converted, read_tensors(path)[0], path)
        return converted
    held_out = nets.x_held_out, nets.y_held_out
    fitted = posterior.fit(
        net,
        (nets.x, nets.y),
        prior_precision="held-out",
        held_out=held_out,
        probabilities=probabilities,
        progress=False,
    )
    write_tensors(path, dict(fitted.state_dict()))
    return fitted


def _of_dropout(nets: TrainedNetworks) -> nn.Module:
    return _of_all_weights(nets, "dropout", scores.averaged_softmax)


# fmt: off
_GROUPS = {
    "classification": {
        "mnn": Group(
            "mnn", "MNN", "Moment neural network, one covariance per sample.", by_mean,
            TrainedNetworks.moment_network, forms=("own", "fitted", "calibrated"),
        ),
        "plain": Group(
            "plain", "plain", "Conventional network of the same widths.", by_average,
            lambda nets: Members([nets.network("plain")]), forms=("own", "fitted", "calibrated"),
        ),
        "dropout": Group("dropout", "MC dropout", _MASKS, by_average, _masks),
        "no-masks": Group(
            "dropout", "dropout without masks", _NO_MASKS, by_points, _without_masks
        ),
        "ensemble": Group(
            "plain", "deep ensemble", "Average of {members} conventional networks of other seeds.",
            by_average, lambda nets: Members(nets.ensemble("plain")), is_ensemble=True,
        ),
        "laplace": Group(
            "plain", "last-layer Laplace",
            "The conventional network with a Gaussian posterior of its last weights, the prior's "
            "precision chosen on held-out data.",
            by_expectation, _bayesian, forms=("own",),
        ),
        "posterior": Group(
            "plain", "posterior",
            "The conventional network with a Gaussian posterior of all its weights, the prior and "
            "the temperature chosen on held-out data.",
            by_expectation, _of_all_weights, forms=("own",),
        ),
        "posterior-dropout": Group(
            "dropout", "posterior, trained with dropout",
            "The posterior of the network of MC dropout, of which nothing is dropped; the softmax "
            "is averaged over points.",
            by_points, _of_dropout, forms=("own",),
        ),
    },
    "regression": {
        "mnn": Group(
            "mnn", "MNN", "Moment neural network, its variance as it comes.", by_targets,
            TrainedNetworks.moment_network, forms=("own", "calibrated", "distribution"),
        ),
        "plain": Group(
            "plain", "plain, constant variance",
            "Conventional network of the same widths, and one variance for all, by held-out data.",
            # As it comes, a single network has no variance, and so predicts no target.
            by_targets, lambda nets: MemberMoments(Members([nets.network("plain")])),
            forms=("calibrated",),
        ),
        "dropout": Group(
            "dropout", "MC dropout", f"{_MASKS} Their spread is the variance.", by_targets,
            lambda nets: MemberMoments(_masks(nets)),
        ),
        "no-masks": Group(
            "dropout", "dropout without masks", _NO_MASKS, by_targets, _without_masks
        ),
        "gaussian": Group(
            "gaussian", "mean and variance",
            "Conventional network with a mean and a variance, by their likelihood.",
            by_targets, lambda nets: nets.network("gaussian"),
        ),
        "ensemble": Group(
            "gaussian", "deep ensemble",
            "Mixture of {members} networks with a mean and a variance, of other seeds.",
            by_targets, lambda nets: Mixture(nets.ensemble("gaussian")), is_ensemble=True,
        ),
        "smsc": Group(
            "smsc", "MNN, SMSC",
            "Moment neural network, mean and covariance trained by their likelihood (covary train "
            "--loss likelihood).",
            by_targets, TrainedNetworks.likelihood_network,
        ),
        "laplace": Group(
            "plain", "last-layer Laplace",
            "Bayesian linear regression on the conventional network's last features, noise and "
            "prior by marginal likelihood.",
            by_targets, _bayesian,
        ),
        "posterior": Group(
            "plain", "posterior",
            "The conventional network with a Gaussian posterior of all its weights; noise, prior "
            "and temperature by held-out data.",
            by_targets, _of_all_weights,
        ),
        "posterior-dropout": Group(
            "dropout", "posterior, trained with dropout",
            "The posterior of the network of MC dropout, of which nothing is dropped.",
            by_targets, _of_dropout,
        ),
    },
}
# fmt: on
