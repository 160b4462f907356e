"""Every file of a run or a comparison, damaged: commands name it, and change no other file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from covary import runs
from covary.cli import app
from covary.report import page
from covary.runs import Choices, DataConfig, Run, costs
from covary.runs.samples import load_data
from covary.runs.training import resolve, train
from covary.training import StoppedError

# The commands that need each file, with options that make them quick.
QUICK = ["--samples", "8"]
TRAIN = ["train", "{table}", "--target", "y", "--hidden", "6,4", "--resume", "--out", "{run}"]
COMPARE = ["compare", "{table}", "--target", "y", "--hidden", "4", "--epochs", "1", "--seeds", "1"]
COMPARE += ["--methods", "plain", "--validation", "0.2", "--resume", "--out", "{run}"]
COMMANDS = {
    "report": ["report", "{run}"],
    "evaluate": ["evaluate", "{run}", "--ood", "{other}"],
    "calibrate": ["calibrate", "{run}"],
    "attack": ["attack", "{run}", "--attack", "fgsm", "--epsilon", "0.1", *QUICK],
    "fidelity": ["fidelity", "{run}", *QUICK],
    "verify": ["verify", "{run}", "--samples", "1", "--copies", "64", "--duration", "20"],
    "train": [*TRAIN, "--epochs", "2", "--validation", "0.2"],
    "train more": [*TRAIN, "--epochs", "3", "--validation", "0.2"],
}
OTHER_COMMANDS = {"export": ["export", "{run}", "{run}/net.nir"], "compare": COMPARE}
USED_BY = {
    "config.toml": ("report", "evaluate", "train", "verify"),
    "schema.json": ("evaluate",),
    "environment.json": ("report",),
    "metrics.jsonl": ("report", "train more"),
    "checkpoint.safetensors": ("train", "train more"),
    "model.safetensors": ("report", "evaluate", "calibrate", "attack", "fidelity", "verify"),
    "evaluation.json": ("report",),
    "predictions.npz": ("report",),
    "calibration.json": ("evaluate",),
    "score.safetensors": ("evaluate",),
    "score-plain.safetensors": ("evaluate",),
    "attack.json": ("report",),
    "attack.npz": ("report",),
    "fidelity.json": ("report",),
    "fidelity.npz": ("report",),
    "verification.json": ("report",),
    "verification.npz": ("report",),
}
# Files of a comparison, and what is removed from its folder so that going on with it needs them.
COMPARED = {
    "settings.json": "",
    "costs.json": "",
    "seed-0/mnn.json": "",
    "seed-0/plain.json": "",
    "seed-0/mnn/config.toml": "",
    "seed-0/mnn/model.safetensors": "seed-0/mnn.json",
    "seed-0/mnn/checkpoint.safetensors": "seed-0/mnn/model.safetensors",
    "seed-0/plain-0/training.json": "seed-0/plain.json",
    "seed-0/plain-0/model.safetensors": "seed-0/plain.json",
}
# Keys that files of earlier versions need not have, and what may also be null or empty.
OPTIONAL = {"notes", "arrays_sha256", "predictions_sha256", "fidelity", "scores"}
OPTIONAL |= {"calibration", "by_target", "verdict", "kind", "classes", "missing", "temperature"}
OPTIONAL |= {"offset", "data", "training_samples", "validation_samples", "test_samples"}
OPTIONAL |= {"processes", "device", "budget"}
# Of settings and numbers of a comparison.
OPTIONAL |= {"covariance", "chosen", "members", "dropout", "samples", "epsilon", "attacked"}
Damage = Callable[[Path], None]


def wrong(value: Any) -> Any:
    """Something of another type."""
    return {"wrong": [1]} if isinstance(value, str | int | float | list) else "wrong"


def rewritten(change: Callable[[bytes], bytes]) -> Damage:
    def rewrite(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return rewrite


def flipped(seed: int, mask: int) -> Damage:
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        for place in np.random.default_rng(seed).integers(len(changed), size=3):
            changed[place] ^= mask
        return bytes(changed)

    return rewritten(flip)


def replaced(make: Callable[[Path], object]) -> Damage:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


ANY: dict[str, Damage] = {
    "empty": rewritten(lambda content: b""),
    "half": rewritten(lambda content: content[: len(content) // 2]),
    "text": rewritten(lambda content: b"nothing that anyone wrote"),
    "folder": replaced(Path.mkdir),
    "pipe": replaced(os.mkfifo),
    **{f"flipped bytes {seed}": flipped(seed, 0xFF) for seed in range(3)},
    **{f"flipped bits {seed}": flipped(seed, 1 << seed % 5) for seed in range(10)},
}
# One of each kind, where a command takes longer.
FEW = ["empty", "half", "text", "folder", "pipe", "flipped bytes 0", "flipped bits 0"]


def edited(change: Callable[[dict[str, Any]], object]) -> Damage:
    def edit(path: Path) -> None:
        if path.suffix == ".toml":
            content = tomlkit.parse(path.read_text()).unwrap()
            change(content)
            path.write_text(tomlkit.dumps(content))
        else:
            content = json.loads(path.read_text())
            change(content)
            path.write_text(json.dumps(content))

    return edit


def of_json(content: dict[str, Any]) -> Iterator[tuple[str, Damage]]:
    yield "list", rewritten(lambda _: b"[]")
    yield "null", rewritten(lambda _: b"null")
    for i, (key, value) in enumerate(content.items()):
        if i % 2 or key in OPTIONAL:
            yield f"{key}: other type", edited(lambda c, k=key, v=value: c.update({k: wrong(v)}))  # type: ignore[misc]
        else:
            yield f"{key}: missing", edited(lambda c, k=key: c.pop(k))  # type: ignore[misc]


def of_toml(content: dict[str, Any]) -> Iterator[tuple[str, Damage]]:
    for section in ("data", "model", "training"):
        yield f"{section}: missing", edited(lambda c, s=section: c.pop(s))  # type: ignore[misc]
        yield f"{section}: unknown", edited(lambda c, s=section: c[s].update(strange=1))  # type: ignore[misc]
        for key, value in content[section].items():
            yield (
                f"{section}.{key}: other type",
                edited(lambda c, s=section, k=key, v=value: c[s].update({k: wrong(v)})),  # type: ignore[misc]
            )
    for key, value in (("activation", "none"), ("covariance", "none"), ("hidden", [-1])):
        yield f"model.{key}: {value}", edited(lambda c, k=key, v=value: c["model"].update({k: v}))  # type: ignore[misc]


def undefined(path: Path) -> None:
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(".weight") or name == "center")
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata)


def without_an_array(path: Path) -> None:
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in list(stored.files)[1:]}
    np.savez(path, **arrays)


def trained(folder: Path, *, hidden: tuple[int, ...] = (6, 4), activation: str = "relu") -> Run:
    """A run on a small table, with all that was ever measured of it if it does not spike."""
    table = folder / "table.csv"
    if not table.exists():
        rows = np.random.default_rng(0).normal(size=(500, 3)).round(3)
        label = np.where(rows.sum(1) > 0, "yes", "no")
        for name, part in (("table.csv", slice(0, 450)), ("other.csv", slice(450, 500))):
            lines = [
                f"{a},{b},{c},{y}" for (a, b, c), y in zip(rows[part], label[part], strict=True)
            ]
            (folder / name).write_text("a,b,c,y\n" + "\n".join(lines))
    config = DataConfig(name=str(table), target=("y",), validation=0.2)
    dataset, schema = load_data(config)
    run = Run(folder / "-".join(map(str, hidden)))
    chosen = Choices(epochs=2, hidden=hidden, activation=activation)
    train(resolve(config, dataset, chosen), dataset, run, schema=schema)
    if activation == "lif":
        return run
    runs.measure_fidelity(run, samples=8)
    runs.evaluate(run, ood=[str(folder / "other.csv")])
    runs.attack_run(run, runs.AttackConfig(attacks=("fgsm",), epsilons=(0.1,), samples=8))
    runs.verify(run, samples=1, copies=64, duration=20.0)
    return run


@pytest.fixture(scope="module", autouse=True)
def quick():
    """No processes that measure memory, and no figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "peak_memory", lambda *_: 1.5)
        patch.setattr(page, "write", lambda _results, target: target)
        patch.setattr("covary.report.write_verification", lambda run: run.path / "figures")
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, quick) -> Run:
    return trained(tmp_path_factory.mktemp("damaged"))


@pytest.fixture(scope="module")
def another(whole) -> Run:
    return trained(whole.path.parent, hidden=(5,))


@pytest.fixture(scope="module")
def spiking(whole) -> Run:
    pytest.importorskip("nir")
    return trained(whole.path.parent, hidden=(3,), activation="lif")


@pytest.fixture(scope="module")
def compared(whole) -> Path:
    """The folder of a comparison, made by the command that goes on with it."""
    folder = whole.path.parent / "compared"
    code, output = said(Run(folder), "compare", whole.path.parent)
    assert code == 0, output
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def said(run: Run, command: str, home: Path) -> tuple[int, str]:
    places = {"run": run.path, "table": home / "table.csv", "other": home / "other.csv"}
    words = [word.format(**places) for word in (COMMANDS | OTHER_COMMANDS)[command]]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "500"})
    assert not isinstance(result.exception, StoppedError)
    return result.exit_code, result.output


def check(
    whole: Run, folder: Path, file: str, damage: Damage, *, may_work: bool, named: bool = True
) -> None:
    """Run the commands that need a file on copies of a run in which it is damaged."""
    home = Path(whole.config.data.name).parent
    for command in USED_BY.get(file, ("report",)):
        run = Run(shutil.copytree(whole.path, folder / command))
        damage(run.path / file)
        check_command(run, command, home, file, may_work=may_work, named=named)


def check_command(
    run: Run, command: str, home: Path, file: str, *, may_work: bool, named: bool = True
) -> None:
    """A command in whose folder this file is damaged says so in a sentence, and changes nothing."""
    before = contents(run.path)
    code, output = said(run, command, home)
    if code == 0:
        assert may_work, f"{command} works with a damaged {file}"
        return
    last = output.strip().splitlines()[-1]
    assert code in (1, 2), output
    assert last.startswith("error: "), output
    assert file in last or not named, f"{command} does not name {file}: {last}"
    assert "Traceback" not in output
    assert "--debug" not in last, last
    assert contents(run.path) == before, f"{command} failed, and changed a file"


def test_all_commands_work_with_good_files(whole, tmp_path):
    assert set(USED_BY) <= set(contents(whole.path))
    for command in COMMANDS:
        run = Run(shutil.copytree(whole.path, tmp_path / command))
        assert said(run, command, whole.path.parent)[0] == 0, command


@pytest.mark.parametrize("damage", ANY)
@pytest.mark.parametrize("file", USED_BY)
def test_damaged_bytes(whole, tmp_path, file, damage):
    # A flipped bit may give another number or text, such as the name of other data.
    harmless = damage.startswith("flipped") and not file.endswith(".npz")
    harmless |= file == "metrics.jsonl" and damage in ("empty", "half", "text")
    named = not damage.startswith("flipped bits")
    check(whole, tmp_path, file, ANY[damage], may_work=harmless, named=named)


@pytest.mark.parametrize("file", [name for name in USED_BY if name.endswith(".json")])
def test_keys_that_are_missing_or_of_another_type(whole, tmp_path, file):
    content = json.loads((whole.path / file).read_text())
    for i, (label, damage) in enumerate(of_json(content)):
        (tmp_path / str(i)).mkdir()
        print(label)  # which it was, if it fails
        check(whole, tmp_path / str(i), file, damage, may_work=False)


def test_entries_of_the_configuration(whole, tmp_path):
    content = tomlkit.parse(whole.config_text).unwrap()
    for i, (label, damage) in enumerate(of_toml(content)):
        (tmp_path / str(i)).mkdir()
        print(label)  # which it was, if it fails
        check(whole, tmp_path / str(i), "config.toml", damage, may_work=False)


@pytest.mark.parametrize("file", [name for name in USED_BY if name.endswith("safetensors")])
def test_weights_that_are_not_finite(whole, tmp_path, file):
    check(whole, tmp_path, file, undefined, may_work=False)


@pytest.mark.parametrize("file", [name for name in USED_BY if name.endswith(".npz")])
def test_an_array_is_missing(whole, tmp_path, file):
    check(whole, tmp_path, file, without_an_array, may_work=False)


def test_files_of_spiking_networks(whole, tmp_path):
    """Read by the report as the others are: a few ways in which they are damaged."""
    layer = {"name": "activation1", "units": 4, "neuron": {}, "poor": [], "pairs": [], "jump": None}
    layer |= {"mean_rate": 0.1, "mean_fano": 1.0, "silent": 0.0, "saturated": 0.0, "errors": {}}
    same = ("command", "versions", "git_commit", "platform", "started", "seconds", "seed")
    content = {key: value for key, value in whole.evaluation.to_json().items() if key in same}
    content |= {"dataset": "x", "weights": whole.weights, "task": "classification", "noise": [0.2]}
    content |= {"activation": "lif", "inputs": [0], "copies": 64, "duration": 200.0, "limit": 0.05}
    content |= {"burn_in": 50.0, "window": 200.0, "dt": 0.5, "layers": [layer], "decisions": None}
    content |= {"entropy": {"times": [], "simulated": [], "bar": [], "moments": None}}
    names = ("rate", "fano", "sampled_rate", "rate_error", "sampled_fano", "fano_error", "pairs")
    run = Run(shutil.copytree(whole.path, tmp_path / "run"))
    run.verification_path.unlink()
    run.spikes_path.write_text(json.dumps(content))
    np.savez(run.path / "spikes.npz", **{f"activation1/{name}": np.zeros(4) for name in names})
    assert run.spikes is not None
    assert said(run, "report", whole.path.parent)[0] == 0
    damages = [("spikes.npz", without_an_array), ("spikes.npz", ANY["half"])]
    damages += [("spikes.json", damage) for _, damage in of_json(content)]
    both = ("spikes.json", "spikes.npz")
    damages += [(file, ANY[name]) for file in both for name in ("pipe", "folder")]
    for i, (file, damage) in enumerate(damages):
        (tmp_path / str(i)).mkdir()
        check(run, tmp_path / str(i), file, damage, may_work=False)


@pytest.mark.parametrize("damage", FEW)
@pytest.mark.parametrize("file", ["config.toml", "model.safetensors"])
def test_exporting_a_damaged_run(spiking, tmp_path, file, damage):
    run = Run(shutil.copytree(spiking.path, tmp_path / "run"))
    ANY[damage](run.path / file)
    flips, named = damage.startswith("flipped"), not damage.startswith("flipped bits")
    home = spiking.path.parent
    check_command(run, "export", home, file, may_work=flips, named=named)


def test_exporting_weights_that_are_not_finite(spiking, tmp_path):
    run = Run(shutil.copytree(spiking.path, tmp_path / "run"))
    undefined(run.model_path)
    check_command(run, "export", spiking.path.parent, "model.safetensors", may_work=False)


def test_exporting_and_comparing_again_work_with_good_files(spiking, compared, tmp_path):
    home = spiking.path.parent
    for command, folder in (("export", spiking.path), ("compare", compared)):
        run = Run(shutil.copytree(folder, tmp_path / command))
        code, output = said(run, command, home)
        assert code == 0, output
    for file, removed in COMPARED.items():
        assert {file, *filter(None, [removed])} <= set(contents(compared))


def check_comparison(compared: Path, folder: Path, file: str, damage: Damage, **more: bool) -> None:
    """Go on with a copy of a comparison in which a file is damaged that this needs."""
    run = Run(shutil.copytree(compared, folder))
    if COMPARED.get(file):
        (run.path / COMPARED[file]).unlink()
    damage(run.path / file)
    check_command(run, "compare", compared.parent, file, **more)


@pytest.mark.parametrize("damage", FEW)
@pytest.mark.parametrize("file", COMPARED)
def test_going_on_with_a_damaged_comparison(compared, tmp_path, file, damage):
    flips, named = damage.startswith("flipped"), not damage.startswith("flipped bits")
    folder = tmp_path / "compared"
    check_comparison(compared, folder, file, ANY[damage], may_work=flips, named=named)


@pytest.mark.parametrize("file", [name for name in COMPARED if name.endswith(".json")])
def test_keys_of_a_comparison(compared, tmp_path, file):
    content = json.loads((compared / file).read_text())
    for i, (label, damage) in enumerate(of_json(content)):
        print(label)  # which it was, if it fails
        # Numbers that seem to be of another covariance are measured anew.
        other = label.startswith("covariance") and content["covariance"] is None
        check_comparison(compared, tmp_path / str(i), file, damage, may_work=other)


@pytest.mark.parametrize("file", [name for name in COMPARED if name.endswith("safetensors")])
def test_weights_of_a_comparison_that_are_not_finite(compared, tmp_path, file):
    check_comparison(compared, tmp_path / "compared", file, undefined, may_work=False)


def test_a_folder_in_the_place_of_a_comparisons_result(compared, tmp_path):
    damage = ANY["folder"]
    check_comparison(compared, tmp_path / "compared", "compare.json", damage, may_work=False)


@pytest.mark.parametrize("file", USED_BY)
def test_files_of_another_run(whole, another, tmp_path, file):
    """What says of which network it is, is passed over and made anew; the rest is refused."""
    passed_over = {"evaluation.json", "calibration.json", "score.safetensors", "schema.json"}
    passed_over |= {"score-plain.safetensors", "attack.json", "fidelity.json", "verification.json"}
    passed_over |= {"environment.json", "metrics.jsonl"}
    stranger = rewritten(lambda _: (another.path / file).read_bytes())
    check(whole, tmp_path, file, stranger, may_work=file in passed_over)
