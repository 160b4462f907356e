"""Contracts as test classes: run them on an activation, covariance, rule ... of your own.

Subclass a contract in a test file, name the class ``Test...``, give it cases, and run pytest:

    class TestMine(covary.testing.CovarianceContract):
        cases = {"start": lambda: Mine.of(Full(None, torch.ones(1, 4, dtype=torch.float64)))}

Every method ``test_...`` of a contract runs on every case. The library's own tests do the same.
"""

from covary.testing.activations import ActivationContract
from covary.testing.contract import Contract
from covary.testing.covariances import CovarianceContract
from covary.testing.rules import RuleContract
from covary.testing.scores import ScoreContract
from covary.testing.sources import SourceContract

__all__ = [
    "ActivationContract",
    "Contract",
    "CovarianceContract",
    "RuleContract",
    "ScoreContract",
    "SourceContract",
]
