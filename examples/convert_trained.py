"""For an engineer with a trained CNN: error bars for its outputs, without training it again.

python -m examples.convert_trained
"""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt

import covary
from examples.drawing import BLUE, ORANGE, options, save
from examples.plain_digits import trained


def main() -> None:
    arguments = options(__doc__)
    model, x, _, x_test, y_test = trained(2 if arguments.quick else 15)

    net = covary.convert(model, noise=0.05)
    covary.track(net, x)
    print(net)

    with torch.no_grad():
        out = net(x_test)
        # How many standard deviations the best class leads the second by.
        best = out.mean.topk(2).indices
        rows = torch.zeros(len(x_test), 1, 10)
        rows.scatter_(2, best[:, None, :1], 1.0).scatter_(2, best[:, None, 1:], -1.0)
        lead = out.project(rows)
        distance = (lead.mean / lead.stddev)[:, 0]
    right = out.mean.argmax(1) == y_test
    print(f"\n{len(y_test)} test digits, {right.float().mean():.1%} right")
    for name, some in (("right", right), ("wrong", ~right)):
        print(f"  {name}: the decision is {distance[some].median():.1f} deviations from changing")
    print(
        f"\nagainst draws, {covary.verify(net, x_test[:8], draws=160 if arguments.quick else 1600)}"
    )

    figure, (bars, spread) = plt.subplots(1, 2, figsize=(9, 3.6))
    closest = int(distance.argmin())
    bars.errorbar(
        range(10),
        out.mean[closest],
        yerr=2 * out.stddev[closest],
        fmt="o",
        color=BLUE,
        ecolor="grey",
    )
    bars.set_xticks(range(10))
    bars.set_xlabel("class")
    bars.set_ylabel("logit, two deviations to each side")
    bars.set_title(f"the closest decision (a {int(y_test[closest])})")
    bars.set_ylim(top=float(out.mean[closest].max()) + 5)
    picture = bars.inset_axes((0.8, 0.7, 0.2, 0.28))
    picture.imshow(x_test[closest, 0], cmap="gray_r")
    picture.set_axis_off()
    for some, color, name in ((right, BLUE, "right"), (~right, ORANGE, "wrong")):
        spread.hist(
            distance[some], bins=30, range=(0, 30), density=True, alpha=0.6, color=color, label=name
        )
    spread.set_xlabel("lead of the best class, in standard deviations")
    spread.set_ylabel("share of test digits (density)")
    spread.legend(title="prediction")
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
