"""Test accuracy on images in percent, with the number in brackets behind it, as printed."""

from __future__ import annotations

# The paper's own networks; in brackets are standard deviations over 20 runs.
OWN: dict[str, dict[str, str]] = {
    "mnist": {
        "MNN relu": "99.04 (0.00)",
        "dMNN relu": "99.03 (0.02)",
        "MNN heaviside": "99.01 (0.00)",
        "dMNN heaviside": "99.05 (0.00)",
    },
    "fashion-mnist": {
        "MNN relu": "89.85 (0.03)",
        "dMNN relu": "90.05 (0.00)",
        "MNN heaviside": "90.08 (0.00)",
        "dMNN heaviside": "89.93 (0.00)",
    },
    "cifar10": {
        "MNN relu": "71.04 (0.01)",
        "dMNN relu": "70.57 (0.48)",
        "MNN heaviside": "70.36 (0.01)",
        "dMNN heaviside": "69.63 (0.02)",
    },
    "cifar100": {
        "MNN relu": "35.56 (0.01)",
        "dMNN relu": "31.01 (0.03)",
        "MNN heaviside": "40.30 (0.00)",
        "dMNN heaviside": "40.04 (0.01)",
    },
}
# The same where mini-batches share a covariance in training.
SHARED: dict[str, dict[str, str]] = {
    "mnist": {"MNN relu": "98.99 (0.00)", "MNN heaviside": "99.00 (0.00)"},
    "fashion-mnist": {"MNN relu": "89.66 (0.00)", "MNN heaviside": "90.13 (0.00)"},
    "cifar10": {"MNN relu": "70.75 (0.01)", "MNN heaviside": "69.86 (0.01)"},
    "cifar100": {"MNN relu": "35.84 (0.02)", "MNN heaviside": "40.21 (0.02)"},
}
# Methods that the paper compares with, from other papers.
CITED: dict[str, dict[str, str]] = {
    "mnist": {"VarOut": "98.88 (0.05)", "DVI": "99.03 (0.06)", "VBP": "99.15 (0.06)"},
    "fashion-mnist": {"VarOut": "89.19 (0.24)", "DVI": "89.67 (0.07)", "VBP": "89.90 (0.16)"},
    "cifar10": {"VarOut": "66.60 (1.06)", "DVI": "64.85 (1.13)", "VBP": "68.67 (1.00)"},
    "cifar100": {"VarOut": "37.15 (1.43)", "DVI": "33.79 (1.14)", "VBP": "39.03 (1.61)"},
}


def best_cited(data: str) -> float:
    """The largest accuracy, in percent, of a method that the paper compares with."""
    return max(float(cell.split()[0]) for cell in CITED[data].values())
