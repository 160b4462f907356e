"""New images for a network that was trained on others of their size: PNG files, npz, or arrays."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from covary.data.columns import shortened
from covary.data.dataset import Array, DataError, needed
from covary.data.rows import Chunk
from covary.files import check_is_file

_OTHERS = (".bmp", ".gif", ".jpeg", ".jpg", ".tif", ".tiff", ".webp")
_CHANNELS = {"1": 1, "L": 1, "P": 3, "RGB": 3, "LA": 2, "PA": 4, "RGBA": 4}  # of Pillow's modes


@dataclass(frozen=True)
class ImageSchema:
    """What images a run takes, and what it makes of them.

    Attributes:
        shape: (channels, height, width) of each.
        classes: the labels' names.
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]

    @property
    def wanted(self) -> str:
        """What is needed, in words."""
        channels, height, width = self.shape
        named = {1: " (grey)", 3: " (red, green, blue)"}.get(channels, "")
        return f"{width} x {height} pixels of {channels} channel{'s'[: channels > 1]}{named}"


def read_images(
    source: str | os.PathLike[str] | Array, schema: ImageSchema, *, chunk: int, array: str = ""
) -> Iterator[Chunk]:
    """New images in order, in memory for one chunk.

    What is wrong with the source as a whole is told when this is called; what is wrong with an
    image, when its chunk is read.

    Args:
        source: a folder of PNG files, its sub-folders included; a PNG file; an npz file; or an
            array in memory. An array is (n, channels, height, width), (n, height, width, channels)
            or, of grey images, (n, height, width); whole numbers from 0 to 255, or floating point
            numbers from 0 to 1.
        schema: what images are needed.
        chunk: images in a chunk; the last one may have fewer.
        array: the name of the array in an npz file that has several.

    Yields:
        The images: ``x`` is (n, channels, height, width), on the scale of bytes; ``columns`` has
        ``file``, the path within the folder, or ``image``, the place in the array, from 0.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_dir() or path.suffix.lower() == ".png":
            if array:
                raise DataError(f"{path} holds no arrays, so {array!r} cannot be chosen (--array).")
            return _of_files(path, _png_files(path), schema, chunk)
        if path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"):
            raise DataError(
                f"The run is of images, and takes a folder of PNG files or an npz file; {path} is "
                "a table."
            )
        return _of_npz(path, array, schema, chunk)
    found = np.asarray(source)
    _check_array(found.shape, found.dtype, schema, "The array")
    parts = (found[start : start + chunk] for start in range(0, len(found), chunk))
    return _of_parts(parts, schema, "The array")


def _png_files(folder: Path) -> list[Path]:
    """The PNG files in a folder and its sub-folders, in the order of their names."""
    if not folder.is_dir():
        check_is_file(folder, DataError)
        return [folder]
    found, others = [], []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            if name.lower().endswith(".png"):
                found.append(Path(place, name))
            elif name.lower().endswith(_OTHERS):
                others.append(Path(place, name))
    if others:
        raise DataError(
            f"{folder} has {len(others)} images that are no PNG files, the first is {others[0]}; "
            "convert them to PNG, or move them away."
        )
    if not found:
        raise DataError(f"{folder} has no PNG files in it, nor in its sub-folders.")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _of_files(source: Path, files: list[Path], schema: ImageSchema, size: int) -> Iterator[Chunk]:
    import pyarrow as pa

    with needed("Pillow", "reading PNG files", "data"):
        import PIL.Image  # noqa: F401

    folder, rest, start = source if source.is_dir() else source.parent, iter(files), 0
    while some := list(islice(rest, size)):
        names = [os.fsencode(path.relative_to(folder).as_posix()) for path in some]
        columns = {"file": pa.array([name.decode(errors="replace") for name in names])}
        x = np.stack([_pixels(path, schema, str(path)) for path in some])
        yield Chunk(start, x, None, None, {}, columns)
        start += len(some)


def read_png(file: BinaryIO, schema: ImageSchema) -> Chunk:
    """One image, from the bytes of a PNG file."""
    with needed("Pillow", "reading PNG files", "data"):
        x = _pixels(file, schema, "The image")
    return Chunk(0, x[None].copy(), None, None, {})  # tensors may be written to


def _pixels(file: Path | BinaryIO, schema: ImageSchema, label: str) -> Array:
    """(channels, height, width) bytes of one PNG file."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file, formats=["PNG"]) as image:
            size, mode = image.size, image.mode
            if "transparency" in image.info:
                mode = {"L": "LA", "P": "PA", "RGB": "RGBA"}.get(mode, mode)
            channels, height, width = schema.shape
            if size == (width, height) and _CHANNELS.get(mode) == channels:
                found = np.asarray(image.convert("L" if channels == 1 else "RGB"))
                return found.reshape(height, width, channels).transpose(2, 0, 1)
    except Exception as error:  # damaged files raise errors of a dozen kinds
        told = f"{label} is not a readable PNG file"
        if isinstance(error, UnidentifiedImageError):  # which says no more than that
            raise DataError(f"{told}.") from error
        raise DataError(f"{told}: {error}.") from error
    got = _CHANNELS.get(mode)
    told = f"{got} channel{'s'[: got > 1]}" if got else f"{mode} values"
    more = ", with transparency" if got in (2, 4) else ""
    raise DataError(
        f"{label} has {size[0]} x {size[1]} pixels of {told}{more}; the run takes {schema.wanted}. "
        "Convert it first."
    )


def _of_npz(path: Path, array: str, schema: ImageSchema, size: int) -> Iterator[Chunk]:
    """Of an npz file: name, type and shape of its array are checked before anything is read."""
    check_is_file(path, DataError)
    with _readable(path), zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name[-4:] == ".npy"]
    listed = shortened(map(repr, names), 25)
    if not names:
        raise DataError(f"{path} has no arrays in it.")
    if array and array not in names:
        raise DataError(f"{path} has no array {array!r}; it has {listed}.")
    if not array and len(names) > 1:
        raise DataError(
            f"{path} has {len(names)} arrays, {listed}; choose that of the images (--array NAME)."
        )
    name = array or names[0]
    label = f"The array {name!r} of {path}"
    with _readable(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        shape, in_columns, dtype = _header(file)
    _check_array(shape, dtype, schema, label)
    return _of_parts(_npz_parts(path, name, size, in_columns), schema, label)


def _npz_parts(path: Path, name: str, size: int, in_columns: bool) -> Iterator[Array]:
    """The array of an npz file, so many images at a time."""
    with _readable(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        if in_columns:  # Fortran's order, in which the last image ends where the first one does
            file.seek(0)
            whole = np.lib.format.read_array(file, allow_pickle=False)
            yield from (whole[start : start + size] for start in range(0, len(whole), size))
            return
        (total, *shape), _, dtype = _header(file)
        each = dtype.itemsize * int(np.prod(shape))
        for start in range(0, total, size):
            count = min(size, total - start)
            data = file.read(count * each)
            if len(data) < count * each:
                raise ValueError("it ends too early")
            yield np.frombuffer(data, dtype).reshape(count, *shape)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the order is Fortran's, and type of an array; then its values follow."""
    version = np.lib.format.read_magic(file)
    old = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
    found: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(file)
    return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Around reading an npz file: say that it is damaged, or none at all."""
    try:
        yield
    except (DataError, MemoryError, GeneratorExit):
        raise
    except Exception as error:  # damaged archives raise errors of a dozen kinds
        raise DataError(f"{path} is not a readable npz file: {error}.") from error


def _check_array(
    shape: tuple[int, ...], dtype: np.dtype[Any], schema: ImageSchema, label: str
) -> None:
    """Refuse arrays of other images, or of no numbers."""
    channels, height, width = schema.shape
    fits = [schema.shape, (height, width, channels), *([(height, width)] if channels == 1 else [])]
    if tuple(shape[1:]) not in fits:
        allowed = " or ".join(f"(n, {', '.join(map(str, each))})" for each in dict.fromkeys(fits))
        raise DataError(
            f"{label} has the shape {tuple(shape)}; the run takes {schema.wanted}, arrays of the "
            f"shape {allowed}."
        )
    if dtype.kind not in "uif":
        raise DataError(
            f"{label} is of type {dtype}; images are whole numbers from 0 to 255 (uint8), or "
            "floating point numbers from 0 to 1."
        )
    if not shape[0]:
        raise DataError(f"{label} has no images in it.")


def _of_parts(parts: Iterator[Array], schema: ImageSchema, label: str) -> Iterator[Chunk]:
    import pyarrow as pa

    start = 0
    for part in parts:
        columns = {"image": pa.array(np.arange(start, start + len(part)))}
        yield Chunk(start, _bytes(part, schema, label, start), None, None, {}, columns)
        start += len(part)


def _bytes(images: Array, schema: ImageSchema, label: str, start: int) -> Array:
    """(n, channels, height, width) on the scale of bytes."""
    most = 1 if images.dtype.kind == "f" else 255
    wrong = ~((images >= 0) & (images <= most))
    if wrong.any():
        row = int(np.flatnonzero(wrong.reshape(len(images), -1).any(1))[0])
        first = images[row][wrong[row]][0]
        whole = most == 255
        raise DataError(
            f"{label} has the value {first:g} in image {start + row} (counted from 0); "
            f"{'whole' if whole else 'floating point'} numbers are taken from 0 to {most}"
            f"{'' if whole else ': divide them by 255, or give bytes (uint8)'}."
        )
    if images.shape[1:] != schema.shape and images.ndim == 4:
        images = images.transpose(0, 3, 1, 2)
    images = images.reshape(len(images), *schema.shape)
    # float32 is what networks compute in; copies, as tensors may be written to
    return (images * np.float32(255)).astype(np.float32) if most == 1 else images.astype(np.uint8)
