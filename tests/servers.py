"""A server in a thread of this process, and runs for it that are trained in seconds."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import uvicorn

from covary.server import Limits, Served, application
from covary.server.application import Serving
from covary.server.running import bound, configured
from tests.commands import covary

HOSTILE = "<img src=x onerror=alert(1)>"


def frame(rows: int = 400, seed: int = 0) -> pd.DataFrame:
    """Sold houses: errors of a column, dates, truth values, and names that are markup."""
    random = np.random.default_rng(seed)
    found = pd.DataFrame(
        {
            "income": random.uniform(10, 60, rows),
            "income_error": random.uniform(0, 2, rows),
            "rooms": random.integers(1, 9, rows),
            "sold": (
                pd.Timestamp("2020-01-01") + pd.to_timedelta(random.integers(0, 900, rows), "D")
            ),
            "<b>city</b>": random.choice(["Oslo", "Bonn", HOSTILE], rows),
            "garden": random.choice(["true", "false"], rows),
            "country": "Norway",
        }
    )
    found["sold"] = found["sold"].dt.strftime("%Y-%m-%d")
    price = 2 * found["income"] + 5 * found["rooms"] + random.normal(0, 5, rows)
    found["<i>price"] = price
    found["kind"] = np.where(price > 110, HOSTILE, np.where(price > 85, "a|b", "low"))
    return found


def trained(folder: Path, target: str, *options: object) -> Path:
    """A run of these houses."""
    other = {"<i>price": "kind", "kind": "<i>price"}[target]
    frame().drop(columns=other).to_csv(folder / "houses.csv", index=False)
    options = ("--epochs", 80, "--lr", 0.01, "--validation", 0.2, *options)
    if target != "kind":
        options += ("--error", "income=income_error")
    covary("train", folder / "houses.csv", "--target", target, "--out", folder / "run", *options)
    return folder / "run"


def row(**others: Any) -> dict[str, Any]:
    """A row as clients send it."""
    found = {
        "income": 30.0, "income_error": 1.0, "rooms": 4, "sold": "2021-03-01",
        "<b>city</b>": "Oslo", "garden": True,
    }  # fmt: skip
    return found | others


@dataclass
class Live:
    """A server that answers."""

    url: str
    serving: Serving
    server: uvicorn.Server
    client: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])


@contextmanager
def live(run: Path, *, token: str = "", look: float = 2.0, port: int = 0, **limits: Any):
    """A server of a run, until the context ends."""
    serving = Serving(
        lambda steps: Served.load(run, progress=steps), Limits(**limits), run, look=look
    )
    with bound("127.0.0.1", port) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        app = application(serving, token=token)
        server = uvicorn.Server(configured(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            with httpx.Client(base_url=url, timeout=30) as client:
                yield Live(url, serving, server, client)
        finally:
            server.should_exit = True
            thread.join()
