"""What a spiking network did: spike counts of its layers, and its output as time goes on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from covary.activations.neuron import LIF
from covary.stochastic.statistics import Estimate, StreamingMoments


class CountMoments:
    """Collects spike counts of windows of a layer: variances, or covariances where asked for."""

    def __init__(
        self, groups: int, batch: int, units: int, covariance: bool, device: torch.device
    ) -> None:
        self.shape, self.covariance = (batch, units), covariance
        # Each neuron by itself is an input of one unit: no products of different neurons.
        inputs = (batch, units) if covariance else (batch * units, 1)
        self._moments = StreamingMoments(groups, *inputs, device=device)

    def add(self, counts: Tensor) -> None:
        """Take in (groups, B, copies, n): counts in one more window."""
        if not self.covariance:
            counts = counts.transpose(2, 3).flatten(1, 2)[..., None]
        self._moments.add(counts)

    def layer(self, name: str, neuron: LIF, window: float) -> SpikingLayer:
        """What was found."""
        estimate = self._moments.estimate()
        return SpikingLayer(name, neuron, window, self.covariance, self.shape, estimate)


@dataclass(frozen=True, eq=False, repr=False)
class SpikingLayer:
    """Spike counts of n neurons for B inputs, in windows, with Monte-Carlo standard errors.

    Variances and covariances per ms, Cov[N_i, N_j] / window, are comparable to those of a moment
    neural network, which are the limit of long windows. In finite ones they are off by an amount
    that goes down as 1 / window: a neuron that fires regularly has a variance of up to 1/4 in any
    window (1/6 on average) and correlations take a time to build up, that of the membrane. Compare
    windows of different lengths.

    Attributes:
        name: of the stage, as in ``covary.record``.
        neuron: its constants.
        window: in ms.
        has_covariance: whether covariances between neurons were asked for.
        shape: (B, n).
        counts: moments of the counts themselves.
    """

    name: str
    neuron: LIF
    window: float
    has_covariance: bool
    shape: tuple[int, int]
    counts: Estimate

    @property
    def rate(self) -> Tensor:
        """(B, n) spikes per ms."""
        return self.counts.mean.reshape(self.shape) / self.window

    @property
    def rate_error(self) -> Tensor:
        """(B, n) standard error."""
        return self.counts.mean_error.reshape(self.shape) / self.window

    @property
    def variance(self) -> Tensor:
        """(B, n) of the count, per ms."""
        return self.counts.variance.reshape(self.shape) / self.window

    @property
    def variance_error(self) -> Tensor:
        """(B, n) standard error."""
        return self.counts.variance_error.reshape(self.shape) / self.window

    @property
    def fano(self) -> Tensor:
        """(B, n) variance of the count over its mean; NaN for neurons that never fired."""
        return _fano(self.counts.mean, self.counts.covariance_matrix).reshape(self.shape)

    @cached_property
    def fano_error(self) -> Tensor:
        """(B, n) standard error."""
        return self.counts.standard_error(_fano).reshape(self.shape)

    @property
    def covariance(self) -> Tensor:
        """(B, n, n) of the counts, per ms."""
        self._check_covariance()
        return self.counts.covariance_matrix / self.window

    @property
    def covariance_error(self) -> Tensor:
        """(B, n, n) standard error."""
        self._check_covariance()
        return self.counts.covariance_error / self.window

    def _check_covariance(self) -> None:
        if not self.has_covariance:
            raise ValueError(
                f"Covariances of {self.name} were not recorded. Ask for them: "
                f"simulate_spikes(..., covariance=[{self.name!r}])."
            )

    def __repr__(self) -> str:
        batch, units = self.shape
        windows = self.counts.groups * self.counts.count
        return f"SpikingLayer(inputs={batch}, units={units}, windows={windows:,})"


def _fano(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1) / mean


@dataclass(frozen=True, eq=False, repr=False)
class Readout:
    """The output of a spiking network from spikes so far, y(t) = W N(t) / t + b: how it decides.

    Attributes:
        times: (T,) in ms since the end of burning in.
        outputs: (groups, B, copies, T, m): of every copy, by groups of copies.
    """

    times: Tensor
    outputs: Tensor

    @property
    def mean(self) -> Tensor:
        """(B, T, m) over copies."""
        return self.outputs.mean((0, 2))

    @property
    def decisions(self) -> Tensor:
        """(groups, B, copies, T) the class of the largest output."""
        return self.outputs.argmax(-1)

    def accuracy(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) how often a copy decides for the label (B,), and its Monte-Carlo standard error.

        The error is that of drawing copies, for these inputs; that of drawing inputs comes on top.
        """
        right = self.decisions == labels.to(self.outputs.device)[:, None, None]
        of_groups = right.double().mean((1, 2))
        return of_groups.mean(0), of_groups.std(0) / len(of_groups) ** 0.5

    def covariance(self) -> Tensor:
        """(B, T, m, m) across copies, times t, so that it tends to that of the moments."""
        return torch.stack([one.covariance_matrix for one in self._estimates()], 1)

    def entropy(self) -> tuple[Tensor, Tensor]:
        """(B, T) entropy of a Gaussian with that covariance, and its standard error.

        Corrected for the number of copies; NaN where there are no more of them than outputs.
        """
        found = [one.entropy() for one in self._estimates()]
        entropy, error = (torch.stack(values, 1) for values in zip(*found, strict=True))
        return entropy, error

    def _estimates(self) -> list[Estimate]:
        groups, batch, _, _, units = self.outputs.shape
        estimates = []
        for i, time in enumerate(self.times.tolist()):
            moments = StreamingMoments(groups, batch, units, device=self.outputs.device)
            moments.add(self.outputs[:, :, :, i] * time**0.5)
            estimates.append(moments.estimate())
        return estimates

    def __repr__(self) -> str:
        groups, batch, copies, times, units = self.outputs.shape
        return f"Readout(inputs={batch}, copies={groups * copies}, times={times}, outputs={units})"
