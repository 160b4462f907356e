"""A cache of W diag(var) W^T: what the first weight of a network makes of the noise of inputs.

Kept for each weight for as long as it lives, outside of modules and values: so nothing of it is
ever copied or saved. It spares every batch but the first the product W W^T.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from covary import linalg


class Gram(NamedTuple):
    """W diag(var) W^T of a weight (m, n) and variances (1, n), and by what to know them again."""

    half: Tensor  # (m, m) as ``linalg.lower_half``
    diagonal: Tensor  # (1, m)
    state: tuple[Any, ...]
    var: Tensor
    tally: Tensor  # (n,)
    sums: Tensor  # (m,) W tally

    def is_of(self, weight: Tensor, var: Tensor) -> bool:
        """Whether weight and variances are still the same."""
        # Changes through .data are not counted, but they show in sums of the weights: other ones
        # for each input, where norms would miss a change of sign or of order.
        return (
            self.state == _state(weight)
            and torch.equal(self.sums, weight @ self.tally)
            and torch.equal(self.var, var)
        )


_grams = WeakTensorKeyDictionary()
_lock = threading.Lock()


def recall(weight: Tensor, var: Tensor) -> Gram | None:
    """What is kept of this weight, if neither it nor the variances have changed since."""
    if not _can_be_kept(weight):
        return None
    with _lock:
        if weight not in _grams:
            return None
        gram: Gram = _grams[weight]
    return gram if gram.is_of(weight, var) else None


def form(weight: Tensor, var: Tensor, owner: Tensor | None) -> Tensor:
    """The lower half of W diag(var) W^T, kept for its owner: the weight, as the layer has it."""
    # Not as tensors of inference mode: what is kept may meet gradients later.
    with torch.inference_mode(False), torch.no_grad():
        half = linalg.lower_half_of_gram(weight * var, weight)
        if owner is not None and _can_be_kept(owner):
            tally = torch.linspace(1, 2, weight.shape[1], dtype=weight.dtype)
            diagonal = F.linear(var, weight.square())
            gram = Gram(half, diagonal, _state(weight), var.clone(), tally, weight @ tally)
            with _lock:
                _grams[owner] = gram
    return half


def version_of(weight: Tensor | None) -> int | None:
    """How often the content was changed; None where torch does not count (compiled, inference)."""
    # Within a pytree that is taken apart, anything may stand in the place of a tensor.
    if torch.compiler.is_compiling() or not isinstance(weight, Tensor) or weight.is_inference():
        return None
    return weight._version


def _can_be_kept(weight: Tensor) -> bool:
    """Whether torch counts changes of the weight, on a CPU (comparing would wait for a device)."""
    if version_of(weight) is None or weight.device.type != "cpu":
        return False
    return not is_functorch_wrapped_tensor(weight)


def _state(weight: Tensor) -> tuple[Any, ...]:
    return version_of(weight), weight.data_ptr(), weight.dtype
