"""The contract of a score: one number per sample, that no other sample has a part in."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from covary import covariance
from covary.covariance import Diagonal, Full
from covary.models import mlp
from covary.moments import Moments
from covary.nn.fidelity import TrackingWarning
from covary.testing.contract import Contract, seeded


class ScoreContract(Contract):
    """Shapes, independence of samples, and what is at the edges.

    Attributes:
        cases: name -> the score, Moments (B, n) -> (B,).
    """

    cases: ClassVar[Mapping[str, Callable[[Moments], Tensor]]] = {}

    def is_of_classes(self, name: str) -> bool:
        """Whether it takes outputs for logits, and refuses a single one."""
        return True

    def sees_covariance(self, name: str) -> bool:
        """Whether it depends on the covariance."""
        return True

    def test_takes_every_covariance(self, name: str) -> None:
        """In float32 and float64, with the result that the same matrix has when stored in full."""
        score = self.cases[name]
        for kind in covariance.names():
            for dtype in (torch.float32, torch.float64):
                torch.manual_seed(0)
                net = mlp([4, 8, 3], noise=0.3, covariance=kind).to(dtype).eval()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", TrackingWarning)
                    out = net(torch.randn(5, 4, dtype=dtype))
                    same = Moments(out.mean, Full(out.covariance_matrix))
                    assert score(out).shape == (5,)
                    assert_close(score(out), score(same), rtol=1e-4, atol=1e-6)

    def test_samples_are_scored_one_by_one(self, name: str) -> None:
        """In another order, or without the others, each has the same score."""
        moments = gaussians(4, 1.0, batch=6)
        found, order = self.cases[name](moments), [3, 0, 5, 1]
        assert_close(self.cases[name](moments[order]), found[order])

    def test_dimensions_in_front_of_the_batch(self, name: str) -> None:
        """Replicas (R, B, n) have scores (R, B), with one covariance for the batch or one each."""
        for own in (1, 6):
            mean = torch.randn(2, 6, 4, generator=seeded())
            factor = torch.randn(2, own, 4, 4, generator=seeded(1))
            stacked = Moments(mean, Full(factor @ factor.mT, torch.zeros(2, 1, 1)))
            found = self.cases[name](stacked)
            assert found.shape == (2, 6)
            for replica in range(2):
                alone = self.cases[name](Moments(mean[replica], Full(stacked.cov.dense()[replica])))
                assert_close(found[replica], alone, rtol=1e-4, atol=1e-5)

    def test_large_logits_and_variances(self, name: str) -> None:
        mean = torch.tensor([[1e4, 0.0, -1e4], [3e38, 0.0, 1e38], [0.0, 0.0, 0.0]])
        for var in (0.0, 1.0, 1e10, 1e30):
            moments = Moments(mean, Diagonal(torch.full_like(mean, var)))
            assert not self.cases[name](moments).isnan().any(), f"variance {var}"

    def test_a_sample_that_is_not_finite_spoils_no_other(self, name: str) -> None:
        """Its own score is NaN, if it depends on what is not finite."""
        moments = gaussians(3, 1.0, batch=4)
        matrix = moments.covariance_matrix.clone()
        matrix[1] = math.nan
        found = self.cases[name](Moments(moments.mean, Full(matrix)))
        others = torch.tensor([0, 2, 3])
        assert_close(found[others], self.cases[name](moments)[others])
        assert bool(found[1].isnan()) == self.sees_covariance(name)

    def test_no_samples_at_all(self, name: str) -> None:
        none = Moments(torch.zeros(0, 3), Full(torch.zeros(0, 3, 3)))
        assert self.cases[name](none).shape == (0,)

    def test_what_it_cannot_take_is_refused(self, name: str) -> None:
        """Tensors, and a single output where classes are compared, with the remedy."""
        with pytest.raises(TypeError, match="Moments"):
            self.cases[name](torch.zeros(3, 2))  # type: ignore[arg-type]
        one = Moments(torch.zeros(3, 1), Diagonal(torch.ones(3, 1)))
        if self.is_of_classes(name):
            with pytest.raises(ValueError, match="classes"):
                self.cases[name](one)
        else:
            assert self.cases[name](one).shape == (3,)


def gaussians(
    n: int,
    stddev: float,
    *,
    batch: int = 40,
    rank: int | None = None,
    means: float = 2.0,
    dtype: torch.dtype = torch.float64,
) -> Moments:
    """Random means and covariances of average variance stddev^2, of this rank."""
    generator = seeded(n)
    rank = n if rank is None else rank
    mean = means * torch.randn(batch, n, generator=generator, dtype=torch.float64)
    factor = torch.randn(batch, n, rank, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.mT * stddev**2 / rank
    return Moments(mean.to(dtype), Full(matrix.to(dtype)))
