"""Let a classifier refuse the answers it is least sure of, and see what that does to its errors.

python -m examples.refuse_when_unsure
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from covary.estimators import MomentClassifier
from covary.uncertainty import metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    arguments = parser.parse_args()

    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.5, random_state=0, stratify=y)
    model = MomentClassifier(
        hidden=(64, 32), activation="heaviside", noise=0.2, epochs=arguments.epochs, random_state=0
    )
    model.fit(x, y)

    wrong = model.predict(x_test) != y_test
    scores = {
        "entropy of the covariance": model.uncertainty(x_test),
        "max-softmax (no covariance)": 1 - model.predict_proba(x_test, calibrated=False).max(1),
    }
    print(f"{len(y_test)} test digits, {wrong.mean():.1%} wrong if all are answered")
    for name, score in scores.items():
        curve = metrics.risk_coverage(score, wrong)
        for answered in (0.95, 0.9, 0.8):
            risk = curve.risk[np.searchsorted(curve.coverage, answered)]
            print(f"  {name}: {risk:.2%} wrong of the surest {answered:.0%}")


if __name__ == "__main__":
    main()
