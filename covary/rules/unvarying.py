"""Functions whose result does not vary (shapes, comparisons), and embeddings."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from covary.rules.helpers import run_of
from covary.rules.registry import CHOICE, about_the_mean, rule
from covary.varying import Varying, plain, varying_in

about_the_mean(
    *("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes"),
    *("requires_grad", "grad_fn", "is_leaf", "grad", "output_nr", "retains_grad"),
    *("is_cuda", "is_cpu", "is_mps", "is_meta", "is_xpu", "is_sparse", "is_quantized"),
    *("is_nested", "is_mkldnn", "is_sparse_csr", "is_vulkan", "is_xla", "is_ipu"),
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "get_device"),
    *("element_size", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
    *("is_inference", "is_conj", "is_neg", "is_same_size", "dense_dim"),
    *("zeros_like", "ones_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "result_type", "can_cast"),
    *(Tensor.__len__, Tensor.__repr__, Tensor.__format__, Tensor.__hash__),
)


@rule(
    *("gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal"),
    *("not_equal", "isnan", "isinf", "isfinite", "argsort", "sign", "isclose"),
    *("logical_not", "logical_and", "logical_or", "signbit", "bitwise_not"),
    *(Tensor.__eq__, Tensor.__ne__, Tensor.__gt__, Tensor.__ge__, Tensor.__lt__, Tensor.__le__),
    *(Tensor.__and__, Tensor.__or__, Tensor.__invert__, "argmax", "argmin"),
    is_choice=True,
)
def compared(*args: Any, **kwargs: Any) -> Any:
    """A comparison of the means. Its result does not vary, and no Python ``if`` may read it."""
    run = run_of(args)
    run.note(CHOICE)
    return run.constant(run.function(*plain(list(args)), **plain(kwargs)), varying_in(args))


# Those of torch itself have another order of arguments.
@rule(F.embedding, F.embedding_bag, is_composed=True, lifts=True)
def embedding(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows of a table: whole numbers cannot vary, so noise enters behind them as into inputs."""
    if isinstance(weight, Varying):
        raise weight.run.refusal("Its table varies.")
    run = x.run
    found: Tensor = run.function(plain(x), weight, *args, **kwargs)
    if x.node == -2:  # chosen by the means, not an input
        return run.constant(found, [x])
    samples = x.samples
    if samples is not None and found.dim() > x.dim():
        samples = samples.moved(lambda index: index[..., None], x.shape)
    return run.lift(found, run.named(), samples)
