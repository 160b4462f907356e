"""Data frames and arrays as inputs of a network: categories, dates, truths, missing values."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_array

from covary.data.columns import Gathered, as_days, hint_of_spelling, shortened, with_nearest
from covary.data.schema import Column, encoded, features, unusual
from covary.data.tables import MAX_CATEGORIES

_MISSING = ("error", "indicator")


@dataclass(frozen=True)
class Frame:
    """How a data frame of pandas, or an array, becomes numbers, as learnt from training rows.

    Numbers stay as they are. Categories and texts become a 0/1 column for each of their values,
    ``name=value``; truth values 0 and 1; dates (or texts that are all ISO dates) days since
    1970-01-01, with sine and cosine of month, weekday and hour where these vary. Arrays, and
    columns that do not vary, stay as they are.

    Attributes:
        columns: how each column is encoded, in the order of training.
        missing: ``"error"``, or ``"indicator"``: a missing number is its training mean, a missing
            category is 0 in all of its columns, and where training had missing values a 0/1 column
            ``name missing`` marks them.
        is_named: whether columns are found by their names, as those of a data frame are.

    Examples:
        >>> frame = Frame.fit(np.array([[1.0, 2.0], [np.nan, 4.0]]), missing="indicator")
        >>> frame.names
        ('x0', 'x0 missing', 'x1')
        >>> frame(np.array([[np.nan, 7.0]])).tolist()
        [[1.0, 1.0, 7.0]]
    """

    columns: tuple[Column, ...]
    missing: str
    is_named: bool

    @classmethod
    def fit(cls, X: ArrayLike, *, missing: str = "error") -> Frame:
        """Learn from rows (n, d) how columns are to be encoded."""
        if missing not in _MISSING:
            raise ValueError(f"missing must be one of {', '.join(_MISSING)}, got {missing!r}.")
        values = {name: _gathered(name, column) for name, column in _columns(X, missing).items()}
        _check(values, missing)
        columns = tuple(_learnt(column) for column in values.values())
        return cls(columns, missing, _is_frame(X))

    @property
    def names(self) -> tuple[str, ...]:
        """(d,) names of the features."""
        return features(self.columns)

    def __call__(self, X: ArrayLike) -> NDArray[np.float64]:
        """Features (n, d) of rows that have the columns of the training rows, in any order.

        A category that training did not have is 0 in all of its columns; ``unusual`` finds it.
        """
        values = self._values(X)
        return encoded(self.columns, values, np.arange(_length(values)))

    def unusual(self, X: ArrayLike) -> NDArray[np.bool_]:
        """(n,) whether a row has an unseen category, or a missing value where training had none."""
        values = self._values(X)
        return np.isin(np.arange(_length(values)), list(unusual(self.columns, values)))

    def check_seen(self, X: ArrayLike) -> None:
        """Refuse a category that training did not have."""
        values = self._values(X)
        told = filter(None, (column.told_unseen(values[column.name]) for column in self.columns))
        if found := "; ".join(told):
            raise ValueError(
                f"X has what fit did not see (unseen='error'): {found}. Correct it, or fit with "
                "such rows."
            )

    def _values(self, X: ArrayLike) -> dict[str, Gathered]:
        """The columns of new rows, as they were read in training."""
        found, known = _columns(X, self.missing), [column.name for column in self.columns]
        if self.is_named and _is_frame(X):
            _check_names(list(found), known)
        elif len(found) != len(known):
            raise ValueError(f"X has {len(found)} features, and {len(known)} were there in fit.")
        else:  # by their place
            found = dict(zip(known, found.values(), strict=True))
        values = {
            column.name: _gathered(column.name, found[column.name], column.gathered_as)
            for column in self.columns
        }
        _check(values, self.missing)
        return values


def is_needed(X: Any, missing: str) -> bool:
    """Whether an array, or a data frame of numbers, is not all that X is."""
    if missing != "error" or not _is_frame(X):
        return missing != "error"
    import pandas as pd

    is_number = pd.api.types.is_numeric_dtype
    return any(not is_number(dtype) or pd.api.types.is_bool_dtype(dtype) for dtype in X.dtypes)


def _is_frame(X: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(X, pandas.DataFrame)


def _length(values: Mapping[str, Gathered]) -> int:
    return len(next(iter(values.values())).values)


def _columns(X: Any, missing: str) -> dict[str, Any]:
    """The columns of a data frame (Series) by name, or those of an array as ``x0``, ``x1``, ..."""
    if not _is_frame(X):
        finite = "allow-nan" if missing == "indicator" else True
        array = check_array(X, dtype=np.float64, ensure_all_finite=finite, input_name="X")
        return {f"x{i}": column for i, column in enumerate(array.T)}
    names = [str(name) for name in X.columns]
    if not X.size:
        raise ValueError(f"X is a data frame without {'rows' if names else 'columns'}.")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"X has more than one column {repeated[0]!r}; give each its own name.")
    return {name: X.iloc[:, i] for i, name in enumerate(names)}


def _check_names(found: list[str], known: list[str]) -> None:
    """New rows must have the columns of training, and no others."""
    absent = [name for name in known if name not in found]
    new = [name for name in found if name not in known]
    told = [f"it lacks {with_nearest(absent, new)}"] if absent else []
    told += [f"it has {shortened(map(repr, new), 25)}, which fit did not see"] if new else []
    if told:
        raise ValueError(f"X has other columns than in fit: {', and '.join(told)}.")


def _gathered(name: str, column: Any, kind: str = "") -> Gathered:
    """A column of an array or a data frame; ``kind`` is what it was in training."""
    if isinstance(column, np.ndarray):
        found = Gathered.of(name, "number", column)
    else:
        found = _of_series(name, column.infer_objects(), kind)
    if kind not in ("", found.kind):
        raise ValueError(
            f"The column {name!r} of X holds {found.kind}s, and held {kind}s in fit; convert it."
        )
    return found


def _of_series(name: str, column: Any, kind: str) -> Gathered:
    """A column of a data frame as numbers, days, or texts."""
    import pandas as pd

    types, dtype = pd.api.types, column.dtype
    if column.isna().all():
        return Gathered.of(name, kind, np.full(len(column), np.nan))
    is_text = types.is_bool_dtype(dtype) or isinstance(dtype, pd.CategoricalDtype)
    if kind == "text" or (is_text and not kind):
        return _of_texts(name, column, "text")
    if types.is_numeric_dtype(dtype) and not types.is_complex_dtype(dtype):
        return Gathered.of(name, "number", column.to_numpy(np.float64, na_value=np.nan))
    if types.is_datetime64_any_dtype(dtype):
        when = column if column.dt.tz is None else column.dt.tz_convert(None)
        since = when.to_numpy("datetime64[us]") - np.datetime64(0, "us")
        return Gathered.of(name, "date", since / np.timedelta64(1, "D"))
    if is_text or types.is_object_dtype(dtype) or types.is_string_dtype(dtype):
        return _of_texts(name, column, kind)
    raise ValueError(
        f"The column {name!r} of X is of type {dtype}, expected numbers, truth values, texts, "
        "categories or dates; convert it."
    )


def _of_texts(name: str, column: Any, kind: str) -> Gathered:
    """Texts, or days if all of the texts are dates, as they have to be where training had dates."""
    import pandas as pd

    try:
        codes, found = pd.factorize(column)
    except TypeError as error:
        raise ValueError(
            f"The column {name!r} of X holds what is no text or number ({error})."
        ) from error
    texts = [str(each) for each in found]
    if kind != "text":
        # missing values have the code -1, which leads to the last place
        days = np.array([*map(as_days, texts), np.nan])
        wrong = [text for text, day in zip(texts, days, strict=False) if np.isnan(day)]
        if not wrong:
            return Gathered.of(name, "date", days[codes])
        if kind == "date":
            raise ValueError(
                f"The column {name!r} of X holds {wrong[0]!r:.60}, and held dates in fit; write "
                "dates as 2024-03-01 or 2024-03-01 12:30:00."
            )
    numbers = {text: float(i) for i, text in enumerate(dict.fromkeys(texts))}
    places = np.array([*(numbers[text] for text in texts), np.nan])
    return Gathered.of(name, "text", places[codes], numbers)


def _check(values: Mapping[str, Gathered], missing: str) -> None:
    """Refuse infinite numbers, and missing values unless they are marked."""
    infinite = [name for name, column in values.items() if np.isinf(column.values).any()]
    if infinite:
        raise ValueError(f"Input X contains infinity, in {shortened(map(repr, infinite))}.")
    counts = {name: np.isnan(column.values).sum() for name, column in values.items()}
    if missing == "error" and any(counts.values()):
        told = shortened(f"{name!r} ({count})" for name, count in counts.items() if count)
        raise ValueError(
            f"Input X contains NaN: values are missing in {told}; fill them, or have them marked "
            "with missing='indicator'."
        )


def _learnt(column: Gathered) -> Column:
    """How a column is encoded, from all of its rows."""
    absent = np.isnan(column.values)
    if absent.all():
        raise ValueError(f"The column {column.name!r} of X has no value at all; leave it out.")
    if len(column.texts) > MAX_CATEGORIES:
        raise ValueError(
            f"The column {column.name!r} of X holds {len(column.texts)} different texts, at most "
            f"{MAX_CATEGORIES} are taken as categories; leave it out, or put them into groups"
            f"{hint_of_spelling(column.texts)}."
        )
    return Column.varying(column, np.arange(len(absent)), bool(absent.any()), notes=[])
