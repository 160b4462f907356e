"""Rollouts of a learned pendulum: how many steps do error bars hold?

    python -m benchmarks.pendulum

The network of examples/pendulum.py goes 50 steps ahead from 16 states that are known to some
error, with its own error in every step, beside 10,000 drawn rollouts of each. Deviations of moments
are compared with drawn ones. So are those of a Gaussian of which 10,000 states are drawn anew in
every step: what is lost by keeping a mean and a covariance alone from step to step, whoever
computes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks import tables, tables_networks
from covary import Moments
from covary.convert import Converted
from covary.covariance import Full
from examples.pendulum import AHEAD, converted, moments, sampled
from examples.pendulum_network import learned

SEED, STARTS, COPIES = 0, 16, 10_000
ERRORS, STEPS = (0.1, 0.2, 0.4), (1, 10, 20, 30, 40, 50)
# With the least error, deviations are this close to the drawn ones, in the median over states.
LEAST, MOST = 0.95, 1.05


def drawn_anew(net: Converted, state: Moments) -> list[Moments]:
    """Gaussians with mean and covariance of drawn states, of which the next are drawn."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(AHEAD):
        before = state.sample(COPIES, generator=generator)
        drawn = net.draw(before.flatten(0, 1), generator=generator).view_as(before)
        apart = (drawn - drawn.mean(0)).transpose(0, 1)  # (B, copies, 2)
        state = Moments(drawn.mean(0), Full(apart.mT @ apart / COPIES))
        found.append(state)
    return found


def agreement(state: Moments, drawn: Tensor) -> dict[str, float]:
    """Of one step: deviations over drawn ones, and the share of draws inside 95% intervals."""
    ratio = (state.stddev / drawn.std(0)).flatten()
    inside = (drawn - state.mean).abs() < 1.96 * state.stddev
    return {
        "median": float(ratio.median()),
        "least": float(ratio.min()),
        "most": float(ratio.max()),
        "inside": float(inside.float().mean()),
    }


def measure() -> dict[str, Any]:
    torch.manual_seed(SEED)
    model, x, error_of_step = learned(3000)
    net = converted(model, x, error_of_step)
    starts = 2.0 * (2 * torch.rand(STARTS, 2) - 1)
    found: dict[str, Any] = {}
    for error in ERRORS:
        start = Moments.of(starts, std=error)
        drawn, true = sampled(net, start, COPIES)
        ways = {"moments": moments(net, start), "drawn anew": drawn_anew(net, start)}
        rows = {
            name: {str(step): agreement(states[step - 1], drawn[step - 1]) for step in STEPS}
            for name, states in ways.items()
        }
        for step in STEPS:
            of_nature = agreement(ways["moments"][step - 1], true[step - 1])
            rows["moments"][str(step)]["inside, pendulum"] = of_nature["inside"]
        found[str(error)] = rows
    return {"starts": STARTS, "copies": COPIES, "error of a step": error_of_step, "errors": found}


def broken_promises(measured: dict[str, Any]) -> list[str]:
    """What the project promises and a measurement does not keep."""
    rows = measured["errors"][str(ERRORS[0])]["moments"]
    return [
        f"step {step}: deviations are {row['median']:.2f} of the drawn ones"
        for step, row in rows.items()
        if not LEAST <= row["median"] <= MOST
    ]


def main() -> None:
    measured = measure()
    tables.publish(
        "pendulum",
        "python -m benchmarks.pendulum",
        SEED,
        measured,
        shown=[tables_networks.pendulum],
        broken=broken_promises(measured),
    )


if __name__ == "__main__":
    main()
