"""``covary predict`` and ``covary.Predictor`` of images: PNG files, npz files, arrays."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

from covary import data, runs
from covary.cli import common
from covary.data import DataError
from covary.data.new_images import ImageSchema, read_images
from covary.serving import Predictor, predict_table
from tests.commands import covary, trained_run
from tests.spies import peak_memory
from tests.test_predict import trained

OUT = ["prediction", "probability", "set", "uncertainty", "novelty", "flag", "reason"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return trained_run(tmp_path_factory.mktemp("digits"), "digits", epochs=20, hidden=(32,)).path


@pytest.fixture(scope="module")
def houses(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("houses"), "price")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """(200, 1, 8, 8) bytes that training did not see."""
    return data.load("digits").x_test[:200].numpy()


@pytest.fixture
def folder(images, tmp_path) -> Path:
    """The same as PNG files, some of them in sub-folders; names are in the order of the images."""
    for i, image in enumerate(images):
        path = tmp_path / "scans" / ("a" if i < 50 else "b/deep" if i < 90 else "") / f"c{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(path)
    (tmp_path / "scans" / "notes.txt").write_text("no image")
    (tmp_path / "scans" / "._c000.png").write_text("what macOS leaves")
    return tmp_path / "scans"


def test_files_equal_what_the_predictor_says_in_memory(digits, images, folder, tmp_path):
    """Exactly: of a folder, of each form of an array, in each format."""
    predictor = Predictor.load(digits)
    expected = predictor(images)
    assert list(expected) == OUT
    y = np.array(data.load("digits").classes)[data.load("digits").y_test[:200]]
    assert (expected["prediction"] == y).mean() > 0.9
    np.testing.assert_allclose(expected["uncertainty"], 1 - expected["probability"], atol=1e-6)
    inside = [one in each.split("|") for one, each in zip(y, expected["set"], strict=True)]
    assert 0.84 < np.mean(inside) < 0.97  # of 200, at the level 0.9
    forms = {
        "bytes": images,
        "grey": images[:, 0],
        "last": images.transpose(0, 2, 3, 1),
        "columns": np.asfortranarray(images),
        "integers": images.astype(np.int64),
        "float": images / 255,
        "half": (images.astype(np.float32) / 255),
    }
    for name, form in forms.items():
        save = np.savez_compressed if name == "grey" else np.savez
        save(tmp_path / f"{name}.npz", form)
        summary = predict_table(predictor, tmp_path / f"{name}.npz", tmp_path / f"{name}.parquet")
        assert summary.rows == 200
        found = pd.read_parquet(tmp_path / f"{name}.parquet")
        assert found["image"].tolist() == list(range(200))
        for key, values in predictor(form).items():
            np.testing.assert_array_equal(found[key].to_numpy(), values)
            if values.dtype == float:
                np.testing.assert_allclose(values, expected[key], rtol=1e-4, atol=1e-6)
    covary("predict", digits, folder, "--out", tmp_path / "p.csv")
    texts = {"prediction": str, "set": str}
    found = pd.read_csv(tmp_path / "p.csv", keep_default_na=False, dtype=texts)
    assert list(found) == ["file", *OUT]
    assert found["file"][0] == "a/c000.png"
    assert found["file"][50] == "b/deep/c050.png"
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key].to_numpy().astype(values.dtype), values)
    one = tmp_path / "one.csv"
    covary("predict", digits, folder / "c150.png", "--out", one, "--keep", "none")
    assert list(pd.read_csv(one)) == OUT


def test_chunks_of_images_give_the_same_to_rounding(digits, images, folder, tmp_path):
    predictor = pickle.loads(pickle.dumps(Predictor.load(digits)))
    seen: list[int] = []
    predict_table(predictor, folder, tmp_path / "p.csv", chunk=60, progress=seen.append)
    assert seen == [60, 60, 60, 20]
    found = pd.read_csv(tmp_path / "p.csv")
    np.testing.assert_allclose(found["probability"], predictor(images)["probability"], rtol=1e-4)


def test_images_off_the_data_are_flagged_and_less_sure(digits, images):
    predictor, random = Predictor.load(digits), np.random.default_rng(0)
    near = predictor(images)
    assert (near["novelty"] <= predictor.limit).mean() > 0.95
    for strange in (255 - images, random.integers(0, 256, images.shape, np.uint8)):
        far = predictor(strange)
        assert (far["flag"] == "ask someone").all()
        assert set(far["reason"]) == {"off the data"}
        assert far["uncertainty"].min() > np.median(near["uncertainty"])
    assert "images that training did not see" in predictor.promise


def test_a_trunk_has_its_novelty_behind_it(tmp_path, images):
    run = trained_run(tmp_path / "run", "digits", epochs=2, hidden=(16,), trunk="lenet").path
    predictor = Predictor.load(run)
    assert predictor.model.novelty.low.shape == (32 * 2 * 2,)
    found = predictor(images)
    again = Predictor.load(run)
    for key, values in again(images).items():
        np.testing.assert_array_equal(values, found[key])
    assert (found["novelty"] <= predictor.limit).mean() > 0.95
    assert (predictor(255 - images)["novelty"] > predictor.limit).mean() > 0.5


def _saved(path: Path, *arrays: Any, **named: Any) -> Path:
    np.savez(path, *arrays, **named)
    return path


def _grey(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


def _cut(folder: Path) -> Path:
    path = folder / "sub" / "cut.png"
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)).save(whole, "PNG")
    path.write_bytes(whole.getvalue()[:-40])
    return folder


def _png(folder: Path, image: Image.Image) -> Path:
    image.save(folder / "sub" / "wrong.png")
    return folder


def _see_through(folder: Path) -> Path:
    Image.new("L", (8, 8)).save(folder / "sub" / "wrong.png", transparency=0)
    return folder


def _text(path: Path, text: str = "no archive") -> Path:
    path.write_text(text)
    return path


WANTED = "the run takes 8 x 8 pixels of 1 channel (grey)"
BROKEN = {
    "another size": (
        lambda f: _png(f, Image.new("L", (28, 30))),
        f"sub/wrong.png has 28 x 30 pixels of 1 channel; {WANTED}",
    ),
    "colours": (
        lambda f: _png(f, Image.new("RGB", (8, 8))),
        f"has 8 x 8 pixels of 3 channels; {WANTED}. Convert it first.",
    ),
    "a palette": (lambda f: _png(f, Image.new("P", (8, 8))), "of 3 channels; the run takes"),
    "transparency": (
        lambda f: _png(f, Image.new("LA", (8, 8))),
        "of 2 channels, with transparency; the run takes",
    ),
    "a grey that is transparent": (_see_through, "of 2 channels, with transparency; the run takes"),
    "16 bits": (lambda f: _png(f, Image.new("I;16", (8, 8))), "pixels of I;16 values; the run"),
    "a cut file": (_cut, "sub/cut.png is not a readable PNG file"),
    "a text": (
        lambda f: (_text(f / "sub" / "x.png"), f)[1],
        "sub/x.png is not a readable PNG file",
    ),
    "other images": (
        lambda f: (_text(f / "sub" / "x.JPG"), f)[1],
        "has 1 images that are no PNG files, the first is",
    ),
    "no images": (lambda f: f / "empty", "has no PNG files in it, nor in its sub-folders"),
    "no folder": (lambda f: f / "nowhere", "is not there"),
    "no file": (lambda f: f / "nowhere.png", "is not there"),
    "several arrays": (
        lambda f: _saved(f / "n.npz", x=_grey(2, 8, 8), y=_grey(2)),
        "has 2 arrays, 'x', 'y'; choose that of the images (--array NAME)",
    ),
    "another shape": (
        lambda f: _saved(f / "n.npz", _grey(2, 3, 8, 8)),
        f"has the shape (2, 3, 8, 8); {WANTED}, arrays of the shape (n, 1, 8, 8) or (n, 8, 8, 1) "
        "or (n, 8, 8)",
    ),
    "a number": (lambda f: _saved(f / "n.npz", np.array(3)), "has the shape ()"),
    "texts": (lambda f: _saved(f / "n.npz", np.full((2, 8, 8), "a")), "is of type <U1; images are"),
    "objects": (
        lambda f: _saved(f / "n.npz", np.full((2, 8, 8), None)),
        "is of type object; images are whole numbers",
    ),
    "floats up to 255": (
        lambda f: _saved(f / "n.npz", np.full((2, 8, 8), 255.0)),
        "has the value 255 in image 0 (counted from 0); floating point numbers are taken from 0 to "
        "1: divide them by 255",
    ),
    "NaN": (
        lambda f: _saved(f / "n.npz", np.stack([np.zeros((8, 8)), np.full((8, 8), np.nan)])),
        "has the value nan in image 1",
    ),
    "whole numbers beyond bytes": (
        lambda f: _saved(f / "n.npz", np.full((2, 8, 8), 300)),
        "has the value 300 in image 0 (counted from 0); whole numbers are taken from 0 to 255.",
    ),
    "no image in the array": (lambda f: _saved(f / "n.npz", _grey(0, 8, 8)), "has no images in it"),
    "no archive": (lambda f: _text(f / "n.npz"), "is not a readable npz file: File is not a zip"),
    "no arrays": (lambda f: _saved(f / "n.npz"), "has no arrays in it"),
    "a table": (lambda f: _text(f / "n.csv", "a,b\n1,2\n"), "n.csv is a table."),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_one_sentence_and_nothing_is_written(what, digits, images, tmp_path):
    make, told = BROKEN[what]
    for sub in ("sub", "empty"):
        (tmp_path / "scans" / sub).mkdir(parents=True)
    Image.fromarray(images[0, 0]).save(tmp_path / "scans" / "good.png")
    source, out = make(tmp_path / "scans"), tmp_path / "out" / "predictions.csv"
    said = " ".join(covary("predict", digits, source, "--out", out, code=1).split())
    assert told in said
    assert said.count("error:") == 1
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_an_archive_that_ends_in_its_middle_leaves_what_was_there(digits, images, tmp_path):
    np.savez(tmp_path / "n.npz", np.concatenate([images] * 10))
    content = bytearray((tmp_path / "n.npz").read_bytes())
    content[len(content) // 2] ^= 255
    (tmp_path / "n.npz").write_bytes(bytes(content))
    out = tmp_path / "p.csv"
    out.write_text("as it was")
    with pytest.raises(DataError, match=r"n\.npz is not a readable npz file: Bad CRC-32"):
        predict_table(Predictor.load(digits), tmp_path / "n.npz", out, overwrite=True, chunk=50)
    assert out.read_text() == "as it was"
    assert not list(tmp_path.glob(".*unfinished"))


def test_an_array_is_chosen_by_its_name(digits, images, folder, tmp_path):
    path = _saved(tmp_path / "n.npz", labels=_grey(200), images=images)
    covary("predict", digits, path, "--array", "images", "--out", tmp_path / "p.csv")
    assert len(pd.read_csv(tmp_path / "p.csv")) == 200
    said = covary("predict", digits, path, "--array", "image", "--out", tmp_path / "q.csv", code=1)
    assert "has no array 'image'; it has 'labels', 'images'" in " ".join(said.split())
    said = covary("predict", digits, folder, "--array", "x", "--out", tmp_path / "q.csv", code=1)
    assert "holds no arrays" in said


def test_rows_and_images_are_not_taken_for_each_other(digits, houses, folder, tmp_path):
    for source in (folder, folder / "c150.png", _saved(tmp_path / "n.npz", _grey(2, 8, 8))):
        said = covary("predict", houses, source, "--out", tmp_path / "p.csv", code=1)
        assert "The run is of a table, and takes a csv, JSON lines or parquet file; " in said
    with pytest.raises(DataError, match=r"takes a folder of PNG files, .*; got columns"):
        Predictor.load(digits)({"a": [1.0]})
    with pytest.raises(DataError, match="got a stream"):
        predict_table(Predictor.load(digits), io.BytesIO(b""), tmp_path / "p.csv")
    assert not (tmp_path / "p.csv").exists()


def test_colour_images_have_their_channels_in_order(tmp_path):
    """Those of PNG files, of a palette too, and of arrays with channels in front or behind."""
    random, schema = np.random.default_rng(0), ImageSchema((3, 5, 4), ("a", "b"))
    image = random.integers(0, 4, (5, 4, 3), np.uint8) * 85
    Image.fromarray(image).save(tmp_path / "a.png")
    Image.fromarray(image).quantize(64).save(tmp_path / "b.png")
    expected = image.transpose(2, 0, 1)
    (chunk,) = read_images(tmp_path, schema, chunk=10)
    np.testing.assert_array_equal(chunk.x[0], expected)
    np.testing.assert_array_equal(chunk.x[1], expected)
    for array in (expected[None], image[None]):
        (chunk,) = read_images(array, schema, chunk=10)
        np.testing.assert_array_equal(chunk.x[0], expected)
    with pytest.raises(DataError, match=r"4 x 5 pixels of 3 channels \(red, green, blue\)"):
        read_images(np.zeros((2, 5, 4)), schema, chunk=10)


def test_memory_is_bounded_by_the_chunk(digits, images, tmp_path):
    predictor = Predictor.load(digits)

    def peak(count: int) -> int:
        np.savez_compressed(tmp_path / "many.npz", np.concatenate([images] * count))
        source, out = tmp_path / "many.npz", tmp_path / "p.csv"
        return peak_memory(lambda: predict_table(predictor, source, out, chunk=500, overwrite=True))

    assert peak(100) < 1.2 * peak(10)


def test_progress_on_a_terminal(digits, images, tmp_path, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(common, "voice", Console(file=shown, force_terminal=True, width=80))
    np.savez(tmp_path / "n.npz", images)
    covary("predict", digits, tmp_path / "n.npz", "--out", tmp_path / "p.csv")
    assert "0 images" in shown.getvalue()
    assert "200 images, " in shown.getvalue()
    assert "images/s" in shown.getvalue()


def test_images_of_a_run_are_known_without_its_data(digits, houses):
    known = runs.open(digits).images
    assert known == ImageSchema((1, 8, 8), tuple("0123456789"))
    assert runs.open(houses).images is None
