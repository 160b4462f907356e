"""What is known of a network beside its weights, as buffers that are saved with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from covary.sources.weights import UncertainWeights

# Sums over weights agree to this, relative to their size, whatever device or type they are on.
_EQUAL = 1e-6


class Kept(nn.Module):
    """Buffers by names with dots, all replaced by what comes with other weights."""

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The buffers whose names begin with this, by the rest of their names."""
        return by_name(self._buffers, prefix)

    def keep(self, prefix: str, values: Mapping[str, Tensor]) -> None:
        """Add or replace buffers of this prefix."""
        for name, value in values.items():
            self._buffers[prefix + name.replace(".", "/")] = value.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if not any(key.startswith(prefix) for key in state_dict):
            return
        self._buffers.clear()
        for key, value in state_dict.items():
            if key.startswith(prefix):
                self._buffers[key.removeprefix(prefix)] = torch.empty_like(value)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def by_name(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What stands behind a prefix in a state: in the names of buffers, dots are slashes."""
    return {
        name.removeprefix(prefix).replace("/", "."): value
        for name, value in state.items()
        if name.startswith(prefix)
    }


class Posterior(Kept):
    """The Gaussian posterior of a network's weights; empty until ``covary.posterior.fit``.

    It belongs to the weights that it was fitted to, and keeps sums of them to tell.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: tuple[object, ...] = ()

    @property
    def weights(self) -> dict[str, UncertainWeights]:
        """How the weights vary, by the path of the parameter."""
        left, right = self.named("left/"), self.named("right/")
        return {
            path: UncertainWeights(
                variance, left.get(path), right.get(path), linearised=self.is_linearised
            )
            for path, variance in self.named("variance/").items()
        }

    @property
    def is_empty(self) -> bool:
        """Whether no weight varies."""
        return not self._buffers

    @property
    def is_linearised(self) -> bool:
        """Whether outputs are taken as linear in how weights vary."""
        return "linearised" in self._buffers

    @property
    def prior_precision(self) -> dict[str, float]:
        """The precision of the prior of each layer, by the path of the parameter."""
        return {path: float(value) for path, value in self.named("prior/").items()}

    @property
    def temperature(self) -> float:
        """What the variance of the weights was multiplied by, to fit held-out data."""
        value = self._buffers.get("temperature")
        return 1.0 if value is None else float(value)

    @property
    def log_marginal(self) -> float:
        """The logarithm of the marginal likelihood of the training data, by Laplace's method."""
        value = self._buffers.get("log_marginal")
        return math.nan if value is None else float(value)

    @property
    def noise(self) -> Tensor | None:
        """In regression, the variance of targets around outputs, of the shape of one output."""
        return self._buffers.get("noise")

    def replace(
        self,
        weights: Mapping[str, UncertainWeights],
        prior: Mapping[str, float],
        model: nn.Module,
        *,
        linearised: bool = True,
        temperature: float = 1.0,
        log_marginal: float = math.nan,
        noise: Tensor | None = None,
    ) -> None:
        """Keep this posterior, fitted to the weights of this model, in place of any other."""
        self._buffers.clear()
        for part in ("variance", "left", "right"):
            found = {path: getattr(each, part) for path, each in weights.items()}
            self.keep(
                f"{part}/", {path: value for path, value in found.items() if value is not None}
            )
        self.keep("prior/", {path: torch.tensor(value) for path, value in prior.items()})
        self._buffers["log_marginal"] = torch.tensor(log_marginal, dtype=torch.float64)
        self._buffers["temperature"] = torch.tensor(temperature)
        self._buffers["fitted_to"] = _sums_of(_tensors_of(model))
        if linearised:
            self._buffers["linearised"] = torch.tensor(True)
        if noise is not None:
            self._buffers["noise"] = noise
        self._seen = ()

    def check(self, model: nn.Module) -> None:
        """Raise an error if the model has other weights than the posterior was fitted to."""
        if self.is_empty:
            return
        fitted_to = self._buffers["fitted_to"]
        assert fitted_to is not None
        tensors = _tensors_of(model)
        seen = (id(fitted_to), *((each.data_ptr(), _version(each)) for each in tensors))
        if seen == self._seen:
            return
        apart = (_sums_of(tensors) - fitted_to.cpu()).abs().amax()
        # Sums may have lost digits on the way through another type; NaN is refused as well.
        if not apart <= _EQUAL * fitted_to[1].abs().cpu().clamp(min=1e-30):
            raise RuntimeError(
                "The posterior of this network was fitted to other weights than it has now: it was "
                "trained on, or weights of another network were loaded. Fit it again "
                "(net = covary.posterior.fit(net, data)), or forget it (net.posterior.clear())."
            )
        self._seen = seen

    def clear(self) -> None:
        """Forget it: weights no longer vary."""
        self._buffers.clear()

    def __repr__(self) -> str:
        prior = ", ".join(f"{path} {value:.3g}" for path, value in self.prior_precision.items())
        if not prior:
            return "Posterior(empty)"
        return f"Posterior(temperature {self.temperature:.3g}; prior precision: {prior})"


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers of real numbers."""
    return [each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]


def _version(value: Tensor) -> int:
    return -1 if value.is_inference() else value._version


@torch.no_grad()
def _sums_of(tensors: Iterable[Tensor]) -> Tensor:
    """(2,) a sum of all numbers, each with a factor of its own, and the root of their squares."""
    total, squares = 0.0, 0.0
    for number, each in enumerate(tensors):
        flat = each.detach().reshape(-1).cpu().double()
        factors = torch.arange(len(flat), dtype=torch.float64).add_(number).cos_()
        total += float(flat @ factors)
        squares += float(flat @ flat)
    return torch.tensor([total, math.sqrt(squares)], dtype=torch.float64)
