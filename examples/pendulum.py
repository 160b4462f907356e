"""For an engineer with a learned simulator: error bars 50 steps ahead, without sampled rollouts.

python -m examples.pendulum
"""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt
from torch import Tensor

import covary
from covary.convert import Converted
from examples.drawing import BLUE, GREEN, GREY, ORANGE, options, save
from examples.pendulum_network import Step, learned, nature

ERRORS, AHEAD = (0.1, 0.2, 0.4), 50  # standard deviations of the first state; steps
STARTS = torch.tensor([[2.0, 0.0], [0.5, 0.5], [-1.0, 1.0], [0.0, -1.5]])  # angle, velocity


def converted(model: Step, x: Tensor, error: float) -> Converted:
    """The network with its own error in every step; tracked for input errors of many sizes."""
    own = {"": covary.sources.GaussianNoise(error)}  # "" is the model: at its output
    net = covary.convert(model, noise=0, sources=own, variances="propagated")
    covary.track(net, covary.Moments.of(x, std=0.5 * torch.rand(len(x), 1)))
    return net


@torch.no_grad()
def moments(net: Converted, state: covary.Moments) -> list[covary.Moments]:
    """The state after each step: what comes out goes in again."""
    found = []
    for _ in range(AHEAD):
        found.append(state := net(state))
    return found


def sampled(net: Converted, state: covary.Moments, copies: int) -> tuple[Tensor, Tensor]:
    """(AHEAD, copies, B, 2) drawn states after each step: of the network, and of the pendulum."""
    generator = torch.Generator().manual_seed(0)
    drawn = [state.sample(copies, generator=generator)]
    true = drawn[:]
    for _ in range(AHEAD):
        drawn.append(net.draw(drawn[-1].flatten(0, 1), generator=generator).view_as(drawn[0]))
        true.append(nature(true[-1]))
    return torch.stack(drawn[1:]), torch.stack(true[1:])


def main() -> None:
    arguments = options(__doc__)
    torch.manual_seed(0)
    net = converted(*learned(50 if arguments.quick else 3000))
    figure, (band, cover) = plt.subplots(1, 2, figsize=(9, 3.6))
    time = range(1, AHEAD + 1)
    for error, color in zip(ERRORS, (BLUE, ORANGE, GREEN), strict=True):
        start = covary.Moments.of(STARTS, std=error)
        found = moments(net, start)
        mean = torch.stack([each.mean for each in found])[:, None]  # (AHEAD, 1, B, 2)
        std = torch.stack([each.stddev for each in found])[:, None]
        drawn, true = sampled(net, start, 500 if arguments.quick else 10_000)
        inside = ((torch.stack([drawn, true]) - mean).abs() < 1.96 * std).float().mean((2, 3, 4))
        network, pendulum = inside[:, -1].tolist()
        print(f"first state known to {error}: 95% intervals of step {AHEAD} hold {network:.1%} of")
        print(f"  rollouts of the network, and {pendulum:.1%} of those of the pendulum")
        cover.plot(time, inside[0], color=color, label=str(error))
        if error == ERRORS[0]:
            low, high = ((mean + side * std)[:, 0, 0, 0] for side in (-2, 2))
            band.plot(time, true[:, :30, 0, 0], color=GREY, linewidth=0.5)
            band.fill_between(time, low, high, color=BLUE, alpha=0.3, linewidth=0)
    band.set(xlabel="step", ylabel="angle", title="two deviations, and 30 pendulums")
    cover.axhline(0.95, color="grey", linewidth=1)
    cover.set(xlabel="step", ylim=(0.8, 1), title="rollouts inside 95% intervals")
    cover.legend(title="error of the first state")
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
