"""Attention, by its parts: products linearised at the means, and a softmax."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.rules.helpers import run_of
from covary.rules.registry import composed


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
    """softmax(q k^T / sqrt(d)) v."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if is_causal:
        sizes = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = ~attn_mask  # here true where it hides
    return _attended(query * factor, key, value, [attn_mask], dropout_p, training=True)[0]


def _attended(
    q: Any, k: Any, v: Any, masks: Sequence[Any], dropout: float, *, training: bool
) -> tuple[Any, Any]:
    """softmax(q k^T) v, and the softmax; masks hide scores where they are true, or are added."""
    scores = q @ k.transpose(-2, -1)
    for mask in masks:
        if mask is not None:
            hides = mask.dtype == torch.bool
            scores = scores.masked_fill(mask, -math.inf) if hides else scores + mask
    weights = F.softmax(scores, -1)
    return (F.dropout(weights, dropout, training) if dropout else weights) @ v, weights


@composed(torch._nested_tensor_from_mask_left_aligned)
def no_nested_tensors(x: Any, mask: Any) -> bool:
    """Let nn.TransformerEncoder take its ordinary path, which pads."""
    return False


@composed(F.multi_head_attention_forward)
def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """nn.MultiheadAttention for (L, N, E) values."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    inputs = given.query, given.key, given.value
    extras = given.bias_k, given.bias_v, given.static_k
    if given.add_zero_attn or any(each is not None for each in extras):
        raise run_of(inputs).refusal("It has bias_k, bias_v, add_zero_attn or static keys.")
    if given.query.dim() != 3:
        raise run_of(inputs).refusal("It takes inputs without a batch.", "Give them one: x[None].")
    is_packed = not given.use_separate_proj_weight
    if is_packed and inputs[0] is inputs[1] is inputs[2]:  # one product for all three
        made = F.linear(inputs[0], given.in_proj_weight, given.in_proj_bias).chunk(3, -1)
    else:
        weights = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
        weights = given.in_proj_weight.chunk(3) if is_packed else weights
        biases = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
        made = tuple(F.linear(*each) for each in zip(inputs, weights, biases, strict=True))
    # (L, N, E) -> (N, heads, L, E / heads)
    q, k, v = (
        each.reshape(*each.shape[:-1], given.num_heads, -1).permute(1, 2, 0, 3) for each in made
    )
    mask, padding = given.attn_mask, given.key_padding_mask
    if mask is not None and mask.dim() == 3:  # (N heads, L, S)
        mask = mask.reshape(-1, given.num_heads, *mask.shape[1:])
    if padding is not None:
        padding = padding[:, None, None]
    out, attended = _attended(
        q / math.sqrt(q.shape[-1]), k, v, [mask, padding], given.dropout_p, training=given.training
    )
    out = out.permute(2, 0, 1, 3).flatten(-2)
    out = F.linear(out, given.out_proj_weight, given.out_proj_bias)
    if not given.need_weights:
        return out, None
    return out, attended.mean(1) if given.average_attn_weights else attended
