"""For an engineer with several sources of error: what each of them makes of an output.

python -m examples.sources_of_error
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor, nn

import covary
from covary.sources import Relative, Rounding
from examples.drawing import BLUE, GREEN, GREY, ORANGE, options, save
from examples.plain_sine import trained

COPIES = 300  # draws of each input
EVERY = {"input": [Relative(0.1), Rounding(0.5)]}
LAYERS = {"": 0.05, "input": 0.0}  # noise before each tanh, none at the input


class Case(NamedTuple):
    how: dict[str, Any]  # what covary.convert takes
    std: float = 0.0  # errors of the inputs

    def inputs(self, x: Tensor) -> Tensor | covary.Moments:
        return covary.Moments.of(x, std=self.std) if self.std else x


CASES = {
    "input errors": Case({}, std=0.2),
    "relative errors": Case({"sources": {"input": Relative(0.1)}}),
    "rounding": Case({"sources": {"input": Rounding(0.5)}}),
    "layer noise": Case({"noise": LAYERS}),
    "dropout": Case({"dropout": True}),
    "all of them": Case({"noise": LAYERS, "dropout": True, "sources": EVERY}, 0.1),
}
COLORS = {"input": BLUE, "noise": GREEN, "dropout": GREY}


@torch.no_grad()
def draw(case: Case, model: nn.Module, x: Tensor) -> Figure:
    """Two deviations around the mean, and the variance; computed (filled) and drawn (dashed)."""
    net = covary.convert(model, **{"noise": 0.0, **case.how}, variances="propagated")
    covary.track(net, case.inputs(x))
    out, many = net(case.inputs(x)), case.inputs(x.repeat(COPIES, 1))
    drawn = net.draw(many, generator=torch.Generator().manual_seed(0)).view(COPIES, len(x))
    figure, (band, variance) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(3, 2))
    band.plot(x, drawn[:3].T, ".", color=GREY, ms=2)
    low, high = ((out.mean + side * out.stddev)[:, 0] for side in (-2, 2))
    band.fill_between(x[:, 0], low, high, color=BLUE, alpha=0.4, linewidth=0)
    edges = [drawn.mean(0) + side * drawn.std(0) for side in (-2, 2)]
    band.plot(x, torch.stack(edges, 1), "--", color=ORANGE, linewidth=1)
    band.set(ylim=(-2, 2), xlabel="input", ylabel="output")
    parts = {kind: part[:, 0] for kind, part in out.budget().by_kind().items()}
    variance.stackplot(x[:, 0], *parts.values(), colors=[COLORS[k] for k in parts], alpha=0.6)
    variance.plot(x, drawn.var(0), "--", color=ORANGE, linewidth=1)
    variance.legend([*parts, "drawn"], loc="upper center", ncols=2)
    variance.set(xlabel="input", ylabel="variance", ylim=(0, 1.4 * drawn.var(0).max()))
    print(f"drawn variance over computed one: {drawn.var(0).sum() / out.variance.sum():.2f}")
    return figure


def main() -> None:
    arguments = options(__doc__)
    model, x = trained(50 if arguments.quick else 3000), torch.linspace(-3, 3, 241)[:, None]
    for name, case in CASES.items():
        print(name, end=", ")
        path = arguments.figure
        if path and name != "all of them":
            path = path.with_stem(f"{path.stem}_{name.replace(' ', '_')}")
        save(draw(case, model, x), path)


if __name__ == "__main__":
    main()
