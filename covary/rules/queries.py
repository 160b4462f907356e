"""Functions that need only the mean, and whose result does not vary: shapes, types, zeros."""

from __future__ import annotations

from torch import Tensor

from covary.rules.registry import about_the_mean

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
