"""For an engineer with a table: a classifier that refuses the answers it is least sure of.

python -m examples.refuse_when_unsure
"""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from covary.estimators import MomentClassifier
from covary.uncertainty import metrics
from examples.drawing import BLUE, GREY, ORANGE, options, save


def main() -> None:
    arguments = options(__doc__)

    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.5, random_state=0, stratify=y)
    model = MomentClassifier(
        "quick", epochs=2 if arguments.quick else None, noise=0.2, random_state=0
    )
    model.fit(x, y)

    wrong = model.predict(x_test) != y_test
    moments = model.moments(x_test)
    scores = {
        f"uncertainty ({model.score_}, chosen by held-out rows)": model.uncertainty(x_test),
        "entropy of the covariance": moments.entropy().numpy(),
        "max-softmax (no covariance)": 1 - moments.mean.softmax(-1).max(-1).values.numpy(),
    }
    print(f"{len(y_test)} test digits, {wrong.mean():.1%} wrong if all are answered")
    figure, panel = plt.subplots(figsize=(6, 3.8))
    styles = ((BLUE, "-"), (GREY, "-"), (ORANGE, "--"))
    for (name, score), (color, line) in zip(scores.items(), styles, strict=True):
        curve = metrics.risk_coverage(score, wrong)
        panel.plot(100 * curve.coverage, 100 * curve.risk, line, color=color, label=name)
        for answered in (0.95, 0.9, 0.8):
            risk = curve.risk[np.searchsorted(curve.coverage, answered)]
            print(f"  {name}: {risk:.2%} wrong of the surest {answered:.0%}")
    panel.axhline(100 * wrong.mean(), color="grey", linestyle=":", label="all are answered")
    panel.set_xlabel("answered, surest first (% of test digits)")
    panel.set_ylabel("wrong among the answered (%)")
    panel.set_xlim(50, 100)
    panel.set_ylim(0)
    panel.legend()
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
