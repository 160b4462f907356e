"""``covary attack``: what it measures, what it writes, what it says, and the page's section."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import covary
from covary import report
from covary.attacks import fgsm
from covary.files import FileError
from covary.report import figures_attack
from covary.runs import DataConfig, Run, RunError, evaluate, results
from covary.runs.attack import DEFENDED, TRAINED, AttackConfig, attack_run, verdict
from covary.runs.samples import load_data
from tests import commands
from tests.commands import trained_run
from tests.test_files import ORIGIN

EPSILONS = (0.0, 0.1, 0.3)
CHEAP: dict[str, Any] = {"samples": 60, "square_samples": 20, "queries": 20, "steps": 5}


def trained(path, name: str = "digits", **chosen) -> Run:
    quick = {"epochs": 12, "hidden": (24, 16), "activation": "heaviside", "lr": 5e-3}
    return trained_run(path, name, **quick | chosen)


command = partial(commands.covary, "attack")


def stored(run: Run) -> dict[str, Any]:
    return json.loads((run.path / "attack.json").read_text(), parse_constant=pytest.fail)


def row(result, attack: str, network: str, epsilon: float) -> dict[str, Any]:
    wanted = (attack, network, epsilon)
    (found,) = [
        row for row in result["rows"] if (row["attack"], row["network"], row["epsilon"]) == wanted
    ]
    return found


@pytest.fixture(scope="module")
def attacked(tmp_path_factory) -> Run:
    """A Heaviside run under all attacks."""
    run = trained(tmp_path_factory.mktemp("runs") / "digits")
    attack_run(run, AttackConfig(epsilons=EPSILONS, **CHEAP))
    return run


@pytest.fixture(scope="module")
def evaluated(attacked) -> Run:
    """The same, with what else a page needs."""
    evaluate(attacked)
    return attacked


def test_every_attack_of_every_strength_has_a_row(attacked):
    result = stored(attacked)
    found = [(row["attack"], row["network"], row["epsilon"]) for row in result["rows"]]
    own = [(name, TRAINED) for name in ("fgsm", "pgd", "square")]
    others = ("fgsm", "transfer-fgsm", "pgd", "transfer-pgd", "square")
    own += [(name, DEFENDED) for name in others]
    assert sorted(found) == sorted((*pair, e) for pair in own for e in EPSILONS)
    assert result["epsilons"] == list(EPSILONS)
    assert "25.5 of 255" in result["epsilon_scale"]
    assert (result["covariance"], result["search_covariance"]) == ("full", "diagonal")
    assert (result["samples"], result["square"]) == (60, {"queries": 20, "samples": 20})
    assert {"weights", "command", "versions", "git_commit", "platform", "seed"} <= result.keys()
    for one in result["rows"]:
        assert one["samples"] == (20 if one["attack"] == "square" else 60)
        assert one["auroc"].keys() == {"entropy", "max_softmax"}
        if one["epsilon"] == 0:
            assert one["auroc"] == {"entropy": 0.5, "max_softmax": 0.5}


def test_numbers_are_those_of_the_network(attacked):
    dataset, _ = load_data(DataConfig(name="digits"))
    rows = np.random.default_rng(0).permutation(len(dataset.x_test))[:60]
    x, y = dataset.x_test[rows].float(), dataset.y_test[rows]
    net = covary.with_covariance(attacked.network(), "full")
    moved = fgsm(net, x, y, 0.1 * 255, bounds=(0, 255))
    result = stored(attacked)
    arrays = np.load(attacked.path / "attack.npz", allow_pickle=False)
    for name, network, one in (
        ("fgsm", TRAINED, net),
        ("transfer-fgsm", DEFENDED, covary.with_noise(net, [0.0, 0.0])),
    ):
        with torch.no_grad():
            out = one(moved)
        found = row(result, name, network, 0.1)
        assert found["accuracy"] == (out.mean.argmax(1) == y).double().mean().item()
        assert found["entropy"]["median"] == pytest.approx(np.median(out.entropy()), abs=1e-3)
        sure = out.mean.softmax(-1).amax(-1)
        assert found["max_softmax"]["mean"] == pytest.approx(sure.mean().item(), abs=1e-4)
        entropy = arrays[f"{name}/{network}/0.1"]
        np.testing.assert_allclose(entropy, out.entropy(), atol=1e-2)


def test_the_defence_hides_the_gradient_only(attacked):
    result = stored(attacked)
    with_noise, without = result["networks"]
    assert with_noise["with_gradient"] > 0.9
    assert without["with_gradient"] == 0
    assert without["noise"] == [0.0, 0.0, 0.2]
    for epsilon in EPSILONS:
        assert row(result, "fgsm", DEFENDED, epsilon)["accuracy"] == without["accuracy"]
    assert row(result, "transfer-fgsm", DEFENDED, 0.3)["accuracy"] < without["accuracy"] - 0.3
    said = " ".join(result["verdict"])
    assert "FGSM leaves accuracy unchanged at every epsilon" in said
    assert "hides gradients; it does not remove the weakness" in said


def test_the_same_seed_gives_the_same_numbers(attacked):
    config = AttackConfig(epsilons=(0.0, 0.3), attacks=("square", "pgd"), **CHEAP)
    again = attack_run(attacked, config).to_json()
    # As other tests expect to find it.
    attack_run(attacked, AttackConfig(epsilons=EPSILONS, **CHEAP))
    before = stored(attacked)["rows"]
    assert [one for one in again["rows"] if one["epsilon"] == 0.3] == [
        one for one in before if one["epsilon"] == 0.3 and "fgsm" not in one["attack"]
    ]


def test_more_scores_can_be_asked_for(tmp_path):
    run = trained(tmp_path / "relu", activation="relu", epochs=3)
    result = attack_run(
        run,
        AttackConfig(epsilons=(0.2,), attacks=("fgsm",), clip=False, **CHEAP),
        scores={"brightness": lambda _, x: x.flatten(1).mean(1)},
    ).to_json()
    (only,) = result["rows"]  # no defence is known for it
    assert only["auroc"].keys() == {"entropy", "max_softmax", "brightness"}
    assert [network["name"] for network in result["networks"]] == [TRAINED]
    assert result["clip"] is False
    assert not any("sigma" in sentence for sentence in result["verdict"])


def test_tables_are_attacked_in_standard_deviations(tmp_path):
    run = trained(tmp_path / "moons", "two-moons", hidden=(16,), epochs=4)
    said = command(run.path, "--epsilon", "0,1", *options())
    assert "standard deviations of each column" in said
    result = stored(run)
    assert row(result, "fgsm", TRAINED, 1.0)["accuracy"] < result["networks"][0]["accuracy"] - 0.2
    # One hidden layer without noise has no variance, hence no entropy.
    assert row(result, "square", DEFENDED, 1.0)["entropy"]["median"] is None
    assert "undefined" in said


def test_what_cannot_be_attacked(attacked, tmp_path):
    regression = trained(tmp_path / "diabetes", "diabetes", hidden=(4,), epochs=1)
    with pytest.raises(ValueError, match="Attacks are on classifiers"):
        attack_run(regression)
    with pytest.raises(RunError):
        attack_run(Run(tmp_path / "nothing"))
    for change, words in (
        ({"epsilons": (-0.1,)}, "finite and >= 0, got -0.1"),
        ({"epsilons": ()}, "got none"),
        ({"attacks": ("fgsn",)}, "Known attacks are fgsm, pgd, square; got 'fgsn'"),
        ({"samples": 0}, "samples"),
        ({"search": "shared"}, "full, tracked, diagonal"),
        ({"covariance": "shared"}, "full, tracked, diagonal"),
    ):
        with pytest.raises(ValueError, match=words):
            attack_run(attacked, AttackConfig(**change))


def options() -> list[str]:
    return ["--samples", "60", "--square-samples", "20", "--queries", "20", "--steps", "5"]


def test_the_command_shows_and_tells(attacked, tmp_path):
    run = Run(shutil.copytree(attacked.path, tmp_path / "run"))
    said = command(run.path, "--epsilon", "0,0.3", "--attack", "fgsm", "--samples", "40")
    assert f"{DEFENDED}: accuracy" in said
    assert "transfer-fgsm" in said
    assert "square" not in said
    assert "0.1 is 25.5 of 255" in said
    for sentence in stored(run)["verdict"]:
        assert sentence in said
    said = command(run.path, "--epsilon", "0.1", "--attack", "pgd,fgsm", "--json", *options())
    result = json.loads(said[said.index("{") :], parse_constant=pytest.fail)
    assert result["rows"] == stored(run)["rows"]
    more = command(run.path, "--epsilon", "0.1", "--json", "--whole-gradient", *options())
    whole = json.loads(more[more.index("{") :])
    assert (result["gradient"], whole["gradient"]) == ("means", "means and variances")
    for name in ("fgsm", "pgd"):
        ours, theirs = (row(one, name, TRAINED, 0.1) for one in (result, whole))
        assert ours["entropy"] != theirs["entropy"]
    for wrong in (
        ["--epsilon", "0,-1"],
        ["--epsilon", "much"],
        ["--attack", "magic"],
        ["--covariance", "shared"],
        ["--search-covariance", "shared"],
    ):
        assert "Invalid value" in command(run.path, *wrong, code=2)
    assert "no config.toml" in command(tmp_path / "nothing", code=1)


def test_help_says_what_epsilon_is():
    said = " ".join(re.sub(r"[│┃]", " ", command("--help")).split())
    assert "25.5 of 255" in said
    assert "covary attack runs/mnist" in said
    assert "twice the number" in said


def test_the_page_has_a_section(evaluated):
    path = report.write(evaluated.path)
    source = path.read_text(encoding="utf-8")
    section = re.search(r'<section id="attacks">.*?</section>', source, re.DOTALL)
    assert section is not None
    assert '<a href="#attacks">' in source
    for sentence in stored(evaluated)["verdict"]:
        assert sentence.replace("'", "&#39;") in section[0]
    assert f"{row(stored(evaluated), 'pgd', TRAINED, 0.3)['accuracy']:.3f}" in section[0]
    drawn = {figure.stem for figure in (path.parent / "figures").glob("attack-*.png")}
    assert drawn == {
        "attack-accuracy-1",
        "attack-accuracy-2",
        "attack-entropy-fgsm",
        "attack-entropy-pgd",
        "attack-entropy-square",
        "attack-awareness",
    }
    assert all(f'id="figure-{name}"' in section[0] for name in drawn)


def test_the_page_leaves_out_what_is_of_other_weights(evaluated, tmp_path):
    run = Run(shutil.copytree(evaluated.path, tmp_path / "run"))
    content = stored(run) | {"weights": "another"}
    (run.path / "attack.json").write_text(json.dumps(content))
    source = report.write(run.path).read_text(encoding="utf-8")
    section = re.search(r'<section id="attacks">.*?</section>', source, re.DOTALL)
    assert section is not None
    assert "What was attacked is of other weights than those this page is about" in section[0]
    assert "<figure" not in section[0]
    (run.path / "attack.json").unlink()
    assert 'id="attacks"' not in report.write(run.path).read_text(encoding="utf-8")


def test_a_run_without_entropies_or_with_a_broken_file(attacked, tmp_path):
    run = Run(shutil.copytree(attacked.path, tmp_path / "run"))
    (run.path / "attack.npz").unlink()
    (run.path / "attack.json").write_text(json.dumps(stored(run) | {"arrays_sha256": ""}))
    found = run.attack
    names = [drawing.name for drawing in figures_attack.drawings(found)]
    assert names == ["attack-accuracy-1", "attack-accuracy-2", "attack-awareness"]
    (run.path / "attack.json").write_text('{"weights": "x"}')
    with pytest.raises(FileError, match=r"attack\.json, key .* Run `covary attack .*` again"):
        _ = run.attack


def made_up(
    trained: dict[str, list[float]], defended: dict[str, list[float]] | None = None, **more
):
    """A result with these accuracies, and these medians of entropy."""
    medians = more.get("medians", [-20.0, -5.0, -8.0])
    both = {TRAINED: trained} | ({DEFENDED: defended} if defended else {})
    nothing = results.Quartiles(None, None, None, None)
    return results.Attack(
        **ORIGIN,
        dataset="digits",
        task="classification",
        weights="",
        activation="heaviside",
        covariance="full",
        search_covariance="full",
        samples=100,
        epsilons=EPSILONS,
        epsilon_scale="pixels",
        clip=True,
        gradient="means",
        pgd={"steps": 1, "step_size": 1.0, "random_start": True},
        square={"queries": 1, "samples": 1},
        networks=tuple(
            results.AttackedNetwork(name, (0.2,), 0.97, float(name == TRAINED)) for name in both
        ),
        rows=tuple(
            results.AttackRow(
                attack=attack,
                network=network,
                epsilon=epsilon,
                samples=100,
                accuracy=accuracy,
                entropy=replace(nothing, median=median),
                max_softmax=nothing,
                auroc={"entropy": more.get("auroc", 0.8)},
            )
            for network, found in both.items()
            for attack, values in found.items()
            for epsilon, accuracy, median in zip(EPSILONS, values, medians, strict=True)
        ),
    )


FALL, STAY = [0.97, 0.4, 0.1], [0.97, 0.97, 0.97]


@pytest.mark.parametrize(
    ("result", "there", "absent"),
    [
        (made_up({"fgsm": FALL}), ["FGSM leaves 0.400 at 0.1 and 0.100 at 0.3"], ["sigma"]),
        (
            made_up({"fgsm": FALL}, {"fgsm": STAY, "transfer-fgsm": FALL}),
            ["unchanged at every epsilon", "as trained, FGSM leaves 0.400", "does not remove"],
            ["Square", "holds"],
        ),
        (
            made_up({"fgsm": FALL}, {"fgsm": STAY, "transfer-fgsm": STAY, "square": STAY}),
            ["the defence holds against what was tried"],
            ["does not remove"],
        ),
        (made_up({"pgd": FALL}, {"pgd": FALL}), ["PGD, from its random start alone, leaves"], []),
        (made_up({"fgsm": FALL}), ["-5.0 nats at 0.1, and falls again to -8.0"], ["every step"]),
        (made_up({"fgsm": FALL}, medians=[1, 2, 3]), ["rises with every step"], ["falls"]),
        (made_up({"fgsm": FALL}, medians=[1, 3.04, 3.02]), ["though not with"], ["falls again"]),
        (made_up({"fgsm": FALL}, medians=[3, 2, 1]), ["never rises"], ["falls again"]),
        (made_up({"fgsm": FALL}, medians=[2, 1, 3]), ["though not with every step"], []),
        (made_up({"fgsm": FALL}, medians=[3, 1, 2]), ["median entropy falls"], ["rises"]),
        (made_up({"fgsm": FALL}, medians=[None] * 3), ["AUROC"], ["median entropy"]),
        (made_up({"fgsm": FALL}, auroc=0.3), ["surer of them than of clean"], []),
        (made_up({"fgsm": FALL}, auroc=None), [], ["AUROC"]),
    ],
)
def test_the_verdict_says_what_the_numbers_say(result, there, absent):
    said = " ".join(verdict(result))
    for words in there:
        assert words in said
    for words in absent:
        assert words not in said
