"""A column of a table as it is read: numbers, dates, or texts that are numbered as they come."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

# what stands for a value that is not there
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:inf|infinity|nan))$"
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d([.,]\d+)?)?( ?(Z|[+-]\d\d(:?\d\d)?))?)?")
_LIKE_A_DATE = re.compile(r"\d{1,4}([/.-])\d{1,2}\1\d{1,4}( .*)?")
_WITH_COMMA = re.compile(r"[+-]?\d+,\d+")
_EPOCH, _DAY = datetime(1970, 1, 1, tzinfo=timezone.utc), timedelta(days=1)


def shortened(names: Iterable[str], most: int = 10) -> str:
    """``"a, b, c"``; of many names the first ones alone, each cut at 60 characters."""
    some = [name if len(name) <= 60 else f"{name[:59]}…" for name in islice(names, most + 1)]
    return ", ".join([*some[:most], *(["..."] if len(some) > most else [])])


def with_nearest(names: Iterable[str], known: Sequence[str]) -> str:
    """``"'heigth' (did you mean 'height'?), 'b'"``: names that are not among the known ones."""
    near = ((name, get_close_matches(name, known, n=1)) for name in names)
    told = (f"{name!r}{f' (did you mean {close[0]!r}?)' if close else ''}" for name, close in near)
    return shortened(told, 25)


def as_number(text: str) -> float:
    """The number that a text is, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def as_days(text: str) -> float:
    """Days since 1970-01-01 of a date or time as ISO 8601 writes it, NaN if the text is none.

    Time zones are taken into account; a time without one is taken as UTC.
    """
    if not _DATE.fullmatch(text):
        return float("nan")
    try:
        when = datetime.fromisoformat(text)
    except ValueError:  # the 30th of February
        return float("nan")
    return ((when if when.tzinfo else when.replace(tzinfo=timezone.utc)) - _EPOCH) / _DAY


def hint_of_spelling(texts: Iterable[str]) -> str:
    """How to write dates and numbers, if the first of these texts looks like one; else empty."""
    first = next(iter(texts), "")
    if _LIKE_A_DATE.fullmatch(first):
        return "; dates are read if they are written as 2024-03-01 or 2024-03-01 12:30:00"
    if _WITH_COMMA.fullmatch(first):
        return "; numbers are read if they have a point (3.5) and no comma (3,5)"
    return ""


@dataclass
class Gathered:
    """A column as it is read.

    The first block with a value in it decides whether it holds dates (more than half of its values
    are), texts (more than half are no numbers) or numbers. What then turns up among dates or
    numbers and is none is counted as a stray.
    """

    name: str
    kind: str = ""  # number, date, text, or empty as long as only missing values were seen
    limit: float = float("inf")  # the largest number of different texts
    texts: dict[str, int] = field(default_factory=dict)  # the number of each text
    strays: int = 0  # how many texts there are among the numbers or dates
    stray: str = ""  # the first of them
    stray_row: int = 0  # and its row
    zones: set[bool] = field(default_factory=set)  # whether times of dates have a time zone
    refused: str = ""  # what it holds, where that is nothing that can be read
    _chunks: list[Values] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, kind: str, values: Values, texts: Iterable[str] = ()) -> Gathered:
        """A column whose values ``(n,)`` are known: numbers, days, or places among the texts."""
        numbered = {text: i for i, text in enumerate(texts)}
        return cls(name, kind, texts=numbered, _chunks=[values])

    @cached_property
    def values(self) -> Values:
        """All of the column ``(n,)``: numbers, days since 1970, or the numbers of texts.

        NaN where it is missing.
        """
        chunks, self._chunks = self._chunks, []
        return np.concatenate(chunks) if chunks else np.empty(0)

    @property
    def has_too_many_texts(self) -> bool:
        """Whether there are more different texts than allowed; the rest is then passed over."""
        return len(self.texts) > self.limit

    def rows_of(self, text: str) -> npt.NDArray[np.int64]:
        """The rows that hold a text."""
        return np.flatnonzero(self.values == self.texts[text])

    def add(self, array: Any) -> None:
        """Append a pyarrow array."""
        import pyarrow as pa

        block = _plain(array)
        if block is None:
            nested = pa.types.is_binary(array.type)
            self.refused = "bytes, objects or lists" if nested else f"values of type {array.type}"
        if block is None or self.has_too_many_texts:
            self._chunks.append(np.full(len(array), np.nan))
        elif self.kind in ("text", "date"):
            texts = _without_missing(block.cast(pa.string()))
            self._add_texts(texts) if self.kind == "text" else self._add_dates(texts)
        else:
            try:
                self._add_numbers(block.cast(pa.float64()))
            except pa.ArrowInvalid:
                self._add_mixture(_without_missing(block))

    def _add_mixture(self, block: Any) -> None:
        """Append texts of which some are no numbers."""
        import pyarrow.compute as pc

        is_number = pc.match_substring_regex(block, NUMBER)
        texts = block.filter(pc.invert(is_number))
        half = (len(block) - block.null_count) / 2
        if not self.kind and len(texts) > half:
            dates = np.count_nonzero(~np.isnan(_days(texts)))
            self.kind = "date" if dates > half else "text"
            self.add(block)
            return
        self._count_strays(block, pc.invert(is_number))
        self._add_numbers(pc.if_else(is_number, block, None).cast("float64"))

    def _add_numbers(self, block: Any) -> None:
        # a copy, since pyarrow keeps the memory of blocks for the next ones
        values = np.array(block.to_numpy(zero_copy_only=False))
        if not self.kind and not np.isnan(values).all():
            self.kind = "number"
        self._chunks.append(values)

    def _add_dates(self, block: Any) -> None:
        import pyarrow as pa

        texts = block.unique().drop_null().to_pylist()
        self.zones |= {any(sign in text[10:] for sign in "Z+-") for text in texts if text[10:]}
        days = _days(block)
        self._count_strays(block, pa.array(np.isnan(days)))
        self._chunks.append(days)

    def _add_texts(self, block: Any) -> None:
        encoded = block.dictionary_encode()
        texts = encoded.dictionary.to_pylist()
        numbers = [self.texts.setdefault(text, len(self.texts)) for text in texts]
        self._chunks.append(_looked_up(encoded, numbers))

    def _count_strays(self, block: Any, wrong: Any) -> None:
        import pyarrow.compute as pc

        rows = np.flatnonzero(pc.and_(wrong, block.is_valid()).fill_null(False))
        if len(rows) and not self.strays:
            self.stray = block[int(rows[0])].as_py()
            self.stray_row = sum(map(len, self._chunks)) + int(rows[0])
        self.strays += len(rows)


def _plain(array: Any) -> Any:
    """A pyarrow array as float64 or texts, null where missing; None where it is of other types."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if types.is_date(kind) or types.is_timestamp(kind):
        # without its time zone, which leaves UTC; no text has more than microseconds
        return array.cast(pa.timestamp("us"), safe=False).cast(pa.string())
    if types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind):
        return array.cast(pa.string())
    numbers = (types.is_integer, types.is_floating, types.is_decimal, types.is_null)
    if any(is_kind(kind) for is_kind in numbers):
        return array.cast(pa.float64(), safe=False)
    return None


def _without_missing(block: Any) -> Any:
    """Texts without spaces around them, null where they stand for nothing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim_whitespace(block)
    missing = pc.is_in(trimmed, value_set=pa.array(MISSING))
    return pc.if_else(missing, pa.scalar(None, pa.string()), trimmed)


def _days(block: Any) -> Values:
    """Days since 1970 of an array of texts, NaN where they are missing or no dates."""
    encoded = block.dictionary_encode()
    return _looked_up(encoded, [as_days(text) for text in encoded.dictionary.to_pylist()])


def _looked_up(encoded: Any, values: list[Any]) -> Values:
    """The value of each entry of a dictionary, for each row; NaN where there is none."""
    lookup = np.array([*values, np.nan], np.float64)  # the last place is where index -1 leads
    found: Values = lookup[encoded.indices.fill_null(-1).to_numpy()]
    return found


def gather(
    blocks: Iterable[Mapping[str, Any]],
    wanted: Iterable[str],
    kinds: Mapping[str, str],
    limits: Mapping[str, int],
) -> dict[str, Gathered]:
    """The wanted columns of some blocks; ``kinds`` says what is known beforehand of some."""
    columns = {
        name: Gathered(name, kinds.get(name, ""), limits.get(name, float("inf"))) for name in wanted
    }
    for block in blocks:
        for name, column in columns.items():
            column.add(block[name])
    return columns
