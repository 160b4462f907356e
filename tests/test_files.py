"""Files are written whole or not at all, and read with errors that name them; records likewise."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch

from covary import files
from covary.files import FileError
from covary.runs.records import Record, decoded, to_json

ORIGIN: dict[str, Any] = {
    "command": "covary evaluate runs/x",
    "versions": {"torch": "2"},
    "git_commit": None,
    "platform": "Linux",
    "started": "2026-01-01T00:00:00+00:00",
    "seconds": 1.5,
    "seed": 0,
}


@dataclass(frozen=True)
class Inner:
    name: str
    values: tuple[float | None, ...]
    pair: tuple[int, str] = (1, "a")


@dataclass(frozen=True, kw_only=True)
class Outer(Record):
    kind: Literal["a", "b"]
    inner: Inner | None
    by_name: Mapping[str, Inner]
    several: Mapping[str, Mapping[str, float | None]]
    poor: bool = False


def outer() -> Outer:
    inner = Inner("x", (1.0, math.nan, math.inf))
    return Outer(**ORIGIN, kind="a", inner=inner, by_name={"y": inner}, several={"t": {"n": 3}})


def test_a_record_comes_back_with_undefined_numbers_as_none(tmp_path):
    path = tmp_path / "outer.json"
    written = outer().write(path)
    assert written.inner == Inner("x", (1.0, None, None))
    assert Outer.read(path) == written == decoded(Outer, written.to_json(), "it")
    assert json.loads(path.read_text()) == written.to_json()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("kind", "c", r"key 'kind': expected 'a' or 'b', got 'c'"),
        ("poor", 1, r"key 'poor': expected true or false, got 1"),
        ("seed", True, r"key 'seed': expected a whole number, got True"),
        ("seed", 1.5, r"key 'seed': expected a whole number, got 1\.5"),
        ("seconds", "long", r"key 'seconds': expected a number, got 'long'"),
        ("inner", [], r"key 'inner': expected an object, got a list"),
        ("inner", {"name": "x"}, r"key 'inner\.values': missing; expected a list"),
        ("inner", {"name": "x", "values": 3}, r"key 'inner\.values': expected a list, got 3"),
        ("inner", {"name": "x", "values": ["3"]}, r"key 'inner\.values\[0\]': expected a number"),
        (
            "inner",
            {"name": "x", "values": [], "pair": [1]},
            r"key 'inner\.pair': expected a list of 2",
        ),
        ("by_name", {"y": None}, r"key 'by_name\.y': expected an object, got null"),
        ("several", {"t": {"n": {}}}, r"key 'several\.t\.n': expected a number, got an object"),
        ("versions", "2", r"key 'versions': expected an object, got '2'"),
    ],
)
def test_a_record_says_which_key_is_wrong(tmp_path, key, value, said):
    path = tmp_path / "outer.json"
    path.write_text(json.dumps(to_json(outer()) | {key: value}))
    with pytest.raises(FileError, match=rf"outer\.json, {said}.*Do this\."):
        Outer.read(path, "Do this.")


def test_a_record_needs_all_of_its_keys():
    for key in set(to_json(outer())) - {"poor"}:
        content = to_json(outer())
        del content[key]
        with pytest.raises(FileError, match=f"key '{key}': missing"):
            decoded(Outer, content, "it")
    assert decoded(Outer, to_json(outer()) | {"later": 1}, "it") == decoded(
        Outer, to_json(outer()), "it"
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"3", b"[" * 100_000])
def test_what_is_not_json_is_named(tmp_path, content):
    path = tmp_path / "it.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"it\.json"):
        files.read_json(path)


READERS = [files.read_json, files.read_arrays, files.read_tensors, files.read_text]


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, said in (("pipe", "a named pipe"), ("folder", "a folder"), ("gone", "is not there")):
        with pytest.raises(FileError, match=rf"{name} is.*{said.removeprefix('is ')}"):
            read(tmp_path / name)


def test_arrays_and_tensors_come_back_and_damage_is_named(tmp_path):
    arrays, tensors = {"a/b": np.arange(300.0)}, {"w": torch.arange(6.0)}
    files.write_arrays(tmp_path / "a.npz", arrays)
    files.write_tensors(tmp_path / "w.safetensors", tensors, {"said": "so"})
    np.testing.assert_array_equal(files.read_arrays(tmp_path / "a.npz")["a/b"], arrays["a/b"])
    found, metadata = files.read_tensors(tmp_path / "w.safetensors")
    assert torch.equal(found["w"], tensors["w"])
    assert metadata == {"said": "so"}
    whole = (tmp_path / "a.npz").read_bytes()
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        (tmp_path / "a.npz").write_bytes(changed)
        try:
            back = files.read_arrays(tmp_path / "a.npz")
        except FileError:
            with pytest.raises(FileError, match=r"a\.npz"):
                files.read_arrays(tmp_path / "a.npz")
        else:  # in dates and the like, which say nothing of the numbers
            assert [value.tolist() for value in back.values()] == [arrays["a/b"].tolist()]


def test_a_write_that_fails_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    path = tmp_path / "it.json"
    files.write_json(path, {"a": 1})

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*it\.json"):
        files.write_json(path, {"a": 2})
    assert files.read_json(path) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["it.json"]
