"""For an engineer with a table: error bars that follow the noise, and grow off the data.

python -m examples.table_intervals
"""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt

from covary.estimators import MomentRegressor
from examples.drawing import BLUE, GREY, ORANGE, options, save


def main() -> None:
    arguments = options(__doc__)

    random = np.random.default_rng(0)
    x = random.uniform(-3, 3, (1200, 1))
    truth, noise = np.sin(2 * x[:, 0]), np.where(x[:, 0] < 0, 0.1, 0.5)
    y = truth + noise * random.standard_normal(len(x))
    model = MomentRegressor(
        "quick" if arguments.quick else "default",
        epochs=2 if arguments.quick else None,
        random_state=0,
    ).fit(x, y)
    for name, part in model.variance_parts_.items():
        print(f"{name}: {part.share:.0%} of the variance, worth {part.gain:.2f} nats a row")

    line = np.linspace(-6, 6, 601)[:, None]
    low, high = model.predict_interval(line, level=0.9)
    budget = model.budget(line)
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5.6), sharex=True, height_ratios=(2, 1))
    above.plot(x[:, 0], y, ".", color=GREY, markersize=2, label="measured")
    above.plot(line[:, 0], model.predict(line), color="black", label="prediction")
    above.fill_between(line[:, 0], low, high, color=BLUE, alpha=0.3, label="90% interval")
    above.set_ylim(-4, 4)
    above.set_ylabel("target")
    above.legend(fontsize=8, loc="upper left", ncols=3)
    for (name, part), color in zip(budget.items(), (BLUE, ORANGE), strict=True):
        below.plot(line[:, 0], part[:, 0].sqrt(), color=color, label=name)
    below.set_yscale("log")
    below.set_ylabel("standard deviation")
    below.set_xlabel("input (none was measured beyond -3 and 3)")
    below.legend(fontsize=8)

    x_new = random.uniform(-3, 3, (5000, 1))
    y_new = np.sin(2 * x_new[:, 0])
    y_new += np.where(x_new[:, 0] < 0, 0.1, 0.5) * random.standard_normal(len(x_new))
    low, high = model.predict_interval(x_new, level=0.9)
    print(f"{((low <= y_new) & (y_new <= high)).mean():.1%} of 5000 new rows within 90% intervals")
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
