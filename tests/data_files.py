"""Tiny files in the formats that data come in, and a server on this machine that hands them out."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import tarfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    sizes = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def write_idx(path: Path, array: np.ndarray) -> Path:
    path.write_bytes(gzip.compress(idx_bytes(array)))
    return path


def cifar_bytes(pictures: np.ndarray, labels: np.ndarray) -> bytes:
    """Records of all label bytes ``(n,)`` or ``(n, 2)`` and a picture ``(n, 3, 32, 32)``."""
    rows = [labels.reshape(len(pictures), -1), pictures.reshape(len(pictures), -1)]
    return np.concatenate(rows, axis=1).astype(np.uint8).tobytes()


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def write_strips(path: Path, pictures: np.ndarray, labels: np.ndarray, per_strip: int = 2) -> Path:
    from PIL import Image

    strips = []
    for start in range(0, len(pictures), per_strip):
        strip = pictures[start : start + per_strip].transpose(0, 2, 3, 1).reshape(-1, 32, 3)
        buffer = io.BytesIO()
        Image.fromarray(strip).save(buffer, "WEBP", lossless=True)
        strips.append(buffer.getvalue())
    blob = np.frombuffer(b"".join(strips), np.uint8)
    offsets = np.cumsum([0, *map(len, strips)]).astype(np.uint32)
    np.savez(path, webp=blob, offsets=offsets, labels=labels.astype(np.uint8))
    return path


@dataclass
class Server:
    """Hands out ``files`` by path, and can misbehave.

    ``cuts`` are the numbers of bytes after which the next answers break off; ``told`` is whether
    answers say how long they are; ``shift`` is how far behind the wanted byte they begin; ``pause``
    is how many seconds pass before each 16 bytes.
    """

    files: dict[str, bytes]
    ranges: bool = True
    told: bool = True
    shift: int = 0
    pause: float = 0.0
    cuts: list[int] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def serve(files: dict[str, bytes], **misbehaviour):
    """A ``Server`` on the loopback interface for as long as the context lasts."""
    server = Server({f"/{name}": data for name, data in files.items()}, **misbehaviour)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = self.headers.get("Range")
            server.requests.append((self.path, wanted))
            data = server.files.get(self.path)
            if data is None:
                self.send_error(404)
                return
            start = 0
            if wanted and server.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) + server.shift
                if start >= len(data):
                    self.send_error(416)
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            else:
                self.send_response(200)
            if server.told:
                self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            rest = data[start:]
            if server.cuts:
                rest = rest[: server.cuts.pop(0)]
            server.sent.append(len(rest))
            self.close_connection = True
            # a client that has had enough hangs up
            with contextlib.suppress(ConnectionError):
                for i in range(0, len(rest), 16 if server.pause else len(rest)):
                    time.sleep(server.pause)
                    self.wfile.write(rest[i : i + 16] if server.pause else rest)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}/"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
