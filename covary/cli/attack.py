"""``covary attack``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from covary import runs
from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, RunPath, Seed, reported, say
from covary.cli.options import AttackedCovariance
from covary.runs.attack import (
    ATTACKS,
    EPSILONS,
    attack_run,
    check_attacks,
    check_epsilons,
    check_search,
)
from covary.runs.config import check_covariance
from covary.runs.results import Attack, AttackRow

_SWEEP, _ALL = ",".join(f"{epsilon:g}" for epsilon in EPSILONS), ",".join(ATTACKS)
_Epsilon = Annotated[
    str,
    typer.Option(
        "--epsilon",
        help="How far inputs are moved at most, with commas. Images: in parts of the range of a "
        "pixel (0.1 is 25.5 of 255). Tables: in standard deviations of each column.",
    ),
]
_Attacks = Annotated[
    str, typer.Option("--attack", help=f"Which: {', '.join(ATTACKS)}; with commas.")
]
_Clip = Annotated[
    bool,
    typer.Option(
        "--clip/--no-clip",
        help="Keep pixels in their range, and columns of tables between their extremes.",
    ),
]
_WholeGradient = Annotated[
    bool,
    typer.Option(
        "--whole-gradient",
        help="Let fgsm and pgd also follow how means depend on variances: stronger. Training and "
        "the paper leave that out.",
    ),
]


@reported
def attack(
    run: RunPath,
    epsilon: _Epsilon = _SWEEP,
    attacks: _Attacks = _ALL,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Test inputs, at most.")] = 1000,
    square_samples: Annotated[
        int, typer.Option("--square-samples", min=1, help="Of them, for square, at most.")
    ] = 200,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Gradients that pgd follows.")] = 20,
    queries: Annotated[
        int, typer.Option("--queries", min=1, help="How often square asks about an input.")
    ] = 300,
    clip: _Clip = True,
    covariance: AttackedCovariance = None,
    search: Annotated[
        str,
        typer.Option(
            "--search-covariance",
            help="The same for the network that pgd and square ask on their way.",
        ),
    ] = "diagonal",
    whole_gradient: _WholeGradient = False,
    seed: Seed = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Attack a classifier: how accurate it stays, and whether it notices.

    FGSM and PGD follow the gradient, Square asks for outputs alone. A Heaviside network is also
    attacked with sigma_1 = sigma_2 = 0, the paper's defence, which hides its gradient; therefore
    attacks that were made on the network as trained are tried on it too (transfer-fgsm,
    transfer-pgd). AUROC says how well attacked inputs are told from clean ones. Numbers go to
    attack.json in the folder of the run.

    Where pixels are taken to go from -1 to 1, as in the paper's code, an epsilon has twice the
    number that it has here.

    Examples:

    - `covary attack runs/mnist`
    - `covary attack runs/mnist --attack fgsm --samples 10000 --no-clip`
    - `covary attack runs/mnist --epsilon 0,0.1,0.3 --json`
    """
    strengths = common.numbers(epsilon, float, "--epsilon") or ()
    names = common.numbers(attacks, str, "--attack") or ()
    opened = runs.open(run, data_dir=data_dir)
    with common.wrong_use():
        check_epsilons(strengths)
        check_attacks(names)
        check_search(search)
        check_covariance(covariance, None, opened.config.model)
    result = attack_run(
        opened,
        epsilons=strengths,
        attacks=names,
        samples=samples,
        square_samples=square_samples,
        steps=steps,
        queries=queries,
        covariance=covariance,
        search=search,
        whole_gradient=whole_gradient,
        clip=clip,
        seed=seed,
        progress=common.progress,
    )
    if as_json:
        common.show_json(result.to_json())
        return
    for network in result.networks:
        _show(result, network.name)
    for sentence in (*(f"Note: {note}" for note in result.notes), *result.verdict):
        say(sentence)
    say(f"epsilon is in {result.epsilon_unit}.")
    say(f"Written to {opened.attack_path}.")


def _show(result: Attack, network: str) -> None:
    """A table of each measure, epsilons by attacks."""
    rows = [row for row in result.rows if row.network == network]
    names = result.names(network)
    for title, shown in _MEASURES.items():
        common.show_table(
            f"{network}: {title}",
            ["epsilon", *names],
            [
                [f"{epsilon:g}", *(shown(row) for row in rows if row.epsilon == epsilon)]
                for epsilon in result.epsilons
            ],
        )


def _accuracy(row: AttackRow) -> str:
    return _decimal(row.accuracy, 3)


def _median(row: AttackRow) -> str:
    return _decimal(row.entropy.median, 1)


def _auroc(score: str, row: AttackRow) -> str:
    # At 0 nothing was attacked, so there is nothing to tell apart.
    return "" if row.epsilon == 0 else _decimal(row.auroc[score], 2)


def _decimal(value: float | None, digits: int) -> str:
    return "undefined" if value is None else f"{value:.{digits}f}"


_MEASURES: dict[str, Callable[[AttackRow], str]] = {
    "accuracy": _accuracy,
    "median entropy (nats)": _median,
    "AUROC of entropy": partial(_auroc, "entropy"),
    "AUROC of max-softmax": partial(_auroc, "max_softmax"),
}
