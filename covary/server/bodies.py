"""Bodies of requests -> rows that are read: JSON of rows or pixels, and PNG files."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from covary.data import Chunk, DataError, ImageSchema, Schema, read_png
from covary.data.columns import shortened, with_nearest
from covary.files import kind_of
from covary.server.limits import Refused
from covary.serving import Predictor

JSON, PNG = "application/json", "image/png"


def content_type(header: str, schema: Schema | ImageSchema) -> str:
    """The type of a body, if it is one that the run takes."""
    name = header.partition(";")[0].strip().lower()
    allowed = (JSON,) if isinstance(schema, Schema) else (JSON, PNG)
    if name not in allowed:
        told = f"The content type is {header[:60]!r}; send {' or '.join(allowed)}."
        raise Refused(415, told)
    return name


def read_body(predictor: Predictor, kind: str, body: bytes, most: int) -> Chunk:
    """The rows or images of a body, ``most`` of them at most.

    A ``DataError`` says what is wrong with them.
    """
    schema = predictor.schema
    if kind == PNG and not isinstance(schema, Schema):
        return read_png(io.BytesIO(body), schema)
    try:
        given = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise DataError("The body is JSON that is nested too deeply.") from None
    except UnicodeDecodeError:
        raise DataError("The body is not in UTF-8, as JSON is.") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        if not isinstance(error, json.JSONDecodeError):  # Python's limit of digits
            raise DataError(
                "The body has a whole number of thousands of digits; send one that a column or "
                "pixel can have."
            ) from None
        # Its message has a place, and nothing of the body.
        raise DataError(f"The body is no JSON: {error}.") from None
    if not isinstance(given, list):
        raise DataError(f"The body is {kind_of(given)}; send {wanted(schema)}.")
    if not given:
        raise DataError(f"The body is an empty list; send {wanted(schema)}.")
    if isinstance(schema, Schema):
        whole: Any = _columns(given, schema, most)
    else:
        whole = _pixels(given, schema)
        _refuse_count(len(whole), most, "images")
    try:
        (chunk,) = predictor.read(whole, chunk=most)
    except UnicodeError:
        raise DataError("A text has half of a character in it (a lone surrogate).") from None
    return chunk


def wanted(schema: Schema | ImageSchema) -> str:
    """What a body has to be, in words."""
    if isinstance(schema, Schema):
        return "a list of rows, each an object with a value for each column"
    return f"a list of images, or one: nested lists of numbers, {schema.wanted}; or a PNG"


def _refuse_constant(name: str) -> NoReturn:
    raise DataError(f"{name} is no number of JSON; send null for a value that is missing.")


def _refuse_count(count: int, most: int, things: str) -> None:
    if count > most:
        raise DataError(
            f"The body has {count:,} {things}, and {most:,} are taken at a time: send several "
            "requests."
        )


def _columns(rows: list[Any], schema: Schema, most: int) -> dict[str, list[Any]]:
    """Values (n,) of each column that the run reads; each row has to have all but constants."""
    _refuse_count(len(rows), most, "rows")
    needed = [*schema.inputs, *schema.errors.values()]
    constants = [column.name for column in schema.columns if column.kind == "constant"]
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"Row {i + 1} is {kind_of(row)}; send {wanted(schema)}.")
        if lacks := [name for name in needed if name not in row]:
            told = with_nearest(lacks, [*row][:100])
            raise DataError(
                f"Row {i + 1} has no value for {told}; send null where it is missing. "
                f"The columns are {shortened(needed, 25)}."
            )
    names = needed + [name for name in constants if any(name in row for row in rows)]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(names)}


def _pixels(given: list[Any], schema: ImageSchema) -> np.ndarray:
    """An array of images (n, ...), from nested lists of n or of one."""
    shape, flat = [len(given)], given
    while flat and isinstance(flat[0], list) and len(shape) < 5:
        sizes = {len(each) if isinstance(each, list) else -1 for each in flat}
        if len(sizes) > 1:
            raise DataError(f"Lists of the body differ in length; send {wanted(schema)}.")
        shape += sizes
        flat = list(chain.from_iterable(flat))
    others = {type(each) for each in flat} - {int, float}
    if others:
        wrong = next(each for each in flat if type(each) in others)
        raise DataError(f"The body has {kind_of(wrong)} among its pixels; send {wanted(schema)}.")
    whole = all(type(each) is int for each in flat)
    try:
        found = np.array(flat, np.int64 if whole else np.float64).reshape(shape)
    except OverflowError:
        raise DataError("The body has a pixel that is no number from 0 to 255.") from None
    channels, height, width = schema.shape
    one = [schema.shape, (height, width, channels), *([(height, width)] * (channels == 1))]
    return found[None] if found.shape in one else found
