"""A served run under load: capacity, half an hour, too much of it, and a kill in the middle.

    python -m benchmarks.serving_load --minutes 30

The run is a network on MNIST, which is trained first if it is not there, and whose covariances are
tracked when it predicts. Server and load
are two processes of this machine, over loopback. Each part is kept when it is measured
(``out/serving_load.json``), and measured again with ``--again``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks import tables
from benchmarks.results import ROOT
from covary import data, runs
from covary.files import write_json

SEED = 0
CONNECTIONS, MANY = 64, 1024
IMAGES = 500
SECONDS_OF_CAPACITY = 20.0
TRAIN = ["mnist", "--activation", "relu", "--epochs", "3"]
KEPT = ROOT / "out" / "serving_load.json"


@dataclass
class Server:
    """A server in a process of its own."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname
        assert parts.port
        return parts.hostname, parts.port

    def megabytes(self) -> float:
        """Resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024


@contextlib.contextmanager
def serving(run: Path, *options: str) -> Iterator[Server]:
    """The command, until the context ends."""
    command = [sys.executable, "-m", "covary", "serve", str(run), "--port", "0", *options]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            until, url = time.monotonic() + 300, ""
            while not url:
                lines = Path(log.name).read_text(encoding="utf-8").splitlines()
                started = [line for line in lines if '"event": "started"' in line]
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the server did not start: " + "\n".join(lines[-5:]))
                url = json.loads(started[0])["url"] if started else ""
                time.sleep(0.1)
            yield Server(url, process)
        finally:
            process.terminate()
            process.wait(60)


def request(body: bytes, kind: str, path: str = "/predict") -> bytes:
    """A request as bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


GET = "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def answered(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes
) -> tuple[int, bytes]:
    """Status and body of the answer to a request, on a connection that stays."""
    writer.write(sent)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    )
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


@dataclass
class Load:
    """Requests to a server over some connections, at a rate or as fast as answers come.

    Attributes:
        address: of the server.
        requests: taken in turns.
        connections: that stay open.
        rate: requests in a second; as fast as answers come if 0.
        statuses: how many answers had each status; what broke off has the name of its error.
        seconds: from when a request was due until its answer was there, of those with status 200.
        wrong: answers of status 200 that are no predictions.
    """

    address: tuple[str, int]
    requests: list[bytes]
    connections: int = CONNECTIONS
    rate: float = 0.0
    statuses: Counter[int | str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    _next: int = 0

    async def run(self, seconds: float) -> float:
        """Send for so many seconds; gives those that it took."""
        began = time.perf_counter()
        until = began + seconds
        await asyncio.gather(*(self._one(began, until) for _ in range(self.connections)))
        return time.perf_counter() - began

    async def _one(self, began: float, until: float) -> None:
        reader = writer = None
        while True:
            number, self._next = self._next, self._next + 1
            due = began + number / self.rate if self.rate else time.perf_counter()
            if due >= until or time.perf_counter() >= until:
                break
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            try:
                if reader is None or writer is None:
                    reader, writer = await asyncio.open_connection(*self.address)
                sent = self.requests[number % len(self.requests)]
                async with asyncio.timeout(30):
                    status, body = await answered(reader, writer, sent)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.statuses[type(error).__name__] += 1
                reader = None
                await asyncio.sleep(0.05)
                continue
            self.statuses[status] += 1
            if status == 200:
                self.seconds.append(time.perf_counter() - due)
                self.wrong += b'"predictions":[{"prediction":"' not in body
        if writer is not None:
            writer.close()

    def numbers(self, took: float) -> dict[str, Any]:
        """What came of it."""
        times = np.array(self.seconds or [np.nan]) * 1000
        return {
            "requests": sum(self.statuses.values()),
            "sent per second": sum(self.statuses.values()) / took,
            "per second": len(self.seconds) / took,
            "statuses": {str(key): count for key, count in sorted(self.statuses.items(), key=str)},
            "wrong": self.wrong,
            "p50 ms": float(np.percentile(times, 50)),
            "p99 ms": float(np.percentile(times, 99)),
            "most ms": float(times.max()),
        }


def pictures() -> list[bytes]:
    """Requests with images of the test set, each a PNG."""
    from PIL import Image

    found = []
    for image in data.load("mnist").x_test[:IMAGES].numpy():
        file = io.BytesIO()
        Image.fromarray(image[0]).save(file, "PNG")
        found.append(request(file.getvalue(), "image/png"))
    return found


def loaded(server: Server, requests: list[bytes], seconds: float, **how: Any) -> dict[str, Any]:
    load = Load(server.address, requests, **how)
    return load.numbers(asyncio.run(load.run(seconds)))


def capacity(run: Path, requests: list[bytes]) -> dict[str, Any]:
    """Requests in a second, as fast as answers come: batched, and one by one."""
    found = {}
    for name, options in (("batched", ()), ("one by one", ("--batch-rows", "1"))):
        with serving(run, *options) as server:
            loaded(server, requests, 5.0)
            found[name] = loaded(server, requests, SECONDS_OF_CAPACITY)
    ratio = found["batched"]["per second"] / found["one by one"]["per second"]
    return {**found, "times faster": ratio}


def sustained(run: Path, requests: list[bytes], rate: float, minutes: float) -> dict[str, Any]:
    """At a rate, with memory of the server every few seconds."""
    with serving(run) as server:
        loaded(server, requests, 5.0)
        memory: list[float] = []

        async def watched() -> tuple[Load, float]:
            load = Load(server.address, requests, rate=rate)

            async def look() -> None:
                while True:
                    memory.append(server.megabytes())
                    await asyncio.sleep(min(5.0, 60 * minutes / 60))

            looking = asyncio.create_task(look())
            took = await load.run(60 * minutes)
            looking.cancel()
            return load, took

        load, took = asyncio.run(watched())
        found = load.numbers(took)
    tenth = max(1, len(memory) // 10)
    first, last = np.mean(memory[tenth : 2 * tenth]), np.mean(memory[-tenth:])
    memories = {"MB at first": float(first), "MB at last": float(last)}
    growth = {"growth of memory": float(last / first - 1)}
    return {"minutes": minutes, "rate": rate, **found, **memories, **growth}


def too_much(run: Path, requests: list[bytes], rate: float) -> dict[str, Any]:
    """At a rate that cannot be answered: what is refused, whether health stays up, and after."""
    health: list[float] = []

    async def measure(server: Server) -> tuple[Load, float, float]:
        load = Load(server.address, requests, connections=MANY, rate=rate)

        async def look() -> None:
            while True:
                began = time.perf_counter()
                status = await _asked(server, GET.format("/health").encode())
                health.append(time.perf_counter() - began if status == 200 else float("inf"))
                await asyncio.sleep(0.25)

        looking = asyncio.create_task(look())
        took = await load.run(20.0)
        looking.cancel()
        began = time.perf_counter()
        while True:
            asked = time.perf_counter()
            status = await _asked(server, requests[0])
            now = time.perf_counter()
            if (status == 200 and now - asked < 0.1) or now - began > 60:
                return load, took, now - began

    with serving(run) as server:
        loaded(server, requests, 2.0)
        load, took, recovered = asyncio.run(measure(server))
    found = {"rate": rate, **load.numbers(took), "seconds to recover": recovered}
    return {**found, "health, most ms": 1000 * max(health), "health asked": len(health)}


async def _asked(server: Server, sent: bytes) -> int:
    reader, writer = await asyncio.open_connection(*server.address)
    try:
        async with asyncio.timeout(30):
            return (await answered(reader, writer, sent))[0]
    finally:
        writer.close()


def killed(run: Path, requests: list[bytes]) -> dict[str, Any]:
    """kill -9 amid load, and a new start."""
    files = {path: _sha256(path) for path in sorted(run.rglob("*")) if path.is_file()}

    async def measure(server: Server) -> Load:
        load = Load(server.address, requests)
        task = asyncio.create_task(load.run(4.0))
        await asyncio.sleep(2.0)
        os.kill(server.process.pid, signal.SIGKILL)
        await task
        return load

    with serving(run) as server:
        load = asyncio.run(measure(server))
    changed = [path.name for path, digest in files.items() if _sha256(path) != digest]
    new = {path for path in run.rglob("*") if path.is_file()} - files.keys()
    with serving(run) as server:
        after = loaded(server, requests, 2.0)
    statuses = {str(key): count for key, count in sorted(load.statuses.items(), key=str)}
    return {
        "before and after the kill": statuses,
        "wrong": load.wrong,
        "files that changed": changed + sorted(path.name for path in new),
        "statuses of a new start": after["statuses"],
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def broken_promises(measured: dict[str, Any]) -> list[str]:
    """What the numbers must be, and are not."""
    load, most, kill = measured["sustained"], measured["too much"], measured["killed"]
    checks = {
        "batches are five times faster": measured["capacity"]["times faster"] >= 5,
        "no error": set(load["statuses"]) == {"200"} and not load["wrong"],
        "memory does not grow": load["growth of memory"] <= 0.05,
        "p99 is below ten times p50": load["p99 ms"] < 10 * load["p50 ms"],
        "too many are refused": set(most["statuses"]) == {"200", "429"} and not most["wrong"],
        "health stays up": most["health, most ms"] < 5000,
        "it recovers": most["seconds to recover"] <= 5,
        "a kill leaves files as they were": not kill["files that changed"] and not kill["wrong"],
        "it starts again": set(kill["statuses of a new start"]) == {"200"},
    }
    return [name for name, holds in checks.items() if not holds]


def trained() -> Path:
    """The run, which is trained if it is not there."""
    path = ROOT / "out" / "serving" / "mnist"
    if not runs.Run(path).model_path.exists():
        command = [sys.executable, "-m", "covary", "train", *TRAIN, "--out", str(path)]
        subprocess.run([*command, "--overwrite"], cwd=ROOT, check=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--again", action="store_true", help="measure all parts anew")
    parser.add_argument("--trial", action="store_true", help="store nothing in results/")
    arguments = parser.parse_args()
    run, requests = trained(), pictures()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() and not arguments.again else {}
    if kept.get("sustained", {}).get("minutes") != arguments.minutes:
        kept.pop("sustained", None)

    def rate() -> float:
        return float(kept["capacity"]["batched"]["per second"])

    parts = {
        "capacity": lambda: capacity(run, requests),
        "sustained": lambda: sustained(run, requests, 0.8 * rate(), arguments.minutes),
        "too much": lambda: too_much(run, requests, 3 * rate()),
        "killed": lambda: killed(run, requests),
    }
    for name, measure in parts.items():
        if name not in kept:
            kept[name] = measure()
            write_json(KEPT, kept)
        print(name, json.dumps(kept[name], indent=1), flush=True)
    broken = broken_promises(kept)
    if arguments.trial:
        print("Not as it must be:", broken or "nothing")
        return
    command = f"python -m benchmarks.serving_load --minutes {arguments.minutes:g}"
    tables.publish("serving", command, SEED, kept, shown=[tables.serving], broken=broken)


if __name__ == "__main__":
    main()
