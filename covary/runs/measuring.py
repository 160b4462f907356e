"""Every number of every sample: what a network makes of inputs, and how unsure it is of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary.models import noise_of, with_noise
from covary.moments import Moments
from covary.nn import Activation, Linear
from covary.recording import record
from covary.runs.uncertainty import HeldOut
from covary.uncertainty import scores
from covary.uncertainty.features import FEATURES

Arrays = dict[str, np.ndarray]
Progress = Callable[[Sequence[Any], str], Iterator[Any]]
_BATCH = 128
# The entropy of a wide hidden layer takes its eigenvalues: for so many samples, not for all.
LAYER_SAMPLES = 500
# Inputs that the report shows, of each of four kinds.
_GALLERY = 12
# What scores are called among the other arrays.
SCORE = "score:"


def layer_names(net: nn.Module) -> list[str]:
    """The layers that entropies are taken of: every activation, and the output."""
    activations = [name for name, layer in net.named_modules() if isinstance(layer, Activation)]
    linears = [name for name, layer in net.named_modules() if isinstance(layer, Linear)]
    return [*activations, linears[-1]]


def numbered(progress: Progress | None, i: int, count: int) -> Progress | None:
    """The same for one of several inputs or parts, whose names say which."""
    if progress is None:
        return None
    return lambda items, name: progress(items, f"{i + 1}/{count}, {name}")


@torch.no_grad()
def measure(
    net: nn.Module,
    x: Tensor,
    y: Tensor | None,
    name: str,
    *,
    held_out: HeldOut,
    classify: bool,
    seed: int,
    progress: Progress | None,
) -> Arrays:
    """Moments, scores and calibrated predictions of every sample, layers' entropies of some."""
    device = next(net.parameters()).device
    collected: dict[str, list[np.ndarray]] = {}
    batches = torch.split(torch.arange(len(x)), _BATCH)
    for rows in progress(batches, name) if progress else batches:
        for key, value in _measured(net, x[rows].to(device), held_out, classify).items():
            collected.setdefault(key, []).append(value.cpu().numpy())
    arrays = {key: np.concatenate(values) for key, values in collected.items()}
    wrong = np.zeros(len(x), dtype=bool)
    if y is not None:
        arrays["target" if y.is_floating_point() else "label"] = y.numpy()
        if not y.is_floating_point():
            wrong = arrays["mean"].argmax(1) != arrays["label"]
    rows = some_of_each(wrong, LAYER_SAMPLES, seed)
    arrays["layer_entropy"] = np.full((len(x), len(layer_names(net))), np.nan, dtype=np.float32)
    chunks = np.array_split(rows, max(1, len(rows) // _BATCH))
    for some in progress(chunks, f"{name}, by layer") if progress else chunks:
        with record(net) as layers:
            net(x[some].to(device))
        chosen = {layer: layers[layer] for layer in layer_names(net)}
        entropies = scores.layer_entropies(chosen).values()
        arrays["layer_entropy"][some] = np.stack([each.cpu().numpy() for each in entropies], 1)
    gallery = _gallery(arrays["entropy"], wrong)
    return arrays | {"input": x[gallery].numpy(), "input_index": gallery}


def _measured(net: nn.Module, x: Tensor, held_out: HeldOut, classify: bool) -> dict[str, Tensor]:
    """All of one batch."""
    kind = FEATURES["moments"]
    with kind.watch(net) as seen:
        out: Moments = net(x)
    found = {"mean": out.mean, "variance": out.variance, "entropy": out.entropy()}
    if not classify:
        found["covariance"] = out.covariance_matrix
    for name, score in (scores.SCORES if classify else scores.COVARIANCE_SCORES).items():
        found[SCORE + name] = score(out)
    for name, fitted in held_out.scores.items():
        found[SCORE + name] = (
            fitted.of(kind.of(seen, out).cpu(), out.mean.cpu())
            if fitted.features == "moments"
            else fitted(net, x)
        )
    if held_out.calibration is not None:
        quiet = held_out.noise
        if quiet is not None and list(quiet) != noise_of(net):
            out = with_noise(net, quiet)(x)
        calibrated = held_out.calibration.to(x.device)(out)
        if classify:
            found["calibrated_probabilities"] = scores.expected_softmax(calibrated).float()
        else:
            found["calibrated_mean"] = calibrated.mean
            found["calibrated_variance"] = calibrated.variance
            found["calibrated_covariance"] = calibrated.covariance_matrix
    return found


def some_of_each(wrong: np.ndarray, count: int, seed: int) -> np.ndarray:
    """(k,) rows to look at closely: half of them wrong predictions if there are so many."""
    order = np.random.default_rng(seed).permutation(len(wrong))
    few = order[wrong[order]][: count // 2]
    rest = order[~wrong[order]][: count - len(few)]
    return np.sort(np.concatenate([few, rest]))


def _gallery(entropy: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Rows of the least and most certain samples, of the surest wrong and least sure right ones."""
    order = np.argsort(entropy, kind="stable")
    right_order, wrong_order = order[~wrong[order]], order[wrong[order]]
    chosen = [
        order[:_GALLERY],
        order[-_GALLERY:],
        wrong_order[:_GALLERY],
        right_order[-_GALLERY:],
    ]
    return np.unique(np.concatenate(chosen))
