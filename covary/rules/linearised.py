"""Smooth functions of several elements, linearised at the mean: softmax, norms, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.rules.helpers import counted, differentiated, estimated, fixed, kept
from covary.rules.registry import LINEARISED, composed, rule
from covary.varying import Varying


def _linearised(x: Varying, dims: Sequence[int], *args: Any, **kwargs: Any) -> Varying:
    fixed(x, dims)
    function, others, options = x.run.function, kept(x.run, args), kept(x.run, kwargs)
    return differentiated(
        lambda value: function(value, *others, **options), [x], x.samples, LINEARISED
    )


@rule("softmax", "log_softmax", "softmin")
def softmax(x: Varying, dim: int | None = None, *args: Any, **kwargs: Any) -> Varying:
    """Along one dimension, which is not the batch."""
    if dim is None:  # as torch chooses it
        dim = 0 if x.dim() in (0, 1, 3) else 1
    return _linearised(x, [dim], dim, *args, **kwargs)


@rule("normalize")
def normalize(x: Varying, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Varying:
    """x / |x| along one dimension, which is not the batch."""
    return _linearised(x, [dim], p, dim, eps)


@rule("layer_norm", "rms_norm")
def layer_norm(x: Varying, normalized_shape: Sequence[int], *args: Any, **kwargs: Any) -> Varying:
    """Over the last dimensions."""
    dims = list(range(-len(normalized_shape), 0))
    value, mean = _linearised(x, dims, normalized_shape, *args, **kwargs), x.numbers

    weight = kept(x.run, kwargs.get("weight", args[0] if args else None))

    def spread(v: Tensor) -> Tensor:
        # Of each element by itself: divided by the deviation of all, times the scale.
        by = v / mean.var(dims, correction=0, keepdim=True).clamp(min=1e-12)
        return by if weight is None else by * weight.square()

    return estimated(value, [x], spread)


@rule(F.instance_norm)
def instance_norm(
    x: Varying,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Varying:
    """Over the positions of each channel; running statistics move once, in the forward pass."""
    if use_input_stats and running_mean is not None:
        with torch.no_grad():
            F.instance_norm(x.numbers, running_mean, running_var, momentum=momentum)
        running_mean = running_var = None
    return _linearised(
        x, range(1, x.dim()), running_mean, running_var, weight, bias, use_input_stats, momentum,
        eps,
    )  # fmt: skip


@rule("group_norm", "local_response_norm")
def group_norm(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """Over channels and positions of each sample."""
    return _linearised(x, range(1, x.dim()), *args, **kwargs)


@rule("norm", "vector_norm", "var", "std", "logsumexp")
def reduced(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """One number for the elements along some dimensions, none of which is the batch."""
    run, function = x.run, x.run.function
    first = args[0] if args and function.__name__ in ("var", "std", "logsumexp") else None
    dims = kwargs.get("dim", first if first is not None else (args[1] if len(args) > 1 else None))
    if dims is None or isinstance(dims, bool):
        raise run.refusal("It goes over all elements, the batch among them.", "Name its dim=.")
    every = counted(dims, x.dim())
    fixed(x, every)
    mean = function(x.numbers, *args, **kwargs)
    samples = x.samples.without(every) if mean.dim() < x.dim() else x.samples
    return differentiated(lambda v: function(v, *args, **kwargs), [x], samples, LINEARISED)


@composed("scaled_dot_product_attention")
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(q k^T / sqrt(d)) v by its parts, each of which has a rule."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        rows, columns = scores.shape[-2:]
        attn_mask = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    weights = F.softmax(scores, -1)
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return weights @ value


@composed(torch._nested_tensor_from_mask_left_aligned)
def no_nested_tensors(x: Any, mask: Any) -> bool:
    """Let nn.TransformerEncoder take its ordinary path, which pads."""
    return False


@composed(F.multi_head_attention_forward)
def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """nn.MultiheadAttention by its parts, for (L, N, E) values, or (L, E) without a batch."""
    run = next(v for v in (query, key, value) if isinstance(v, Varying)).run
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None:
        raise run.refusal("It has bias_k, bias_v, add_zero_attn or static keys.")
    if query.dim() != 3:
        raise run.refusal("It takes inputs without a batch.", "Give them one: x[None].")
    if use_separate_proj_weight:
        weights: Sequence[Any] = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases: Sequence[Any] = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)

    def heads(given: Any, weight: Tensor, bias: Tensor | None) -> Any:
        # (L, N, E) -> (N, heads, L, E / heads)
        made = F.linear(given, weight, bias)
        shape = (*made.shape[:-1], num_heads, -1)
        return made.reshape(shape).permute(1, 2, 0, 3)

    q, k, v = (heads(*each) for each in zip((query, key, value), weights, biases, strict=True))
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    for mask, dims in ((attn_mask, None), (key_padding_mask, (slice(None), None, None))):
        if mask is None:
            continue
        if dims is not None:
            mask = mask[dims]
        elif mask.dim() == 3:  # (N heads, L, S)
            mask = mask.reshape(-1, num_heads, *mask.shape[1:])
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(mask, -math.inf) if hides else scores + mask
    attended = F.softmax(scores, -1)
    dropped = F.dropout(attended, dropout_p, training) if dropout_p and training else attended
    out = (dropped @ v).permute(2, 0, 1, 3).flatten(-2)
    out = F.linear(out, out_proj_weight, out_proj_bias)
    if not need_weights:
        return out, None
    return out, attended.mean(1) if average_attn_weights else attended
