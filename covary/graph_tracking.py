"""Measure, on some inputs, the variances that a converted network takes at its nonlinearities."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from covary.convert import Converted
from covary.covariance.swept import Swept
from covary.inputs import Inputs, arguments, batch_of, leaves, some
from covary.measuring import Average, Spread
from covary.moments import Moments
from covary.nn.fidelity import TrackingWarning, frames_to_caller

# How often each input is drawn, and how many inputs at a time.
_DRAWS, _AT_ONCE = 8, 32
# Variances are estimated for each sample if that changes the output's covariance by more than this.
_NEGLIGIBLE = 0.03
# Shares of sources are averaged over so many inputs and random rows of the output.
_SHARE_SAMPLES, _SHARE_ROWS = 32, 8
# Variances of draws are compared on so many times 32 inputs, and are well within these limits.
_RATIO_CHUNKS, _WELL = 4, (0.85, 1.18)

Ratio = tuple[float, float]
Steps = Callable[[Sequence[Any], str], Iterable[Any]]


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


@torch.no_grad()
def track_converted(
    net: Converted, batches: Iterable[Any] | Any, *, samples: int, steps: Steps
) -> Tracking:
    """Measure variances on up to so many inputs, and what share of the output's comes from where.

    Both become buffers of the network. See ``covary.track``.
    """
    chunks = list(_chunks(net, batches, samples))
    counts = [batch_of(chunk, net.batch_dim) for chunk in chunks]
    if sum(counts) < 2:
        raise ValueError(f"track needs 2 samples at least, and got {sum(counts)}.")
    average = Average()
    axes = leaves(net.batch_axes(chunks[0]))
    drawn = [Projections(axes, seed) for seed in range(min(len(chunks), _RATIO_CHUNKS))]
    for number, chunk in enumerate(steps(chunks, "variances")):
        watch = drawn[number].add if number < len(drawn) else None
        found = net.drawn_variances(
            chunk, draws=_DRAWS, seed=number, checks=number == 0, watch=watch
        )
        average.add(found, counts[number])
    net.noise.check_all_used()
    measured = average.value()
    ways = {"averaged": [False], "propagated": [True]}.get(net.variances, [False, True])
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
            ready[propagates] = net.sites.known(), _shares(net, chunks[0])
        difference = math.nan
        propagates = ways[-1]
        if len(ways) > 1:
            (_, (_, plain)), (_, (_, fine)) = ready[False], ready[True]
            difference = ((plain - fine).norm() / fine.norm()).item() if fine.numel() else 0.0
            propagates = difference > _NEGLIGIBLE
        known, (shares, _) = ready[propagates]
        net.sites.set_propagates(propagates)
        net.sites.replace(known)
        net.sites.set_shares(shares)
        ratio, bar = _ratio(net, chunks, drawn)
    finally:
        net.train(was_training)
    if drawn and shares and not math.isfinite(ratio):
        warnings.warn(
            "Variances of this network are not finite on the inputs it was tracked with: noise may "
            "take a function out of the numbers that it is defined for (a logarithm, a power). "
            "Let no noise enter there: covary.convert(model, noise={'': 0.05, 'its module': 0.0}).",
            TrackingWarning,
            stacklevel=frames_to_caller(),
        )
    is_off = ratio - 2 * bar > _WELL[1] or ratio + 2 * bar < _WELL[0]
    if is_off and sum(counts) >= _AT_ONCE:  # of fewer inputs, not even the error is known
        warnings.warn(
            f"The variances that this network computes are {1 / ratio:.2f} of those of draws, on "
            "the inputs it was tracked with: many units that depend on each other may be at a kink "
            "together (flat backgrounds), or the noise be large. Take less noise, let moments "
            "begin later (covary.convert(model, start=...)), and look with covary.verify(net, x).",
            TrackingWarning,
            stacklevel=frames_to_caller(),
        )
    return Tracking(sum(counts), shares, propagates, difference, ratio, bar)


class Projections:
    """Variances of random projections of a model's outputs, over draws.

    Args:
        axes: the dimension of the batch of each output, by the path to it.
        seed: decides the projections.
    """

    def __init__(self, axes: Mapping[str, int | None], seed: int) -> None:
        self._axes = {name: axis for name, axis in axes.items() if axis is not None}
        self._generator = torch.Generator().manual_seed(seed)
        self._spreads: dict[str, Spread] = {}
        self.signs: dict[str, Tensor] = {}  # (r, N, *event), by the path to the output

    def add(self, outputs: Any) -> None:
        """Take in a draw."""
        drawn = leaves(outputs)
        for name, axis in self._axes.items():
            value = drawn[name].movedim(axis, 0)
            if name not in self.signs:
                self.signs[name] = _signs(value, self._generator)
                self._spreads[name] = Spread([])
            rows = self.signs[name] * value
            self._spreads[name].add([rows.reshape(*rows.shape[:2], -1).sum(-1)])

    def variances(self, name: str) -> Tensor:
        """(N,) of one output: the sum over projections."""
        return self._spreads[name].measured()[""].sum(0)


def _ratio(net: Converted, chunks: Sequence[Inputs], drawn: Sequence[Projections]) -> Ratio:
    """Variances of draws over those that are computed, of the same projections; and its error."""
    found, expected = [], []
    for (args, named), projections in zip(chunks, drawn, strict=False):
        outputs = leaves(net(*args, **named))
        for name, signs in projections.signs.items():
            out = outputs[name]
            assert isinstance(out.cov, Swept)
            parts = out.cov.tape.variances(out.cov.at, signs)
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
    signs = torch.randint(0, 2, (_SHARE_ROWS, *value.shape), generator=generator)
    return signs.to(value) * 2 - 1


def _shares(net: Converted, inputs: Inputs) -> tuple[dict[str, float], Tensor]:
    """Of the sum of all variances of the output, by source, on average over inputs.

    Besides, covariances (N, r, r) of some random rows of the output.
    """
    args, named = some(inputs, slice(0, _SHARE_SAMPLES), net.batch_dim)
    generator = torch.Generator().manual_seed(0)
    total: dict[str, float] = {}
    covariances = []
    outputs = net(*args, **named)
    for out in leaves(outputs).values():
        if not isinstance(out, Moments):
            continue
        assert isinstance(out.cov, Swept)
        # Rows of random signs: what they have of a variance is, on average, the sum over outputs.
        signs = _signs(out.mean, generator)
        parts = out.cov.tape.variances(out.cov.at, signs)
        covariances.append(out.cov.tape.quadratic(out.cov.at, signs))
        whole = sum(parts.values())
        for name, part in parts.items():
            share = torch.where(part > 0, part / whole, 0.0)
            total[name] = total.get(name, 0.0) + share.mean().item()
    every = sum(total.values())
    shares = {name: share / every for name, share in total.items()} if every else {}
    return shares, torch.cat(covariances) if covariances else torch.zeros(0)


def _chunks(net: Converted, batches: Any, samples: int) -> Iterable[Inputs]:
    """Arguments for the model, some samples at a time, until there are so many."""
    if samples < 2:
        raise ValueError(f"track needs 2 samples at least, got samples={samples}.")
    if isinstance(batches, Dataset):
        raise TypeError(
            "track takes batches and got a Dataset, which gives single samples. Wrap it: "
            "torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)."
        )
    if isinstance(batches, Mapping) or (
        isinstance(batches, tuple) and all(isinstance(each, Tensor) for each in batches)
    ):
        batches = [batches]
    if not isinstance(batches, Tensor | Iterable) or isinstance(batches, str | np.ndarray):
        raise TypeError(
            "track takes a tensor of inputs, a tuple or dict of them, or a loader of batches; got "
            f"{type(batches).__name__}."
        )
    if isinstance(batches, Tensor):
        batch_of(batches, net.batch_dim)
        # Evenly spaced ones: data often come sorted.
        size = batches.shape[net.batch_dim]
        count = min(samples, size)
        every = torch.arange(count, device=batches.device) * size // max(1, count)
        batches = [batches.index_select(net.batch_dim, every)]
    left = samples
    for batch in batches:
        inputs = arguments(net.model, batch, has_labels=True)
        size = batch_of(inputs, net.batch_dim)
        for low in range(0, min(size, left), _AT_ONCE):
            high = min(low + _AT_ONCE, size, left)
            yield some(inputs, slice(low, high), net.batch_dim)
        left -= min(size, left)
        if left <= 0:
            return
