"""What a run says of new rows or images, and how sure it is: fitted to what it was not trained on.

A ``RowModel`` is a run's network with what rows have shown that it, or a network trained alike, was
not trained on: how large errors are and where, and how far from the training data a row is. It is
fitted when it is first needed, and kept in the run's folder.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from covary.budget import Budget
from covary.data import DataError, Schema
from covary.files import FileError, read_tensors, write_atomically, write_json, write_tensors
from covary.inputs import in_batches
from covary.models import with_covariance, with_noise
from covary.moments import Moments, mean_of
from covary.nn import Lift, Linear, Rescale
from covary.progress import Steps
from covary.runs.config import RunConfig
from covary.runs.directory import Run, RunError
from covary.runs.records import to_json
from covary.runs.results import CalibrationNumbers, KeptCalibration
from covary.runs.samples import LEAST, enough, validation_rows
from covary.runs.tracking import chosen, quietly
from covary.runs.uncertainty import known_or_fitted
from covary.runs.unseen import covariance_of, without_a_fold
from covary.uncertainty import scores
from covary.uncertainty.agreement import gathered
from covary.uncertainty.answering import with_doubt
from covary.uncertainty.calibration import LogitCalibration
from covary.uncertainty.novelty import Novelty
from covary.uncertainty.predictive import Floats, Predictive
from covary.uncertainty.residuals import (
    Evidence,
    FittedResiduals,
    ResidualModel,
    VariancePart,
    correlation_of,
    distributions,
    fit_residuals,
)

# Rows that are computed at a time: so many, or as many as covariances of so many numbers are of.
_BATCH, _NUMBERS = 4096, 2**24
# Numbers in the images that are computed at a time, and in the inputs that novelty is fitted to.
_PIXELS, _FITTED_TO = 2**20, 2**24
_MOST = 20_000  # held-out rows that are looked at: more say little more
_ENOUGH = 2000  # held-out rows, with which there is no need of training rows as well
_LEAST_TRAINING = 50  # rows: networks trained without a fifth of fewer say little of errors
# How much variances count beside likelihoods where a family of distributions is chosen. Set by a
# table whose noise grows along a column: a likelier mixture had deviations the wrong way round.
_VARIANCES_COUNT = 0.5
_REMEDY = "Remove it: covary predict fits it again."
# Of the file that keeps it. Before it was written, mixtures were of normal distributions.
_FORMAT = "2"


class Answers(NamedTuple):
    """What is said of n rows.

    Attributes:
        said: their distributions, or probabilities (n, k) of the classes.
        uncertainty: (n,) higher is less sure. Of a distribution its standard deviation, of several
            targets the geometric mean; of classes the probability that the predicted one is wrong.
        novelty: (n,) distance from the training data, in standard deviations of a column.
    """

    said: Predictive | Floats
    uncertainty: Tensor
    novelty: Tensor


class _Passed(NamedTuple):
    """What a network makes of n rows, on its own scale.

    Attributes:
        inputs: (n, d) of its first layer of moments: standardised columns or pixels, or what the
            trunk gives.
        out: the moments of the output; of a regression, on the standardised scale.
        exact: the same as if inputs had no errors.
    """

    inputs: Tensor
    out: Moments
    exact: Moments


class TargetHead(nn.Module):
    """Distributions of t targets, from a model of the residuals of each."""

    far: Tensor  # (n, t) in order, how far levels of held-out rows were from 1/2
    correlation: Tensor  # (t, t) of the targets

    def __init__(
        self,
        models: list[ResidualModel],
        worth: Sequence[Mapping[str, VariancePart]],
        far: Tensor,
        correlation: Tensor,
    ) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.worth = worth  # of the parts of each target's variance
        self.register_buffer("far", far)
        self.register_buffer("correlation", correlation)

    @classmethod
    def fit(cls, seen: _Passed, y: Tensor, held_out: int) -> TargetHead:
        """To standardised targets (n, t) of rows that networks were not trained on.

        The first ``held_out`` of them are those that the run's own network was not trained on.
        """
        found: list[FittedResiduals] = [
            fit_residuals(
                _evidence(seen, column),
                (y - seen.out.mean)[:, column],
                parts=("emergent", "learned"),
                variances_count=_VARIANCES_COUNT,
            )
            for column in range(y.shape[1])
        ]
        levels = torch.stack([each.levels for each in found], 1).double()
        far = (levels[:held_out] - 0.5).abs().sort(0).values
        models, worth = zip(*((each.model, each.worth) for each in found), strict=True)
        return cls(list(models), worth, far, correlation_of(levels))

    def forward(
        self, seen: _Passed, novelty: Tensor, rescale: Rescale
    ) -> tuple[Predictive, Tensor]:
        """On the scale of the targets."""
        every = [model(_evidence(seen, column)) for column, model in enumerate(self.models)]
        near = distributions(every, self.correlation.numpy())
        mean = rescale(seen.out.mean.double()).numpy()
        # Off the data, a target may be as far from what is said as it varies over the data.
        doubt = novelty.square()[:, None].numpy()
        unit, t = rescale.scale.double().numpy(), len(self.models)
        said = near.placed(mean, unit, doubt, is_one_target=t == 1)
        return said, _one_spread(torch.tensor(said.std()).reshape(len(mean), t))

    def tensors(self, seen: _Passed, novelty: Tensor, rescale: Rescale) -> dict[str, Tensor]:
        """Means and standard deviations (n, t) of the same distributions, by plain operations."""
        every = [model(_evidence(seen, column)) for column, model in enumerate(self.models)]
        variance = torch.stack([each.variance for each in every], 1)
        std = rescale.scale.double() * (variance + novelty.square()[:, None]).sqrt()
        prediction = mean_of(rescale(seen.out.mean.double()))
        return {"prediction": prediction, "std": std, "uncertainty": _one_spread(std)}

    def parts(self, seen: _Passed, novelty: Tensor, rescale: Rescale) -> dict[str, Tensor]:
        """(n, t) what variances are made of, in squared units of the targets."""
        given = [_evidence(seen, column) for column in range(len(self.models))]
        exact = [replace(each, known=torch.zeros_like(each.known)) for each in given]
        found, own = (
            [model(each) for model, each in zip(self.models, some, strict=True)]
            for some in (given, exact)
        )
        near, without = (torch.stack([e.variance for e in every], 1) for every in (found, own))
        ratio = [each.parts["emergent"].mean(0) / sum(each.parts.values()).mean(0) for each in own]
        emergent = torch.stack(ratio, 1).double().nan_to_num(0.0) * without
        parts = {
            "emergent": emergent,
            "learned": without - emergent,
            "input errors": (near - without).clamp(min=0),
            "distance": novelty.double().square()[:, None].expand_as(near),
        }
        unit = rescale.scale.double().square()
        return {name: unit * part for name, part in parts.items()}


def _one_spread(std: Tensor) -> Tensor:
    """(n,) one number for the standard deviations (n, t) of all targets."""
    return std.log().mean(1).exp() if std.shape[1] > 1 else std[:, 0]


class ClassHead(nn.Module):
    """Calibrated probabilities of classes."""

    strange: Tensor  # (n,) in order, one minus the probability of held-out rows' own classes
    variance: Tensor  # () of logits over the data

    def __init__(self, calibration: LogitCalibration, rows: int) -> None:
        super().__init__()
        self.calibration = calibration
        self.register_buffer("strange", torch.zeros(rows, dtype=torch.float64))
        self.register_buffer("variance", torch.zeros((), dtype=torch.float64))

    @classmethod
    def fit(cls, seen: Iterable[_Passed], y: Tensor, calibration: LogitCalibration) -> ClassHead:
        """To labels (n,) of held-out rows, which come in batches."""
        found, means, chances = cls(calibration, len(y)), [], []
        for some in seen:
            out = calibration(some.out)
            means.append(out.mean.double())
            chances.append(scores.expected_softmax(out).double())
        found.variance = torch.cat(means).var(0, correction=0).mean()
        found.strange = (1 - torch.cat(chances).gather(1, y[:, None])[:, 0]).sort().values
        return found

    def forward(self, seen: _Passed, novelty: Tensor) -> tuple[Floats, Tensor]:
        """Off the data logits are smaller, and in doubt."""
        found = self.tensors(seen, novelty)
        return found["probability"].numpy(), found["uncertainty"]

    def tensors(self, seen: _Passed, novelty: Tensor) -> dict[str, Tensor]:
        """Probabilities (n, k) and what they leave in doubt (n,), by plain operations."""
        logits = with_doubt(self.calibration(seen.out), novelty, self.variance)
        probability = scores.expected_softmax(logits).double()
        return {"probability": probability, "uncertainty": scores.doubt(probability)}

    def parts(self, seen: _Passed, novelty: Tensor) -> dict[str, Tensor]:
        """(n, k) what variances of the calibrated logits are made of."""
        distance = novelty.double()[:, None]
        near = (1 + distance) ** -4  # as with_doubt has it
        own, total = (self.calibration(each).variance.double() for each in (seen.exact, seen.out))
        return {
            "emergent": near * own,
            "input errors": near * (total - own).clamp(min=0),
            "distance": (distance.square() * self.variance).expand_as(own),
        }


class RowModel(nn.Module):
    """Inputs (n, d), with errors if they have any, or images -> ``Answers``; all as in the data.

    Attributes:
        net: the run's network, with a covariance for each row.
        novelty: inputs of the first layer of moments -> distance from the training data.
        unit: () what these are divided by: 1 for columns of tables, which are standardised; of
            images the root mean square of their standard deviations.
        head: what makes answers of the network's moments.
        seen_novelty: (n,) of held-out rows, as the next two.
        seen_uncertainty: (n,)
        seen_error: (n, t) what targets are off by; or (n, 1), 1 where the class is wrong.
        batch: rows that it takes at a time.
        covariance: how the network stores its covariances.
        seconds: that fitting took, but for the network; with those of networks like it.
        config: of the run.
        about: what its file says beside the tensors: of which weights it is, and the head.
    """

    unit: Tensor
    seen_novelty: Tensor
    seen_uncertainty: Tensor
    seen_error: Tensor
    config: RunConfig
    about: Mapping[str, str]

    def __init__(
        self,
        net: nn.Sequential,
        novelty: Novelty,
        head: TargetHead | ClassHead,
        batch: int,
        *shape: int,
    ) -> None:
        super().__init__()
        self.net, self.novelty, self.head, self.batch = net, novelty, head, batch
        self.covariance, self.seconds = "", 0.0
        self.register_buffer("unit", torch.ones((), dtype=torch.float64))
        for name in ("seen_novelty", "seen_uncertainty"):
            self.register_buffer(name, torch.zeros(shape[0], dtype=torch.float64))
        self.register_buffer("seen_error", torch.zeros(shape, dtype=torch.float64))

    @torch.no_grad()
    def forward(
        self, x: Tensor | Moments, is_strange: Tensor | None = None, *, near: bool = False
    ) -> Answers:
        """A batch; rows that have what training had not, ``is_strange`` (n,), are a unit off it.

        With ``near``, as if no row were off the data.
        """
        seen = _seen(self.net, x)
        novelty = self.novelty(seen.inputs / self.unit) * (not near)
        said, uncertainty = self.head(seen, _doubted(novelty, is_strange), *self._more)
        return Answers(said, uncertainty, novelty)

    @torch.no_grad()
    def variance_parts(self, x: Tensor | Moments, is_strange: Tensor | None = None) -> Budget:
        """What the variances of a batch are made of.

        Of targets (n, t), in their squared units, and they add up to the variances that are said;
        of classes (n, k), of the calibrated logits.

        * ``emergent``: noise of the network, moved through its layers to this input.
        * ``learned``: what errors on rows that it had not seen have shown beyond that (of targets).
        * ``input errors``: standard deviations that came with the inputs.
        * ``distance``: how far the row is off the training data.
        """
        seen = _seen(self.net, x)
        novelty = _doubted(self.novelty(seen.inputs / self.unit), is_strange)
        return Budget(self.head.parts(seen, novelty, *self._more))

    @property
    def _more(self) -> tuple[Any, ...]:
        """What a head needs besides: of targets, their scale."""
        return () if isinstance(self.head, ClassHead) else (self.net[-1],)

    @torch.no_grad()
    def tensors(self, x: Tensor | Moments) -> dict[str, Tensor]:
        """What is said of a batch by plain operations on tensors alone, as a file can have it.

        ``mean`` (n, k) and ``covariance`` (n, k, k) of the network in the units of the data; what
        ``tensors`` of the head has; ``novelty`` (n,).
        """
        seen = _seen(self.net, x)
        novelty, rescale = self.novelty(seen.inputs / self.unit), self.net[-1]
        if isinstance(self.head, ClassHead):
            out, found = seen.out, self.head.tensors(seen, novelty)
        else:
            assert isinstance(rescale, Rescale)
            out, found = rescale(seen.out), self.head.tensors(seen, novelty, rescale)
        assert isinstance(out, Moments)
        moments = {"mean": out.mean, "covariance": out.covariance_matrix}
        return {**moments, **found, "novelty": novelty}

    def distribution(self, x: Tensor | Moments, *, near: bool = False) -> Predictive:
        """Of the targets of any number of rows (n, d), of a regression."""
        said = [self(some, near=near).said for some in in_batches(x, self.batch)]
        return Predictive.joined(said)

    def fitted(self) -> dict[str, Tensor]:
        """All that is not the network's."""
        state = self.state_dict()
        return {name: value for name, value in state.items() if not name.startswith("net.")}

    def save(self, folder: Path, schema: Schema | None) -> None:
        """Write a run that predicts into an empty folder, without data or results of the run."""
        run, config = Run(folder), self.config
        data = replace(config.data, name=Path(config.data.name).name)
        config = replace(config, data=data, model=replace(config.model, trunk_from=""))
        write_atomically(run.config_path, config.to_toml().encode())
        if schema is not None:
            write_json(run.schema_path, to_json(schema))
        noise = config.model.noise
        run.save_network(with_noise(self.net, noise if len(noise) > 1 else noise[0]))
        write_tensors(run.predictor_path, self.fitted(), self.about)


def _doubted(novelty: Tensor, is_strange: Tensor | None) -> Tensor:
    """(n,) novelty, 1 at least of rows that have what training had not."""
    return novelty if is_strange is None else torch.maximum(novelty, is_strange.to(novelty))


def row_model(run: Run, *, progress: Steps | None = None) -> RowModel:
    """What is kept in the folder of a run, if it is of its weights; else it is fitted now."""
    kept = _kept(run)
    return _fitted(run, progress) if kept is None else kept


def _kept(run: Run) -> RowModel | None:
    """What is in the folder; None if it is of other weights, or of another calibration."""
    path = run.predictor_path
    if not path.exists():
        return None
    tensors, about = read_tensors(path)
    known, of = _calibration(run), about.get("calibration")
    if about.get("weights") != run.weights or not _is_understood(about):
        return None
    if known is not None and of != _numbers(run, known):
        return None
    try:
        with torch.no_grad():
            return _restored(run, tensors, about).requires_grad_(False)
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise FileError(f"{path} does not fit {run.path}: {error}. {_REMEDY}") from error


def _is_understood(about: Mapping[str, str]) -> bool:
    """Whether a file's numbers mean here what they meant when it was written."""
    if "format" in about:
        return about["format"] == _FORMAT
    return "seconds" in about and "mixture" not in about.get("families", "")


def _restored(run: Run, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> RowModel:
    net, inputs = run.network(about["covariance"]), len(tensors["novelty.low"])
    head: TargetHead | ClassHead
    temperature, scale, noise = json.loads(about["calibration"])
    net = net if noise is None else with_noise(net, noise)
    if run.classifies:
        head = ClassHead(LogitCalibration(temperature, scale), len(tensors["head.strange"]))
    else:
        models = []
        for i, family in enumerate(json.loads(about["families"])):
            networks = len(tensors[f"head.models.{i}.first"])
            models.append(ResidualModel(family, networks, inputs))
        parts = (torch.zeros_like(tensors[f"head.{name}"]) for name in ("far", "correlation"))
        worth = [
            {name: VariancePart(*numbers) for name, numbers in each.items()}
            for each in json.loads(about["worth"])
        ]
        head = TargetHead(models, worth, *parts)
    batch = _rows_at_a_time(run, net, about["covariance"])
    found = RowModel(net, Novelty(inputs), head, batch, *tensors["seen_error"].shape)
    found.load_state_dict({**found.state_dict(), **tensors})
    found.covariance, found.seconds = about["covariance"], float(about["seconds"])
    found.config, found.about = run.config, dict(about)
    return found.eval()


def _fitted(run: Run, progress: Steps | None) -> RowModel:
    """Fit to rows that training has not seen, or a training like it has not; and keep it."""
    began = time.perf_counter()
    try:
        total = len(run.data.x)
    except DataError as error:
        raise DataError(
            f"{error} Predictions are fitted to what training held out, once, and need the run's "
            "data for that."
        ) from error
    held_out, training = validation_rows(total, run.config)
    rows = held_out[:_MOST]
    if len(rows) < LEAST:
        raise RunError(
            f"{run.path} held out {len(rows)} samples from training, too few to know how sure it "
            f"is ({LEAST} at least). Train again with {enough(total)}."
        )
    x, y, known = run.data.inputs[rows], run.data.y[rows], _calibration(run)
    net, about = run.network(), {"format": _FORMAT, "weights": run.weights}
    head: TargetHead | ClassHead
    with quietly():
        how = chosen(run, net, None if known is None else known.covariance)
        net, about["covariance"] = with_covariance(net, how.covariance), how.covariance
        batch = _rows_at_a_time(run, net, how.covariance)
        numbers: CalibrationNumbers | None = known
        if run.classifies:
            found = known_or_fitted(run, net, how, progress=progress)
            numbers = found.numbers()
        about["calibration"] = _numbers(run, numbers)
        if numbers is not None and numbers.noise is not None:
            net = with_noise(net, numbers.noise)
        if run.classifies:
            assert isinstance(found.calibration, LogitCalibration)
            head = ClassHead.fit(_batches(net, x, batch), y, found.calibration)
        else:
            head = _target_head(run, net, rows, training, progress)
            about["families"] = json.dumps([str(model.family) for model in head.models])
            about["worth"] = json.dumps(head.worth)
        novelty, unit = _novelty(net, run.data.x, training, batch)
        model = RowModel(net, novelty, head, batch, len(y), 1 if run.classifies else y.shape[1])
        model.unit = unit
        _look_back(model, x, y)
    model.covariance, model.seconds = how.covariance, round(time.perf_counter() - began, 3)
    model.config, model.about = run.config, {**about, "seconds": str(model.seconds)}
    if run.is_writable:
        write_tensors(run.predictor_path, model.fitted(), model.about)
    return model.eval().requires_grad_(False)


def _target_head(
    run: Run, net: nn.Sequential, held_out: Tensor, training: Tensor, progress: Steps | None
) -> TargetHead:
    """Fitted to held-out rows; and if they are few, to training rows as if they were, too."""
    parts, rescale = [(net, held_out)], net[-1]
    assert isinstance(rescale, Rescale)
    are_few = len(held_out) < _ENOUGH and _LEAST_TRAINING <= len(training) <= _MOST - _ENOUGH
    # Images would take long; and where training is not done, networks alike are not known yet.
    if are_few and run.images is None and run.model_path.exists():
        parts += without_a_fold(run, net, training, progress)
    passed: list[_Passed] = []
    for one, rows in parts:
        batch = _rows_at_a_time(run, one, covariance_of(one))
        passed += _batches(one, run.data.inputs[rows], batch)
    inputs, out, exact = zip(*passed, strict=True)
    seen = _Passed(torch.cat(inputs), gathered(out), gathered(exact))
    y = run.data.y[torch.cat([rows for _, rows in parts])]
    return TargetHead.fit(seen, mean_of(rescale.undone(y.double())), len(held_out))


def _look_back(model: RowModel, x: Tensor | Moments, y: Tensor) -> None:
    """Keep what the model says of held-out rows, and how wrong that is."""
    answers = [model(some) for some in in_batches(x, model.batch)]
    model.seen_novelty = torch.cat([each.novelty for each in answers])
    model.seen_uncertainty = torch.cat([each.uncertainty for each in answers])
    if isinstance(model.head, ClassHead):
        predicted = np.concatenate([np.asarray(each.said).argmax(1) for each in answers])
        model.seen_error = (torch.tensor(predicted) != y).double()[:, None]
    else:
        means = np.concatenate([each.said.mean() for each in answers])
        model.seen_error = (y.double() - torch.tensor(means).reshape(y.shape)).abs()


def _calibration(run: Run) -> KeptCalibration | None:
    """That of the run's weights, if there is one."""
    known = run.kept_calibration
    return known if known is not None and known.weights == run.weights else None


def _numbers(run: Run, calibration: CalibrationNumbers | None) -> str:
    """By which a calibration is known; of a regression the noise that it chose is taken alone."""
    noise = None if calibration is None else calibration.noise
    if calibration is None or not run.classifies:
        return json.dumps([None, None, noise])
    return json.dumps([calibration.temperature, calibration.scale, noise])


def _evidence(seen: _Passed, column: int) -> Evidence:
    """What is known of rows for one target; there is one network, so means have no spread."""
    emergent, total = (each.variance[:, column] for each in (seen.exact, seen.out))
    known = (total - emergent).clamp(min=0)
    mean = seen.exact.mean[:, column]
    # Where inputs are so far off that squares overflow, doubt of the distance says it all.
    emergent, known = (each.nan_to_num(0.0, posinf=0.0) for each in (emergent, known))
    return Evidence(seen.inputs, mean, emergent, torch.zeros_like(emergent), known)


@torch.no_grad()
def _seen(net: nn.Sequential, x: Tensor | Moments) -> _Passed:
    """What a network makes of a batch."""
    before, inner = _parts(net)
    given = before(x)
    inputs, within = mean_of(given), nn.Sequential(*inner)
    exact = within(inputs)
    return _Passed(inputs.flatten(1), exact if isinstance(given, Tensor) else within(given), exact)


def _parts(net: nn.Sequential) -> tuple[nn.Sequential, list[nn.Module]]:
    """What stands in front of the first moments (scales, a trunk), and layers up to the scale."""
    layers = list(net)
    place = next(i for i, layer in enumerate(layers) if isinstance(layer, Lift))
    inner = layers[place:-1] if isinstance(layers[-1], Rescale) else layers[place:]
    return nn.Sequential(*layers[:place]), inner


@torch.no_grad()
def _novelty(net: nn.Sequential, x: Tensor, training: Tensor, batch: int) -> tuple[Novelty, Tensor]:
    """Fitted to as many training inputs as need be, and the unit of its inputs, ()."""
    before, _ = _parts(net)
    most = max(LEAST, _FITTED_TO // before(x[training[:1]]).numel())
    if len(training) > most:
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))
        training = training[order[:most]]
    found = [before(x[rows]).double() for rows in torch.split(training, batch)]
    inputs = torch.cat(found)
    unit = torch.ones((), dtype=torch.float64)
    if x.ndim > 2:
        spread = inputs.var(0, correction=0).mean().sqrt()
        unit = torch.where(spread > 0, spread, unit)
    return Novelty.fit(inputs / unit), unit


def _batches(net: nn.Sequential, x: Tensor | Moments, size: int) -> Iterator[_Passed]:
    """The same of as many rows as there are, so many at a time."""
    return (_seen(net, some) for some in in_batches(x, size))


def _rows_at_a_time(run: Run, net: nn.Module, covariance: str) -> int:
    """How many rows fit into memory with the covariances that layers form, and with images."""
    *hidden, outputs = (
        layer.weight.shape[0] for layer in net.modules() if isinstance(layer, Linear)
    )
    name, _, exact = covariance.partition(":")
    formed = hidden if name == "full" else [width for width in hidden if width <= int(exact or 0)]
    most = _BATCH if run.images is None else _PIXELS // math.prod(run.images.shape)
    return max(1, min(_BATCH, most, _NUMBERS // max([*formed, outputs]) ** 2))
