"""Measure, on some inputs, what a network needs to compute its covariance: ``track``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from covary.convert import Converted, check_has_moments
from covary.covariance import Probe
from covary.inputs import Inputs, arguments, batch_of, in_batches, leaves, some
from covary.measuring import Average, DrawnVariances
from covary.models import left_alone, with_covariance
from covary.moments import Moments, mean_of
from covary.nn import Lift, Linear
from covary.nn.fidelity import Fidelity, FidelityRow, TrackingWarning, frames_to_caller
from covary.passes import has_errors
from covary.progress import Steps, shown
from covary.uncertainty.agreement import agreement, gathered

# Of chains:
# Numbers in the largest tensor of a pass: 128 MB in single precision.
_NUMBERS_AT_A_TIME = 2**25
# Multiplications that exact covariances may take: some seconds on two cores of a CPU.
_AFFORDABLE = 1e12
_LEAST_SAMPLES = 16
# ``"tracked:N"`` is not tried with more: exact covariances would be as cheap.
_WIDEST_EXACT = 128
# Of converted networks:
# How often each input is drawn, and how many inputs at a time.
_DRAWS, _AT_ONCE = 8, 32
# Variances are estimated for each sample if that changes the output's covariance by more than this.
_NEGLIGIBLE = 0.03
# Shares of sources are averaged over so many random rows of the output.
_ROWS = 8
# Variances of draws are compared on so many times 32 inputs, and are well within these limits.
_RATIO_CHUNKS, _WELL = 4, (0.85, 1.18)


class Tracking(NamedTuple):
    """What ``covary.track`` measured of a converted network.

    ``ratio`` tells how good its moments are on these inputs: the variances of draws over those that
    it computes, summed over outputs and inputs. It is 1 if all is well, and NaN without variance.
    ``ratio_bar`` is its standard error, from the scatter between inputs.
    """

    samples: int  # inputs that it was measured on
    shares: dict[str, float]  # of the variance of the output, by where the noise enters
    propagates: bool  # whether variances are estimated for each sample
    difference: float  # that it makes to the covariance of the output, relative; NaN if not tried
    ratio: float = math.nan
    ratio_bar: float = math.nan


@overload
def track(  # type: ignore[overload-overlap]
    net: Converted, batches: Iterable[Any], *, samples: int = ..., progress: bool = ...
) -> Tracking: ...


@overload
def track(
    net: nn.Module, batches: Iterable[Any], *, samples: int = ..., progress: bool = ...
) -> Fidelity: ...


def track(
    net: nn.Module, batches: Iterable[Any], *, samples: int = 256, progress: bool = True
) -> Fidelity | Tracking:
    """Measure, on some inputs, what a network needs to compute its covariance.

    A network that ``covary.convert`` made needs the variances before its nonlinearities. They are
    measured by a few draws of its noise; print(net) then shows where the variance of its output
    comes from. A ``TrackingWarning`` tells if variances of draws and computed ones disagree.

    A chain of ``covary.nn`` layers needs corrections of its estimated variances, one factor for
    each unit (docs/theory.md, eq. 28), measured on half of the samples. On the other half tracked
    covariances are compared with exact ones, for several N of ``"tracked:N"``. Afterwards
    ``covary.with_covariance(net, "tracked")`` uses the least N that was good enough, and warns if
    none was. All results are buffers, saved with the weights, and replace earlier ones.

    Args:
        net: a network that ``covary.convert`` made, or one with a ``covary.nn.Lift``.
        batches: inputs like those the network was trained on: a tensor (N, ...), ``Moments`` if
            they have errors, or what gives batches of them, such as a ``DataLoader`` (of tuples,
            the first is taken). For a converted network, of tuples as many first elements are taken
            as its ``forward`` requires, since labels may follow; a dict gives parameters of
            ``forward`` by their names, optional ones too. A single tuple or dict is one batch.
        samples: how many inputs to take, at most: of a tensor, evenly spaced ones; of batches, the
            first. Of fewer than 32, all serve for both purposes, and the comparison says little.
        progress: show a bar, on a terminal that has ``rich``.

    Returns:
        Of a converted network a ``Tracking``: the shares of its sources of noise, and by what
        ratio variances of draws differ from computed ones. Of a chain a ``Fidelity``, with a row
        for every N tried: rank correlation of entropies with exact ones, and relative
        error of the covariance.

    Examples:
        >>> import covary, torch
        >>> net = covary.mlp([4, 8, 6, 3], activation="heaviside", noise=0.2)
        >>> fidelity = covary.track(net, torch.randn(64, 4))
        >>> [row.covariance for row in fidelity.rows]
        ['tracked:0', 'tracked:6']
        >>> fast = covary.with_covariance(net, "tracked").eval()
    """
    if isinstance(net, Converted):
        with shown(progress) as steps, left_alone(net.model):
            return _track_converted(net, batches, samples, steps)
    check_has_moments(net, "track")
    # A network of its own, but for parameters and buffers; exact nowhere, so all is measured.
    tracked = with_covariance(net, "tracked:0").eval()
    exact = with_covariance(net, "full").eval()
    linears = [layer for layer in tracked.modules() if isinstance(layer, Linear)]
    if not linears:
        raise ValueError("track needs a network with a covary.nn.Linear; this has none.")
    taken = list(_taken(batches, samples, _first))
    inputs = gathered(taken) if isinstance(taken[0], Moments) else torch.cat(taken)
    inputs = inputs.to(next(net.parameters()).device)
    # What serves for both purposes says less, but of so few nothing is left to set aside.
    few = len(inputs) < 2 * _LEAST_SAMPLES
    to_measure, to_compare = (inputs, inputs) if few else (inputs[::2], inputs[1::2])
    lifts = [layer for layer in net.modules() if isinstance(layer, Lift)]
    for lift in lifts:
        lift.fidelity = None  # of corrections that are about to go, should this be interrupted
    with torch.no_grad(), shown(progress) as steps, warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)  # it is just being found out how good
        _measure(tracked, linears, to_measure, steps)
        rows = tuple(_compare(exact, tracked, to_compare, linears, steps))
    fidelity = Fidelity.of(torch.tensor(rows))  # rounded, as it is kept
    for lift in lifts:
        lift.set_fidelity(fidelity)
    return fidelity


def _measure(net: nn.Module, linears: list[Linear], inputs: Tensor | Moments, steps: Steps) -> None:
    """Measure corrections, one layer after the other, each behind layers that are corrected."""
    for layer in linears:
        layer.begin_tracking(anew=True)
    widest = max(max(layer.in_features, layer.out_features) for layer in linears)
    at_once = max(1, min(len(inputs), _NUMBERS_AT_A_TIME // widest**2))
    units = max(1, _NUMBERS_AT_A_TIME // (widest * at_once))
    chunks = in_batches(inputs, at_once)
    for number, layer in enumerate(linears, start=1):
        # Turn after turn with the same samples, so that every unit sees all of them.
        todo = [chunk for chunk in chunks for _ in range(math.ceil(layer.out_features / units))]
        layer.probe = Probe(samples=at_once, units=units, momentum=0.0)
        for chunk in steps(todo, f"corrections, {number} of {len(linears)}"):
            net(chunk)
        layer.probe = None


def _compare(
    exact: nn.Module,
    tracked: nn.Module,
    inputs: Tensor | Moments,
    linears: list[Linear],
    steps: Steps,
) -> Iterator[FidelityRow]:
    """How well ``"tracked:N"`` agrees with exact covariances, by N."""
    price = sum(float(layer.out_features) * layer.in_features**2 for layer in linears[1:]) or 1.0
    inputs = inputs[: max(_LEAST_SAMPLES, int(_AFFORDABLE / price))]
    widest = max(layer.out_features for layer in linears)
    chunks = in_batches(inputs, max(1, _NUMBERS_AT_A_TIME // widest**2))
    truth = gathered([_moments(exact(chunk)) for chunk in steps(chunks, "exact covariances")])
    # Widths of the layers whose estimates matter: the first is exact, the last is the output.
    hidden = {layer.out_features for layer in linears[1:-1]}
    for width in [0, *sorted(width for width in hidden if width <= _WIDEST_EXACT)]:
        kind = f"tracked:{width}"
        net = with_covariance(tracked, kind)
        found = gathered([_moments(net(c)) for c in steps(chunks, kind)])
        agrees = agreement(truth, found)
        yield FidelityRow(width, agrees.rank, agrees.covariance)


def _moments(out: Any) -> Moments:
    if not isinstance(out, Moments):
        raise TypeError(
            f"track needs a network that gives Moments, this gave {type(out).__name__}."
        )
    return out


@torch.no_grad()
def _track_converted(net: Converted, batches: Any, samples: int, steps: Steps) -> Tracking:
    """Measure variances at nonlinearities, and the share of each source in the output's."""
    if isinstance(batches, Mapping) or (
        isinstance(batches, tuple) and all(isinstance(each, Tensor | Moments) for each in batches)
    ):
        batches = [batches]
    dim = net.batch_dim
    chunks: list[Inputs] = [
        some(inputs, slice(low, low + _AT_ONCE), dim)
        for inputs in _taken(
            batches, samples, lambda batch: arguments(net.model, batch, has_labels=True), dim
        )
        for low in range(0, batch_of(inputs, dim), _AT_ONCE)
    ]
    counts = [batch_of(chunk, dim) for chunk in chunks]
    average = Average()
    axes = leaves(net.batch_axes(chunks[0]))
    drawn = [_Projections(axes, seed) for seed in range(min(len(chunks), _RATIO_CHUNKS))]
    for number, chunk in enumerate(steps(chunks, "variances")):
        watch = drawn[number].add if number < len(drawn) else None
        found = net.drawn_variances(
            chunk, draws=_DRAWS, seed=number, checks=number == 0, watch=watch
        )
        average.add(found, counts[number])
    net.plan.check_all_used()
    measured = average.value()
    net.sites.set_with_errors(has_errors(chunks))
    # What differs from sample to sample makes variances that do.
    likely = [True] if net.sites.with_errors or net.plan.depends_on_values else [False, True]
    ways = {"averaged": [False], "propagated": [True]}.get(net.variances, likely)
    was_training = net.training
    net.eval()
    try:
        ready = {}
        for propagates in steps(ways, "levels"):
            net.sites.set_propagates(propagates)
            level = Average()
            for chunk, count in zip(chunks, counts, strict=True):
                level.add(net.levels(chunk, measured), count)
            net.sites.replace(measured | level.value())
            ready[propagates] = net.sites.known(), *_shares(net, chunks[0])
        difference, propagates = math.nan, ways[-1]
        if len(ways) > 1:
            rough, fine = ready[False][2], ready[True][2]
            difference = ((rough - fine).norm() / fine.norm()).item() if fine.numel() else 0.0
            propagates = difference > _NEGLIGIBLE
        known, shares, _ = ready[propagates]
        net.sites.set_propagates(propagates)
        net.sites.replace(known, shares)
        ratio, bar = _ratio(net, chunks, drawn)
    finally:
        net.train(was_training)
    linear = net.plan.linearised
    is_compared = any(share for name, share in shares.items() if name not in linear)
    if is_compared and not math.isfinite(ratio):
        _warn(
            "Variances of this network are not finite on the inputs it was tracked with: noise may "
            "take a function out of the numbers that it is defined for (a logarithm, a power). "
            "Let no noise enter there: covary.convert(model, noise={'': 0.05, 'its module': 0.0})."
        )
    is_off = ratio - 2 * bar > _WELL[1] or ratio + 2 * bar < _WELL[0]
    if is_off and sum(counts) >= _AT_ONCE:  # of fewer inputs, not even the error is known
        _warn(
            f"The variances that this network computes are {1 / ratio:.2f} of those of draws, on "
            "the inputs it was tracked with: many units that depend on each other may be at a kink "
            "together (flat backgrounds), or the noise be large. Take less noise, let moments "
            "begin later (covary.convert(model, start=...)), and look with covary.verify(net, x)."
        )
    return Tracking(sum(counts), shares, propagates, difference, ratio, bar)


def _warn(message: str) -> None:
    warnings.warn(message, TrackingWarning, stacklevel=frames_to_caller())


class _Projections:
    """Variances over draws of random projections of outputs, whose batch is in these dimensions."""

    def __init__(self, axes: Mapping[str, int | None], seed: int) -> None:
        self._axes = {name: axis for name, axis in axes.items() if axis is not None}
        self._generator = torch.Generator().manual_seed(seed)
        self._spreads = {name: DrawnVariances([]) for name in self._axes}
        self.signs: dict[str, Tensor] = {}  # (r, N, *event), by the path to the output

    def add(self, outputs: Any) -> None:
        """Take in a draw."""
        drawn = leaves(outputs)
        for name, axis in self._axes.items():
            value = drawn[name].movedim(axis, 0)
            if name not in self.signs:
                self.signs[name] = _signs(value, self._generator)
            rows = self.signs[name] * value
            self._spreads[name].add([rows.reshape(*rows.shape[:2], -1).sum(-1)])

    def variances(self, name: str) -> Tensor:
        """(N,) of one output: the sum over projections."""
        return self._spreads[name].measured()[""].sum(0)


def _ratio(
    net: Converted, chunks: Sequence[Inputs], drawn: Sequence[_Projections]
) -> tuple[float, float]:
    """Variances of draws over those that are computed, of the same projections; and its error."""
    found, expected = [], []
    for (args, named), projections in zip(chunks, drawn, strict=False):
        outputs = leaves(net(*args, **named))
        for name, signs in projections.signs.items():
            cov = outputs[name].cov
            every = cov.tape.variances(cov.at, signs)
            parts = {name: part for name, part in every.items() if name not in net.plan.linearised}
            if parts:
                found.append(projections.variances(name))
                expected.append(torch.stack(list(parts.values())).sum((0, -1)))
    if not found:
        return math.nan, math.nan
    draws, moments = torch.cat(found).double(), torch.cat(expected).double()
    ratio = draws.sum() / moments.sum()
    return ratio.item(), ((draws - ratio * moments).norm() / moments.sum()).item()


def _signs(value: Tensor, generator: torch.Generator) -> Tensor:
    """(r, *shape) rows of random signs: of each, the variance is on average the sum over units."""
    signs = torch.randint(0, 2, (_ROWS, *value.shape), generator=generator)
    return signs.to(value) * 2 - 1


def _shares(net: Converted, inputs: Inputs) -> tuple[dict[str, float], Tensor]:
    """Each source's share in the sum of all variances of the output, averaged over inputs.

    Besides, covariances (N, r, r) of some random rows of the output.
    """
    args, named = inputs
    generator = torch.Generator().manual_seed(0)
    total: dict[str, float] = {}
    covariances = []
    for out in leaves(net(*args, **named)).values():
        if not isinstance(out, Moments):
            continue
        cov: Any = out.cov
        signs = _signs(out.mean, generator)
        parts = cov.tape.variances(cov.at, signs)
        covariances.append(cov.tape.quadratic(cov.at, signs))
        whole = sum(parts.values())
        for name, part in parts.items():
            share = torch.where(part > 0, part / whole, 0.0)
            total[name] = total.get(name, 0.0) + share.mean().item()
    every = sum(total.values())
    shares = {name: share / every for name, share in total.items()} if every else {}
    return shares, torch.cat(covariances) if covariances else torch.zeros(0)


def _first(batch: Any) -> Tensor | Moments:
    """The inputs of a batch for a chain, which may have labels behind them."""
    x = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(x, Tensor | Moments):
        raise TypeError(
            "track takes a tensor or Moments, or batches of inputs or of (inputs, ...); got a "
            f"batch of {type(batch).__name__}."
        )
    return x


def _taken(
    batches: Any, samples: int, inputs_of: Callable[[Any], Any], batch_dim: int = 0
) -> Iterator[Any]:
    """Inputs of one batch after the other, until there are so many samples."""
    if samples < 2:
        raise ValueError(f"track needs 2 samples at least, got samples={samples}.")
    if isinstance(batches, Dataset):
        raise TypeError(
            "track takes batches and got a Dataset, which gives single samples. Wrap it: "
            "torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)."
        )
    if isinstance(batches, Tensor | Moments):
        # Evenly spaced ones: data often come sorted.
        size = batch_of(batches, batch_dim)
        every = torch.arange(min(samples, size), device=mean_of(batches).device) * size
        every = every // max(1, len(every))
        is_plain = isinstance(batches, Tensor)
        batches = [batches.index_select(batch_dim, every) if is_plain else batches[every]]
    elif not isinstance(batches, Iterable) or isinstance(batches, str | np.ndarray):
        raise TypeError(
            "track takes a tensor of inputs, a tuple or dict of them, or a loader of batches; got "
            f"{type(batches).__name__}."
        )
    count = 0
    for batch in batches:
        inputs = some(inputs_of(batch), slice(0, samples - count), batch_dim)
        count += batch_of(inputs, batch_dim)
        yield inputs
        if count >= samples:
            break
    if count < 2:
        raise ValueError(f"track needs 2 samples at least, and got {count}.")
