"""The contract of a rule: as noise goes to 0, the covariance of f(x) is sigma^2 J J^T."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from covary.convert import convert
from covary.moments import Moments
from covary.nn.fidelity import TrackingWarning
from covary.testing.contract import Contract, seeded
from covary.varying import Varying

# Of the noise at the input.
SIGMA = 1e-4


class RuleContract(Contract):
    """Mean and covariance of a function of torch functions, against its own derivative.

    Attributes:
        cases: name -> a function of one tensor, which keeps the samples of the first dimension
            apart, and its input in float64.
        mean_tolerance: relative and absolute error of the mean.
        tolerance: relative error of the covariance.
    """

    cases: ClassVar[Mapping[str, tuple[Callable[[Any], Any], Tensor]]] = {}
    mean_tolerance: ClassVar[float] = 1e-6
    tolerance: ClassVar[float] = 1e-4

    def test_covariance_is_that_of_the_jacobian(self, name: str) -> None:
        """And variances and projections are those of the covariance."""
        function, x = self.cases[name]
        found = moments(function, x)
        allowed = self.mean_tolerance
        assert_close(found.mean, function(x), rtol=allowed, atol=allowed)
        matrix = found.covariance_matrix
        assert relative(matrix, jacobian_covariance(function, x)) < self.tolerance
        rows = torch.randn(2, matrix.shape[-1], generator=seeded(), dtype=matrix.dtype)
        projected = found.project(rows).covariance_matrix
        assert relative(projected, rows @ matrix @ rows.mT) < 1e-9
        variance = moments(function, x).variance.flatten(1)
        assert_close(variance, matrix.diagonal(dim1=1, dim2=2))

    def test_a_tape_holds_no_values_in_flight(self, name: str) -> None:
        """They would keep all of a pass alive, and through it the tape itself."""
        function, x = self.cases[name]
        runs = []

        def watched(x: Any) -> Any:
            if isinstance(x, Varying):
                runs.append(weakref.ref(x.run))
            return function(x)

        gc.disable()
        try:
            found = moments(watched, x)
            assert runs
            assert not any(run() is not None for run in runs)
            del found
        finally:
            gc.enable()


class Apply(nn.Module):
    """A function as a module, with a parameter so that it has a device."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any) -> Any:
        """The function itself."""
        return self.function(*args)


def moments(function: Callable[..., Any], x: Tensor, noise: float = SIGMA) -> Moments:
    """The moments of the function of x in float64, with noise at the input alone."""
    net = convert(Apply(function).eval().double(), noise={"input": noise})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        out: Moments = net(x)
    return out


def jacobian_covariance(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    differentiate: Callable[..., Any] = torch.func.jacrev,
) -> Tensor:
    """(B, m, m) sigma^2 J J^T, by the derivative of the whole batch: samples must not mix."""
    batch = len(x)
    jacobian = differentiate(lambda x: function(x).reshape(batch, -1))(x)
    jacobian = jacobian.reshape(batch, -1, batch, x[0].numel())
    own = torch.stack([jacobian[i, :, i] for i in range(batch)])
    assert jacobian.square().sum() <= own.square().sum() * (1 + 1e-12), "samples are mixed"
    return SIGMA**2 * own @ own.mT


def relative(value: Tensor, truth: Tensor) -> float:
    """The norm of the difference over that of the truth."""
    return float((value - truth).norm() / truth.norm())
