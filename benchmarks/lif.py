"""LIF moments: how fast beside the package of the paper's authors, and how exact.

    pip install --no-deps moment-neural-network erfi_pytorch     # for this alone
    python -m benchmarks.lif

Mean, variance and gain of 50,000 neurons, in turns in one process, with one thread and with all.
The other package (Chebyshev pieces in numpy and scipy, float64) gives standard deviations and gains
scaled by them, its own way to say the same. Errors are relative, against 30 digits, of those of
400 neurons with mu in [-10, 10] and sigma in [0.001, 20] that fire more than 1e-12 times per ms.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from benchmarks import tables
from covary.activations import LIF, lif
from covary.runs import costs
from tests import reference_lif

ELEMENTS = 50_000
ROUNDS = 40
LEAST_TIMES_FASTER = 5.0
# The same in calls of scipy's Dawson function on as many numbers, for tests, which do without that
# package: moments that were 6.1 times faster took as long as 3.1 of them.
MOST_OVER_DAWSON = 3.1 * 6.1 / LEAST_TIMES_FASTER
RANGES = {"all": ((-10, 10), (1e-3, 20)), "responsive": ((-1, 4), (0.5, 3))}  # of mu and sigma
MOST_ERROR = {"float32": 1e-5, "float64": 1e-9}
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def speed(peer: Any) -> dict[str, dict[str, float]]:
    """How many times faster than the peer, by range of inputs and type."""
    random = np.random.default_rng(0)
    found = {}
    for name, (means, deviations) in RANGES.items():
        mu, sigma = random.uniform(*means, ELEMENTS), random.uniform(*deviations, ELEMENTS)

        def theirs(mu: np.ndarray = mu, sigma: np.ndarray = sigma) -> None:
            mean = peer.forward_fast_mean(mu, sigma)
            deviation = peer.forward_fast_std(mu, sigma, mean)
            peer.forward_fast_chi(mu, sigma, mean, deviation)

        ways: dict[str, Any] = {"peer": theirs}
        for kind, dtype in _DTYPES.items():
            arguments = torch.tensor(mu, dtype=dtype), torch.tensor(sigma**2, dtype=dtype)
            ways[kind] = lambda arguments=arguments: lif()(*arguments)
        times = costs.fastest(ways, range(ROUNDS))
        found[name] = {kind: times["peer"] / times[kind] for kind in _DTYPES}
    return found


def accuracy() -> dict[str, dict[str, float]]:
    """The largest relative error of each moment, by type."""
    random = np.random.default_rng(1)
    neuron = LIF()
    sigma = 10 ** random.uniform(-3, np.log10(20), 400)
    near = neuron.drive_at_threshold + random.uniform(-5, 3, 400) * np.sqrt(neuron.leak) * sigma
    mu = np.where(np.arange(400) % 2, random.uniform(-10, 10, 400), near.clip(-10, 10))
    fires = (neuron.drive_at_threshold - mu) / (np.sqrt(neuron.leak) * sigma) < 5.5
    found = {}
    for kind, dtype in _DTYPES.items():
        given = [torch.tensor(values[fires], dtype=dtype) for values in (mu, sigma**2)]
        out = lif()(*given)
        worst = dict.fromkeys(out._fields, 0.0)
        for i, (m, v) in enumerate(zip(given[0].tolist(), given[1].tolist(), strict=True)):
            true = reference_lif.moments(m, v, neuron)
            if true.mean > 1e-12:
                for name in worst:
                    error = abs(getattr(out, name)[i].item() / getattr(true, name) - 1)
                    worst[name] = max(worst[name], float(error))
        found[kind] = worst
    return found


def broken_promises(measured: dict[str, Any]) -> list[str]:
    """What the project promises and a measurement does not keep."""
    broken = [
        f"{kind}, {where} inputs: {times:.1f} times faster with {threads}"
        for threads, ranges in measured["times faster"].items()
        for where, kinds in ranges.items()
        for kind, times in kinds.items()
        if times < LEAST_TIMES_FASTER
    ]
    return broken + [
        f"{name} in {kind}: error {error:.1e}"
        for kind, errors in measured["largest relative error"].items()
        for name, error in errors.items()
        if error >= MOST_ERROR[kind]
    ]


def main() -> None:
    try:
        from mnn.mnn_core.mnn_utils import Mnn_Core_Func
    except ImportError as error:
        print(
            f"LIF moments were not measured: {error}. It takes pip install --no-deps "
            "moment-neural-network erfi_pytorch, which nothing else here needs."
        )
        return
    warnings.simplefilter("default")  # which that package turns off for everybody
    peer = Mnn_Core_Func()
    threads = torch.get_num_threads()
    measured: dict[str, Any] = {"elements": ELEMENTS, "times faster": {}}
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        name = "1 thread" if count == 1 else f"{count} threads"
        measured["times faster"][name] = speed(peer)
        print(name, measured["times faster"][name], flush=True)
    torch.set_num_threads(threads)
    measured["largest relative error"] = accuracy()
    print(measured["largest relative error"])
    broken = broken_promises(measured)
    tables.publish("lif", "python -m benchmarks.lif", 0, measured, broken=broken)


if __name__ == "__main__":
    main()
