"""Models that one would fit to a table instead of a network, each with a predictive distribution.

``TABLE_MODELS`` has them by task and name. Each is fitted to inputs (n, d) and targets or labels
(n,), of numpy. What comes out gives a ``Distribution`` of the targets of other inputs, as
``scipy.stats.norm`` does, or probabilities of their classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from covary.covariance import Diagonal
from covary.data.dataset import needed
from covary.moments import Moments
from covary.uncertainty.calibration import fit_variance
from covary.uncertainty.metrics import Distribution

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
LEVELS = np.linspace(0.05, 0.95, 19)
# Shares of a Gaussian's shape in that of the quantiles; some of it, so that no density is infinite.
_SHARES = (0.05, 0.2, 0.5, 1.0)
_LEAST_WIDTH = 1e-3  # of the outermost quantiles, in standard deviations of the targets
# Beyond 5%, a Gaussian's mean excess in widths of its 90% interval; it counts as so many rows.
_GAUSSIAN_TAIL, _TAIL_ROWS = 0.127, 10
_HELD_OUT = 0.2
# Sizes of trees that are tried.
_SIZES = (
    {"max_leaf_nodes": 31, "min_samples_leaf": 20},
    {"max_leaf_nodes": 12, "min_samples_leaf": 8},
    {"max_leaf_nodes": 5, "min_samples_leaf": 5},
)
_TREES, _LEAVES = 200, (1, 5)
# Of a Gaussian process: rows for its marginal likelihood, and rows that it is conditioned on.
_LIKELIHOOD_ROWS, _PROCESS_ROWS = 1000, 4000
_STAGES, _PATIENCE = 2000, 50
_STAGE_ROWS = 5000  # that a stage of natural gradient boosting sees at most


class TableRegressor(Protocol):
    """A model fitted to a table's target."""

    def distribution(self, x: Floats) -> Distribution:
        """Of the target of each row of inputs (n, d)."""
        ...


@dataclass(frozen=True, eq=False)
class Quantiles:
    """Distributions of n rows by quantiles: linear between them, and exponential beyond.

    Attributes:
        levels: (k,) probabilities, increasing, between 0 and 1.
        values: (n, k) the quantiles of each row, increasing.
        tail: (n,) mean distance, above 0, of what lies beyond the outermost quantiles from them.
    """

    levels: Floats
    values: Floats
    tail: Floats

    def mean(self) -> Floats:
        """(n,) of each row."""
        return self._expected(lambda a, b: (a + b) / 2, lambda end, tail: end + tail)

    def std(self) -> Floats:
        """(n,) of each row."""
        centred = Quantiles(self.levels, self.values - self.mean()[:, None], self.tail)
        square = centred._expected(
            lambda a, b: (a * a + a * b + b * b) / 3,
            lambda end, tail: end**2 + 2 * end * tail + 2 * tail**2,
        )
        found: Floats = np.sqrt(square)
        return found

    def ppf(self, q: ArrayLike) -> Floats:
        """(n,) quantiles of the rows at a probability, or at one for each row (n,)."""
        chance = np.broadcast_to(np.asarray(q, dtype=np.float64), self.tail.shape)
        least, most = self.levels[0], self.levels[-1]
        place = np.searchsorted(self.levels, chance) - 1
        low, high, level, gap = self._around(place)
        with np.errstate(divide="ignore"):
            below = self.values[:, 0] + self.tail * np.log(chance / least)
            above = self.values[:, -1] - self.tail * np.log((1 - chance) / (1 - most))
        inside = low + (chance - level) / gap * (high - low)
        return np.where(chance < least, below, np.where(chance > most, above, inside))

    def cdf(self, y: ArrayLike) -> Floats:
        """(n,) probability that the target of each row is at most y, (n,)."""
        at = np.asarray(y, dtype=np.float64)
        low, high, level, gap = self._around(self._place(at))
        left, right = self._beyond(at)
        inside = level + ((at - low) / (high - low)).clip(0, 1) * gap
        below, above = self.levels[0] * np.exp(left), (1 - self.levels[-1]) * np.exp(right)
        return np.where(left < 0, below, np.where(right < 0, 1 - above, inside))

    def logpdf(self, y: ArrayLike) -> Floats:
        """(n,) log-density of the target of each row at y, (n,)."""
        at = np.asarray(y, dtype=np.float64)
        low, high, _, gap = self._around(self._place(at))
        left, right = self._beyond(at)
        below = np.log(self.levels[0] / self.tail) + left
        above = np.log((1 - self.levels[-1]) / self.tail) + right
        inside = np.log(gap / (high - low))
        return np.where(left < 0, below, np.where(right < 0, above, inside))

    def _expected(
        self,
        between: Callable[[Floats, Floats], Floats],
        beyond: Callable[[Floats, Floats], Floats],
    ) -> Floats:
        """(n,) an expectation: of a uniform from a to b, and beyond an end by a signed tail."""
        weights = np.diff(self.levels)
        found: Floats = between(self.values[:, :-1], self.values[:, 1:]) @ weights
        found += self.levels[0] * beyond(self.values[:, 0], -self.tail)
        found += (1 - self.levels[-1]) * beyond(self.values[:, -1], self.tail)
        return found

    def _place(self, y: Floats) -> NDArray[np.intp]:
        """(n,) the index of the last quantile up to y."""
        found: NDArray[np.intp] = (self.values <= y[:, None]).sum(1) - 1
        return found

    def _around(self, place: NDArray[np.intp]) -> tuple[Floats, Floats, Floats, Floats]:
        """The quantiles around a place, the level of the first, and how far the next level is."""
        first = place.clip(0, len(self.levels) - 2)
        rows, level = np.arange(len(self.values)), self.levels[first]
        low, high = self.values[rows, first], self.values[rows, first + 1]
        return low, high, level, self.levels[first + 1] - level

    def _beyond(self, y: Floats) -> tuple[Floats, Floats]:
        """How far y is beyond either end, in tails, as exponents that are 0 at most."""
        left, right = y - self.values[:, 0], self.values[:, -1] - y
        return (left / self.tail).clip(max=0), (right / self.tail).clip(max=0)


class BoostedQuantiles:
    """Gradient boosting of 19 quantiles, whose intervals are conformal by held-out rows.

    Each quantile stops early by rows of its own. Of three sizes of trees that with the lowest loss
    there is taken. Intervals of held-out rows (a fifth) then move both their ends by what makes
    them cover (conformalised quantile regression). How much of a Gaussian's shape the quantiles
    between the ends take on, and how long tails are, is fitted to held-out rows too.
    """

    def __init__(self, x: Floats, y: Floats, seed: int) -> None:
        from sklearn.model_selection import train_test_split

        x, x_out, y, y_out = train_test_split(x, y, test_size=_HELD_OUT, random_state=seed)
        self._width = _LEAST_WIDTH * (float(y.std()) or 1.0)
        few = LEVELS[[0, 9, 18]]
        tried = [[self._boosted(x, y, level, seed, size) for level in few] for size in _SIZES]
        # Scores are losses with a minus.
        scores = [sum(max(each.validation_score_) for each in models) for models in tried]
        best = int(np.argmax(scores))
        known = dict(zip(few, tried[best], strict=True))
        self._models = [
            known.get(level) or self._boosted(x, y, level, seed, _SIZES[best]) for level in LEVELS
        ]
        self._moves = self._conformal(self._raw(x_out), y_out)
        self._share, self._tail = _SHARES[0], _GAUSSIAN_TAIL
        ends = self._shaped(x_out)
        self._tail = self._tail_of(ends, y_out)
        self._share = max(_SHARES, key=lambda share: self._likelihood(ends, share, y_out))

    def distribution(self, x: Floats) -> Quantiles:
        """Of the target of each row of inputs (n, d)."""
        return self._quantiles(self._shaped(x), self._share)

    @staticmethod
    def _boosted(x: Floats, y: Floats, level: float, seed: int, size: dict[str, int]) -> Any:
        from sklearn.ensemble import HistGradientBoostingRegressor

        model = HistGradientBoostingRegressor(
            loss="quantile", quantile=level, max_iter=500, early_stopping=True,
            n_iter_no_change=40, max_features=0.5, random_state=seed, **size,
        )  # fmt: skip
        return model.fit(x, y)

    def _raw(self, x: Floats) -> Floats:
        found: Floats = np.sort(np.stack([model.predict(x) for model in self._models], 1), 1)
        return found

    @staticmethod
    def _conformal(values: Floats, y: Floats) -> Floats:
        """(k,) what is added to each quantile, by the rows (n, k) that it was not fitted to."""
        k, n = len(LEVELS), len(y)
        moves = np.zeros(k)
        for low in range(k // 2):
            high = k - 1 - low
            outside = np.maximum(values[:, low] - y, y - values[:, high])
            wanted = min(1.0, (LEVELS[high] - LEVELS[low]) * (1 + 1 / n))
            move = np.quantile(outside, wanted, method="higher")
            moves[low], moves[high] = -move, move
        return moves

    def _shaped(self, x: Floats) -> Floats:
        """(n, k) quantiles of rows, moved, in order, and not all the same."""
        values = np.sort(self._raw(x) + self._moves, 1)
        lacking = (self._width - (values[:, -1] - values[:, 0])).clip(min=0)
        widened: Floats = values + lacking[:, None] * np.linspace(-0.5, 0.5, len(LEVELS))
        return widened

    @staticmethod
    def _tail_of(values: Floats, y: Floats) -> float:
        """Mean distance of what is outside from the interval, in widths of it."""
        low, high = values[:, 0], values[:, -1]
        outside = np.maximum(low - y, y - high) / (high - low)
        outside = outside[outside > 0]
        return float((outside.sum() + _TAIL_ROWS * _GAUSSIAN_TAIL) / (len(outside) + _TAIL_ROWS))

    def _quantiles(self, values: Floats, share: float) -> Quantiles:
        from scipy.stats import norm

        low, high = values[:, :1], values[:, -1:]
        shape = norm.ppf(LEVELS)
        gaussian = low + (high - low) * (shape - shape[0]) / (shape[-1] - shape[0])
        tail = self._tail * (high - low)[:, 0]
        return Quantiles(LEVELS, (1 - share) * values + share * gaussian, tail)

    def _likelihood(self, values: Floats, share: float, y: Floats) -> float:
        return float(self._quantiles(values, share).logpdf(y).mean())


class GaussianProcess:
    """A Gaussian process with a length for each input and white noise, of standardised columns.

    Its lengths and noise are those of the largest marginal likelihood of 1,000 rows, and it is
    conditioned on 4,000 rows: random ones where there are more.
    """

    def __init__(self, x: Floats, y: Floats, seed: int) -> None:
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        order = np.random.default_rng(seed).permutation(len(x))
        few, rows = order[:_LIKELIHOOD_ROWS], order[:_PROCESS_ROWS]
        kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel(0.1)
        process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
        self._model = make_pipeline(StandardScaler(), process)
        with _quiet():
            self._model.fit(x[few], y[few])
            if len(rows) > len(few):
                process.set_params(kernel=process.kernel_, optimizer=None)
                self._model.fit(x[rows], y[rows])

    def distribution(self, x: Floats) -> Distribution:
        """Of the target of each row of inputs (n, d)."""
        return _gaussian(*self._model.predict(x, return_std=True))


class Forest:
    """A random forest whose variance is the spread of its trees, scaled, and a constant.

    Scale and constant make its out-of-bag errors most likely. The size of leaves and how many
    inputs a split looks at are those of the lowest out-of-bag error of smaller forests.
    """

    def __init__(self, x: Floats, y: Floats, seed: int) -> None:
        choices = [(leaf, part) for leaf in _LEAVES for part in (1.0, 1 / 3)]
        tried = [self._grown(x, y, seed, _TREES // 4, *choice) for choice in choices]
        best = choices[int(np.argmax([forest.oob_score_ for forest in tried]))]
        self._forest = self._grown(x, y, seed, _TREES, *best)
        out = np.ones((len(self._forest.estimators_), len(x)), dtype=bool)
        for unseen, rows in zip(out, self._forest.estimators_samples_, strict=True):
            unseen[rows] = False
        mean, variance = self._moments(x, out)
        known = out.sum(0) > 1
        fitted = fit_variance(
            Moments(_column(mean[known]), Diagonal(_column(variance[known]))), _column(y[known])
        )
        self._scale, self._offset = fitted.scale.item(), fitted.offset.item()

    def distribution(self, x: Floats) -> Distribution:
        """Of the target of each row of inputs (n, d)."""
        mean, variance = self._moments(x)
        return _gaussian(mean, np.sqrt(self._scale * variance + self._offset))

    @staticmethod
    def _grown(x: Floats, y: Floats, seed: int, trees: int, leaf: int, part: float) -> Any:
        from sklearn.ensemble import RandomForestRegressor

        forest = RandomForestRegressor(
            trees, min_samples_leaf=leaf, max_features=part, oob_score=True, random_state=seed
        )
        with _quiet():  # rows that all trees have seen
            return forest.fit(x, y)

    def _moments(self, x: Floats, used: NDArray[np.bool_] | None = None) -> tuple[Floats, Floats]:
        """(n,) average and variance of the trees' predictions; of those that are to be used."""
        each = np.stack([tree.predict(x) for tree in self._forest.estimators_])
        weight = np.ones(each.shape, dtype=bool) if used is None else used
        count = weight.sum(0).clip(min=1)
        mean = (each * weight).sum(0) / count
        return mean, ((each - mean) ** 2 * weight).sum(0) / count


class NaturalBoosting:
    """NGBoost: boosting of a Gaussian's mean and variance by natural gradients.

    As many stages as are best for a fifth of the rows, and then fitted to all rows.
    """

    def __init__(self, x: Floats, y: Floats, seed: int) -> None:
        from sklearn.model_selection import train_test_split

        with needed("ngboost", "Natural gradient boosting", "compare"):
            from ngboost import NGBRegressor

        def boosted(stages: int, rows: int) -> Any:
            part = min(1.0, _STAGE_ROWS / rows)
            return NGBRegressor(
                n_estimators=stages, minibatch_frac=part, random_state=seed, verbose=False
            )

        x_in, x_out, y_in, y_out = train_test_split(x, y, test_size=_HELD_OUT, random_state=seed)
        tried = boosted(_STAGES, len(x_in))
        tried.fit(x_in, y_in, X_val=x_out, Y_val=y_out, early_stopping_rounds=_PATIENCE)
        self._model = boosted(tried.best_val_loss_itr + 1, len(x)).fit(x, y)

    def distribution(self, x: Floats) -> Distribution:
        """Of the target of each row of inputs (n, d)."""
        found = self._model.pred_dist(x)
        return _gaussian(found.loc, found.scale)


class BoostedClasses:
    """Gradient boosting of classes, which stops early by a tenth of the rows.

    Of three sizes of trees, that with the lowest loss there is taken. Where a class has a single
    row, nothing can be set apart: then it is scikit-learn's default.
    """

    def __init__(self, x: Floats, y: Labels, seed: int) -> None:
        from sklearn.ensemble import HistGradientBoostingClassifier as Boosting

        self._model = Boosting(random_state=seed, early_stopping=False)
        counts = np.bincount(y)
        if (counts[counts > 0] < 2).any():
            self._model.fit(x, y)
            return
        common = {"max_iter": 500, "early_stopping": True, "n_iter_no_change": 20}
        tried = [Boosting(random_state=seed, **common, **size).fit(x, y) for size in _SIZES]
        self._model = max(tried, key=lambda model: max(model.validation_score_))

    def probabilities(self, x: Floats) -> Floats:
        """(n, classes) of each row of inputs (n, d), classes as in ``y``: 0 ... the largest."""
        return _by_class(self._model, x)


class ForestClasses:
    """A random forest of classes; the size of its leaves has the lowest out-of-bag error."""

    def __init__(self, x: Floats, y: Labels, seed: int) -> None:
        from sklearn.ensemble import RandomForestClassifier

        def grown(leaf: int) -> Any:
            forest = RandomForestClassifier(
                _TREES, min_samples_leaf=leaf, oob_score=True, random_state=seed
            )
            with _quiet():
                return forest.fit(x, y)

        self._model = max((grown(leaf) for leaf in _LEAVES), key=lambda forest: forest.oob_score_)

    def probabilities(self, x: Floats) -> Floats:
        """(n, classes) of each row of inputs (n, d), classes as in ``y``: 0 ... the largest."""
        return _by_class(self._model, x)


@dataclass(frozen=True)
class TableModel:
    """A kind of model.

    Attributes:
        title: in results.
        description: what it does, in a sentence.
        fit: takes inputs (n, d), targets or labels (n,) and a seed.
        library: that it needs beyond scikit-learn, if any.
        rows: how many it is fitted to at most; None for all.
    """

    title: str
    description: str
    fit: Callable[..., Any]
    library: str = ""
    rows: int | None = None


# fmt: off
TABLE_MODELS = {
    "classification": {
        "boosting": TableModel(
            "gradient boosting", "Gradient-boosted trees, stopped early by a tenth of the rows.",
            BoostedClasses,
        ),
        "forest": TableModel(
            "random forest", "Random forest, the size of its leaves by out-of-bag errors.",
            ForestClasses,
        ),
    },
    "regression": {
        "boosting": TableModel(
            "quantile boosting",
            "Gradient boosting of 19 quantiles, conformal by a fifth of the rows.",
            BoostedQuantiles,
        ),
        "gp": TableModel(
            "Gaussian process",
            "Gaussian process with a length for each input, by marginal likelihood.",
            GaussianProcess, rows=_PROCESS_ROWS,
        ),
        "forest": TableModel(
            "random forest",
            "Random forest; the spread of its trees, scaled, and a constant by out-of-bag errors.",
            Forest,
        ),
        "ngboost": TableModel(
            "NGBoost",
            "Natural gradient boosting of a mean and a variance, stages by a fifth of the rows.",
            NaturalBoosting, library="ngboost",
        ),
    },
}
# fmt: on


def _by_class(model: Any, x: Floats) -> Floats:
    """Probabilities with a column of zeros for each label that no training row had."""
    found = np.zeros((len(x), int(model.classes_.max()) + 1))
    found[:, model.classes_] = model.predict_proba(x)
    return found


def _gaussian(mean: Floats, std: Floats) -> Distribution:
    from scipy.stats import norm

    found: Distribution = norm(mean, std)
    return found


def _column(values: Floats) -> torch.Tensor:
    return torch.from_numpy(values)[:, None]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what libraries say of bounds and of rows that no tree left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
