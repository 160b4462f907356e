"""Results as frozen dataclasses, to JSON and back; what a file should hold is said by the types.

Fields are texts, numbers, truth values, ``Literal`` texts, tuples, mappings of texts to one of
these, dataclasses, and unions of them with None. A number that is undefined (NaN, infinity) is None
in a file, and so in what is read back.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from covary.files import FileError, kind_of, read_json, without_nan, write_json

Value = TypeVar("Value")
# Names of numbers -> their values; None where one is undefined.
Numbers = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every result says of how it came about; results are dataclasses made of this.

    Attributes:
        command: what was typed.
        versions: of Python and the libraries that numbers depend on.
        git_commit: of covary's source, where it is a clone.
        platform: system and processor.
        started: when, in UTC.
        seconds: how long it took.
        seed: of all that was random.
    """

    command: str
    versions: Mapping[str, str]
    git_commit: str | None
    platform: str
    started: str
    seconds: float
    seed: int

    def to_json(self) -> dict[str, Any]:
        """As a file has it."""
        return to_json(self)

    def write(self: Value, path: Path) -> Value:
        """Write it to a file, and give what whoever reads the file will get."""
        content = to_json(self)
        write_json(path, content)
        return decoded(type(self), content, str(path))

    @classmethod
    def read(cls: type[Value], path: Path, remedy: str = "") -> Value:
        """Read what ``write`` wrote; an error names the file, the key and what was expected."""
        return decoded(cls, read_json(path, remedy), str(path), remedy)

    @classmethod
    def from_json(cls: type[Value], content: Mapping[str, Any], source: str = "JSON") -> Value:
        """The inverse of ``to_json``; ``source`` is what an error calls the content."""
        return decoded(cls, content, source)


def to_json(record: Any) -> dict[str, Any]:
    """A dataclass as plain types that JSON has."""
    content: dict[str, Any] = without_nan(asdict(record))
    return content


def decoded(cls: type[Value], content: Any, source: str, remedy: str = "") -> Value:
    """A dataclass from plain types; keys that it does not have are passed over.

    Args:
        cls: the dataclass.
        content: what a file holds.
        source: the file's name.
        remedy: a sentence that ends an error.
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
    if is_dataclass(kind):
        return _dataclass(kind, value, key)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(parts, value, key)
    if origin is Literal:
        if value not in parts:
            expected = " or ".join(map(repr, parts))
            raise _Mismatch(key, f"expected {expected}, got {_shown(value)}")
        return value
    if origin is tuple:
        return _tuple(kind, value, key)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _Mismatch(key, f"expected an object, got {_shown(value)}")
        return {name: _decoded(parts[1], one, _below(key, name)) for name, one in value.items()}
    if not _is_plain(kind, value):
        raise _Mismatch(key, f"expected {_name_of(kind)}, got {_shown(value)}")
    return value


def _dataclass(kind: Any, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        raise _Mismatch(key, f"expected an object, got {_shown(value)}")
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


def _one_of(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    for kind in others[:-1]:
        try:
            return _decoded(kind, value, key)
        except _Mismatch:
            continue
    return _decoded(others[-1], value, key)


def _tuple(kind: Any, value: Any, key: str) -> tuple[Any, ...]:
    parts = get_args(kind)
    if not isinstance(value, list | tuple):
        raise _Mismatch(key, f"expected a list, got {_shown(value)}")
    kinds = [parts[0]] * len(value) if parts[1:] == (Ellipsis,) else list(parts)
    if len(kinds) != len(value):
        raise _Mismatch(key, f"expected a list of {len(kinds)}, got one of {len(value)}")
    return tuple(
        _decoded(each, one, f"{key}[{i}]")
        for i, (each, one) in enumerate(zip(kinds, value, strict=True))
    )


def _is_plain(kind: Any, value: Any) -> bool:
    if kind in (int, float):
        allowed = (int,) if kind is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    return isinstance(value, kind)


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
