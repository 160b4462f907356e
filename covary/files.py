"""Files written whole or not at all, and read with errors that name them; nothing is pickled."""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor


class FileError(ValueError):
    """A file that cannot be read, or does not contain what it should. The message names it."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step: whoever looks, at any moment, sees the old or the new one."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` when all went well, in one step."""
    # Of this process alone: another may be writing the same file.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name has to reach the disk too
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(unfinished)):
            raise
        # "No space left on device" alone does not say where.
        raise type(error)(error.errno, error.strerror, str(path)) from error


def escaped(text: str, characters: str) -> str:
    """The text with these characters (a regular expression) as ``\\u001b``, as JSON reads them."""
    return re.sub(characters, lambda found: f"\\u{ord(found[0]):04x}", text)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON; NaN and infinity become null."""
    text = json.dumps(without_nan(content), indent=1, allow_nan=False, ensure_ascii=False)
    write_atomically(path, (text + "\n").encode())


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays as compressed ``.npz``."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write_atomically(path, packed.getvalue())


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors, and texts beside them, as safetensors; the same bytes for the same content."""
    from safetensors.torch import save

    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    packed = memoryview(save(whole, metadata=None if metadata is None else dict(metadata)))
    # The library has texts in an order of chance. A header is JSON behind its length in 8 bytes.
    end = 8 + int.from_bytes(packed[:8], "little")
    header = json.dumps(json.loads(bytes(packed[8:end])), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    with replacing(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(packed[end:])


def read_bytes(path: Path) -> bytes:
    """All of a file."""
    check_is_file(path)
    return path.read_bytes()


def read_text(path: Path) -> str:
    """All of a file of text, in UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not text in UTF-8: {error}.") from error


def read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    """The object in a file of JSON, NaN and infinity as None; ``remedy`` ends an error."""
    try:
        content = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise FileError(f"{path} is not JSON: {error}. {remedy}".rstrip()) from error
    if not isinstance(content, dict):
        found = kind_of(content)
        raise FileError(f"{path} holds {found} where an object is expected. {remedy}".rstrip())
    return {key: without_nan(value) for key, value in content.items()}


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an ``.npz`` file."""
    try:
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files}
    except (FileError, MemoryError):
        raise
    except Exception as error:  # damaged archives raise errors of a dozen kinds
        raise FileError(f"{path} is not a readable npz file: {error}.") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    check_is_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise FileError(f"{path} is not a readable safetensors file: {error}.") from error


def check_is_file(path: Path, error: type[ValueError] = FileError) -> None:
    """Refuse what is no ordinary file: reading a named pipe would wait forever."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise error(f"{path} is not there.") from None
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror}.") from failure
    kinds = {stat.S_IFREG: "", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe"}
    if found := kinds.get(stat.S_IFMT(mode), "a device or a socket"):
        raise error(f"{path} is {found}, where a file is expected.")


def kind_of(value: Any) -> str:
    """What a value of JSON is, in words."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def without_nan(value: Any) -> Any:
    """NaN and infinity as None, within dictionaries and lists too: JSON has no word for them."""
    if isinstance(value, Mapping):
        return {key: without_nan(some) for key, some in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(some) for some in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
