"""A tracked covariance: estimated variances, and the recipe that gives the rest by a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from covary import linalg
from covary.covariance.base import (
    EVERY,
    Covariance,
    Selection,
    as_covariance,
    register_value,
)
from covary.covariance.exact import Full
from covary.covariance.grams import form, recall, version_of
from covary.settings import without_autocast

# A layer of more units has its variances swept in blocks, without the covariances in between.
_FEW_UNITS = 64


class Probe(NamedTuple):
    """How corrections are measured during a forward pass."""

    samples: int  # of the batch, the first so many
    units: int  # of each layer, at most
    momentum: float  # weight of the new measurement in the running average


def _check_weights(cov: Tracked) -> None:
    cov._check_weight()  # what has changed already must not pass for unchanged


@partial(
    register_value, constants=["exact_width"], derived=["version", "owner"], check=_check_weights
)
@dataclass(frozen=True, eq=False, repr=False)
class Tracked(Covariance):
    """``gain_i gain_j (W C W^T)_ij`` plus ``excess`` on the diagonal, for a C that is a recipe too.

    Activations take each unit's variance as an ``estimate``: what the squares of the weights make
    of the estimates before them, times a measured correction (docs/theory.md, eq. 28). No matrix
    is formed on the way. Whoever asks for the covariance gets it by one sweep back through the
    recipe: as many backward passes as there are units here, instead of a forward pass for every
    hidden unit. With exact estimates the result is exact (eq. 27).

    Attributes:
        before: what the weight is applied to; without a weight, the exact covariance at which the
            recipe starts.
        weight: (m, n), or None.
        gain: (1 | B, m), or None for 1.
        excess: (1 | B, m), or None for 0.
        estimate: (1 | B, m) the variance of each unit.
        exact_width: layers of up to so many units form their covariance at once, so that their
            variances are exact, given those before.
        version: of the weight's content; an optimizer may have changed it before the sweep.
        owner: the weight as its layer has it, where W C W^T may be kept for the next batch.
    """

    before: Covariance
    weight: Tensor | None
    gain: Tensor | None
    excess: Tensor | None
    estimate: Tensor
    exact_width: int = 0
    version: int | None = None
    owner: Tensor | None = None

    def __post_init__(self) -> None:
        if self.version is None:
            object.__setattr__(self, "version", version_of(self.weight))

    def __getstate__(self) -> dict[str, Any]:
        self._check_weight()
        return {**self.__dict__, "owner": None, "_half": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has a weight of its own, whose changes are counted anew.
        self.__dict__.update(state | {"version": version_of(state["weight"])})

    @classmethod
    def start(cls, var: Tensor, n: int) -> Tracked:
        inputs = Full.start(var, n)
        return cls(inputs, None, None, None, inputs.variance)

    @property
    def variance(self) -> Tensor:
        units = self.estimate.shape[-1]
        if units <= _FEW_UNITS or "_known" in self.__dict__:
            return self.dense().diagonal(dim1=-2, dim2=-1)
        edges = range(0, units, _FEW_UNITS)
        blocks = [torch.arange(low, min(low + _FEW_UNITS, units)) for low in edges]
        return torch.cat([self.variance_of(block) for block in blocks], -1)

    @property
    def unit_variance(self) -> Tensor:
        return self.estimate

    def dense(self) -> Tensor:
        # Variance, entropy and covariance are often wanted together, and one sweep gives them all.
        known: Tensor | None = self.__dict__.get("_known")
        wants_grad = torch.is_grad_enabled() and self.estimate.requires_grad
        if known is None or (wants_grad and not known.requires_grad):
            with torch.set_grad_enabled(wants_grad), without_autocast(self.estimate.device):
                known = self._swept()
            if not torch.compiler.is_compiling():
                self.__dict__["_known"] = known
        # A copy, small beside the sweep: whoever changes it in place must not change this value.
        return known.clone() if wants_grad else known.detach().clone()

    def linear(self, weight: Tensor) -> Tracked:
        owner = None
        if not torch.is_grad_enabled():
            owner = weight
            weight = weight.detach()  # the sweep comes later, when gradients may be on again
        if weight.shape[0] <= self.exact_width:
            formed = Full(self.quadratic(weight[None]))
            return Tracked(formed, None, None, None, formed.variance, self.exact_width)
        if owner is None or not self._is_uncorrelated or len(self.estimate) != 1:
            estimate = F.linear(self.estimate, weight.square())
            return Tracked(self, weight, None, None, estimate, self.exact_width)
        known = recall(owner, self.estimate)
        estimate = F.linear(self.estimate, weight.square()) if known is None else known.diagonal
        behind = Tracked(self, weight, None, None, estimate, self.exact_width, owner=owner)
        if known is not None:
            behind.__dict__["_half"] = known.half
        return behind

    def add_noise(self, var: float) -> Tracked:
        before = self.estimate.new_zeros(1, 1) if self.excess is None else self.excess
        return self._with(excess=before + var, estimate=self.estimate + var)

    def gate(self, gain: Tensor, variance: Tensor) -> Tracked:
        # Never negative but for round-off: eq. (7).
        excess = torch.addcmul(variance, gain * self.estimate, gain, value=-1).clamp(min=0)
        if self.excess is not None:
            excess = torch.addcmul(excess, gain * self.excess, gain)
        gain = gain if self.gain is None else self.gain * gain
        return self._with(gain=gain, excess=excess, estimate=variance.expand_as(excess))

    def scale(self, factor: Tensor) -> Tracked:
        gain = factor if self.gain is None else self.gain * factor
        excess = None if self.excess is None else factor * self.excess * factor
        return self._with(gain=gain, excess=excess, estimate=self.estimate * factor.square())

    def select(self, samples: Selection) -> Tracked:
        if isinstance(samples, slice) and samples == EVERY:
            return self
        selected = self._with(
            before=self.before.select(samples),
            gain=None if self.gain is None else linalg.rows(self.gain, samples),
            excess=None if self.excess is None else linalg.rows(self.excess, samples),
            estimate=linalg.rows(self.estimate, samples),
        )
        if "_known" in self.__dict__:
            selected.__dict__["_known"] = linalg.rows(self.__dict__["_known"], samples, dim=-3)
        return selected

    @property
    def is_exact(self) -> bool:
        """Whether the estimates are exact: formed, or of weights on units that share no noise."""
        return self.weight is None or self._before()._is_uncorrelated

    @property
    def _is_uncorrelated(self) -> bool:
        """Whether units share no noise yet, so that the covariance is diag(estimate)."""
        before = self.before
        return self.weight is None and isinstance(before, Full) and before.matrix is None

    def corrected(self, factor: Tensor) -> Tracked:
        """The same with estimates times a factor (1 | B, m), unless they are exact."""
        return self if self.is_exact else self._with(estimate=self.estimate * factor)

    def variance_of(self, units: Tensor) -> Tensor:
        """(1 | B, u) variances of some units (u,), by a sweep of u rows."""
        wants_grad = torch.is_grad_enabled() and self.estimate.requires_grad
        with torch.set_grad_enabled(wants_grad), without_autocast(self.estimate.device):
            if self.weight is None:
                core = self.before.variance[..., units]
            else:
                rows = self._current_weight()[..., units, :].unsqueeze(-3)
                # Where weights cancel, round-off can leave -1e-9; a variance is never negative.
                core = self._before().quadratic(rows).diagonal(dim1=-2, dim2=-1).clamp(min=0)
            if self.gain is not None:
                gain = _each(self.gain, self.estimate)[..., units]
                core = gain * core * gain
            if self.excess is not None:
                core = core + _each(self.excess, self.estimate)[..., units]
            return core

    def quadratic(self, rows: Tensor) -> Tensor:
        """R C R^T: the sweep, some samples at a time. docs/theory.md, eq. (27)."""
        wants_grad = torch.is_grad_enabled() and (self.estimate.requires_grad or rows.requires_grad)
        with torch.set_grad_enabled(wants_grad), without_autocast(rows.device):
            if self.estimate.dim() > 2:
                return self._sweep(rows)
            batch, count = linalg.batch_of(self.estimate, rows), rows.shape[-2]
            first = self._first()
            if first is not None and first._is_plain(rows) and first._pays_in_common(batch * count):
                first._half_in_common()  # one chunk alone might find it not worth while
            numbers = count * self._widest()

            def some(samples: slice) -> Tensor:
                return self.select(samples)._sweep(linalg.rows(rows, samples, dim=-3))

            return linalg.in_chunks(some, batch, numbers, rows.device)

    def _sweep(self, rows: Tensor) -> Tensor:
        node, total = self, None
        while node.weight is not None:
            weight, before = node._current_weight(), node._before()
            known = node.__dict__.get("_half") is not None
            if known or node._pays_in_common(rows.shape[-3] * rows.shape[-2]):
                return _sum(total, node._quadratic_in_common(rows))
            rows, total = node._passed(rows, total)
            rows = linalg.tall_product(rows, weight)
            node = before
        rows, total = node._passed(rows, total)
        return _sum(total, node.before.quadratic(rows))

    def _passed(self, rows: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rows behind the gain, and the total with what the excess adds to it."""
        if self.excess is not None:
            total = _sum(total, linalg.row_products(rows * self.excess[..., None, :], rows))
        if self.gain is not None:
            rows = rows * self.gain[..., None, :]
        return rows, total

    def _quadratic_in_common(self, rows: Tensor) -> Tensor:
        """The rest of a sweep, where W C W^T is the same for all samples: it is formed once."""
        if not self._is_plain(rows):
            matrix = self._before().quadratic(self._current_weight().unsqueeze(-3)).squeeze(-3)
            passed, total = self._passed(rows, None)
            return _sum(total, linalg.row_products(linalg.tall_product(passed, matrix), passed))
        gain = self.estimate.new_ones(1, 1) if self.gain is None else self.gain
        excess = self.estimate.new_zeros(1, 1) if self.excess is None else self.excess
        return linalg.gated_quadratic(rows, self._half_in_common(), gain, excess)

    def _pays_in_common(self, rows: int) -> bool:
        """Whether W C W^T is the same for all samples, and so many rows make up for forming it.

        It is (m, m), and half of it is multiplied by every row, instead of the (m, n) weight.
        """
        assert self.weight is not None
        m, n = self.weight.shape[-2:]
        return self._before().estimate.shape[-2] == 1 and rows > m and m < 2 * n

    def _is_plain(self, rows: Tensor) -> bool:
        """Whether values can be computed in place: no gradient, no compiler, no vmap."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or rows.dim() > 3:
            return False
        # Of inputs under vmap, the first rows are weights that are not; but the estimates are.
        return not any(map(is_functorch_wrapped_tensor, (rows, self.estimate)))

    def _half_in_common(self) -> Tensor:
        """(m, m) W C W^T as ``linalg.lower_half``: chunks of samples and later layers need it."""
        half: Tensor | None = self.__dict__.get("_half")
        if half is None:
            weight, before = self._current_weight(), self._before()
            if before._is_uncorrelated:
                half = form(weight, before.estimate, self.owner)
            else:
                half = linalg.lower_half(before.quadratic(weight[None])[0])
            self.__dict__["_half"] = half
        return half

    def _swept(self) -> Tensor:
        if self.weight is None:
            matrix = self.before.dense()
        else:
            matrix = self._before().quadratic(self._current_weight().unsqueeze(-3))
        if self.gain is not None:
            matrix = self.gain[..., None] * matrix * self.gain[..., None, :]
        matrix = as_covariance(matrix)
        if self.excess is not None:
            matrix = matrix + torch.diag_embed(_each(self.excess, self.estimate))
        return matrix

    def _first(self) -> Tracked | None:
        """The node of the first weight on the way from the input."""
        node, first = self, None
        while node.weight is not None:
            first, node = node, node._before()
        return first

    def _widest(self) -> int:
        """The most units that a sweep back from here meets."""
        node, widest = self, self.estimate.shape[-1]
        while node.weight is not None:
            node = node._before()
            if node.weight is not None:  # inputs are met by what is formed in common, if at all
                widest = max(widest, node.estimate.shape[-1])
        return widest

    def _before(self) -> Tracked:
        assert isinstance(self.before, Tracked)  # whatever has a weight was made by linear()
        return self.before

    def _with(self, **changes: Any) -> Tracked:
        """``dataclasses.replace``, at a fraction of its cost; without what was swept."""
        changed = object.__new__(Tracked)
        changed.__dict__.update(self.__dict__)
        changed.__dict__.pop("_known", None)
        changed.__dict__.update(changes)
        return changed

    def _current_weight(self) -> Tensor:
        assert self.weight is not None
        self._check_weight()
        return self.weight

    def _check_weight(self) -> None:
        if self.version is not None and version_of(self.weight) != self.version:
            raise RuntimeError(
                "The weights were changed after the forward pass, before its covariance was looked "
                "at. Look first (out.covariance_matrix, out.entropy()), then step the optimizer."
            )


def _each(value: Tensor, estimate: Tensor) -> Tensor:
    """(1 | B, 1 | m) for each unit: (1 | B, m)."""
    return value.expand(*value.shape[:-1], estimate.shape[-1])


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part
