"""Linear layer: mean -> W mean + b, covariance -> W C W^T."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary.covariance import Probe, Tracked
from covary.moments import Moments
from covary.nn.protocol import Drawn, check_features, each_row, share
from covary.settings import covariance_grad, without_autocast

# A training step measures the corrections of so many units of each layer on so many samples.
TRAINING_PROBE = Probe(samples=4, units=32, momentum=0.1)


class Linear(nn.Module):
    """mean -> W mean + b, C -> W C W^T, with the parameters and initialisation of ``nn.Linear``.

    In a network that tracks its covariance, each unit's variance is estimated and corrected by a
    factor, whose logarithm is the buffer ``log_correction`` (docs/theory.md, eq. 28). It is updated
    in training as batch norm's statistics are, and measured by ``covary.track``; ``probed`` counts
    the units measured so far. A network that never tracked has neither buffer.
    """

    bias: Tensor | None
    log_correction: Tensor | None
    probed: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        plain = nn.Linear(in_features, out_features, bias, device, dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = plain.weight
        self.register_parameter("bias", plain.bias)
        self.register_buffer("log_correction", None)
        self.register_buffer("probed", None)
        # How corrections are measured in evaluation mode, while covary.track is at work.
        self.probe: Probe | None = None

    @each_row
    def forward(self, moments: Moments) -> Moments:
        check_features(moments, self, self.in_features)
        if moments.mean.dtype != self.weight.dtype:
            raise TypeError(
                f"Linear has {self.weight.dtype} weights and got {moments.mean.dtype} input. "
                "Convert either: x.float(), or net.double()."
            )
        with without_autocast(self.weight.device):
            mean = F.linear(moments.mean, self.weight, self.bias)
            with covariance_grad():
                cov = moments.cov.linear(self.weight)
                if isinstance(cov, Tracked):
                    cov = self._correct(cov)
                return Moments(mean, cov)

    def begin_tracking(self, *, anew: bool = False) -> None:
        """Have buffers for corrections; ``anew``, forget what was measured."""
        if self.log_correction is None or self.probed is None:
            with torch.inference_mode(False):  # else they could not be updated later, in training
                self.log_correction = self.weight.new_zeros(self.out_features, requires_grad=False)
                self.probed = self.weight.new_zeros((), dtype=torch.int64)
        elif anew:
            self.log_correction.zero_()
            self.probed.zero_()

    def _correct(self, cov: Tracked) -> Tracked:
        probe = self.probe or (TRAINING_PROBE if self.training else None)
        if probe is not None and not cov.is_exact:
            self.begin_tracking()
            with torch.no_grad():
                self._measure(cov, probe)
        if self.log_correction is None:
            return cov
        return cov.corrected(self.log_correction.exp()[None])

    def _measure(self, cov: Tracked, probe: Probe) -> None:
        """Compare estimates with variances by a sweep, for a few samples and units.

        Units take turns. Each one's correction is the average of what was measured of it, then,
        after 1 / momentum times, a running one.
        """
        assert self.log_correction is not None
        assert self.probed is not None
        count = min(probe.units, self.out_features)
        turn = self.probed + torch.arange(count, device=self.probed.device)
        units, times = turn % self.out_features, turn // self.out_features
        cov = cov.select(slice(0, probe.samples))
        measured, estimated = cov.variance_of(units), cov.estimate[..., units]
        # Dead units and networks without noise have no variance to take the logarithm of.
        least = torch.finfo(measured.dtype).tiny
        usable = (measured > least) & (estimated > least)
        ratio = torch.where(usable, measured, 1.0).log() - torch.where(usable, estimated, 1.0).log()
        average = ratio.sum(0) / usable.sum(0).clamp(min=1)
        before = self.log_correction.gather(0, units)
        momentum = (1 / (times + 1).to(before.dtype)).clamp(min=probe.momentum)
        after = torch.where(usable.any(0), torch.lerp(before, average, momentum), before)
        # Not scatter_: within vmap, as replicas use it, that is a loop.
        self.log_correction.copy_(self.log_correction.scatter(0, units, after))
        self.probed.add_(count)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # Weights of a network that does not track fit one that does, and the other way round.
        names = [f"{prefix}log_correction", f"{prefix}probed"]
        if any(name in state_dict for name in names):
            self.begin_tracking()
        elif self.log_correction is not None:
            self.begin_tracking(anew=True)
            state_dict = state_dict | {names[0]: self.log_correction, names[1]: self.probed}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def plain(self) -> nn.Linear:
        bias = self.bias is not None
        return share(self, nn.Linear(self.in_features, self.out_features, bias, device="meta"))

    def drawn(self) -> Drawn:
        return Drawn(weight=self.weight, shift=self.bias)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"
