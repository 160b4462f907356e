"""Rows: whether two cumulants are enough, by drawing the networks that they describe."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from covary import activations
from covary.models import with_covariance
from covary.moments import Moments
from covary.runs.samples import load_data
from covary.stochastic import Chain, Stage
from reproduction.experiment import SEEDS, Claim, Experiment, Measured, Part, by_scale, seeds
from reproduction.experiments import cumulants, mechanism, networks
from reproduction.experiments.cumulants import Draws, Shape
from reproduction.experiments.statistics import line
from reproduction.experiments.teacher_student import DTYPE, drawn, normal
from reproduction.workshop import Network, Workshop

# Central intervals of a Gaussian whose share of draws is counted.
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)
_USUAL = LEVELS.index(0.95)
# Draws of an input whose nearest neighbours are looked for.
_POINTS = 4096
# Of the histogram in the figure: deviations to each side, and bins.
_REACH, _BINS = 6.0, 60
# Random networks: hidden layers, outputs, and inputs where there are few.
_HIDDEN, _OUTPUTS, _FEW = 3, 4, 4
_NOISE = 0.3
# The power with which cumulants fall is that of networks at least as wide.
_WIDE = 16


def measure(part: Part, workshop: Workshop) -> Measured:
    """A trained network, or random ones of several widths. Settings: those of ``_of_trained``,
    which have a ``network``, or of ``_of_widths``."""
    if "network" in part.settings:
        return _of_trained(part, workshop)
    return _of_widths(part, workshop)


# Trained networks


def _of_trained(part: Part, workshop: Workshop) -> Measured:
    """Cumulants in front of every activation, and what they do to the output.

    Settings: ``network``, ``inputs`` of the test part, chosen at random, ``copies`` of each.
    """
    settings = part.settings
    run = workshop.trained(settings["network"], part.seed)
    dataset, _ = load_data(run.config.data, data_dir=workshop.data_dir, seed=part.seed)
    generator = torch.Generator().manual_seed(part.seed)
    rows = torch.randperm(len(dataset.x_test), generator=generator)[: settings["inputs"]]
    x, net = dataset.x_test[rows], run.network()
    draws = cumulants.drawn(
        Chain.of(net), x, copies=settings["copies"], seed=part.seed, progress=workshop.progress
    )
    output = draws.output.transpose(0, 1).flatten(1, 2)  # (B, N, d)
    numbers: dict[str, float | None] = {}
    series: dict[str, Any] = {}
    for found in (_of_shapes(draws), _of_intervals(net, x, output), _of_entropy(draws, part.seed)):
        numbers |= found.metrics
        series |= found.series
    if part.seed == 0:
        series["histogram"] = _histogram(output, next(reversed(draws.shapes.values())))
    return Measured(numbers, series)


def _of_shapes(draws: Draws) -> Measured:
    """Sizes of skewness and kurtosis by stage, over inputs and units."""
    layers: dict[str, list[float]] = {"skewness": [], "kurtosis": []}
    for shape in draws.shapes.values():
        layers["skewness"].append(cumulants.size(shape.skewness, shape.skewness_error)[0])
        layers["kurtosis"].append(cumulants.size(shape.kurtosis, shape.kurtosis_error)[0])
    last = next(reversed(draws.shapes.values()))
    numbers: dict[str, float | None] = {
        f"{kind}_{name}": value
        for name, values in layers.items()
        for kind, value in (("output", values[-1]), ("hidden", max(values[:-1])))
    }
    numbers["skewness_error"] = last.skewness_error.nanmedian().item()
    numbers["kurtosis_error"] = last.kurtosis_error.nanmedian().item()
    return Measured(numbers, {"layers": layers})


def _of_intervals(net: nn.Module, x: Tensor, output: Tensor) -> Measured:
    """Which share of draws (B, N, d) is within intervals of mean and deviation."""
    moments = _moments(net, x)
    sampled = _shares(output, output.mean(1), output.std(1))
    analytic = _shares(output, moments.mean, moments.variance.sqrt())
    z = (output - output.mean(1, keepdim=True)) / output.std(1, keepdim=True)
    least = -float(torch.special.ndtri(torch.tensor(0.025).double()))
    tails = (z < -least).double().mean(1) - (z > least).double().mean(1)
    usual = sampled[_USUAL]
    worst = usual.flatten()[(usual - LEVELS[_USUAL]).abs().argmax()]
    numbers = {
        "coverage": usual.mean().item(),
        "coverage_worst": worst.item(),
        "coverage_moments": analytic[_USUAL].mean().item(),
        "tails_apart": tails.abs().mean().item(),
        "beyond_three": ((z.abs() > 3).double().mean() / math.erfc(3 / math.sqrt(2))).item(),
    }
    series = {
        "sampled": sampled.mean((1, 2)).tolist(),
        "analytic": analytic.mean((1, 2)).tolist(),
    }
    return Measured(numbers, {"levels": list(LEVELS), "coverage": series})


def _shares(output: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """(levels, B, d)."""
    found = [
        cumulants.shares_within((draws - mean[i]) / deviation[i], LEVELS)
        for i, draws in enumerate(output)
    ]
    return torch.stack(found, 1)


@torch.no_grad()
def _moments(net: nn.Module, x: Tensor) -> Moments:
    out: Moments = with_covariance(net, "full")(x)
    return out


def _of_entropy(draws: Draws, seed: int) -> Measured:
    """By how much the output's entropy is less than that of a Gaussian with its covariance.

    In nats per output, by neighbours and by cumulants; and whether inputs are in another order.
    """
    series: dict[str, list[float]] = {"gaussian": [], "neighbours": [], "edgeworth": []}
    errors, dimensions, same, apart = [], [], [], []
    for i in range(draws.output.shape[1]):
        values = cumulants.white(draws.output[:, i])
        points = values.flatten(0, 1)[:: max(1, values[..., 0].numel() // _POINTS)]
        count, d = points.shape
        alone, together = (cumulants.gaussian_log_distances(count, n, seed) for n in (1, d))
        apart += [cumulants.by_neighbours(each[:, None], alone) for each in points.T]
        by_cumulants = cumulants.edgeworth(values)
        log_determinant = cumulants.log_determinant(draws.output[:, i])
        series["gaussian"].append(0.5 * (d * (1 + math.log(2 * math.pi)) + log_determinant))
        series["neighbours"].append(cumulants.by_neighbours(points, together) / d)
        series["edgeworth"].append(by_cumulants.value / d)
        errors.append(by_cumulants.error / d)
        dimensions.append(d)
        same.append(cumulants.repeated(draws.output[:, i].flatten(0, 1)[: len(points)]))
    gaussian, lost = np.array(series["gaussian"]), np.array(series["neighbours"])
    true = gaussian - lost * dimensions
    whole = np.array(dimensions) == max(dimensions)
    numbers: dict[str, float | None] = {
        "negentropy": _mean(lost),
        "negentropy_apart": _mean(np.array(apart)),
        "negentropy_floor": float(np.std(together, ddof=1)),
        "negentropy_edgeworth": _mean(np.array(series["edgeworth"])),
        "negentropy_edgeworth_error": float(np.sqrt(np.mean(np.square(errors)))),
        "entropy_order": _rank_correlation(gaussian[whole], true[whole]),
        "repeated": float(np.mean(same)),
    }
    return Measured(numbers, {"entropy": series})


def _mean(values: np.ndarray) -> float | None:
    """The average; None if any is infinite."""
    return float(values.mean()) if np.isfinite(values).all() else None


def _rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    if len(first) < 3 or not np.isfinite(second).all():
        return None
    return float(spearmanr(first, second).statistic)


def _histogram(output: Tensor, shape: Shape) -> dict[str, Any]:
    """The standardised draws of the output that is most skewed among inputs and units."""
    place = int(shape.skewness.abs().nan_to_num().argmax())
    i, j = divmod(place, shape.skewness.shape[1])
    z = ((output[i, :, j] - output[i, :, j].mean()) / output[i, :, j].std()).double().numpy()
    counts, edges = np.histogram(z, _BINS, (-_REACH, _REACH))
    density = counts / (len(z) * (edges[1] - edges[0]))
    return {"edges": edges.tolist(), "density": density.tolist()}


# Random networks


def _of_widths(part: Part, workshop: Workshop) -> Measured:
    """Skewness and kurtosis of the outputs of random networks, by width.

    Settings: ``activation``, ``gain``, ``few`` inputs or as many as the width, ``widths``,
    ``networks`` of each, ``inputs``, ``copies``. Noise is on the inputs and, where these are not
    few, in front of every activation.
    """
    settings = part.settings
    generator = torch.Generator().manual_seed(part.seed)
    curves: dict[str, list[float]] = {"skewness": [], "kurtosis": []}
    least: dict[str, list[float]] = {"skewness": [], "kurtosis": []}
    for width in workshop.progress(settings["widths"], "widths"):
        shapes = []
        for _ in range(settings["networks"]):
            chain = _random(width, settings, generator)
            x = normal((settings["inputs"], chain.stages[0].weight.shape[1]), generator).float()
            seed = int(torch.randint(2**31, (1,), generator=generator))
            draws = cumulants.drawn(chain, x, copies=settings["copies"], seed=seed)
            shapes.append(next(reversed(draws.shapes.values())))
        every = Shape(*(torch.cat(same) for same in zip(*shapes, strict=True)))
        for name, values, errors in (
            ("skewness", every.skewness, every.skewness_error),
            ("kurtosis", every.kurtosis, every.kurtosis_error),
        ):
            found, floor = cumulants.size(values, errors)
            curves[name].append(found)
            least[name].append(floor)
    numbers: dict[str, float | None] = {}
    # In narrow networks all units of a layer may be off: a power is one of wide ones.
    wide = [width >= _WIDE for width in settings["widths"]]
    log_widths = [math.log(width) for width in itertools.compress(settings["widths"], wide)]
    for name, curve in curves.items():
        seen = [max(value, floor) for value, floor in zip(curve, least[name], strict=True)]
        fitted = line(log_widths, [math.log(value) for value in itertools.compress(seen, wide)])
        numbers |= {f"{name}_slope": fitted.slope, f"{name}_widest": curve[-1]}
    return Measured(numbers, {"widths": list(settings["widths"]), **curves, "least": least})


def _random(width: int, settings: Mapping[str, Any], generator: torch.Generator) -> Chain:
    """Hidden layers of one width with random weights and a readout, as it is drawn."""
    few = settings["few"]
    inputs = _FEW if few else width
    net = drawn(
        [inputs, *[width] * _HIDDEN, _OUTPUTS],
        generator,
        input_cov=_NOISE**2 * torch.eye(inputs, dtype=DTYPE),
        noise=0.0 if few else _NOISE,
        readout=True,
        gain=settings["gain"],
        activation=activations.get(settings["activation"]),
    )
    layers = list(zip(net.weights, net.biases, strict=True))
    stages = [
        Stage(f"layer{i}", weight.float(), bias.float(), net.noise, net.activation)
        for i, (weight, bias) in enumerate(layers[:-1])
    ]
    weight, bias = (each.float() for each in layers[-1])
    stages.append(Stage("output", weight, bias, 0.0, activations.get("identity")))
    return Chain(nn.Sequential(), _NOISE, False, tuple(stages))


# Rows

_TRAINED = {
    "mnist-relu": "a ReLU network on MNIST",
    "mnist-heaviside": "a Heaviside network on MNIST",
    "concrete-relu": "a network of regression",
    "quadrants-relu": "a network of two classes in the plane",
}
_WIDTHS = {
    "random-relu": ("relu", math.sqrt(2), False),
    "random-heaviside": ("heaviside", 2.0, False),
    "random-few-inputs": ("relu", math.sqrt(2), True),
}


def _trained(scale: str) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Label, network and how many seeds; MNIST's are those of other experiments."""
    small = scale == "smoke"
    for activation in ("relu", "heaviside"):
        network = networks.mnist(scale, activation, "shared").to_dict()
        yield f"mnist-{activation}", network, SEEDS[scale]
    cheap = 1 if small else 3
    regression: dict[str, Any] = {"hidden": (50,), "activation": "relu", "covariance": "full"}
    regression |= {"noise": (0.3, 0.0), "lr": 1e-3, "epochs": 2 if small else 500}
    limit = 128 if small else 0
    concrete = Network(name="concrete-relu", data="concrete", settings=regression, limit=limit)
    yield "concrete-relu", concrete.to_dict(), cheap
    quadrants = mechanism.network("cooldown", **({"epochs": 2, "limit": 600} if small else {}))
    yield "quadrants-relu", quadrants, cheap


def _parts(scale: str) -> Sequence[Part]:
    small = scale == "smoke"
    parts: list[Part] = []
    for label, network, count in _trained(scale):
        parts += seeds(
            label,
            count,
            network=network,
            inputs={"smoke": 4, "quick": 32, "paper": 64}[scale],
            copies={"smoke": 512, "quick": 32_768, "paper": 65_536}[scale],
        )
    for label, (activation, gain, few) in _WIDTHS.items():
        parts += seeds(
            label,
            1 if small else 3,
            activation=activation,
            gain=gain,
            few=few,
            widths=[4, 8] if small else [4, 8, 16, 32, 64, 128],
            networks=2 if small else 4,
            inputs=2 if small else 8,
            copies={"smoke": 512, "quick": 32_768, "paper": 131_072}[scale],
        )
    return parts


# Of what does not hold, the reason; by label and metric.
_HARDLY_EVER = (
    "Many units of the trained network hardly ever switch: an output stays where it is, and jumps "
    "now and then."
)
_FEW_CAUSES = (
    "All noise comes in by eight inputs, so that all hidden units vary together: where they bend, "
    "they bend the output, whatever their number."
)
_PLANE = (
    "Noise is large beside the distance to the boundaries, and the last hidden layer has eight "
    "units, which vary together."
)
_WHY: dict[tuple[str, str], str] = {
    ("mnist-relu", "negentropy"): "It is little, and just above the bound, though neighbours find "
    "less of it than there is. Skewness and tails grow from layer to layer.",
    ("mnist-heaviside", "skewness"): _HARDLY_EVER,
    ("mnist-heaviside", "kurtosis"): _HARDLY_EVER,
    ("mnist-heaviside", "coverage"): _HARDLY_EVER,
    ("mnist-heaviside", "negentropy"): "The output reads 24 units that are 0 or 1, without noise "
    "behind them. It has finitely many values, no density and no differential entropy: nearly all "
    "draws are equal to others.",
    ("concrete-relu", "skewness"): _FEW_CAUSES,
    ("concrete-relu", "kurtosis"): _FEW_CAUSES,
    ("concrete-relu", "negentropy"): _FEW_CAUSES,
    ("quadrants-relu", "skewness"): _PLANE,
    ("quadrants-relu", "kurtosis"): _PLANE,
    ("quadrants-relu", "coverage"): _PLANE,
    ("quadrants-relu", "negentropy"): "The two outputs are nearly one number, and what is left is "
    "a function of it: draws lie along a bent curve, and the Gaussian fills the ellipse around it. "
    "Single directions lose much less.",
    (
        "random-few-inputs",
        "slope",
    ): "However many units there are, all see the same four causes, so "
    "that their deviations do not average out. With noise of its own in every unit they do.",
    ("", "coverage_moments"): "Moments are approximate where covariances are strong, as in the "
    "plane, and where distributions are skewed.",
    (
        "",
        "beyond_three",
    ): "Outputs that are skewed or jump have one long tail, and hardly any other.",
    ("", "entropy_order"): "Entropies of the plane differ by shape as much as by size; those of "
    "the Heaviside network are not defined.",
}
_EVERY = tuple(_TRAINED)


def _claims() -> Iterator[Claim]:
    for label, words in _TRAINED.items():
        for name, excess, most in (("skewness", "", 0.5), ("kurtosis", "excess ", 1.0)):
            yield Claim(
                says=f"Higher-order cumulants contribute much less than the first two: "
                f"{excess}{name} of "
                f"the outputs of {words} (root of the mean square).",
                metric=f"output_{name}",
                label=label,
                most=most,
                why=_WHY.get((label, name), ""),
            )
        yield Claim(
            says=f"Mean and covariance describe the output of {words}: intervals that should hold "
            "95% of the draws do (average share).",
            metric="coverage",
            label=label,
            least=0.94,
            most=0.96,
            why=_WHY.get((label, "coverage"), ""),
        )
        yield Claim(
            says=f"The output of {words} has the entropy of a Gaussian (nats that it has less, per "
            "output; 0.05 is as much as a deviation that is 5% off).",
            metric="negentropy",
            label=label,
            most=0.05,
            why=_WHY.get((label, "negentropy"), ""),
        )
    yield from _of_ours()


def _of_ours() -> Iterator[Claim]:
    """What tells how far the former go, and how sure they are."""
    for name, words in (
        ("hidden_skewness", "Skewness in front of hidden activations (layer where it is largest)."),
        ("hidden_kurtosis", "Excess kurtosis there."),
        ("skewness_error", "Standard error of one skewness of an output (median)."),
        ("kurtosis_error", "Standard error of one excess kurtosis (median)."),
        ("negentropy_floor", "Standard error of one entropy, per output, by Gaussian draws."),
        ("negentropy_apart", "The entropy that directions of the output lose one by one."),
        ("coverage_worst", "Share within the 95% interval, of the output that is farthest off."),
        ("tails_apart", "By how much the shares below and above that interval differ (average)."),
        ("repeated", "Share of draws that are equal to another one."),
    ):
        yield Claim(says=words, metric=name, label=_EVERY, ours=True)
    for label, words in _TRAINED.items():
        yield Claim(
            says=f"The entropy that the output of {words} has less, by Edgeworth's first terms.",
            metric="negentropy_edgeworth",
            label=label,
            ours=True,
        )
    yield Claim(
        says="Intervals of the moment network's own mean and variance hold 95% of the draws.",
        metric="coverage_moments",
        label=_EVERY,
        least=0.94,
        most=0.96,
        ours=True,
        why=_WHY.get(("", "coverage_moments"), ""),
    )
    yield Claim(
        says="Rare outputs are as rare as a Gaussian's: draws beyond three deviations, over what a "
        "Gaussian has there.",
        metric="beyond_three",
        label=_EVERY,
        least=0.5,
        most=2.0,
        ours=True,
        why=_WHY.get(("", "beyond_three"), ""),
    )
    yield Claim(
        says="Inputs are in the order of their entropies, whether these are a Gaussian's or those "
        "of the draws (rank correlation).",
        metric="entropy_order",
        label=_EVERY,
        least=0.95,
        ours=True,
        why=_WHY.get(("", "entropy_order"), ""),
    )
    for name, excess in (("skewness", ""), ("kurtosis", "excess ")):
        for labels, words in (
            (("random-relu", "random-heaviside"), "of random networks"),
            (
                ("random-few-inputs",),
                "of random networks whose noise comes in by four inputs alone",
            ),
        ):
            yield Claim(
                says=f"The {excess}{name} {words} falls with the width, by the square root of it "
                "at least (power of the width).",
                metric=f"{name}_slope",
                label=labels,
                most=-0.5,
                ours=True,
                why=_WHY.get((labels[0], "slope"), ""),
            )


_ABOUT = (
    "The paper keeps the first two cumulants, Eq. (trunc) at Z = 2, takes that for a Gaussian, and "
    "takes the rest to be small. Here networks are drawn, as Eq. (stoc_network) has them with "
    "layers that follow at once, and the third and fourth cumulants of the draws are measured: "
    "skewness and excess kurtosis, both 0 of a Gaussian, in front of every activation and at the "
    "output. Behind an activation signals are not Gaussian, and nothing takes them to be. Networks "
    "are those of mnist-relu and mnist-heaviside with one covariance per mini-batch; of regression "
    "on concrete (8-50-1, sigma = 0.3 at the inputs alone, 500 epochs); and of mechanism "
    "(2-64-32-16-8-2). Of each so many random test inputs as the settings say are drawn; the noise "
    "of sampling is taken out of averages, in quadrature. Intervals are the mean and multiples of "
    "the deviation that a Gaussian has there, both of the draws, so that they are about the shape "
    "alone; those of the moment network are beside them. The entropy of the draws is estimated by "
    "distances to nearest neighbours, less what the same estimate gives for Gaussian draws, "
    "which in ten dimensions finds less than there is; Edgeworth's series, cut off behind fourth "
    "cumulants, is beside it. Random networks have three "
    "hidden layers of one width, random weights (variance 2 over the width for ReLU, 4 over it for "
    "Heaviside) and noise of sigma = 0.3 in every layer; or with ReLU, four inputs and noise on "
    "these alone. How they fall with the width is told of widths of 16 and more: in narrower ones "
    "all units of a layer may be off."
)
EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="second-order",
        about=_ABOUT,
        measure=measure,
        parts=by_scale(_parts),
        claims=tuple(_claims()),
    ),
)
