"""The named sets, from ``catalogue.toml``, which says what is known of each without having it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from covary.data import uci
from covary.data.built_in import MAKERS
from covary.data.dataset import Arrays
from covary.data.download import File
from covary.data.images import READERS


@dataclass(frozen=True)
class Form:
    """One way in which a set lies on disk: all of ``files``, and what reads them in that order."""

    files: tuple[File, ...]
    read: Callable[..., Arrays]
    notes: tuple[str, ...] = ()

    @property
    def downloadable(self) -> bool:
        """Whether every file has an address to fetch it from."""
        return all(file.urls or file.made_from for file in self.files)


@dataclass(frozen=True)
class SetEntry:
    """What is known of a named set without having it.

    ``forms`` are tried in turn, and are empty for the sets that ``make`` gives without any file.
    ``splits`` counts the published splits to choose from, 0 where there is a single one.
    """

    name: str
    title: str
    task: str
    size: str
    licence: str = "generated"
    source: str = "generated from the seed"
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    splits: int = 0
    forms: tuple[Form, ...] = ()
    make: Callable[[int], Arrays] | None = None


def image_form(
    name: str,
    *,
    reader: str,
    files: Iterable[Mapping[str, Any]],
    addresses: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Form:
    """A form of a set of images: each of its files lies below all of the addresses."""
    known = (
        File(
            f"{name}/{file['name']}",
            file["sha256"],
            tuple(f"{address}{file['name']}" for address in addresses),
            file.get("size", 0),
        )
        for file in files
    )
    return Form(tuple(known), READERS[reader], notes)


def uci_entry(
    name: str,
    *,
    rows: int,
    features: tuple[str, ...],
    sha256: str,
    texts: str = "",
    splits: int = 20,
    notes: tuple[str, ...] = (),
    **described: Any,
) -> SetEntry:
    """A set of the regression benchmark, made from the published texts in the folder ``texts``."""
    # a number takes no more than 32 characters
    sizes = {"data.txt": 32 * rows * (len(features) + 1)}
    sizes |= dict.fromkeys(("index_features.txt", "index_target.txt"), 4096)
    sources = tuple(
        File(text, None, (f"{uci.TEXTS}{texts or name}/data/{text}",), size)
        for text, size in sizes.items()
    )
    make = partial(uci.convert_uci, splits=splits)
    file = File(f"uci/{name}.npz", sha256, digest=uci.uci_digest, made_from=sources, make=make)
    return SetEntry(
        name,
        task="regression",
        size=f"{rows} x {len(features)}, {splits} splits 90 % + 10 %",
        licence="CC BY 4.0 (UCI); the collected text files CC BY-NC 4.0",
        features=features,
        splits=splits,
        forms=(Form((file,), uci.read_uci_set, notes),),
        **described,
    )


def _entries() -> Iterator[SetEntry]:
    kinds = tomllib.loads(files("covary.data").joinpath("catalogue.toml").read_text("utf-8"))
    for name, described in kinds["built-in"].items():
        yield SetEntry(name, make=MAKERS[name], **_with_tuples(described))
    for name, described in kinds["images"].items():
        forms = tuple(image_form(name, **_with_tuples(form)) for form in described.pop("forms"))
        yield SetEntry(name, task="classification", forms=forms, **_with_tuples(described))
    for name, described in kinds["uci"].items():
        yield uci_entry(name, **_with_tuples(described))


def _with_tuples(described: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in described.items()
    }


CATALOGUE = {entry.name: entry for entry in _entries()}
