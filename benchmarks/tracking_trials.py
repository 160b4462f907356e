"""What carries the error of tracked variances, and what would close the gap.

    python -m benchmarks.tracking_trials

Networks trained with full covariance track it in several ways, fitted on a few training digits and
compared with exact covariances on test digits and on letters. Where the error comes from is seen
when some layers are given their exact variances.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covary
from benchmarks import parity, tables
from benchmarks.steps import WIDTHS
from covary import Moments, data
from covary.covariance import Covariance, Full, Tracked
from covary.nn.fidelity import TrackingWarning
from covary.runs.directory import weights_digest
from covary.training.batches import shuffled
from covary.uncertainty.agreement import agreement

SEED = 0
FIT_SAMPLES, SAMPLES = 256, 1000
# Layers count from 1, and have WIDTHS[layer] units and so many weights. The first has exact
# variances and the last is the output; those between have estimates.
OUTPUT = len(WIDTHS) - 1
WEIGHTS = [0, *(inputs * units for inputs, units in pairwise(WIDTHS))]
NAMES = ["input", *(f"linear{layer}" for layer in range(1, OUTPUT + 1))]
ESTIMATED = range(2, OUTPUT)
# How many samples the overall average counts for, beside those of a class or a component.
CLASS_RIDGE, COMPONENT_RIDGE = 10.0, 1.0

# (B, m) variances, from a layer's moments as its weights give them, before noise is added.
Estimate = Callable[[int, Moments], Tensor]


class Part(NamedTuple):
    """Samples, and what is exact of them."""

    x: Tensor
    layers: Mapping[int, Moments]


class Trial(NamedTuple):
    scheme: str
    multiplications: float | None  # for a sample; None where exact variances are given
    moments: Callable[[Part], Moments]


def walk(net: nn.Sequential, x: Tensor, change: Callable[[int, Moments], Covariance]) -> Moments:
    """A forward pass in which the covariance of some layers is replaced."""
    out: Any = x
    for name, module in net.named_children():
        out = module(out)
        if name in NAMES and (layer := NAMES.index(name)) in ESTIMATED:
            out = Moments(out.mean, change(layer, out))
    return out


def tracked(net: nn.Sequential, estimate: Estimate, x: Tensor) -> Moments:
    """A forward pass with these variances, and the sweep for the output."""

    def change(layer: int, moments: Moments) -> Covariance:
        return replace(recipe(moments.cov), estimate=estimate(layer, moments))

    return walk(net, x, change)


def recipe(cov: Covariance) -> Tracked:
    assert isinstance(cov, Tracked)
    return cov


def before(moments: Moments) -> Tracked:
    """Of the layer before, behind its activation."""
    return recipe(recipe(moments.cov).before)


def there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def bare(_layer: int, moments: Moments) -> Tensor:
    """As if the units of the layer before were independent."""
    return recipe(moments.cov).estimate


# (B, k) what corrections may depend on, from a layer's moments and the samples' classes (B,).
FEATURES: dict[str, Callable[[Moments, Tensor], Tensor]] = {
    "class": lambda _, classes: F.one_hot(classes, WIDTHS[-1]).float(),
    "means": lambda moments, _: moments.mean,
    "gains before": lambda moments, _: there(before(moments).gain),
    # Of dead units nothing is left to take the logarithm of.
    "variances before": lambda moments, _: before(moments).estimate.clamp(min=1e-12).log(),
}


def corrections(
    net: nn.Sequential, fit: Part, classes: Tensor, feature: str, components: int
) -> Callable[[Tensor], Estimate]:
    """Factors that depend on a feature; each layer's are fitted behind corrected layers."""
    predictors: dict[int, Callable[[Tensor], Tensor]] = {}

    def estimate(classes: Tensor, layer: int, moments: Moments) -> Tensor:
        features = FEATURES[feature](moments, classes)
        if layer not in predictors:
            target = fit.layers[layer].variance.log() - bare(layer, moments).log()
            predictors[layer] = regression(features, target, components)
        return bare(layer, moments) * predictors[layer](features).exp()

    tracked(net, partial(estimate, classes), fit.x)
    return lambda new: partial(estimate, new)


def regression(features: Tensor, target: Tensor, components: int) -> Callable[[Tensor], Tensor]:
    """Linear in the first principal components of features, or, with 0 of them, in features."""
    center, average = features.mean(0), target.mean(0)
    basis, ridge = torch.eye(features.shape[1]), CLASS_RIDGE
    if components:
        _, sizes, axes = torch.linalg.svd(features - center, full_matrices=False)
        # Of variance 1, so that one ridge suits them all.
        basis = (axes / sizes[:, None])[:components].mT * len(features) ** 0.5
        ridge = COMPONENT_RIDGE
    inputs = (features - center) @ basis
    penalised = inputs.mT @ inputs + ridge * torch.eye(inputs.shape[1])
    slope = basis @ torch.linalg.solve(penalised, inputs.mT @ (target - average))
    least, most = target.amin(0), target.amax(0)  # nothing beyond what was seen is believed
    return lambda new: ((new - center) @ slope + average).clamp(least, most)


def with_correlation(
    net: nn.Sequential, estimate: Estimate, layer: int, fit: Part, x: Tensor
) -> Moments:
    """Variances by estimates up to a layer, which has the average correlation; exact from there."""
    correlations = fit.layers[layer].cov.scale(1 / fit.layers[layer].stddev).dense()
    correlation = Full(correlations.mean(0, keepdim=True), torch.zeros(1, 1))
    variances: dict[int, Tensor] = {}

    def change(here: int, moments: Moments) -> Covariance:
        variances[here] = estimate(here, moments) if here <= layer else moments.variance
        if here < layer:
            return replace(recipe(moments.cov), estimate=variances[here])
        return correlation.scale(variances[here].sqrt()) if here == layer else moments.cov

    walk(net, x, change)
    return tracked(net, lambda here, _: variances[here], x)


class LowRank:
    """Variances of a covariance F^T F + diag(rest) that goes from layer to layer, uncorrected.

    F (B, k, m) is what k directions of each layer see of the covariance (Nystrom's approximation);
    the rest counts as independent. Directions are those in which the average sample varies most.
    """

    def __init__(self, net: nn.Sequential, x: Tensor, rank: int) -> None:
        self.directions: dict[int, Tensor] = {}
        for layer, moments in layers_of(covary.with_covariance(net, "shared"), x).items():
            values, vectors = torch.linalg.eigh(moments.cov.dense()[0])
            self.directions[layer] = vectors[:, -rank:].mT
            if layer == 1:  # has the same covariance for all samples
                self.first = self.directions[1] * values[-rank:, None].sqrt()
        self.factor = self.first

    def estimate(self, layer: int, moments: Moments) -> Tensor:
        last, weight = before(moments), there(recipe(moments.cov).weight)
        factor = (self.first if layer == 2 else self.factor) * there(last.gain)[:, None]
        rest = (last.estimate - factor.square().sum(1)).clamp(min=0)
        directions, factor = self.directions[layer], factor @ weight.mT
        seen = directions @ factor.mT @ factor + (directions @ weight * rest[:, None]) @ weight.mT
        root = torch.linalg.cholesky(seen @ directions.mT)
        self.factor = torch.linalg.solve_triangular(root, seen, upper=False)
        return factor.square().sum(1) + rest @ weight.square().mT


def of_sweep(layer: int) -> float:
    """Multiplications back from a layer to the first, whose covariance all samples share."""
    rows = WIDTHS[layer]
    return rows * (sum(WEIGHTS[2:layer]) + WIDTHS[1] ** 2 / 2 + rows * sum(WIDTHS[1:layer]))


def of_recursion(layer: int) -> int:
    """Multiplications for the matrices W C W^T of the layers behind this one."""
    behind = range(layer + 1, OUTPUT + 1)
    return sum((WIDTHS[here] + WIDTHS[here - 1]) * WEIGHTS[here] for here in behind)


def trials(net: nn.Sequential, corrected: nn.Sequential, fit: Part) -> Iterator[Trial]:
    """All schemes; ``corrected`` is the network with what covary.track measured."""
    variances = sum(WEIGHTS) + sum(WEIGHTS[2:])  # with the means they belong to
    base = variances + of_sweep(OUTPUT)

    def constant(layer: int, moments: Moments) -> Tensor:
        log_correction = corrected.get_buffer(f"{NAMES[layer]}.log_correction")
        return bare(layer, moments) * log_correction.exp()

    def of(run: Callable[[Tensor], Moments]) -> Callable[[Part], Moments]:
        return lambda part: run(part.x)

    def regressed(feature: str, components: int = 0) -> Callable[[Part], Moments]:
        def classes(x: Tensor) -> Tensor:
            return tracked(net, constant, x).mean.argmax(-1)

        found = corrections(net, fit, classes(fit.x), feature, components)
        return lambda part: tracked(net, found(classes(part.x)), part.x)

    def given(layers: range, part: Part) -> Moments:
        def estimate(layer: int, moments: Moments) -> Tensor:
            return part.layers[layer].variance if layer in layers else constant(layer, moments)

        return tracked(net, estimate, part.x)

    yield Trial("no corrections", base, of(partial(tracked, net, bare)))
    yield Trial("constant corrections", base, of(partial(tracked, net, constant)))
    yield Trial("corrections by class, in a second pass", base + variances, regressed("class"))
    for feature in ("means", "gains before", "variances before"):
        for count in (8, 32):
            cost = base + count * sum(WIDTHS[layer - 1] + WIDTHS[layer] for layer in ESTIMATED)
            name = f"corrections by {count} components of {feature}"
            yield Trial(name, cost, regressed(feature, count))
    for layer in (2, 3):
        name = f"one correlation matrix for the {WIDTHS[layer]} units of layer {layer}"
        moments = of(partial(with_correlation, net, constant, layer, fit))
        yield Trial(name, base + of_recursion(layer), moments)
    for width in (24, 48, 96):
        layer = WIDTHS.index(width)
        cost = variances + of_sweep(layer) + of_recursion(layer)
        moments = of(covary.with_covariance(corrected, f"tracked:{width}"))
        yield Trial(f"tracked:{width}", cost, moments)
    for rank in (4, 8, 16):
        cost = base + 2 * rank * sum(WEIGHTS[2:OUTPUT]) + 3 * rank**2 * sum(WIDTHS[2:OUTPUT])
        name = f"rank {rank} and a diagonal, no corrections"
        yield Trial(name, cost, of(partial(tracked, net, LowRank(net, fit.x, rank).estimate)))
    for layer in ESTIMATED:
        yield Trial(f"exact variances up to layer {layer}", None, partial(given, range(layer + 1)))
    for layer in ESTIMATED[1:]:
        yield Trial(
            f"exact variances from layer {layer}", None, partial(given, range(layer, OUTPUT))
        )


def layers_of(net: nn.Sequential, x: Tensor) -> dict[int, Moments]:
    with covary.record(net) as layers:
        net(x)
    return {layer: layers[NAMES[layer]] for layer in range(1, OUTPUT + 1)}


def measure(activation: str) -> dict[str, Any]:
    run = parity.path_of(activation, "full", seed=0)
    if not run.model_path.exists():
        sys.exit(f"{run.path} has no trained network. Make it: python -m benchmarks.parity full")
    net, corrected = run.network(), run.network()
    for name, buffer in net.named_buffers():
        if name.endswith("log_correction"):
            buffer.zero_()  # the run may know corrections already
    digits, letters = data.load("mnist"), data.load("notmnist")
    fitted, test, foreign = (
        x[shuffled(len(x), SEED)[:SAMPLES]] for x in (digits.x, digits.x_test, letters.x_test)
    )
    covary.track(corrected, fitted, samples=2 * FIT_SAMPLES, progress=False)  # half serve to fit
    full = covary.with_covariance(net, "full")
    fit, *parts = (Part(x, layers_of(full, x)) for x in (fitted[:FIT_SAMPLES], test, foreign))
    rows = []
    for trial in trials(covary.with_covariance(net, "tracked:0"), corrected, fit):
        cost = trial.multiplications
        row: dict[str, Any] = {"scheme": trial.scheme, "passes": cost and cost / sum(WEIGHTS)}
        for name, part in zip(("test", "notmnist"), parts, strict=True):
            row[name] = agreement(part.layers[OUTPUT], trial.moments(part))._asdict()
        print(activation, row, flush=True)
        rows.append(row)
    trained = {"epochs": run.config.training.epochs, "weights": weights_digest(net)}
    return {**trained, "trials": rows}


def main() -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)  # it is being found out how poor they are
        networks = {name: measure(name) for name in parity.ACTIVATIONS}
    measured = {"fit samples": FIT_SAMPLES, "samples": SAMPLES, "networks": networks}
    command = "python -m benchmarks.tracking_trials"
    tables.publish("tracking_trials", command, SEED, measured, shown=[tables.tracking_trials])


if __name__ == "__main__":
    main()
