"""Named sets, the readers of their files, and random changes to images."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from covary import data
from covary.data import download, images, store, uci
from covary.data.catalogue import CATALOGUE, Form, SetEntry
from covary.data.dataset import Arrays
from covary.data.download import File
from tests import data_files

FOLDER = os.environ.get("COVARY_DATA")
with_files = pytest.mark.skipif(not FOLDER, reason="$COVARY_DATA names no folder with the files")


@pytest.fixture(autouse=True)
def no_other_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("COVARY_DATA", raising=False)
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path / "cache")


# sets without files


def test_digits_are_the_counts_of_scikit_learn_stretched():
    from sklearn.datasets import load_digits

    digits = data.load("digits")
    images = torch.cat([digits.x, digits.x_test])
    assert (digits.x.shape, digits.x_test.shape) == ((898, 1, 8, 8), (899, 1, 8, 8))
    assert digits.is_image
    assert images.dtype == torch.uint8
    assert set(images.unique().tolist()) == {round(count * 255 / 16) for count in range(17)}
    assert sorted(map(bytes, images.numpy())) == sorted(
        map(bytes, np.rint(load_digits().images * 255 / 16).astype(np.uint8))
    )
    assert (digits.y.bincount() - digits.y_test.bincount()).abs().max() <= 1


def test_diabetes_is_raw_and_divided_by_the_seed():
    diabetes = data.load("diabetes")
    assert (diabetes.x.shape, diabetes.y.shape) == ((331, 10), (331, 1))
    assert diabetes.x[:, diabetes.features.index("age")].max() > 60
    assert not torch.equal(diabetes.y, data.load("diabetes", seed=1).y)


def test_quadrants_are_told_apart_by_signs():
    quadrants = data.load("quadrants", seed=3)
    for x, y in ((quadrants.x, quadrants.y), (quadrants.x_test, quadrants.y_test)):
        assert x.shape == (10_000, 2)
        torch.testing.assert_close(x.T.cov(), torch.eye(2).double(), atol=0.06, rtol=0)
        same_sign = (x > 0).all(1) | (x < 0).all(1)
        assert torch.equal(y, (~same_sign).long())


@pytest.mark.parametrize("name", ["quadrants", "two-moons"])
def test_generated_sets_follow_the_seed(name):
    first, again, other = (data.load(name, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)
    assert not set(map(tuple, first.x.tolist())) & set(map(tuple, first.x_test.tolist()))


def test_every_entry_describes_itself():
    for name in data.names():
        entry = data.describe(name)
        assert entry.title
        assert entry.licence
        assert entry.source
        assert entry.task in ("classification", "regression")
        assert bool(entry.make) != any(form.downloadable for form in entry.forms)
        assert len(set(entry.classes)) == len(entry.classes)
        for form in entry.forms:
            assert all(len(file.sha256) == 64 for file in form.files)
            for file in (part for whole in form.files for part in (whole, *whole.made_from)):
                assert bool(file.size) == bool(file.urls)
                assert not file.urls or any(url.startswith("https://") for url in file.urls)
    assert len(data.describe("cifar100").classes) == 100
    assert list(data.describe("cifar100").classes) == sorted(data.describe("cifar100").classes)


@pytest.mark.parametrize(
    "read",
    [
        uci.uci_digest,
        download.file_sha256,
    ],
    ids=["uci", "sha256"],
)
def test_no_check_waits_for_a_pipe(tmp_path, read):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(data.DataError, match="folder is a folder"):
        read(tmp_path / "folder")
    with pytest.raises(data.DataError, match="pipe is a named pipe"):
        read(tmp_path / "pipe")


def test_a_pipe_in_place_of_a_file_of_a_set_is_told(tiny, tmp_path):
    folder = tiny(tmp_path / "given")
    (folder / "tiny" / "labels").unlink()
    os.mkfifo(folder / "tiny" / "labels")
    with pytest.raises(data.DataError, match="labels is a named pipe"):
        data.load("tiny", data_dir=folder)
    assert data.status("tiny", folder).state == "damaged"


def test_wrong_names_and_splits_are_told():
    with pytest.raises(data.DataError, match="Did you mean 'fashion-mnist'"):
        data.load("fashion_mnist")
    with pytest.raises(data.DataError, match="splits 0 to 4"):
        data.load("protein-tertiary-structure", split=5)
    with pytest.raises(data.DataError, match="splits 0 to 0"):
        data.load("digits", split=1)
    with pytest.raises(data.DataError, match="built in"):
        data.fetch("digits")
    assert data.status("digits").state == "built in"


# folders


@pytest.fixture
def tiny(monkeypatch):
    """Write 2 test images to a folder, where they are known by the name ``tiny``."""
    pictures, labels = data_files.images(2, 4, 4), np.array([1, 0])
    contents = {"images": data_files.idx_bytes(pictures), "labels": data_files.idx_bytes(labels)}
    files = tuple(
        File(f"tiny/{name}", data_files.sha256(content)) for name, content in contents.items()
    )
    form = Form(files, images.read_idx_set, notes=("two images",))
    entry = SetEntry("tiny", "Tiny", "classification", "0 + 2", "none", "here", forms=(form,))
    monkeypatch.setitem(CATALOGUE, "tiny", entry)

    def write(folder: Path) -> Path:
        (folder / "tiny").mkdir(parents=True)
        for name, content in contents.items():
            (folder / "tiny" / name).write_bytes(content)
        return folder

    return write


def test_folders_are_searched_in_order(tiny, tmp_path, monkeypatch):
    tiny(tmp_path / "cache")
    assert data.status("tiny").folder == tmp_path / "cache"
    monkeypatch.setenv("COVARY_DATA", str(tiny(tmp_path / "named")))
    assert data.status("tiny").folder == tmp_path / "named"
    given = tiny(tmp_path / "given")
    found = data.status("tiny", given)
    assert (found.state, found.folder, found.detail) == ("verified", given, "two images")
    assert found.bytes == sum(path.stat().st_size for path in (given / "tiny").iterdir())
    assert data.load("tiny", data_dir=given).source == str(given / "tiny")
    (given / "tiny" / "labels").unlink()  # not all of the set
    assert data.status("tiny", given).folder == tmp_path / "named"


def test_a_damaged_file_is_an_error_even_if_another_folder_has_it(tiny, tmp_path):
    tiny(tmp_path / "cache")
    given = tiny(tmp_path / "given")
    (given / "tiny" / "labels").write_bytes(b"damaged")
    with pytest.raises(data.DataError, match="SHA-256") as caught:
        data.load("tiny", data_dir=given)
    assert str(given / "tiny" / "labels") in str(caught.value)
    assert data.status("tiny", given).state == "damaged"


FORMS = [(entry, form) for entry in CATALOGUE.values() for form in entry.forms]


@pytest.mark.parametrize(
    ("entry", "form"), FORMS, ids=[f"{entry.name}-{form.files[0].path}" for entry, form in FORMS]
)
def test_no_wrong_file_reaches_a_reader(entry, form, tmp_path, monkeypatch):
    """In a folder of one's own too: what is not the catalogue's file is refused before."""

    def read(*_):
        pytest.fail("a wrong file was read")

    monkeypatch.setitem(CATALOGUE, entry.name, replace(entry, forms=(replace(form, read=read),)))
    for file in form.files:
        (tmp_path / file.path).parent.mkdir(exist_ok=True)
        (tmp_path / file.path).write_bytes(b"a page that says 404")
    with pytest.raises(data.DataError, match=r"SHA-256|not an npz file") as caught:
        data.load(entry.name, data_dir=tmp_path)
    assert str(tmp_path / form.files[0].path) in str(caught.value)
    assert data.status(entry.name, tmp_path).state == "damaged"


def test_a_set_without_training_part_has_one_of_length_0(tiny, tmp_path):
    loaded = data.load("tiny", data_dir=tiny(tmp_path / "given"))
    assert (loaded.x.shape, loaded.y.shape) == ((0, 1, 4, 4), (0,))
    assert loaded.y_test.tolist() == [1, 0]
    assert loaded.is_image
    loaded.x_test[0] = 0  # a tensor of its own, not a view of read-only bytes


# readers


def test_idx_plain_and_gzipped_are_the_same(tmp_path):
    array = data_files.images(3, 4, 5)
    (tmp_path / "plain").write_bytes(data_files.idx_bytes(array))
    data_files.write_idx(tmp_path / "zipped.gz", array)
    for name in ("plain", "zipped.gz"):
        np.testing.assert_array_equal(images.read_idx(tmp_path / name), array)


def read_tiny_cifar(path: Path, label_bytes: int = 1) -> Arrays:
    return images.read_cifar_set(
        [path],
        train=["a.bin", "b.bin"],
        test=["c.bin"],
        label_bytes=label_bytes,
    )


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_is_read_from_the_archive_in_order(tmp_path, label_bytes):
    """The last label byte counts: of two, the first is the coarse label."""
    pictures = data_files.images(4, 3, 32, 32)
    labels = np.array([3, 1, 4, 0])
    columns = np.stack([np.full(4, 9), labels], axis=1)[:, -label_bytes:]
    members = {
        "c.bin": data_files.cifar_bytes(pictures[3:], columns[3:]),
        "readme": b"not of interest",
        "b.bin": data_files.cifar_bytes(pictures[2:3], columns[2:3]),
        "a.bin": data_files.cifar_bytes(pictures[:2], columns[:2]),
    }
    arrays = read_tiny_cifar(data_files.write_tar(tmp_path / "x.tar.gz", members), label_bytes)
    np.testing.assert_array_equal(np.concatenate([arrays.x, arrays.x_test]), pictures)
    np.testing.assert_array_equal(np.concatenate([arrays.y, arrays.y_test]), labels)


def test_strips_are_read_without_loss(tmp_path):
    pictures, labels = data_files.images(5, 3, 32, 32), np.arange(5)
    path = data_files.write_strips(tmp_path / "x.npz", pictures, labels)
    part = images.read_strips(path)
    np.testing.assert_array_equal(part.images, pictures)
    np.testing.assert_array_equal(part.labels, labels)
    arrays = images.read_parts([path], read=images.read_strips)
    assert (len(arrays.x), len(arrays.x_test)) == (0, 5)


def test_nothing_is_unpickled(tmp_path):
    np.savez(tmp_path / "x.npz", webp=1, offsets=2, labels=np.array([{}], object), X=np.array([{}]))
    with pytest.raises(ValueError, match="allow_pickle"):
        images.read_strips(tmp_path / "x.npz")
    with pytest.raises(data.DataError, match="not an npz file of X"):
        uci.read_uci(tmp_path / "x.npz")


def test_svhn_counts_a_ten_as_zero(tmp_path):
    from scipy.io import savemat

    pictures = data_files.images(3, 3, 32, 32)
    labels = np.array([[10], [1], [9]], np.uint8)
    savemat(tmp_path / "x.mat", {"X": pictures.transpose(2, 3, 1, 0), "y": labels})
    part = images.read_svhn(tmp_path / "x.mat")
    np.testing.assert_array_equal(part.images, pictures)
    assert part.labels.tolist() == [0, 1, 9]


def test_a_wrong_regression_file_is_told(tmp_path):
    path = tmp_path / "x.npz"
    train, test = uci.published_splits(10, 2)
    good = {"X": np.ones((10, 2)), "y": np.ones(10), "train_idx": train, "test_idx": test}
    np.savez(path, **good)
    assert uci.read_uci(path).x.shape == (10, 2)
    right = uci.uci_digest(path)
    for changes in ({"y": np.zeros(10)}, {"X": np.ones((9, 2))}, {"test_idx": train[:, :1]}):
        np.savez(path, **good | changes)
        assert uci.uci_digest(path) != right
    np.savez(path, X=good["X"])
    with pytest.raises(data.DataError, match="not an npz file of X, y, train_idx, test_idx"):
        uci.uci_digest(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(data.DataError, match="not an npz file"):
        uci.uci_digest(path)


# the real files


@with_files
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "notmnist"])
def test_images_of_28_x_28(name):
    loaded = data.load(name, data_dir=FOLDER)
    train = 0 if name == "notmnist" else 60_000
    assert (loaded.x.shape, loaded.x_test.shape) == ((train, 1, 28, 28), (10_000, 1, 28, 28))
    if name == "mnist":
        assert loaded.y_test.bincount().tolist() == [
            980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009
        ]  # fmt: skip
    else:
        assert loaded.y_test.bincount().tolist() == [1000] * 10


@with_files
def test_cifar10_is_the_official_one_byte_for_byte():
    cifar = data.load("cifar10", data_dir=FOLDER)
    batches = zip(cifar.x.split(10_000), cifar.y.split(10_000), strict=True)
    # SHA-1 of the members of the official archive, data_batch_1.bin to test_batch.bin
    assert [
        hashlib.sha1(data_files.cifar_bytes(x.numpy(), y.numpy())).hexdigest()[:8]
        for x, y in [*batches, (cifar.x_test, cifar.y_test)]
    ] == ["aadd24ac", "c0ba65cc", "1dd00a74", "aab85764", "26e2849e", "67eb016d"]


@with_files
def test_svhn_says_that_it_is_not_the_official_one():
    svhn = data.load("svhn", data_dir=FOLDER)
    counts = [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595]
    assert svhn.y_test.bincount().tolist() == counts
    assert "not the official crops" in svhn.notes[0]


@with_files
@pytest.mark.parametrize(
    "entry", [entry for entry in CATALOGUE.values() if entry.splits], ids=lambda entry: entry.name
)
def test_regression_sets_and_their_published_splits(entry, tmp_path):
    """Also: the published text files, written anew, give the values that downloads must have."""
    path = Path(FOLDER) / "uci" / f"{entry.name}.npz"
    x, y, train, test = uci.read_uci(path)
    made = uci.published_splits(len(x), entry.splits)
    np.testing.assert_array_equal(made[0], train)
    np.testing.assert_array_equal(made[1], test)

    loaded = data.load(entry.name, data_dir=FOLDER, split=entry.splits - 1)
    np.testing.assert_array_equal(loaded.x, x[train[-1]])
    np.testing.assert_array_equal(loaded.y_test[:, 0], y[test[-1]])
    assert loaded.x.shape[1] == len(loaded.features)

    sources = [tmp_path / name for name in ("data.txt", "index_features.txt", "index_target.txt")]
    np.savetxt(sources[0], np.column_stack([x, y]), fmt="%.17g")
    np.savetxt(sources[1], np.arange(x.shape[1]))
    np.savetxt(sources[2], [x.shape[1]])
    uci.convert_uci(sources, tmp_path / "made.npz", splits=entry.splits)
    entry.forms[0].files[0].check(tmp_path / "made.npz")


# random changes to images


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_a_random_crop_is_one_window_of_the_padded_image(dtype, padding):
    x = torch.as_tensor(data_files.images(40, 2, 5, 7)).to(dtype)
    cropped = data.random_crop(x, padding, torch.Generator().manual_seed(0))
    assert (cropped.shape, cropped.dtype) == (x.shape, x.dtype)
    places = set()
    for image, got in zip(x, cropped, strict=True):
        padded = torch.zeros(2, 5 + 2 * padding, 7 + 2 * padding, dtype=dtype)
        padded[:, padding : padding + 5, padding : padding + 7] = image
        windows = {
            (top, left): padded[:, top : top + 5, left : left + 7]
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
        }
        fitting = [place for place, window in windows.items() if torch.equal(window, got)]
        assert len(fitting) == 1
        places.add(fitting[0])
    if padding == 1:
        assert len(places) == 9  # every offset occurs: images move on their own
    assert {max(place) for place in places} <= set(range(2 * padding + 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_flip_mirrors_about_half_of_the_images(dtype):
    x = torch.as_tensor(data_files.images(400, 1, 2, 3)).to(dtype)
    flipped = data.horizontal_flip(x, torch.Generator().manual_seed(0))
    mirrored = [torch.equal(got, image.flip(-1)) for image, got in zip(x, flipped, strict=True)]
    kept = [torch.equal(got, image) for image, got in zip(x, flipped, strict=True)]
    assert all(a or b for a, b in zip(mirrored, kept, strict=True))
    assert 150 < sum(mirrored) < 250


def test_augmented_images_are_cropped_and_then_flipped():
    x = torch.as_tensor(data_files.images(10, 3, 6, 6))
    torch.manual_seed(0)
    found = data.augmented(x)
    torch.manual_seed(0)
    assert torch.equal(found, data.horizontal_flip(data.random_crop(x)))
    assert not torch.equal(found, x)


@pytest.mark.parametrize("change", [data.random_crop, data.horizontal_flip])
def test_random_changes_repeat_with_the_generator_and_need_batches(change):
    x = torch.as_tensor(data_files.images(10, 3, 6, 6))
    first, again, other = (
        change(x, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with pytest.raises(ValueError, match="B, C, H, W"):
        change(x[0])
    if change is data.random_crop:
        with pytest.raises(ValueError, match="0 or more"):
            change(x, padding=-1)
