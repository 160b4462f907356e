"""A covariance as a recipe: each unit's variance, and how the rest came about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from covary import linalg
from covary.covariance.base import EVERY, Covariance, as_covariance, register_value
from covary.covariance.exact import Full, Independent, Isotropic
from covary.settings import without_autocast

# A layer of more units has its variances swept in blocks, without the covariances in between.
_FEW_UNITS = 64


class Probe(NamedTuple):
    """How corrections are measured during a forward pass."""

    samples: int  # of the batch, the first so many
    units: int  # of each layer, at most
    momentum: float  # weight of the new measurement in the running average


class Memo:
    """What a weight made of the input's noise, for as long as both stay the same.

    Kept by the layer that has the weight, it spares every batch but the first the product W W^T.
    """

    def __init__(self) -> None:
        self._kept: tuple[Any, Tensor, list[linalg.Block]] | None = None

    def half_of_gram(self, weight: Tensor, var: Tensor) -> list[linalg.Block]:
        """W diag(var) W^T as ``linalg.lower_half``, for (m, n) and (1, n)."""
        version = _version(weight)
        if version is None or weight.device.type != "cpu":  # comparing would wait for the device
            return linalg.lower_half_of_gram(weight * var, weight)
        kept, now = self._kept, (version, weight.data_ptr(), weight.dtype)
        # Changes through .data are not counted, but they show in sums of the weights: other ones
        # for each input, where norms would miss a change of sign or of order.
        tally = torch.linspace(1, 2, weight.shape[1], dtype=weight.dtype, device=weight.device)
        values = torch.cat([weight @ tally, var[0]])
        if kept is None or kept[0] != now or not torch.equal(kept[1], values):
            half = linalg.lower_half_of_gram(weight * var, weight)
            self._kept = kept = now, values, half
        return kept[2]

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()  # neither copied nor saved with its layer


@partial(register_value, constants=["exact_width", "probe"], derived=["memo", "version"])
@dataclass(frozen=True, eq=False, repr=False)
class Tracked(Covariance):
    """``gain_i gain_j (W C W^T)_ij`` plus ``excess`` on the diagonal, for a C that is a recipe too.

    Activations take each unit's variance as an ``estimate``: what the squares of the weights make
    of the estimates before them, times a measured correction (docs/theory.md, eq. 23). No matrix
    is formed on the way. Whoever asks for the covariance gets it by one sweep back through the
    recipe: as many backward passes as there are units here, instead of a forward pass for every
    hidden unit. With exact estimates the result is exact (eq. 22).

    Attributes:
        before: what the weight is applied to; without a weight, a covariance that is held exactly,
            where the recipe starts.
        weight: (m, n), or None.
        gain: (1 | B, m), or None for 1.
        excess: (1 | B, m), or None for 0.
        estimate: (1 | B, m) the variance of each unit.
        exact_width: layers of up to so many units form their covariance at once, so that their
            variances are exact, given those before.
        probe: how corrections are measured, if they are.
        memo: what the layer that has the weight remembers, if anything.
        version: of the weight's content; an optimizer may have changed it before the sweep.
    """

    before: Covariance
    weight: Tensor | None
    gain: Tensor | None
    excess: Tensor | None
    estimate: Tensor
    exact_width: int = 0
    probe: Probe | None = None
    memo: Memo | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        if self.version is None:
            object.__setattr__(self, "version", _version(self.weight))

    def __getstate__(self) -> dict[str, Any]:
        if self.weight is not None:
            self._current_weight()  # what has changed already must not pass for unchanged
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has a weight of its own, whose changes are counted anew.
        self.__dict__.update(state | {"version": _version(state["weight"])})

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
        if not torch.is_grad_enabled():
            weight = weight.detach()  # the sweep comes later, when gradients may be on again
        ungated = partial(
            Tracked, gain=None, excess=None, exact_width=self.exact_width, probe=self.probe
        )
        if weight.shape[0] <= self.exact_width:
            formed = Full(self._products(weight[None]), torch.zeros_like(self.estimate[:1, :1]))
            return ungated(before=formed, weight=None, estimate=formed.variance)
        return ungated(before=self, weight=weight, estimate=self._estimate_behind(weight))

    def _estimate_behind(self, weight: Tensor) -> Tensor:
        if self.weight is None and isinstance(self.before, Isotropic) and self.gain is None:
            # All inputs alike, as at the start of a network: one pass over the weights.
            return self.estimate[:, :1] * weight.square().sum(1)
        return F.linear(self.estimate, weight.square())

    def add_noise(self, var: float) -> Tracked:
        before = self.estimate.new_zeros(1, 1) if self.excess is None else self.excess
        return self._with(excess=before + var, estimate=self.estimate + var)

    def activate(self, gain: Tensor, variance: Tensor) -> Tracked:
        # Never negative but for round-off: eq. (7).
        linear_response = gain * self.estimate * gain
        excess = (variance - linear_response).clamp(min=0)
        if self.excess is not None:
            excess = excess + gain * self.excess * gain
        gain = gain if self.gain is None else self.gain * gain
        return self._with(gain=gain, excess=excess, estimate=variance.expand_as(excess))

    def scale(self, factor: Tensor) -> Tracked:
        gain = factor if self.gain is None else self.gain * factor
        excess = None if self.excess is None else factor * self.excess * factor
        return self._with(gain=gain, excess=excess, estimate=self.estimate * factor.square())

    @property
    def is_exact(self) -> bool:
        """Whether the estimates are exact: formed, or of weights on units that share no noise."""
        if self.weight is None:
            return True
        before = self._before()
        return before.weight is None and not isinstance(before.before, Full)

    def corrected(self, factor: Tensor) -> Tracked:
        """The same with estimates times a factor (1 | B, m), unless they are exact."""
        return self if self.is_exact else self._with(estimate=self.estimate * factor)

    def remembering(self, memo: Memo) -> Tracked:
        """The same with the memo of the layer that has the weight."""
        return self._with(memo=memo)

    def variance_of(self, units: Tensor, samples: slice = EVERY) -> Tensor:
        """(1 | b, u) variances of some units (u,) and samples, by a sweep of u rows."""
        wants_grad = torch.is_grad_enabled() and self.estimate.requires_grad
        with torch.set_grad_enabled(wants_grad), without_autocast(self.estimate.device):
            return self._variance_of(units, samples)

    def _variance_of(self, units: Tensor, samples: slice) -> Tensor:
        if self.weight is None:
            core = linalg.rows(self.before.variance, samples)[..., units]
        else:
            rows = self._current_weight()[..., units, :].unsqueeze(-3)
            # Where weights cancel, round-off can leave -1e-9 here; a variance is never negative.
            core = self._before().quadratic(rows, samples).diagonal(dim1=-2, dim2=-1).clamp(min=0)
        if self.gain is not None:
            gain = linalg.rows(self.gain, samples)
            gain = gain.expand(*gain.shape[:-1], self.estimate.shape[-1])[..., units]
            core = gain * core * gain
        if self.excess is not None:
            excess = linalg.rows(self.excess, samples)
            core = core + excess.expand(*excess.shape[:-1], self.estimate.shape[-1])[..., units]
        return core

    def quadratic(self, rows: Tensor, samples: slice = EVERY) -> Tensor:
        """R C R^T: the sweep. docs/theory.md, eq. (22)."""
        node, total = self, torch.zeros_like(rows[..., :1, :1])
        while node.weight is not None:
            weight, before = node._current_weight(), node._before()
            if "_half" in node.__dict__ or node._pays_in_common(rows.shape[-3] * rows.shape[-2]):
                return total + node._quadratic_in_common(rows, samples)
            rows, total = node._passed(rows, samples, total)
            rows = linalg.tall_product(rows, weight)
            node = before
        rows, total = node._passed(rows, samples, total)
        return total + node.before.quadratic(rows, samples)

    def _passed(self, rows: Tensor, samples: slice, total: Tensor) -> tuple[Tensor, Tensor]:
        """Rows behind the gain, and the total with what the excess adds to it."""
        if self.excess is not None:
            excess = linalg.rows(self.excess, samples)[..., None, :]
            total = total + (rows * excess) @ rows.mT
        if self.gain is not None:
            rows = rows * linalg.rows(self.gain, samples)[..., None, :]
        return rows, total

    def _quadratic_in_common(self, rows: Tensor, samples: slice) -> Tensor:
        """The rest of a sweep, where W C W^T is the same for all samples: it is formed once."""
        if not self._is_plain(rows):
            matrix = self._before().quadratic(self._current_weight().unsqueeze(-3)).squeeze(-3)
            passed, total = self._passed(rows, samples, torch.zeros_like(rows[..., :1, :1]))
            return total + linalg.tall_product(passed, matrix) @ passed.mT
        gain = self.estimate.new_ones(1, 1) if self.gain is None else self.gain
        excess = self.estimate.new_zeros(1, 1) if self.excess is None else self.excess
        return linalg.gated_quadratic(
            rows, self._half_in_common(), linalg.rows(gain, samples), linalg.rows(excess, samples)
        )

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

    def _half_in_common(self) -> list[linalg.Block]:
        # Chunks of samples, and probes of several layers, all need it.
        half: list[linalg.Block] | None = self.__dict__.get("_half")
        if half is None:
            weight, before = self._current_weight(), self._before()
            if before.weight is None and isinstance(before.before, Isotropic):
                half = (self.memo or Memo()).half_of_gram(weight, before.estimate)
            else:
                half = linalg.lower_half(before.quadratic(weight[None])[0])
            self.__dict__["_half"] = half
        return half

    def _swept(self) -> Tensor:
        if self.weight is None:
            matrix = self.before.dense()
        else:
            matrix = self._before()._products(self._current_weight().unsqueeze(-3))
        if self.gain is not None:
            matrix = self.gain[..., None] * matrix * self.gain[..., None, :]
        matrix = as_covariance(matrix)
        if self.excess is not None:
            matrix = matrix + torch.diag_embed(self.excess.expand(self.estimate.shape))
        return matrix

    def _products(self, rows: Tensor) -> Tensor:
        """R C R^T for rows (1, r, n) that all samples have in common, some samples at a time."""
        if self.estimate.dim() > 2:
            return self.quadratic(rows)
        batch, count = len(self.estimate), rows.shape[-2]
        first = self._first()
        if first is not None and first._is_plain(rows) and first._pays_in_common(batch * count):
            first._half_in_common()  # one chunk alone might find it not worth while
        numbers = 2 * count * self._widest()  # the rows, and what becomes of them
        return linalg.in_chunks(partial(self.quadratic, rows), batch, numbers, rows.device)

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
        changed.__dict__.pop("_half", None)
        changed.__dict__.update(changes)
        return changed

    def _current_weight(self) -> Tensor:
        assert self.weight is not None
        if self.version is not None and _version(self.weight) != self.version:
            raise RuntimeError(
                "The weights were changed after the forward pass, before its covariance was looked "
                "at. Look first (out.covariance_matrix, out.entropy()), then step the optimizer."
            )
        return self.weight


def start_tracked(inputs: Isotropic | Independent) -> Tracked:
    """The covariance of independent inputs, where a recipe starts."""
    return Tracked(inputs, None, None, None, inputs.variance)


def _version(weight: Tensor | None) -> int | None:
    """How often the content was changed; None where nobody counts (compiled, inference mode)."""
    # Within a pytree that is taken apart, anything may stand in the place of a tensor.
    if torch.compiler.is_compiling() or not isinstance(weight, Tensor) or weight.is_inference():
        return None
    return weight._version
