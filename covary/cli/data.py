"""``covary data list`` and ``covary data fetch``."""

from __future__ import annotations

from typing import Annotated

import typer

from covary import data
from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, reported, say


@reported
def list_data(data_dir: DataDir = None, as_json: Json = False, debug: Debug = False) -> None:
    """What is known, where it is, and whether its checksums are right.

    Example:

    - `covary data list --data-dir datasets`
    """
    names = common.progress(data.names(), "checking")
    found = [(data.describe(name), data.status(name, data_dir)) for name in names]
    if as_json:
        said = ("name", "title", "task", "size", "licence", "source")
        common.show_json(
            [
                {key: getattr(entry, key) for key in said}
                | {"state": status.state, "detail": status.detail}
                | {"folder": str(status.folder) if status.folder else None}
                for entry, status in found
            ]
        )
        return
    common.show_table(
        "Known data (training + test)",
        ["name", "size", "state", "where"],
        [
            [entry.name, entry.size, status.state, str(status.folder or "")]
            for entry, status in found
        ],
        left=4,
    )
    for entry, status in found:
        if status.state == "damaged":
            say(f"{entry.name} is damaged: {status.detail}")
    if any(status.state == "missing" for _, status in found):
        say("What is missing is downloaded when it is used, or now: covary data fetch NAME.")
    say("Tables of your own need no name: covary train FILE.csv --target COLUMN.")


@reported
def fetch_data(
    name: Annotated[str, typer.Argument(help="A name that covary data list knows.")],
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Download a set from its public source and check it; nothing is done if it is there.

    Goes to --data-dir, or $COVARY_DATA, or the cache of the user. A download that was cut goes on
    where it stopped.

    Example:

    - `covary data fetch cifar10`
    """
    with common.wrong_use():
        entry = data.describe(name)
    if entry.make:
        say(f"{name} is built in: there is nothing to fetch.")
        return
    folder = data.fetch(name, data_dir=data_dir, progress=not as_json)
    status = data.status(name, data_dir)
    if as_json:
        common.show_json({"name": name, "state": status.state, "folder": str(folder)})
        return
    say(f"{name}: {status.state}, in {folder}.")
