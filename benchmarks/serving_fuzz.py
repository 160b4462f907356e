"""Requests that no client should send: a server must answer each with a sentence, or hang up.

    python -m benchmarks.serving_fuzz --requests 2000

Wrong types, NaN, deep JSON, huge numbers, wrong shapes and content types, cut bodies, compressed
bombs, paths, headers and noise, all from a seed; to a server of images and to one of a table.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.predicting import houses
from benchmarks.results import ROOT
from benchmarks.serving_load import request, serving, trained
from covary import runs

SEED, REQUESTS = 0, 2000
# Answers that a server may give to anything, and the time that it may take.
ALLOWED = {200, 400, 401, 403, 404, 405, 408, 411, 413, 415, 422, 426, 429, 431, 503}
SECONDS = 10.0
TIMEOUT = 1.0  # of the server, so that bodies that never come are told soon
AT_ONCE = 8
_JSON, _PNG = "application/json", "image/png"
# The end of what is sent: wait for an answer, or hang up at once.
Sent = tuple[bytes, bool]

_VALUES = [
    "null", "true", "[]", "{}", '""', '"x"', '"\\ud800"', '"\\u0000"', "1e308", "-1e400", "1" * 400,
    "1" * 5000, "NaN", "Infinity", "-Infinity", '"NaN"', '"1e400"', '"2024-02-30"', '"9999-12-31"',
    '"0000-00-00T99:99"', "[[1]]", '{"a": 1}', '"<script>"', "-0", "1e-400", '"' + "y" * 9000 + '"',
    '"=1+1"', '"\u202e"', "[" * 50 + "]" * 50,
]  # fmt: skip


def value(chance: random.Random, kind: str, share: float) -> str:
    """A value of JSON for a column: a fitting one, or of this share of them not."""
    fitting = {"number": "1.5", "date": '"2024-03-01"', "boolean": "true"}.get(kind, '"Oslo"')
    return chance.choice(_VALUES) if chance.random() < share else fitting


def rows(chance: random.Random, schema: dict[str, Any]) -> bytes:
    """Rows of a table, with some values that do not belong there."""
    if schema["kind"] == "images":
        return pixels(chance, schema)
    found, share = [], chance.choice([0.02, 0.2, 0.5])
    for _ in range(chance.choice([1, 1, 2, 30])):
        names = [(each["name"], each["kind"]) for each in schema["columns"]]
        if chance.random() < 0.2:
            names.pop(chance.randrange(len(names)))
        if chance.random() < 0.2:
            names.append((chance.choice(["__proto__", "", "x" * 999, "income "]), "number"))
        cells = (f"{json.dumps(name)}: {value(chance, kind, share)}" for name, kind in names)
        found.append("{" + ", ".join(cells) + "}")
    return f"[{', '.join(found)}]".encode("utf-8", "surrogatepass")


def pixels(chance: random.Random, schema: dict[str, Any]) -> bytes:
    """Images, of which some have another shape, and some pixels are none."""
    _, height, width = schema.get("shape", (1, 8, 8))
    height = chance.choice([height, height, 0, 1, height + 1])
    image = [[chance.choice(["0", "255", "17"]) for _ in range(width)] for _ in range(height)]
    for _ in range(chance.choice([0, 1, 1, 3])):
        if height:
            line = chance.choice(image)
            line[chance.randrange(width)] = chance.choice([*_VALUES, "256", "-1", "0.5"])
            if chance.random() < 0.2:
                line.append("1")
    one = "[" + ", ".join("[" + ", ".join(line) + "]" for line in image) + "]"
    return chance.choice([one, f"[{one}]", f"[[{one}], {one}]", f"[{one}, {one}]"]).encode()


def _zlib(content: bytes) -> bytes:
    return zlib.compress(content, 1)


def _gzip(content: bytes) -> bytes:
    return gzip.compress(content, 1)


@cache
def _bomb(pack: Callable[[bytes], bytes]) -> bytes:
    """80 MB, packed: once, as it takes a while."""
    return pack(b"[" + b"0," * 40_000_000 + b"0]")


def _types(chance: random.Random, schema: dict[str, Any]) -> Sent:
    path = chance.choice(["/predict", "/predict", "/explain"])
    return request(rows(chance, schema), _JSON, path), True


def _json(chance: random.Random, _: dict[str, Any]) -> Sent:
    depth = chance.choice([10, 1000, 100_000])
    body = chance.choice([
        "[" * depth, "[" * depth + "]" * depth, '{"a":' * depth, "[" + "{}," * 5000 + "{}]", "",
        " ", "null", "0", '"x"', "[null]", "[[]]", "[{}]", "{", "nul", "\ufeff[]", "[1,]", "NaN",
        "[NaN]",
        "[" + "1," * 200_000 + "1]", "9" * 100_000, '[{"a": 1, "a": 2}]',
    ])  # fmt: skip
    encoded = body.encode(chance.choice(["utf-8", "utf-8", "utf-16", "utf-32"]))
    return request(encoded, _JSON), True


def _noise(chance: random.Random, _: dict[str, Any]) -> Sent:
    body = chance.randbytes(chance.choice([0, 1, 100, 5000]))
    return chance.choice([(request(body, chance.choice([_JSON, _PNG])), True), (body, False)])


def _types_of_content(chance: random.Random, schema: dict[str, Any]) -> Sent:
    kind = chance.choice([
        "", "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded",
        "application/json; charset=utf-7", "image/png", "image/svg+xml", "*/*", "a" * 5000,
        "application/octet-stream", "application/python-pickle",
    ])  # fmt: skip
    return request(rows(chance, schema), kind), True


def _cut(chance: random.Random, schema: dict[str, Any]) -> Sent:
    whole = request(rows(chance, schema), _JSON)
    if chance.random() < 0.05:
        return whole[:-1], True  # which the server has to wait for
    return whole[: chance.randrange(1, len(whole))], False


def _lengths(chance: random.Random, schema: dict[str, Any]) -> Sent:
    body = rows(chance, schema)
    length = chance.choice(
        ["-1", "0", "1", "9" * 30, "0x10", "1e3", "+5", "\u0663", "10, 10", "", "99999999"]
    )
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {_JSON}\r\n"
    more = chance.choice(["", "", "Transfer-Encoding: chunked\r\n", "Content-Length: 3\r\n"])
    return f"{head}{more}Content-Length: {length}\r\n\r\n".encode() + body, length != "99999999"


def _chunks(chance: random.Random, schema: dict[str, Any]) -> Sent:
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {_JSON}\r\n"
    head += f"Transfer-Encoding: {chance.choice(['chunked', 'gzip, chunked', 'cow'])}\r\n\r\n"
    body = rows(chance, schema)
    size = chance.choice([f"{len(body):x}", "zz", "-1", "f" * 20, f"{len(body):x};a=b", "0"])
    return head.encode() + f"{size}\r\n".encode() + body + b"\r\n0\r\n\r\n", chance.random() < 0.3


def _compressed(chance: random.Random, schema: dict[str, Any]) -> Sent:
    pack: Callable[[bytes], bytes] = _gzip if chance.random() < 0.5 else _zlib
    packed = _bomb(pack) if chance.random() < 0.5 else pack(rows(chance, schema))
    encoding = chance.choice(["gzip", "deflate", "br", "zstd", "gzip, gzip", "x" * 200])
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {_JSON}\r\n"
    head += f"Content-Encoding: {encoding}\r\nContent-Length: {len(packed)}\r\n\r\n"
    return head.encode() + packed, True


def _png(chance: random.Random, _: dict[str, Any]) -> Sent:
    """Of any size, cut, with text that unpacks to much, or with a wrong checksum."""

    def part(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content) ^ (chance.random() < 0.1)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)

    width = chance.choice([8, 28, 0, 60_000, 2**31 - 1])
    depth, colour = chance.choice([(8, 0), (8, 2), (16, 0), (8, 6), (1, 3), (99, 9)])
    found = b"\x89PNG\r\n\x1a\n"
    found += part(b"IHDR", struct.pack(">IIBBBBB", width, width, depth, colour, 0, 0, 0))
    if chance.random() < 0.3:
        found += part(b"zTXt", b"a\0\0" + _bomb(_zlib))
    found += part(b"IDAT", zlib.compress(bytes(chance.choice([0, 29 * 28, 9 * 8]))))
    found += part(b"IEND", b"")
    if chance.random() < 0.3:
        found = found[: chance.randrange(len(found))]
    return request(found, _PNG), True


def _paths(chance: random.Random, _: dict[str, Any]) -> Sent:
    path = chance.choice([
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//predict", "/predict/",
        "/predict/../schema", "/predict%00", "/" + "a" * 9000, "http://127.0.0.1/health", "*",
        "/?a=<script>", "/docs/../..", "/schema?" + "x=y&" * 500, "/%ff%fe", "/\xc3\xa9",
        "predict", "/.git/config",
        "/model.safetensors", "/redoc", "/openapi.json", "/metrics", "/static/../config.toml",
    ])  # fmt: skip
    method = chance.choice(
        ["GET", "POST", "PUT", "DELETE", "TRACE", "OPTIONS", "HEAD", "CONNECT", "get", "X" * 50]
    )
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"), True


def _headers(chance: random.Random, _: dict[str, Any]) -> Sent:
    lines = chance.choice([
        "Host: evil.example", "Host: ", "Host: localhost\r\nHost: other", "X: " + "a" * 70_000,
        "\r\n".join(f"X{i}: {i}" for i in range(2000)), "X : 1", "X: a\rb", "X: a\nSet-Cookie: b",
        "Authorization: Bearer \xff\xfe", "Authorization: " + "B" * 5000, "Expect: 100-continue",
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x",
        "Connection: close, \x00", ": empty", "Range: bytes=0-", "X-Forwarded-For: 1.2.3.4",
        "Content-Length: 5", "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings",
    ])  # fmt: skip
    start = chance.choice(
        ["GET / HTTP/1.1", "GET /schema HTTP/1.1", "GET / HTTP/1.0", "GET /", "PRI * HTTP/2.0"]
    )
    host = "" if lines.startswith("Host") else "Host: localhost\r\n"
    # Some are not a whole request, for which the server may wait.
    return f"{start}\r\n{host}{lines}\r\n\r\n".encode("latin-1"), start != "GET /"


KINDS: dict[str, Callable[[random.Random, dict[str, Any]], Sent]] = {
    "types": _types,
    "JSON": _json,
    "noise": _noise,
    "content types": _types_of_content,
    "cut bodies": _cut,
    "lengths": _lengths,
    "chunks": _chunks,
    "compressed": _compressed,
    "PNG": _png,
    "paths": _paths,
    "headers": _headers,
}


async def outcome(address: tuple[str, int], sent: Sent) -> tuple[str, float]:
    """Send it; the status of the answer or what else came, and the seconds until then."""
    content, waits = sent
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(SECONDS):
            writer.write(content)
            if not waits:
                return "hung up on", 0.0
            found = await _answer(reader, has_body=not content.startswith(b"HEAD"))
    except ConnectionError:
        found = b""
    except TimeoutError:
        return "no answer", time.perf_counter() - began
    finally:
        writer.close()
    took = time.perf_counter() - began
    if not found:
        return "hung up", took
    if b"Traceback" in found or b'File "' in found:
        return "traceback", took
    status = found.split(b" ", 2)[1].decode("latin-1")
    return (status if status.isdigit() and int(status) in ALLOWED else f"bad {status}"), took


async def _answer(reader: asyncio.StreamReader, *, has_body: bool = True) -> bytes:
    """All of an answer, or what there is of it when the server hangs up."""
    found = b""
    while b"\r\n\r\n" not in found:
        if not (part := await reader.read(65536)):
            return found
        found += part
    head, _, body = found.partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1] == b"100":
        return await _answer(reader)
    lengths = [
        has_body and int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    ]
    while len(body) < (lengths[0] if lengths else 0):
        if not (part := await reader.read(65536)):
            break
        body += part
    return head + b"\r\n\r\n" + body


async def fuzzed(
    address: tuple[str, int], schema: dict[str, Any], count: int, seed: int
) -> dict[str, Any]:
    """So many requests of all kinds in turns; outcomes by kind, and the most seconds of one."""
    found: dict[str, Counter[str]] = {name: Counter() for name in KINDS}
    slowest, room = 0.0, asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        nonlocal slowest
        name = list(KINDS)[number % len(KINDS)]
        async with room:
            sent = KINDS[name](random.Random(f"{seed} {number}"), schema)
            told, took = await outcome(address, sent)
        found[name][told] += 1
        slowest = max(slowest, took)

    await asyncio.gather(*(one(number) for number in range(count)))
    return {
        "requests": count,
        "outcomes": {name: dict(sorted(each.items())) for name, each in found.items()},
        "most seconds": slowest,
    }


def broken_promises(measured: dict[str, Any]) -> list[str]:
    """Which servers gave a 500, a traceback or no answer, or none to a sound request afterwards."""
    broken = []
    for name, each in measured.items():
        told = {status for kind in each["outcomes"].values() for status in kind}
        bad = [one for one in told if one.startswith(("bad", "traceback", "no answer"))]
        broken += [f"{name}: {one}" for one in sorted(bad)]
        if each["sound request afterwards"] != "200":
            broken.append(f"{name}: {each['sound request afterwards']} to a sound request")
    return broken


def sound(schema: dict[str, Any]) -> bytes:
    """A request as it should be."""
    if schema["kind"] == "images":
        _, height, width = schema["shape"]
        return request(json.dumps([[0] * width] * height).encode(), _JSON)
    fitting = {"number": 1.5, "date": "2024-03-01", "boolean": True, "category": "Oslo"}
    row = {each["name"]: fitting[each["kind"]] for each in schema["columns"]}
    errors = {each["error"]: 0.0 for each in schema["columns"] if "error" in each}
    return request(json.dumps([row | errors]).encode(), _JSON)


def measured_of(run: Path, count: int) -> dict[str, Any]:
    """A server of the run, in a process of its own."""

    async def measure(address: tuple[str, int]) -> dict[str, Any]:
        schema = json.loads(await _got(address, "/schema"))
        found = await fuzzed(address, schema, count, SEED)
        after, _ = await outcome(address, (sound(schema), True))
        return {**found, "sound request afterwards": after}

    with serving(run, "--timeout", str(TIMEOUT)) as server:
        before = server.megabytes()
        found = asyncio.run(measure(server.address))
        return {**found, "MB before": before, "MB after": server.megabytes()}


async def _got(address: tuple[str, int], path: str) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    found = await _answer(reader)
    writer.close()
    return found.partition(b"\r\n\r\n")[2]


def of_table() -> Path:
    """A run of a table, which is trained if it is not there."""
    path = ROOT / "out" / "serving" / "houses"
    if not runs.Run(path).model_path.exists():
        table = path.with_suffix(".csv")
        table.parent.mkdir(parents=True, exist_ok=True)
        houses(2000, SEED).drop(columns="kind").to_csv(table, index=False)
        command = ["train", str(table), "--target", "price", "--epochs", "10", "--overwrite"]
        subprocess.run([sys.executable, "-m", "covary", *command, "--out", str(path)], check=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--trial", action="store_true", help="store nothing in results/")
    arguments = parser.parse_args()
    places = {"images": trained(), "table": of_table()}
    measured = {name: measured_of(run, arguments.requests // 2) for name, run in places.items()}
    broken = broken_promises(measured)
    if arguments.trial:
        print(json.dumps(measured, indent=1), "Not as it must be:", broken or "nothing")
        return
    command = f"python -m benchmarks.serving_fuzz --requests {arguments.requests}"
    tables.publish(
        "serving_fuzz", command, SEED, measured, shown=[tables.serving_fuzz], broken=broken
    )


if __name__ == "__main__":
    main()
