"""For an engineer with a table: a regression with calibrated error bars.

python -m examples.table_intervals
"""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from covary.estimators import MomentRegressor
from examples.drawing import BLUE, GREY, ORANGE, options, save


def main() -> None:
    arguments = options(__doc__)

    x, y = load_diabetes(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.3, random_state=0)
    model = MomentRegressor(
        hidden=(50,), noise=0.3, epochs=5 if arguments.quick else 60, random_state=0
    ).fit(x, y)

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for panel, calibrated in zip(panels, (False, True), strict=True):
        mean, std = model.predict(x_test, return_std=True, calibrated=calibrated)
        inside = np.abs(y_test - mean) <= 1.96 * std
        name = "calibrated" if calibrated else "not calibrated"
        print(f"{name}: {inside.mean():.0%} of {len(y_test)} test rows within their 95% interval")

        order = np.argsort(mean)
        rows = np.arange(len(order))
        panel.vlines(
            rows,
            (mean - 1.96 * std)[order],
            (mean + 1.96 * std)[order],
            color=GREY,
            alpha=0.5,
            label="95% interval",
        )
        panel.plot(rows, mean[order], color="black", linewidth=1, label="prediction")
        for some, color, label in (
            (inside, BLUE, "measured, inside"),
            (~inside, ORANGE, "outside"),
        ):
            panel.plot(rows[some[order]], y_test[order][some[order]], ".", color=color, label=label)
        panel.set_title(f"{name}: {inside.mean():.0%} inside")
        panel.set_xlabel("test rows, by prediction")
    panels[0].set_ylabel("progression of diabetes")
    panels[0].legend(fontsize=8, loc="upper left")
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
