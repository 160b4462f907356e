"""Frozen dataclasses to JSON and back; their types say what a file should contain.

Fields are texts, numbers, truth values, ``Literal`` texts, tuples, mappings of texts to one of
these, dataclasses, and unions of them with None. A number that is undefined (NaN, infinity) is None
in a file, and so in what is read back.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from covary.files import FileError, kind_of, read_json, without_nan, write_json

Value = TypeVar("Value")
# Names of numbers -> their values; None where one is undefined.
Numbers = Mapping[str, float | None]


@dataclass(frozen=True)
class Stored:
    """A dataclass that is kept as a file of JSON."""

    def to_json(self) -> dict[str, Any]:
        """As a file has it."""
        return to_json(self)

    def write(self, path: Path) -> Self:
        """Write it to a file, and give what whoever reads the file will get."""
        content = self.to_json()
        write_json(path, content)
        return decoded(type(self), content, str(path))

    @classmethod
    def from_json(cls, content: Any, source: str = "JSON", remedy: str = "") -> Self:
        """The inverse of ``to_json``; an error names the source, the key and what was expected."""
        return decoded(cls, content, source, remedy)

    @classmethod
    def read(cls, path: Path, remedy: str = "") -> Self:
        """Read what ``write`` wrote."""
        return cls.from_json(read_json(path, remedy), str(path), remedy)


@dataclass(frozen=True, kw_only=True)
class Provenance(Stored):
    """What a result depends on besides its configuration."""

    command: str  # what was typed
    versions: Mapping[str, str]  # of Python and the libraries that numbers depend on
    git_commit: str | None  # of covary's source, where it is a clone
    platform: str  # system and processor
    started: str  # when, in UTC
    seconds: float  # how long it took


@dataclass(frozen=True, kw_only=True)
class Record(Provenance):
    """What every result says of how it came about; results are dataclasses made of this."""

    seed: int  # of all that was random


def to_json(record: Any) -> dict[str, Any]:
    """A dataclass as plain types that JSON has."""
    content: dict[str, Any] = without_nan(asdict(record))
    return content


def decoded(cls: type[Value], content: Any, source: str, remedy: str = "") -> Value:
    """A dataclass from the content of a file; keys that it does not have are passed over.

    An error names the source, the key, what was expected and got, and ends with the remedy.
    """
    try:
        found: Value = _decoded(cls, content, "")
    except _Mismatch as wrong:
        where = f"{source}, key {wrong.key!r}" if wrong.key else source
        raise FileError(f"{where}: {wrong.problem}. {remedy}".rstrip()) from None
    return found


class _Mismatch(Exception):  # noqa: N818 - caught above, never seen
    def __init__(self, key: str, problem: str) -> None:
        self.key, self.problem = key, problem


def _decoded(kind: Any, value: Any, key: str) -> Any:
    """The value as this kind, or a mismatch that says where."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(parts, value, key)
    if not _fits(origin, parts, value):
        raise _Mismatch(key, f"expected {_name_of(kind)}, got {_shown(value)}")
    if is_dataclass(origin):
        return _dataclass(origin, value, key)
    if origin is tuple:
        kinds = parts[:1] * len(value) if parts[1:] == (Ellipsis,) else parts
        if len(kinds) != len(value):
            raise _Mismatch(key, f"expected a list of {len(kinds)}, got one of {len(value)}")
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(_decoded(each, one, f"{key}[{i}]") for i, (each, one) in pairs)
    if isinstance(value, Mapping):
        return {name: _decoded(parts[1], one, _below(key, name)) for name, one in value.items()}
    return value


def _fits(origin: Any, parts: tuple[Any, ...], value: Any) -> bool:
    """Whether the value itself, not what it contains, is of a kind."""
    if origin is Literal:
        return value in parts
    if isinstance(value, bool):  # which is an int for Python
        return origin is bool
    wanted = {tuple: list | tuple, float: int | float}
    return isinstance(value, Mapping if is_dataclass(origin) else wanted.get(origin, origin))


def _one_of(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    *others, last = (kind for kind in kinds if kind is not type(None))
    if isinstance(value, Mapping) and "kind" in value:  # which says what it is
        for kind in (*others, last):
            hints = _hints(kind) if isinstance(kind, type) and is_dataclass(kind) else {}
            if value["kind"] in get_args(hints.get("kind")):
                return _decoded(kind, value, key)
    for kind in others:
        with suppress(_Mismatch):
            return _decoded(kind, value, key)
    return _decoded(last, value, key)


def _dataclass(kind: Any, value: Mapping[str, Any], key: str) -> Any:
    hints = _hints(kind)
    found = {}
    for field in fields(kind):
        here = _below(key, field.name)
        if field.name in value:
            found[field.name] = _decoded(hints[field.name], value[field.name], here)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise _Mismatch(here, f"missing; expected {_name_of(hints[field.name])}")
    try:
        return kind(**found)
    except (ValueError, TypeError) as error:  # what a class itself refuses
        raise _Mismatch(key, str(error).rstrip(".")) from error


def _name_of(kind: Any) -> str:
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    if kind in names:
        return names[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if each is type(None) else _name_of(each) for each in parts)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    return "a list" if origin is tuple else "an object"


def _shown(value: Any) -> str:
    if isinstance(value, str | int | float):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return kind_of(value)


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
