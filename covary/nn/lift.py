"""Lift: the layer where a plain tensor becomes Moments."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from covary.covariance import Full, Kind, Rows, check_kind, class_name, start
from covary.linalg import is_finite
from covary.moments import Moments, mean_of
from covary.nn.fidelity import UNKNOWN, Fidelity, TrackingWarning, frames_to_caller
from covary.nn.protocol import Noisy, check_noise, taken
from covary.settings import covariance_grad, is_autocast, values_are_checked
from covary.tracing import is_traced


class Lift(Noisy):
    """Tensor or Moments (B, n) -> Moments, with noise on each input; docs/theory.md, eq. (2).

    The covariance of a plain tensor becomes ``noise**2 * I``. Inputs that have errors of their own
    (``Moments.of(values, std=errors)``, or what another network gives) keep them, and the noise is
    added: C -> C + noise**2 I.

    Samples may be several rows of features, (B, T, n): layers then act on each row, and the
    covariance is that of all T n units of a sample.

    For spiking neurons inputs may be rates instead (``poisson=True``): spikes per ms of independent
    Poisson processes, whose counts have the variance ``x + noise**2``.

    Args:
        noise: the standard deviation sigma_1 of the input, saved and loaded with the weights, as is
            ``poisson``.
        covariance: how the network stores its covariance from here on: ``"full"`` (one matrix per
            sample), ``"tracked"`` (one per sample too, but approximate, and computed only where it
            is looked at: much cheaper), ``"diagonal"`` (variances only) or ``"shared"`` (one matrix
            per mini-batch, in evaluation mode too, so that samples depend on their neighbours; see
            ``covary.with_covariance``); or a class, a subclass of ``covary.covariance.Covariance``.
            With ``"tracked:N"``, in evaluation, layers of up to N units have exact variances, given
            those before them, at the price of as many backward passes. ``"tracked"`` takes the
            least N that was good enough when ``covary.track`` compared with exact covariances.
        poisson: whether inputs are rates. Each sample then has a covariance of its own from the
            start, which full ones cost dearly in wide layers.

    In evaluation a network that tracks warns (``TrackingWarning``), once, if its covariances were
    poor when they were compared, or never compared since the last pass in training mode. Compiled
    ones do not; weights that are changed in evaluation mode go unnoticed.
    """

    fidelity: Tensor | None

    def __init__(
        self,
        noise: float,
        covariance: Kind = "full",
        *,
        poisson: bool = False,
    ) -> None:
        super().__init__()
        self.noise = check_noise(noise, "Lift")
        self.covariance = check_kind(covariance)
        self.poisson = poisson
        self.register_buffer("fidelity", None)
        self._read: tuple[Tensor, Fidelity] | None = None
        # Which table was looked at for warnings, and for which covariance.
        self._judged: tuple[Tensor | None, str] | None = None

    def forward(self, inputs: Tensor | Moments) -> Moments:
        x = mean_of(inputs)
        if isinstance(x, Tensor) and is_autocast(x.device):
            x = x.float()  # a trunk may run in half precision; moments never do
        _check_liftable(x, poisson=self.poisson)
        if self.training and torch.is_grad_enabled() and self.fidelity is not None:
            # What was measured of these weights says nothing of those that come.
            self.fidelity = None
        # Not torch.full: where replicas of a network differ in noise, it is a tensor under vmap.
        var = x.new_zeros(1, 1) + self.noise**2
        with covariance_grad():
            if self.poisson:
                var = x.flatten(0, -2) + var
            exact = Full.independent(var, x.shape[-1])
            if isinstance(inputs, Moments):
                exact = _with_errors(exact, inputs)
            cov = start(self._kind(), exact)
        return Moments(x, cov if x.dim() == 2 else Rows(cov, x.shape[1:-1].numel()))

    def set_fidelity(self, fidelity: Fidelity) -> None:
        """Keep how well tracked covariances agreed with exact ones, to choose and to warn by."""
        # float32, so that devices without float64 take it too.
        self.fidelity = torch.tensor(fidelity.rows, dtype=torch.float32)
        self._known()

    def _kind(self) -> Kind:
        """The covariance to start with: of tracked ones, in evaluation, with the N to use."""
        kind = self.covariance
        if not isinstance(kind, str) or class_name(kind) != "tracked":
            return kind
        if self.training:
            return "tracked"
        known = self._known()
        if not is_traced():
            self._warn_once(known, kind)
        return known.named(kind)

    def _warn_once(self, known: Fidelity, kind: str) -> None:
        """Say what is wrong with this table and covariance, unless it was said."""
        judged = self._judged
        table = None if known is UNKNOWN else self.fidelity  # what vmap stacks must not be kept
        if judged and judged[0] is table and judged[1] == kind:
            return
        self._judged = table, kind
        problem = known.problem(kind)
        if problem:
            warnings.warn(problem, TrackingWarning, stacklevel=frames_to_caller())

    def _known(self) -> Fidelity:
        table = self.fidelity
        if table is None or table.is_meta:
            return UNKNOWN
        if is_traced():  # where the table has no values; they were read before
            return UNKNOWN if self._read is None else self._read[1]
        if self._read is None or self._read[0] is not table:
            if is_functorch_wrapped_tensor(table):  # replicas know of no choice
                return UNKNOWN
            self._read = table, Fidelity.of(table)  # once: on a GPU it has to wait
        return self._read[1]

    def _apply(self, *args: Any, **kwargs: Any) -> Lift:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._known()  # read now, from where it was moved to: a compiled network cannot
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        found = state_dict.get(f"{prefix}fidelity")
        self.fidelity = None if found is None else torch.empty_like(found)
        poisson = f"{prefix}poisson"
        if f"{prefix}noise" in state_dict:
            self.poisson = taken(poisson in state_dict, self.poisson, prefix, "poisson")
        others = {name: value for name, value in state_dict.items() if name != poisson}
        super()._load_from_state_dict(others, prefix, *rest)
        self._known()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.poisson:  # a key that is there or not; of one shape with the noise
            noise = destination[f"{prefix}noise"]
            destination[f"{prefix}poisson"] = torch.ones_like(noise, dtype=torch.bool)

    def extra_repr(self) -> str:
        poisson = ", poisson=True" if self.poisson else ""
        kind = self.covariance
        name = repr(kind) if isinstance(kind, str) else kind.__name__
        return f"noise={self.noise:g}, covariance={name}{poisson}"


def _with_errors(noise: Full, inputs: Moments) -> Full:
    """The covariance of inputs that have one already, and independent noise on each."""
    if inputs.mean.dim() != 2:
        raise ValueError(
            f"Lift takes Moments of shape (batch, features), got {tuple(inputs.mean.shape)}. Put a "
            "covary.nn.Flatten before it."
        )
    errors = Full.of(inputs.cov)
    added = noise.variance if errors.added is None else errors.added + noise.variance
    return Full(errors.matrix, added, errors.gain)


def _check_liftable(x: Tensor, *, poisson: bool) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"Lift takes a Tensor, got {type(x).__name__}. Try torch.as_tensor(x).")
    if x.dtype not in (torch.float32, torch.float64):
        # Half precision has neither the range nor the digits for variances of small noise.
        pixels = "" if x.is_floating_point() else ", and divide pixel values by 255"
        raise TypeError(
            f"Lift needs float32 or float64 input, got {x.dtype}. Convert it first: "
            f"x.float(){pixels}."
        )
    if x.dim() < 2:
        raise ValueError(
            f"Lift expects input of shape (batch, features), got {tuple(x.shape)}. Give a single "
            "sample a batch dimension: x[None]."
        )
    if not values_are_checked() or x.is_meta:
        return
    try:
        finite, negative = is_finite(x), poisson and bool((x < 0).any())
    except RuntimeError as error:
        if "vmap" in str(error):  # where there are no values to look at
            return
        raise
    if not finite:
        bad = (~torch.isfinite(x)).nonzero()
        raise ValueError(
            f"Lift got {len(bad)} NaN or infinite values in an input of shape {tuple(x.shape)}, "
            f"the first at {bad[0].tolist()}. Clean the data, or skip this check within "
            "`with covary.check_values(False):`."
        )
    if negative:
        raise ValueError(
            f"Lift with poisson=True takes rates, 0 or more, and got {x.min().item():g}. Divide "
            "pixel values by 255 without shifting them; for inputs of either sign use constant "
            "noise."
        )
