"""Tables of the page: what was measured, as rows of words."""

from __future__ import annotations

from dataclasses import dataclass

from covary.report import words
from covary.runs.results import (
    Attack,
    EntropyGap,
    Fidelity,
    RelativeError,
    SpikingVerification,
    Verification,
    WithBar,
)

ATTACKS = {
    "fgsm": "FGSM",
    "pgd": "PGD",
    "square": "Square",
    "transfer-fgsm": "FGSM, transferred",
    "transfer-pgd": "PGD, transferred",
}
# measure -> its column
_MOMENTS = {
    "mean": "mean error",
    "variance": "variance error",
    "covariance": "covariance error",
    "off_diagonal": "error of pairs",
}
_SPIKES = {
    "rate": "rate error",
    "variance": "variance error",
    "fano": "Fano factor error",
    "covariance": "covariance error",
    "off_diagonal": "error of pairs",
}


@dataclass(frozen=True)
class Row:
    """A row of a table, with a mark beside its name if it has one."""

    name: str
    mark: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Columns of numbers, a row for each thing that has them, and what they mean."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    explained: str = ""


def attack(attack: Attack) -> list[tuple[str, str, list[str]]]:
    """Network, attack, and accuracy at each epsilon; empty where it was not measured."""
    found = []
    for network in attack.networks:
        for name in attack.names(network.name):
            known = {row.epsilon: f"{row.accuracy:.3f}" for row in attack.of(name, network.name)}
            cells = [known.get(epsilon, "") for epsilon in attack.epsilons]
            found.append((network.name, ATTACKS.get(name, name), cells))
    return found


def simulated(measured: Verification | SpikingVerification) -> Table:
    """Each layer's moments against a simulation."""
    return _spikes(measured) if isinstance(measured, SpikingVerification) else _moments(measured)


def _moments(verification: Verification) -> Table:
    tau = "variance, equal \N{GREEK SMALL LETTER TAU}"
    return Table(
        columns=(
            "units",
            *_MOMENTS.values(),
            "noise of covariance",
            "entropy gap, nats",
            "variance, at once",
            tau,
        ),
        rows=tuple(
            Row(
                layer.name,
                "poor" if layer.poor else "",
                (
                    f"{layer.units:,}",
                    *(_error(getattr(layer.steady, key)) for key in _MOMENTS),
                    _percent(layer.steady.covariance.floor),
                    _plus_minus(layer.steady.entropy),
                    *(
                        _plus_minus(layer.simulations[name].variance_share)
                        for name in ("ou-0", "ou-1")
                    ),
                ),
            )
            for layer in verification.layers
        ),
        explained="Errors are relative, by norm, over inputs, with Monte-Carlo standard errors; "
        "what the noise of sampling contributes is taken out in quadrature (the noise of "
        "covariance is the error that exact moments would seem to have). Pairs are covariances of "
        "different units. The entropy gap is that of the simulation less that of the moments. "
        "Variances are those of networks in time over that of the steady state: with layers that "
        "follow at once, and with equal time constants.",
    )


def _spikes(spikes: SpikingVerification) -> Table:
    return Table(
        columns=("units", "spikes/s", "Fano factor", *_SPIKES.values(), "noise of rates"),
        rows=tuple(
            Row(
                layer.name,
                "poor" if layer.poor else "",
                (
                    f"{layer.units:,}",
                    f"{1000 * layer.mean_rate:.1f}",
                    words.NOTHING if layer.mean_fano is None else f"{layer.mean_fano:.2f}",
                    *(_error(layer.errors[key]) for key in _SPIKES),
                    _percent(layer.errors["rate"].floor),
                ),
            )
            for layer in spikes.layers
        ),
        explained="Errors are relative, by norm, over inputs, with Monte-Carlo standard errors; "
        "what the noise of the simulation contributes is taken out in quadrature (the noise of "
        "rates is the error that exact rates would seem to have). Spikes are counted in windows of "
        f"{spikes.window:g} ms. Fano factors, variance over mean of such counts, are those of the "
        "moments, which are those of long windows: in short ones a neuron that fires by the clock "
        "has a variance of up to 1/4 of a spike that is no error of theirs. Pairs are covariances "
        "of different neurons.",
    )


@dataclass(frozen=True)
class FidelityRow:
    """A way of holding the covariance: its costs, and its agreement on each part."""

    name: str
    mark: str
    cost: list[str]
    parts: list[list[str]]


@dataclass(frozen=True)
class FidelityTable:
    """Columns of each part, and a row for each representation."""

    parts: list[tuple[str, float | None]]  # with their inputs
    columns: dict[str, str]
    batch: int
    rows: list[FidelityRow]


def fidelity(measured: Fidelity) -> FidelityTable:
    """Each way of holding the covariance against the exact one."""
    columns = dict(words.FIDELITY)
    if measured.task != "classification":
        del columns["argmax"]
    ways = measured.representations
    marks = {measured.chosen: "chosen"}
    if measured.exact is not None:
        marks[measured.exact.name] = "exact"
    return FidelityTable(
        parts=[(part, ways[0].of(part, "samples") if ways else None) for part in measured.parts],
        columns=columns,
        batch=measured.batch,
        rows=[
            FidelityRow(
                name=one.name,
                mark=marks.get(one.name, ""),
                cost=[words.amount(one.time_over_plain), words.amount(one.peak_memory_mb)],
                parts=[
                    [words.fidelity(key, one.of(part, key)) for key in columns]
                    for part in measured.parts
                ],
            )
            for one in ways
        ],
    )


def _error(error: RelativeError) -> str:
    value, bar = error.value, error.bar
    if value is None or bar is None:
        return words.NOTHING
    decimals = 2 if bar < 0.0005 else 1 if bar < 0.05 else 0
    return f"{100 * value:.{decimals}f} \N{PLUS-MINUS SIGN} {100 * bar:.{decimals}f}%"


def _percent(value: float | None) -> str:
    return words.NOTHING if value is None else f"{100 * value:.1f}%"


def _plus_minus(value: WithBar | EntropyGap) -> str:
    if value.value is None or value.bar is None:
        return words.NOTHING
    return f"{value.value:.2f} \N{PLUS-MINUS SIGN} {value.bar:.2f}".replace("-", words.MINUS)
