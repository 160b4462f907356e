"""The named sets: find them, check them, fetch them, load them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from covary.data.catalogue import CATALOGUE, Form, SetEntry
from covary.data.dataset import DataError, Dataset, needed
from covary.data.download import fetch_file

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Status:
    """What there is of a set on this machine.

    Attributes:
        name: the set.
        state: ``"built in"``, ``"verified"``, ``"damaged"`` or ``"missing"``.
        folder: the data folder in which it was found.
        bytes: the size of its files.
        detail: what is wrong, or a note on what was found.
    """

    name: str
    state: str
    folder: Path | None = None
    bytes: int = 0
    detail: str = ""


def names() -> list[str]:
    """The names that ``load`` knows."""
    return list(CATALOGUE)


def describe(name: str) -> SetEntry:
    """What is known of a set without having it: title, task, size, licence, source, ..."""
    if name not in CATALOGUE:
        close = difflib.get_close_matches(name, CATALOGUE, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        if Path(name).suffix:
            hint = " Tables are .csv, .tsv, .jsonl, .ndjson (also .gz) or .parquet: save it as one."
        raise DataError(f"There is no data set {name!r}.{hint} There are: {', '.join(CATALOGUE)}.")
    return CATALOGUE[name]


def cache_folder() -> Path:
    """The user's cache, where sets are fetched to unless another folder is named."""
    with needed("pooch", "finding the cache", "data"):
        import pooch
    return Path(pooch.os_cache("covary"))


def folders(data_dir: Folder | None) -> Iterator[Path]:
    """The data folders in the order in which they are searched."""
    for named in (data_dir, os.environ.get("COVARY_DATA")):
        if named:
            yield Path(named).expanduser()
    yield cache_folder()


def _find(entry: SetEntry, data_dir: Folder | None) -> tuple[Path, Form] | None:
    """The first folder that has all files of one of the forms."""
    for folder in folders(data_dir):
        for form in entry.forms:
            if all((folder / file.path).exists() for file in form.files):
                return folder, form
    return None


def status(name: str, data_dir: Folder | None = None) -> Status:
    """Whether a set is there, where, and whether its files are the right ones (reads them all)."""
    entry = describe(name)
    if entry.make:
        return Status(name, "built in")
    found = _find(entry, data_dir)
    if found is None:
        return Status(name, "missing", detail=f"covary data fetch {name}")
    folder, form = found
    size = sum((folder / file.path).stat().st_size for file in form.files)
    try:
        for file in form.files:
            file.check(folder / file.path)
    except DataError as error:
        return Status(name, "damaged", folder, size, str(error))
    return Status(name, "verified", folder, size, "; ".join(form.notes))


def fetch(name: str, *, data_dir: Folder | None = None, progress: bool = True) -> Path:
    """Download what is missing or damaged of a set; returns the folder of its files.

    Nothing is done for a set that is found and verified. Files go to ``data_dir`` if given, else to
    the folder that ``$COVARY_DATA`` names if it can be written to, else to the user's cache. Those
    already there are checked and kept.
    """
    entry = describe(name)
    if entry.make:
        raise DataError(f"{name} is built in: there is nothing to fetch.")
    found = _find(entry, data_dir)
    if found is None or status(name, data_dir).state != "verified":
        found = _download(entry, data_dir, progress=progress)
    folder, form = found
    return (folder / form.files[0].path).parent


def _download(entry: SetEntry, data_dir: Folder | None, *, progress: bool) -> tuple[Path, Form]:
    candidates = list(folders(data_dir))
    # a shared folder is often read-only; one asked for by name is never passed over in silence
    writable = (folder for folder in candidates if _writable(folder))
    folder = candidates[0] if data_dir is not None else next(writable, candidates[-1])
    form = next(form for form in entry.forms if form.downloadable)
    for file in form.files:
        fetch_file(file, folder, progress=progress)
    return folder, form


def _writable(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return os.access(existing, os.W_OK)


def load(
    name: str,
    *,
    data_dir: Folder | None = None,
    split: int = 0,
    seed: int = 0,
    download: bool = True,
) -> Dataset:
    """A named set, with the SHA-256 of every file it is read from checked.

    The files are looked for in ``data_dir``, in the folder that ``$COVARY_DATA`` names and in the
    user's cache; the first that has the set wins.

    Args:
        name: one of ``names()``.
        data_dir: a folder to look in first, and to download to.
        split: which of the published splits (the UCI sets; see ``describe(name).splits``).
        seed: of the sets that are generated or divided at random.
        download: fetch a set that is nowhere found, rather than raise a ``DataError``.
    """
    entry = describe(name)
    if not 0 <= split < max(entry.splits, 1):
        raise DataError(f"{name} has splits 0 to {max(entry.splits, 1) - 1}, got split={split}.")
    known = (entry.classes, entry.features, entry.targets)
    if entry.make:
        return Dataset.of(name, entry.task, entry.make(seed), *known, "built in")
    found = _find(entry, data_dir)
    if found is None:
        if not download:
            searched = ", ".join(map(str, folders(data_dir)))
            raise DataError(f"{name} is not in {searched}; run `covary data fetch {name}`.")
        found = _download(entry, data_dir, progress=True)
    folder, form = found
    paths = [folder / file.path for file in form.files]
    for file, path in zip(form.files, paths, strict=True):
        file.check(path)
    arrays = form.read(paths, split) if entry.splits else form.read(paths)
    return Dataset.of(name, entry.task, arrays, *known, str(paths[0].parent), form.notes)
