"""What commands print: tables that fit, and names that cannot take over the terminal."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import typer
from rich.cells import cell_len
from typer.testing import CliRunner

from covary.cli import app, common
from covary.runs import DataConfig, ModelConfig, RunConfig
from covary.training import TrainingConfig

TINY = ["--hidden", "8", "--epochs", "1", "--noise", "0.2"]


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(common.results, "width", 80)


def printed(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of a command."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


# tables


def shown(capsys, *arguments, **more) -> list[str]:
    common.show_table(*arguments, **more)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    return lines


def words(text: str) -> set[str]:
    """Without the lines of tables; paths may be wrapped behind a slash."""
    return set(re.sub(r"[┏┳┓┃┡╇┩│└┴┘━─]", " ", text).replace("/", "/ ").split())


def test_a_table_that_fits_has_its_natural_width(capsys):
    lines = shown(capsys, "A title", ["name", "value"], [["a long name", "1"], ["b", "20"]])
    assert lines[0] == "A title"
    assert lines[2] == "┃ name        ┃ value ┃"
    assert lines[-2] == "│ b           │    20 │"


def test_words_wrap_and_numbers_keep_their_error_bars(capsys):
    header = ["", *(f"negative log-likelihood {i}" for i in range(4))]
    lines = shown(capsys, "T", header, [["some words that wrap", *["1.234 ± 0.567"] * 4]])
    assert words("\n".join(lines)) == {
        "T",
        *" ".join(header).split(),
        *["some", "words", "that", "wrap", "1.234", "±", "0.567"],
    }
    assert sum("1.234 ± 0.567" in line for line in lines) == 1


def test_columns_without_room_go_to_a_table_below(capsys):
    names = [f"column-number-{i}" for i in range(9)]
    lines = shown(capsys, "T", ["layer", *names], [["first", *map(str, range(9))]])
    text = "\n".join(lines)
    assert [text.count(name) for name in names] == [1] * 9
    assert text.count("first") == text.count("layer") == text.count("┏") > 1
    assert text.count("T (continued)") == text.count("┏") - 1


def test_only_what_is_longer_than_the_screen_is_cut(capsys):
    long = "x" * 200
    lines = shown(capsys, long, ["name", "value"], [[long, "1.5"], ["漢字" * 30, "2.5"]])
    assert sum(line.count("x") for line in lines) == 400
    assert sum(line.count("漢") for line in lines) == 30
    assert any("1.5" in line for line in lines)


def test_emoji_codes_and_markup_in_names_stay_what_they_are(capsys):
    text = "\n".join(shown(capsys, "[bold]", ["[red]", ":bug:"], [["[/]", ":smile:"]]))
    assert all(name in text for name in ("[bold]", "[red]", ":bug:", "[/]", ":smile:"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A classifier and a regression of several targets with long names."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    names = ["floor space", "energy_consumption_per_year", "compressive strength", "log-likelihood"]
    with (folder / "houses.csv").open("w", newline="") as file:
        csv.writer(file).writerows([names, *rng.standard_normal((400, 4)).tolist()])
    printed("train", "digits", "--activation", "heaviside", "--out", folder / "digits", *TINY)
    targets = [part for name in names[1:] for part in ("--target", name)]
    printed("train", folder / "houses.csv", *targets, "--out", folder / "houses", *TINY)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "evaluate RUNS/digits --ood digits",
        "evaluate RUNS/houses --ood RUNS/houses.csv",
        "calibrate RUNS/digits",
        "calibrate RUNS/houses --noise per-layer",
        "fidelity RUNS/digits --samples 4 --batch-size 4",
        "verify RUNS/digits --samples 1 --copies 64 --duration 40",
        "attack RUNS/digits --samples 8 --square-samples 2 --queries 2 --steps 2 --epsilon 0,0.1",
        "compare digits --out RUNS/a --ood digits --seeds 2 --members 2 --epochs 1 --hidden 8",
        "compare diabetes --out RUNS/b --seeds 2 --members 2 --epochs 1 --hidden 8",
        "data list --data-dir RUNS",
    ],
    ids=lambda command: command.split(" --")[0].replace("RUNS/", ""),
)
def test_tables_of_commands_fit_80_columns_and_break_no_word(runs, command, monkeypatch):
    asked, usual = [], common.show_table
    monkeypatch.delenv("COVARY_DATA", raising=False)

    def recorded(title, columns, rows, **more):
        rows = list(rows)
        asked.extend([title, *columns, *(cell for row in rows for cell in row)])
        usual(title, columns, rows, **more)

    monkeypatch.setattr(common, "show_table", recorded)
    out, _ = printed(*command.replace("RUNS", str(runs)).split())
    assert max(map(cell_len, out.splitlines())) <= 80
    assert words(out) - {"(continued)"} == words("\n".join(asked))


# names

# clear the screen, colour, title of the window (OSC, ended by BEL and by ST), link, the same by
# characters of eight bits, backspaces, a carriage return, and letters from right to left
ESCAPES = {
    "clear": "\x1b[2J",
    "colour": "\x1b[31m",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://evil\x1b\\",
    "eight bits": "\x9b31m\x9d0;owned\x9c",
    "backspace": "\b\b\b\x7f",
    "return": "\rerror",
    "right to left": "\u202e\u2066",
}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("name", ESCAPES)
def test_escapes_in_columns_classes_and_files_do_not_reach_the_terminal(tmp_path, name):
    """Through training, its notes, its errors, evaluation, JSON and the configuration."""
    escape = ESCAPES[name].replace("/", "|")
    table = tmp_path / f"houses{escape}.csv"
    rng = np.random.default_rng(0)
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([f"a{escape}", f"always{escape}", f"kind{escape}"])
        writer.writerows([x, 1, f"{escape}{'yn'[x > 0]}"] for x in rng.standard_normal(60).tolist())
    run = tmp_path / f"run{escape}"
    target = ["--delimiter", ",", "--target", f"kind{escape}"]
    said = [
        *printed("train", table, *target, "--out", run, *TINY),
        *printed("train", table, *target, *TINY, "--dry-run"),
        *printed("evaluate", run, "--ood", table),
        *printed("train", table, "--delimiter", ",", "--target", f"kin{escape}", code=1),
        *printed("train", f"mnist{escape}", code=2),
        *printed("train", table, *target, "--out", run, code=1),
        *printed("evaluate", f"{run}{escape}", code=1),
    ]
    for text in said:
        assert not CONTROL.search(text)
    assert any(f"\\u{ord(escape[0]):04x}" in text for text in said)
    out, _ = printed("evaluate", run, "--json")
    assert not CONTROL.search(out)
    assert escape in json.loads(out)["dataset"]
    assert RunConfig.from_toml(run / "config.toml").data.target == (f"kind{escape}",)


def test_printable_leaves_letters_alone():
    for text in ("Größe", "漢字", "a\tb\nc", "naïve – “quoted”", "👩‍🔬"):  # noqa: RUF001
        assert common.printable(text) == text
    assert common.printable("\x1b\x00\udc80") == "\\u001b\\u0000\\udc80"


# options


def described(section: type) -> set[str]:
    return {field.name for field in fields(section) if "help" in field.metadata}


def test_options_of_training_are_the_fields_of_its_configuration(tmp_path):
    """Each is in --help, and each reaches the configuration as what it says."""
    said = {
        "model": {
            "hidden": (12, 8), "trunk": "lenet", "activation": "heaviside",
            "noise": (0.1, 0.2, 0.3), "covariance": "tracked:3",
            "batch_norm": True, "dropout": 0.25,
        },
        "training": {
            "epochs": 7, "batch_size": 9, "lr": 0.125, "weight_decay": 0.5, "optimizer": "adamw",
            "schedule": "cosine", "clip": 2.0, "compile": True,
        },
        "data": {"validation": 0.3, "augment": True, "limit": 50},
    }  # fmt: skip
    config = dry("digits", said, "--precision", "64-true", "--seed", "5")
    assert (config["precision"], config["training"]["seed"]) == ("64-true", 5)
    table = {
        "data": {
            "target": ("price", "size"), "task": "regression", "test_fraction": 0.4,
            "missing": "drop", "categories": ("year",), "drop": ("note",), "encoding": "latin-1",
            "delimiter": ";", "errors": ("x=x_std",),
        },
    }  # fmt: skip
    with (tmp_path / "t.csv").open("w", newline="", encoding="latin-1") as file:
        rows = ([i, 2 * i, i % 3, "é", i % 7, 0.1] for i in range(40))
        names = ["price", "size", "year", "note", "x", "x_std"]
        csv.writer(file, delimiter=";").writerows([names, *rows])
    dry(tmp_path / "t.csv", table)
    assert dry("digits", {"model": {"poisson": True}})["training"]["lr"] == 2e-3  # the preset's
    assert dry("yacht", {"data": {"split": 3}})["data"]["validation"] == 0.1  # the usual value
    known = {name for part in (said, table) for values in part.values() for name in values}
    sections = described(ModelConfig) | described(TrainingConfig) | described(DataConfig)
    assert sections == known | {"poisson", "split", "trunk_from"}
    text, _ = printed("train", "--help")
    assert all(flag(name) in text for name in sections)


def flag(name: str) -> str:
    own = {"categories": "--category", "errors": "--error"}
    return own.get(name, f"--{name.replace('_', '-')}")


def dry(data: object, said: dict[str, dict[str, Any]], *more: str) -> dict[str, Any]:
    """The configuration that a command gives, which holds all that was said."""
    command = ["train", data, "--dry-run", "--json", *more]
    for name, value in (pair for values in said.values() for pair in values.items()):
        if value is True:
            command.append(flag(name))
        elif isinstance(value, tuple) and isinstance(value[0], str):
            command += [part for each in value for part in (flag(name), each)]
        else:
            many = ",".join(map(str, value)) if isinstance(value, tuple) else value
            command += [flag(name), many]
    config = json.loads(printed(*command)[0])
    for section, values in said.items():
        assert {key: config[section][key] for key in values} == json.loads(json.dumps(values))
    return config


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", (0, 1, 2)), ("1", (0,)), ("0,1,5", (0, 1, 5)), ("5,", (5,)), (" 2 ", (0, 1))],
)
def test_seeds_are_so_many_or_a_list(text, expected):
    assert common.seeds(text, "--seeds") == expected


@pytest.mark.parametrize("text", ["0", "-1", "", "x", "1,-2", "1000000000000"])
def test_wrong_seeds_are_told(text):
    with pytest.raises(typer.BadParameter, match=r"seeds|not a number"):
        common.seeds(text, "--seeds")


def test_three_seeds_are_three(tmp_path):
    options = ["--methods", "plain", "--epochs", "1", "--hidden", "4", "--out", tmp_path / "c"]
    out, _ = printed("compare", "two-moons", "--seeds", "3", *options, "--json")
    assert json.loads(out)["seeds"] == [0, 1, 2]
    assert "neither a number of seeds" in " ".join(
        printed("compare", "two-moons", "--seeds", "0", *options, code=2)[1]
        .replace("│", "")
        .split()
    )
    assert "(3 is 0, 1 and 2)" in printed("compare", "--help")[0]
