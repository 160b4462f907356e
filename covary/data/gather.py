"""Columns of a table collected block by block as float64, whatever they hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from covary.data.dataset import DataError
from covary.data.table_files import TableFile

Values = npt.NDArray[np.float64]

# what stands for a value that is not there
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:inf|infinity|nan))$"


@dataclass
class Gathered:
    """A column as it is read: numbers, or texts that are numbered as they come.

    The first block with a value in it decides which: texts, if more than half of its values are no
    numbers. Texts that then turn up among numbers are counted as strays.

    Attributes:
        name: of the column.
        kind: ``"number"``, ``"text"``, or empty as long as nothing but missing values was seen.
        limit: the largest number of different texts.
        texts: the number of each text.
        strays: how many texts there are among the numbers.
        stray: the first of them.
    """

    name: str
    kind: str = ""
    limit: float = float("inf")
    texts: dict[str, int] = field(default_factory=dict)
    strays: int = 0
    stray: str = ""
    _chunks: list[Values] = field(default_factory=list)

    @cached_property
    def values(self) -> Values:
        """All of the column ``(n,)``: numbers, or the numbers of texts; NaN where missing."""
        chunks, self._chunks = self._chunks, []
        return np.concatenate(chunks) if chunks else np.empty(0)

    def add(self, block: Any) -> None:
        """Append a pyarrow array of float64 or of texts."""
        import pyarrow as pa

        if self.kind == "text":
            self._add_texts(_without_missing(block.cast(pa.string())))
            return
        try:
            self._add_numbers(block.cast(pa.float64()))
        except pa.ArrowInvalid:
            self._add_mixture(_without_missing(block))

    def _add_mixture(self, block: Any) -> None:
        import pyarrow.compute as pc

        is_number = pc.match_substring_regex(block, NUMBER)
        texts = block.filter(pc.invert(is_number))
        if not self.kind and 2 * len(texts) > len(block) - block.null_count:
            self.kind = "text"
            self._add_texts(block)
            return
        if len(texts):
            self.stray = self.stray or texts[0].as_py()
            self.strays += len(texts)
        self._add_numbers(pc.if_else(is_number, block, None).cast("float64"))

    def _add_numbers(self, block: Any) -> None:
        # a copy, since pyarrow keeps the memory of blocks for the next ones
        values = np.array(block.to_numpy(zero_copy_only=False))
        if not self.kind and not np.isnan(values).all():
            self.kind = "number"
        self._chunks.append(values)

    def _add_texts(self, block: Any) -> None:
        encoded = block.dictionary_encode()
        numbers = [
            self.texts.setdefault(text, len(self.texts)) for text in encoded.dictionary.to_pylist()
        ]
        if len(self.texts) > self.limit:
            some = ", ".join(repr(text) for text in list(self.texts)[:3])
            raise DataError(
                f"Column {self.name!r} holds more than {self.limit} different texts ({some}, ...); "
                f"leave it out with --drop {self.name!r}, or put them into groups."
            )
        # the last place is where index -1 leads
        lookup = np.array([*numbers, np.nan])
        self._chunks.append(lookup[encoded.indices.fill_null(-1).to_numpy()])


def _without_missing(block: Any) -> Any:
    """Texts without spaces around them, null where they stand for nothing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim_whitespace(block)
    missing = pc.is_in(trimmed, value_set=pa.array(MISSING))
    return pc.if_else(missing, pa.scalar(None, pa.string()), trimmed)


def gather(
    table: TableFile,
    wanted: Collection[str],
    *,
    kinds: Mapping[str, str],
    limits: Mapping[str, int],
) -> dict[str, Gathered]:
    """Read the wanted columns; ``kinds`` says what is known beforehand of some of them."""
    columns = {
        name: Gathered(name, kinds.get(name, ""), limits.get(name, float("inf"))) for name in wanted
    }
    for block in table.blocks(list(wanted)):
        for name, values in block.items():
            columns[name].add(values)
    return columns
