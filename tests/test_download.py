"""Fetching files: every way in which a connection lets one down, against a server on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeoutError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covary import data
from covary.data import download, images, store, uci
from covary.data.catalogue import CATALOGUE, Form, SetEntry, uci_entry
from covary.data.download import CHUNK_BYTES, File, fetch_file
from covary.data.locking import locked
from tests import data_files
from tests.data_files import serve, sha256

CONTENT = np.random.default_rng(0).bytes(10 * CHUNK_BYTES + 5)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0)


@pytest.fixture(autouse=True)
def no_other_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("COVARY_DATA", raising=False)
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path / "cache")


def file_at(*addresses: str, content: bytes = CONTENT) -> File:
    urls = tuple(f"{address}numbers.bin" for address in addresses)
    return File("set/numbers.bin", sha256(content), urls)


def closed_address() -> str:
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def left_over(folder) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_arrives_whole_and_alone(tmp_path):
    with serve({"numbers.bin": CONTENT}) as server:
        path = fetch_file(file_at(server.url), tmp_path)
    assert path == tmp_path / "set" / "numbers.bin"
    assert path.read_bytes() == CONTENT
    assert left_over(tmp_path) == ["numbers.bin"]


def test_a_file_that_is_there_is_not_fetched_again(tmp_path):
    with serve({"numbers.bin": CONTENT}) as server:
        fetch_file(file_at(server.url), tmp_path)
        fetch_file(file_at(server.url), tmp_path)
    assert len(server.requests) == 1


def test_of_two_that_miss_a_file_one_fetches_it(tmp_path):
    target = tmp_path / "set" / "numbers.bin"
    with serve({"numbers.bin": CONTENT}) as server, ThreadPoolExecutor() as others:
        fetch_file(file_at(server.url), tmp_path / "elsewhere")  # what it imports takes time, once
        with locked(target.parent, wait=True):
            other = others.submit(fetch_file, file_at(server.url), tmp_path)
            with pytest.raises(FuturesTimeoutError):
                other.result(timeout=0.5)
            target.write_bytes(CONTENT)
        assert other.result(timeout=60) == target
    assert len(server.requests) == 1


def test_a_damaged_file_is_replaced(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "numbers.bin").write_bytes(b"damaged")
    with serve({"numbers.bin": CONTENT}) as server:
        assert fetch_file(file_at(server.url), tmp_path).read_bytes() == CONTENT


def test_a_cut_connection_is_taken_up_where_it_broke(tmp_path):
    with serve({"numbers.bin": CONTENT}, cuts=[3 * CHUNK_BYTES, 2 * CHUNK_BYTES]) as server:
        path = fetch_file(file_at(server.url), tmp_path)
    assert path.read_bytes() == CONTENT
    ranges = [wanted for _, wanted in server.requests]
    assert ranges == [None, f"bytes={3 * CHUNK_BYTES}-", f"bytes={5 * CHUNK_BYTES}-"]
    assert sum(server.sent) == len(CONTENT)


def test_a_download_is_resumed_by_a_later_call(tmp_path):
    """After all tries were cut the part stays, under no name that anything reads."""
    with serve({"numbers.bin": CONTENT}, cuts=[CHUNK_BYTES] * 3) as server:
        with pytest.raises(data.DataError, match="the connection was cut"):
            fetch_file(file_at(server.url), tmp_path)
        assert left_over(tmp_path) == ["numbers.bin.part"]
        server.sent.clear()
        assert fetch_file(file_at(server.url), tmp_path).read_bytes() == CONTENT
    assert server.requests[-1] == ("/numbers.bin", f"bytes={3 * CHUNK_BYTES}-")
    assert server.sent == [len(CONTENT) - 3 * CHUNK_BYTES]
    assert left_over(tmp_path) == ["numbers.bin"]


def test_a_server_that_ignores_ranges_starts_over(tmp_path):
    with serve({"numbers.bin": CONTENT}, ranges=False, cuts=[3 * CHUNK_BYTES]) as server:
        path = fetch_file(file_at(server.url), tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.requests[1][1] == f"bytes={3 * CHUNK_BYTES}-"
    assert server.sent == [3 * CHUNK_BYTES, len(CONTENT)]


def test_a_part_that_is_already_whole_needs_no_more(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "numbers.bin.part").write_bytes(CONTENT)
    with serve({"numbers.bin": CONTENT}) as server:
        assert fetch_file(file_at(server.url), tmp_path).read_bytes() == CONTENT
    assert server.sent == []


def test_a_stale_part_is_thrown_away(tmp_path):
    """The part of another version gives the wrong hash; the next try begins at the beginning."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "numbers.bin.part").write_bytes(b"of another version")
    with serve({"numbers.bin": CONTENT}) as server:
        assert fetch_file(file_at(server.url), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == ["bytes=18-", None]


def test_wrong_content_is_refused_and_nothing_stays(tmp_path):
    other = CONTENT[::-1]
    with (
        serve({"numbers.bin": other}) as server,
        pytest.raises(data.DataError, match=r"numbers\.bin") as caught,
    ):
        fetch_file(file_at(server.url), tmp_path)
    assert sha256(CONTENT) in str(caught.value)
    assert sha256(other) in str(caught.value)
    assert left_over(tmp_path) == []


def test_mirrors_are_tried_in_turn_and_continue_each_other(tmp_path):
    with (
        serve({"numbers.bin": CONTENT}, cuts=[CHUNK_BYTES] * 3) as first,
        serve({}) as second,
        serve({"numbers.bin": CONTENT}) as third,
    ):
        mirrors = first.url, second.url, closed_address(), third.url
        path = fetch_file(file_at(*mirrors), tmp_path)
    assert path.read_bytes() == CONTENT
    assert third.requests == [("/numbers.bin", f"bytes={3 * CHUNK_BYTES}-")]


def test_no_server_is_one_sentence_with_the_remedy(tmp_path):
    address = closed_address()
    with pytest.raises(data.DataError) as caught:
        fetch_file(file_at(address), tmp_path)
    message = str(caught.value)
    assert f"{address}numbers.bin (no connection)" in message
    assert f"put the file into {tmp_path / 'set'} by hand" in message
    assert message.count(". ") == 0
    assert "\n" not in message
    assert left_over(tmp_path) == []


def test_a_missing_file_names_the_status(tmp_path):
    with serve({}) as server, pytest.raises(data.DataError, match="HTTP status 404"):
        fetch_file(file_at(server.url), tmp_path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "set").write_text("a file where the folder should be")
    with pytest.raises(data.DataError, match="--data-dir"):
        fetch_file(file_at(closed_address()), tmp_path)


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    """/dev/full is a disk without room, as the system itself has it."""
    usual = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, *how: usual(Path("/dev/full") if path.suffix == ".part" else path, *how),
    )
    with serve({"numbers.bin": CONTENT}) as server, pytest.raises(data.DataError) as caught:
        fetch_file(file_at(server.url), tmp_path)
    assert f"Cannot write {tmp_path}/set/numbers.bin (No space left on device)" in str(caught.value)
    assert left_over(tmp_path) == []


def sized(file: File, size: int) -> File:
    return replace(file, size=size)


def test_a_file_that_is_too_large_is_not_fetched(tmp_path):
    with (
        serve({"numbers.bin": CONTENT}) as server,
        pytest.raises(data.DataError, match=r"sends 0.164 MB or more, expected 0.001 MB"),
    ):
        fetch_file(sized(file_at(server.url), 1000), tmp_path)
    assert len(server.requests) == 1
    assert left_over(tmp_path) == []


def test_a_file_without_end_is_given_up(tmp_path):
    """A server that does not say how much it sends, and a part that another one left behind."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "numbers.bin.part").write_bytes(CONTENT[:10])
    with (
        serve({"numbers.bin": CONTENT * 4}, told=False) as server,
        serve({"numbers.bin": CONTENT}) as honest,
    ):
        file = sized(file_at(server.url), 1000)
        with pytest.raises(data.DataError, match=r"expected 0.001 MB"):
            fetch_file(file, tmp_path)
        assert len(server.requests) == 1
        assert left_over(tmp_path) == []
        both = sized(file_at(server.url, honest.url), len(CONTENT))
        assert fetch_file(both, tmp_path).read_bytes() == CONTENT


def test_a_server_that_hardly_sends_anything_is_given_up_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(download, "LEAST_BYTES_PER_SECOND", 1e9)
    began = time.monotonic()
    with serve({"numbers.bin": CONTENT[:2000]}, pause=0.05) as server:
        file = sized(file_at(server.url, closed_address(), content=CONTENT[:2000]), 2000)
        with pytest.raises(data.DataError, match="took longer than 0 minutes"):
            fetch_file(file, tmp_path)
        assert time.monotonic() - began < 5
        assert len(server.requests) == 1
        assert left_over(tmp_path) == ["numbers.bin.part"]
        server.pause = 0
        assert fetch_file(file, tmp_path).read_bytes() == CONTENT[:2000]
    assert server.requests[-1][1] is not None  # it was continued


def test_another_part_than_asked_for_is_not_taken(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "numbers.bin.part").write_bytes(CONTENT[:10])
    with serve({"numbers.bin": CONTENT}, shift=5) as server:
        assert fetch_file(file_at(server.url), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == ["bytes=10-", None]


@pytest.mark.parametrize("name", ["numbers.bin", "numbers.bin.part"])
def test_a_pipe_or_a_folder_in_its_place_is_told_at_once(tmp_path, name):
    (tmp_path / "set" / name).mkdir(parents=True)
    with serve({"numbers.bin": CONTENT}) as server:
        with pytest.raises(data.DataError, match=f"{name} is a folder"):
            fetch_file(file_at(server.url), tmp_path)
        (tmp_path / "set" / name).rmdir()
        os.mkfifo(tmp_path / "set" / name)
        with pytest.raises(data.DataError, match=f"{name} is a named pipe"):
            fetch_file(file_at(server.url), tmp_path)
    assert not server.requests


FETCH = """
import sys
from pathlib import Path
from covary.data.download import File, fetch_file
url, sha256, folder = sys.argv[1:]
fetch_file(File("set/numbers.bin", sha256, (url + "numbers.bin",)), Path(folder))
"""


def test_processes_that_miss_the_same_file_do_not_disturb_each_other(tmp_path):
    with serve({"numbers.bin": CONTENT[:5000]}, pause=0.002) as server:
        command = [sys.executable, "-c", FETCH, server.url, sha256(CONTENT[:5000]), str(tmp_path)]
        running = [subprocess.Popen(command) for _ in range(3)]
        assert [one.wait(timeout=120) for one in running] == [0, 0, 0]
    assert (tmp_path / "set" / "numbers.bin").read_bytes() == CONTENT[:5000]
    assert len(server.requests) == 1
    assert left_over(tmp_path) == ["numbers.bin"]


def test_without_locks_each_process_has_a_part_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(95, "no locks")))
    with serve({"numbers.bin": CONTENT}, cuts=[CHUNK_BYTES] * 3) as server:
        with pytest.raises(data.DataError, match="the connection was cut"):
            fetch_file(file_at(server.url), tmp_path)
        assert left_over(tmp_path) == [f"numbers.bin.{os.getpid()}.part"]
        assert fetch_file(file_at(server.url), tmp_path).read_bytes() == CONTENT
    assert left_over(tmp_path) == ["numbers.bin"]


def test_progress_is_shown_on_a_terminal_alone(tmp_path, monkeypatch, capsys):
    with serve({"numbers.bin": CONTENT}) as server:
        fetch_file(file_at(server.url), tmp_path / "silent")
        assert capsys.readouterr() == ("", "")
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        fetch_file(file_at(server.url), tmp_path / "shown")
        assert "numbers.bin" in capsys.readouterr().err
        fetch_file(file_at(server.url), tmp_path / "unwanted", progress=False)
        assert capsys.readouterr() == ("", "")


# whole sets


@pytest.fixture
def tiny(monkeypatch):
    """A set of 4 + 2 images in two idx files each, known by the name ``tiny``; and its bytes."""
    parts = {
        name: data_files.idx_bytes(array)
        for name, array in {
            "train-images": data_files.images(4, 5, 5),
            "train-labels": np.arange(4) % 3,
            "test-images": data_files.images(2, 5, 5, seed=1),
            "test-labels": np.arange(2),
        }.items()
    }

    def install(address: str) -> dict[str, bytes]:
        files = tuple(
            File(f"tiny/{name}", sha256(content), (f"{address}{name}",))
            for name, content in parts.items()
        )
        entry = SetEntry(
            name="tiny",
            title="Tiny",
            task="classification",
            size="4 + 2",
            licence="none",
            source="here",
            classes=("a", "b", "c"),
            forms=(Form(files, images.read_idx_set),),
        )
        monkeypatch.setitem(CATALOGUE, "tiny", entry)
        return parts

    return install


def test_load_downloads_what_is_missing_once(tiny, tmp_path):
    with serve({}) as server:
        server.files |= {f"/{name}": content for name, content in tiny(server.url).items()}
        assert data.status("tiny", tmp_path).state == "missing"
        first = data.load("tiny", data_dir=tmp_path)
        again = data.load("tiny", data_dir=tmp_path, download=False)
    assert len(server.requests) == 4
    assert first.x.tolist() == again.x.tolist() == data_files.images(4, 1, 5, 5).tolist()
    assert first.y.tolist() == [0, 1, 2, 0]
    assert data.status("tiny", tmp_path).state == "verified"
    assert data.status("tiny", tmp_path).folder == tmp_path


def test_fetch_takes_only_the_files_that_are_not_there(tiny, tmp_path):
    with serve({}) as server:
        parts = tiny(server.url)
        server.files |= {f"/{name}": content for name, content in parts.items()}
        (tmp_path / "tiny").mkdir()
        (tmp_path / "tiny" / "train-images").write_bytes(parts["train-images"])
        (tmp_path / "tiny" / "train-labels").write_bytes(b"damaged")
        assert data.fetch("tiny", data_dir=tmp_path, progress=False) == tmp_path / "tiny"
    fetched = sorted(path for path, _ in server.requests)
    assert fetched == ["/test-images", "/test-labels", "/train-labels"]


def test_without_a_folder_the_environment_or_the_cache_is_used(tiny, tmp_path, monkeypatch):
    with serve({}) as server:
        server.files |= {f"/{name}": content for name, content in tiny(server.url).items()}
        assert data.fetch("tiny") == tmp_path / "cache" / "tiny"
        monkeypatch.setenv("COVARY_DATA", str(tmp_path / "named"))
        assert data.fetch("tiny") == tmp_path / "cache" / "tiny"  # it is there: nothing to do
        shutil.rmtree(tmp_path / "cache")
        assert data.fetch("tiny") == tmp_path / "named" / "tiny"
        shutil.rmtree(tmp_path / "named")
        monkeypatch.setattr(store, "_writable", lambda folder: folder.name != "named")
        assert data.fetch("tiny") == tmp_path / "cache" / "tiny"


def test_load_without_download_says_where_it_looked(tiny, tmp_path):
    tiny(closed_address())
    with pytest.raises(data.DataError, match="covary data fetch tiny") as caught:
        data.load("tiny", data_dir=tmp_path, download=False)
    assert str(tmp_path) in str(caught.value)


def tiny_entry(sha256: str = "") -> SetEntry:
    known: dict[str, Any] = {"title": "Tiny", "source": "here", "targets": ("t",)}
    columns = ("a", "b", "c")
    return uci_entry("tiny", rows=20, features=columns, sha256=sha256, splits=2, **known)


@pytest.fixture
def table(monkeypatch):
    """A regression set of the benchmark, 20 x 3, the target being column 1 of the text file."""
    rows = np.random.default_rng(0).standard_normal((20, 4))
    texts = {
        "data.txt": "\n".join(" ".join(map(repr, row)) for row in rows.tolist()).encode(),
        "index_features.txt": b"0\n2\n3\n",
        "index_target.txt": b"1\n",
    }

    def install(address: str, folder) -> tuple[np.ndarray, dict[str, bytes]]:
        monkeypatch.setattr(uci, "TEXTS", address)
        entry = tiny_entry()
        folder.mkdir()
        sources = [folder / name for name in texts]
        for path, content in zip(sources, texts.values(), strict=True):
            path.write_bytes(content)
        uci.convert_uci(sources, folder / "tiny.npz", splits=2)
        (form,) = entry.forms
        right = replace(form.files[0], sha256=uci.uci_digest(folder / "tiny.npz"))
        monkeypatch.setitem(
            CATALOGUE, "tiny", replace(entry, forms=(replace(form, files=(right,)),))
        )
        return rows, {f"tiny/data/{name}": content for name, content in texts.items()}

    return install


def test_a_set_made_from_texts_is_kept_as_one_checked_file(table, tmp_path):
    with serve({}) as server:
        rows, texts = table(server.url, tmp_path / "made")
        server.files |= {f"/{name}": content for name, content in texts.items()}
        tiny = data.load("tiny", data_dir=tmp_path / "there", split=1)
    assert left_over(tmp_path / "there") == ["tiny.npz"]
    train, test = uci.published_splits(20, 2)
    assert tiny.x.tolist() == rows[train[1]][:, [0, 2, 3]].tolist()
    assert tiny.y_test.tolist() == rows[test[1]][:, [1]].tolist()


MAKE = """
import sys
from pathlib import Path
from covary.data import uci
from covary.data.download import fetch_file
from tests.test_download import tiny_entry
uci.TEXTS, sha256, folder = sys.argv[1:]
(form,) = tiny_entry(sha256).forms
fetch_file(form.files[0], Path(folder))
"""


def test_processes_that_make_the_same_file_do_not_disturb_each_other(table, tmp_path):
    with serve({}, pause=0.001) as server:
        _, texts = table(server.url, tmp_path / "made")
        server.files |= {f"/{name}": content for name, content in texts.items()}
        right = uci.uci_digest(tmp_path / "made" / "tiny.npz")
        command = [sys.executable, "-c", MAKE, server.url, right, str(tmp_path / "there")]
        running = [subprocess.Popen(command) for _ in range(3)]
        assert [one.wait(timeout=120) for one in running] == [0, 0, 0]
    assert len(server.requests) == 3  # one for each text
    assert left_over(tmp_path / "there") == ["tiny.npz"]


def test_texts_with_other_values_are_refused(table, tmp_path):
    with serve({}) as server:
        _, texts = table(server.url, tmp_path / "made")
        texts["tiny/data/index_target.txt"] = b"0\n"
        server.files |= {f"/{name}": content for name, content in texts.items()}
        with pytest.raises(data.DataError, match="SHA-256"):
            data.load("tiny", data_dir=tmp_path / "there")
    assert left_over(tmp_path / "there") == []
