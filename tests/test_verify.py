"""``covary verify``: moments against simulations, what is written, what is said and shown."""

from __future__ import annotations

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import covary
from covary import report
from covary.files import FileError
from covary.report import figures_verify
from covary.report import page as pages
from covary.runs import DataConfig, ModelConfig, Run, RunConfig, verify
from covary.runs.samples import load_data
from covary.stochastic import Chain, StreamingMoments, sample_steady
from covary.stochastic.comparison import Error, compare, correlations, reasons, variance_share
from covary.training import TrainingConfig
from tests import commands, report_runs
from tests.report_runs import Page

QUICK: dict[str, Any] = {"samples": 2, "copies": 1600, "duration": 20.0}
OPTIONS = [f"--{key}={value}" for key, value in QUICK.items()]


def run_of(path: Path, data: str = "digits", **model: Any) -> tuple[Run, Any]:
    """A run with weights that nobody trained, and the network, to be changed and saved."""
    usual: dict[str, Any] = {"hidden": (24, 12), "input_shape": (1, 8, 8), "outputs": 10}
    chosen = ModelConfig(**(usual | model))
    config = RunConfig(data=DataConfig(name=data), model=chosen, training=TrainingConfig())
    path.mkdir(parents=True, exist_ok=True)
    path.joinpath("config.toml").write_text(config.to_toml())
    torch.manual_seed(0)
    net = chosen.build()
    Run(path).save_network(net)
    return Run(path), net


command = partial(commands.covary, "verify")


@pytest.fixture(scope="module")
def verified(tmp_path_factory) -> Run:
    run, _ = run_of(tmp_path_factory.mktemp("runs") / "digits")
    verify(run, **QUICK)
    return run


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Seconds saved where nobody looks at figures."""
    monkeypatch.setattr(report, "write_verification", lambda run: run.path / "figures")


def stored(run: Run) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        run.verification_path.read_text(), parse_constant=pytest.fail
    )
    return content


# Comparisons


def draws(covariance: torch.Tensor, count: int = 500, seed: int = 0):
    """An estimate from 16 groups of draws, of mean 1, for one input."""
    n = len(covariance)
    white = torch.randn(
        16, 1, count, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    moments = StreamingMoments(16, 1, n)
    moments.add(1 + white @ torch.linalg.cholesky(covariance).mT)
    return moments.estimate()


def mixed(n: int = 6) -> torch.Tensor:
    torch.manual_seed(n)
    root = torch.randn(n, n, dtype=torch.float64)
    return root @ root.mT + 0.3 * torch.eye(n)


def test_exact_moments_have_no_error_but_that_of_sampling():
    truth = mixed()
    found = [compare(draws(truth, seed=seed), torch.ones(6), truth) for seed in range(30)]
    for key in found[0].errors:
        average = Error.average([one.errors[key] for one in found])
        assert abs(average.squared) < 4 * average.squared_error
        assert average.value < 0.6 * average.floor
        assert not average.is_above(0.0)
        # The floor is what was found where nothing is wrong.
        raw = np.mean([one.errors[key].squared + one.errors[key].floor ** 2 for one in found])
        assert math.sqrt(raw) == pytest.approx(average.floor, rel=0.3)
    gaps = np.array([one.entropy[:2] for one in found])
    assert abs(gaps[:, 0].mean()) < 4 * gaps[:, 1].mean() / math.sqrt(30)
    assert found[0].entropy.dimensions == 6
    assert found[0].samples == pytest.approx(16 * 500, rel=0.8)


def test_errors_are_found_below_the_noise_of_sampling():
    truth = mixed()
    wrong = 1.03 * truth
    expected = 0.03
    found = [compare(draws(truth, 100, seed), 1.03 * torch.ones(6), wrong) for seed in range(40)]
    assert found[0].covariance.floor > expected
    for key in ("mean", "covariance", "variance", "off_diagonal"):
        average = Error.average([one.errors[key] for one in found])
        assert average.squared == pytest.approx(expected**2, abs=4 * average.squared_error)
        assert average.bar > 0
    larger = [compare(draws(truth), torch.ones(6), 1.5 * truth) for _ in range(2)]
    for one in larger:
        assert one.covariance.value == pytest.approx(0.5, abs=5 * one.covariance.bar)
        assert one.covariance.is_above(0.1)
        gap = 0.5 * 6 * math.log(1.5)
        assert one.entropy.value == pytest.approx(-gap, abs=5 * one.entropy.bar)


def test_entropies_are_compared_where_moments_vary():
    """A direction without variance, or with next to none, has no part in it."""
    truth = torch.diag(torch.tensor([1.0, 2.0, 1e-5], dtype=torch.float64))
    other = torch.diag(torch.tensor([1.0, 2.0, 1e-9], dtype=torch.float64))
    gap = compare(draws(truth), torch.ones(3), other).entropy
    assert gap.dimensions == 2
    assert abs(gap.value) < 5 * gap.bar
    silent = draws(other)
    unseen = compare(silent, torch.ones(3), torch.eye(3)).entropy
    assert unseen.dimensions == 3
    assert math.isnan(unseen.value)


def test_nothing_where_nothing_should_be_is_no_error():
    single = compare(draws(mixed(1)), torch.ones(1), mixed(1))
    assert single.off_diagonal == Error(0.0, 0.0, 0.0)
    assert single.covariance.floor > 0


def test_variances_are_shares_of_each_other():
    one, other = draws(mixed(), seed=1), draws(2 * mixed(), seed=2)
    share, error = variance_share(one, other)
    assert share == pytest.approx(0.5, abs=5 * error)
    assert 0.001 < error < 0.05


def test_reasons_tell_correlation_from_inheritance():
    """Two units with the same weights and a sign between them; then a linear output."""
    torch.manual_seed(0)
    net = covary.mlp([4, 3, 2], activation="heaviside", noise=[0.5, 0.02])
    net.linear1.weight.data = torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0], [0, 0.5, 0, 0]])
    net.linear1.bias.data = torch.tensor([0.0, 0.0, 5.0])
    x = torch.zeros(1, 4)
    chain = Chain.of(net)
    with torch.no_grad(), covary.record(net) as layers:
        net(x)
    steady = sample_steady(net, x, copies=16_000)
    hidden, output = (steady[stage.name] for stage in chain.stages)
    start = torch.zeros(4), 0.25 * torch.eye(4)
    analytic = layers["activation1"].covariance_matrix[0]
    why = reasons(chain.stages[0], hidden, analytic, start, start)
    i, j, rho = why.pairs[0]
    assert (i, j) == (0, 1)
    assert rho < -0.98
    assert why.strong_pairs == pytest.approx(1 / 3)
    assert why.error_at_strong_pairs > 0.98
    assert why.saturated == pytest.approx(1 / 3)
    # Of the exact covariance asin(rho) / 2 pi, linear response has rho / 2 pi.
    assert why.own == pytest.approx(
        compare(hidden, hidden.mean[0], analytic).covariance.value, rel=0.1
    )
    before = hidden.mean[0], hidden.covariance_matrix[0]
    inherited = reasons(
        chain.stages[1],
        output,
        layers["linear2"].covariance_matrix[0],
        (layers["activation1"].mean[0], analytic),
        before,
    )
    assert inherited.own < 1e-5


def test_correlations_of_what_does_not_vary_are_0():
    rho = correlations(torch.tensor([[4.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 0.0]]))
    assert rho.tolist() == [[0, 0.5, 0], [0.5, 0, 0], [0, 0, 0]]


# The command's result


def test_the_file_has_all_that_was_measured(verified):
    result = stored(verified)
    assert [layer["name"] for layer in result["layers"]] == [
        "activation1",
        "activation2",
        "linear3",
    ]
    assert [layer["units"] for layer in result["layers"]] == [24, 12, 10]
    assert result["simulations"] == ["steady", "ou-0", "ou-1"]
    assert (result["copies"], result["duration"], result["seed"]) == (1600, 20.0, 0)
    assert len(result["inputs"]) == 2
    assert {"weights", "command", "versions", "git_commit", "notes", "noise"} <= result.keys()
    assert result["ou"]["ou-1"]["time_constants"] == [1.0] * 4
    for layer in result["layers"]:
        assert len(layer["by_input"]) == 2
        for simulation in layer["simulations"].values():
            for key in ("mean", "variance", "covariance", "off_diagonal"):
                assert simulation[key].keys() == {"value", "bar", "floor"}
            assert simulation["effective_samples"] > 100


def test_a_relu_network_in_time_is_its_steady_state_only_if_layers_follow_at_once(verified):
    for layer in stored(verified)["layers"]:
        shares = {name: one["variance_share"] for name, one in layer["simulations"].items()}
        assert shares["steady"]["value"] == 1
        assert abs(shares["ou-0"]["value"] - 1) < 5 * shares["ou-0"]["bar"]
        assert shares["ou-1"]["value"] < 1 - 5 * shares["ou-1"]["bar"]
    assert shares["ou-1"]["value"] < 0.7


def test_a_linear_network_has_no_errors(tmp_path):
    run, _ = run_of(tmp_path / "run", activation="identity")
    result = verify(run, **QUICK).to_json()
    for layer in result["layers"]:
        steady = layer["simulations"]["steady"]
        for key in ("mean", "variance", "covariance", "off_diagonal"):
            assert steady[key]["value"] < 2 * steady[key]["floor"]
        assert abs(steady["entropy"]["value"]) < 5 * steady["entropy"]["bar"]
        assert layer["poor"] == []
    assert result["notes"][0].startswith("No layer's covariances are more than 10% off")


def correlated(path: Path) -> Run:
    """Heaviside units with nearly the same weights: what linear response is worst at."""
    run, net = run_of(path, activation="heaviside", noise=(2.0, 0.01), hidden=(8,), outputs=3)
    with torch.no_grad():
        net.linear1.weight[:] = net.linear1.weight[0] + 0.02 * net.linear1.weight
        net.linear1.bias.zero_()
        dataset, _ = load_data(DataConfig(name="digits"))
        _, inputs = Chain.of(net).prepared(dataset.x_test)
        net.linear1.bias[:] = -(inputs @ net.linear1.weight[0]).median()
    run.save_network(net)
    return run


@pytest.mark.usefixtures("undrawn")
def test_poor_layers_are_named_with_the_reason(tmp_path):
    run = correlated(tmp_path / "run")
    said = command(run.path, *OPTIONS)
    result = stored(run)
    hidden, output = result["layers"]
    assert hidden["poor"] == output["poor"] == ["covariance", "off_diagonal"]
    assert hidden["pairs"][0][2] > 0.9
    assert hidden["reasons"]["error_at_strong_pairs"] > 0.95
    assert output["reasons"]["own"] < 1e-3
    assert re.search(r"│ activation1 \*", said)
    assert "Its inputs are correlated by up to |rho| = 1.00" in result["notes"][0]
    assert "first power of rho" in said
    assert "linear2: covariances are" in result["notes"][1]
    assert "it inherits the rest" in result["notes"][1]
    assert "* Covariances are more than 10% off, beyond doubt." in said


def test_the_seed_decides_inputs_and_noise(verified, tmp_path):
    copy = Run(shutil.copytree(verified.path, tmp_path / "copy"))
    one = QUICK | {"samples": 1}
    first, again, other = (verify(copy, **one, seed=seed).to_json() for seed in (0, 0, 1))
    assert again["layers"] == first["layers"]
    assert other["inputs"] != first["inputs"]
    assert other["layers"] != first["layers"]
    # What is found of an input does not depend on those that come after it.
    both = stored(verified)
    assert both["inputs"][:1] == first["inputs"]
    for layer, alone in zip(both["layers"], first["layers"], strict=True):
        assert layer["by_input"][0] == alone["by_input"][0]


def test_networks_in_time_are_integrated_as_asked(verified, tmp_path):
    copy = Run(shutil.copytree(verified.path, tmp_path / "copy"))
    found = verify(copy, **QUICK | {"samples": 1}, method="euler-maruyama", dt=0.1).to_json()
    assert {one["method"] for one in found["ou"].values()} == {"euler-maruyama"}
    assert {one["dt"] for one in found["ou"].values()} == {0.1}
    assert {one["method"] for one in stored(verified)["ou"].values()} == {"exponential"}


def test_figures_have_what_they_need(verified):
    arrays = np.load(verified.path / "verification.npz", allow_pickle=False)
    assert arrays["input"].shape == (2, 1, 8, 8)
    assert arrays["activation1/mean"].shape == arrays["activation1/variance_error"].shape == (2, 24)
    assert arrays["activation1/pairs"].shape == (2, 24 * 23 // 2, 4)
    assert np.abs(arrays["activation1/pairs"][..., 3]).max() <= 1
    assert arrays["output/covariance"].shape == (10, 10)
    assert arrays["linear3/trace"].shape == (len(arrays["times"]), 6)
    for name in ("ou-0", "ou-1"):
        assert arrays[f"output/{name}/mean"].shape == (10,)
        assert arrays[f"output/{name}/covariance"].shape == (10, 10)
    with torch.no_grad():
        net = covary.with_covariance(verified.network(), "full")
        out = net(torch.from_numpy(arrays["input"]))
    np.testing.assert_allclose(arrays["linear3/mean"], out.mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        arrays["output/covariance"], out.covariance_matrix[0], rtol=1e-3, atol=1e-5
    )


@pytest.mark.usefixtures("undrawn")
def test_a_person_sees_tables_that_fit_a_terminal(verified, tmp_path):
    copy = Run(shutil.copytree(verified.path, tmp_path / "copy"))
    said = command(copy.path, *OPTIONS)
    table = [line for line in said.splitlines() if line.startswith(("│", "┃"))]
    assert len(table) == 2 * (1 + 3)
    assert max(map(len, table)) <= 80
    for name in ("activation1", "activation2", "linear3", "equal tau", "entropy"):
        assert name in said
    assert "Written to" in said
    said = command(copy.path, *OPTIONS, "--samples=1", "--json")
    result = json.loads(said, parse_constant=pytest.fail)
    assert result == stored(copy)


def test_help_has_examples_and_every_option():
    said = command("--help")
    assert "Examples" in said
    for option in ("--samples", "--copies", "--duration", "--seed", "--data-dir", "--json"):
        assert option in said


def test_figures_go_with_the_run(verified, tmp_path, monkeypatch):
    copy = Run(shutil.copytree(verified.path, tmp_path / "copy"))
    monkeypatch.setattr(figures_verify, "drawings", lambda found: [figures_verify.errors(found)])
    folder = report.write_verification(copy.path)
    drawn = sorted(path.name for path in folder.iterdir())
    assert drawn == ["verification-errors.png", "verification-errors.svg"]
    copy.clear()
    assert not [path for path in copy.path.rglob("*") if "verification" in path.name]


def test_a_regression_of_one_target_has_no_matrix_to_show(tmp_path):
    model = {"input_shape": (10,), "outputs": 1, "task": "regression"}
    run, _ = run_of(tmp_path / "run", "diabetes", **model)
    verify(run, **(QUICK | {"samples": 1}))
    found = run.verification
    names = [drawing.name for drawing in figures_verify.drawings(found)]
    assert "verification-covariance" not in names
    assert "verification-moments" in names
    assert stored(run)["layers"][-1]["units"] == 1


def test_what_cannot_be_verified_is_said(verified, tmp_path):
    assert "holds no run" in command(tmp_path, code=1)
    assert "multiple of 16; got 40" in command(verified.path, "--copies", 40, code=1)
    assert "Simulate for longer" in command(verified.path, "--copies=64", "--duration=5", code=1)
    command(verified.path, "--samples", 0, code=2)


# The page


@pytest.fixture(scope="module")
def shown(verified, tmp_path_factory) -> Run:
    """A run that was evaluated, with a simulation of its network."""
    folder = tmp_path_factory.mktemp("shown")
    return report_runs.concrete_with(folder, verified.path / "verification.json")


@pytest.fixture(scope="module")
def page(shown) -> Page:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "save", lambda *_: None)  # files of figures: seconds saved
        return Page(report.write(shown.path))


def section(page: Page) -> str:
    found = re.search(r'<section id="verification">.*?</section>', page.source, re.DOTALL)
    return found[0] if found else ""


def test_the_page_has_the_numbers_and_figures(page, shown):
    source, result = section(page), stored(shown)
    rows = re.findall(r'<th scope="row">(\w+).*?</tr>', source)
    assert rows == ["activation1", "activation2", "linear3"]
    error = result["layers"][-1]["simulations"]["steady"]["covariance"]
    assert f"{100 * error['value']:.1f} ± {100 * error['bar']:.1f}%" in source
    assert result["notes"][-1][:60] in source.replace("&#39;", "'")
    assert len(re.findall(r'<figure id="figure-verification-', source)) == 6
    assert '<a href="#verification">' in page.source
    assert "covary verify RUN" not in page.source


def test_the_page_leaves_out_a_simulation_of_other_weights(shown, tmp_path):
    copy = Run(shutil.copytree(shown.path, tmp_path / "copy"))
    content = stored(copy) | {"weights": "of another"}
    copy.verification_path.write_text(json.dumps(content))
    results = report.read(copy.path)
    assert not results.is_current(results.simulated)
    left_out = section(Page(report.write(copy.path)))
    assert "of other weights than those this page is about, so that is left out" in left_out
    assert "<figure" not in left_out
    copy.verification_path.unlink()
    assert not section(Page(report.write(copy.path)))


def test_files_that_are_not_as_written_are_refused(shown, tmp_path):
    copy = Run(shutil.copytree(shown.path, tmp_path / "copy"))
    content = stored(copy)
    del content["layers"][0]["simulations"]["ou-1"]["variance_share"]
    copy.verification_path.write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"verification\.json, key 'layers.*ou-1\.variance_share'"):
        report.read(copy.path)
    with pytest.raises(report.ReportError, match="was not verified yet"):
        report.write_verification(tmp_path)
