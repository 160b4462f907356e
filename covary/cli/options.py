"""Options of commands: those of configurations, made from their fields, and those of several.

What an option of a configuration is called, which values it takes and how it is explained stands
with the field (``covary.runs.config``, ``covary.training.config``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

from covary.cli import common
from covary.data import describe
from covary.runs.config import PER_SAMPLE_HELP, DataConfig
from covary.runs.training import Existing

NETWORK = "Network"
Result = TypeVar("Result")
Chosen = dict[str, Any]
_NONE: Mapping[type, Sequence[str]] = {}


def option(panel: str, name: str, help_text: str, **more: Any) -> Any:
    """An option under a heading of its own in ``--help``."""
    return typer.Option(name, rich_help_panel=panel, help=help_text, **more)


def _as_said(value: Any) -> Any:
    return value


class _Spelled(NamedTuple):
    """A field of a configuration on the command line."""

    parameter: Parameter
    read: Callable[[Any], Any]  # what was said -> the value of the field
    default: Any  # the value where nothing is said


def _spelled(section: type, field: Field[Any], *, usual: bool) -> _Spelled:
    """Numbers have commas between them, and so have names if the field's metadata have ``commas``.

    Other names are said by repeating the option, and all else as it is.
    """
    kind, told = get_type_hints(section)[field.name], field.metadata
    flag = told.get("flag", f"--{field.name.replace('_', '-')}")
    default: Any = field.default if usual else None
    shown = default
    said: Any = kind if default is not None else kind | None
    read: Callable[[Any], Any] = _as_said
    if get_origin(kind) is tuple:
        of, shown = get_args(kind)[0], ",".join(map(str, default or ())) or None
        repeated = of is str and not told.get("commas")
        said = (list[str] if repeated else str) | None
        read = tuple if repeated else functools.partial(common.numbers, kind=of, option=flag)
    more = {key: told[key] for key in ("min", "show_default") if key in told}
    annotation = Annotated[said, option(told["panel"], flag, told["help"], **more)]
    place = Parameter.KEYWORD_ONLY
    parameter = Parameter(field.name, place, default=shown, annotation=annotation)
    return _Spelled(parameter, read, default)


def configured(
    *sections: type, defaults: Sequence[type] = (), without: Mapping[type, Sequence[str]] = _NONE
) -> Callable[..., Any]:
    """Give a command an option for each described field of these configurations.

    They take the place of its second parameter, ``chosen``, which gets their values by name: None
    for what was not said, but for fields of ``defaults``, which have their usual values then.
    ``without`` names the fields of a configuration that the command does not take.
    """
    spelled = {
        field.name: _spelled(section, field, usual=section in defaults)
        for section in sections
        for field in fields(section)
        if "help" in field.metadata and field.name not in without.get(section, ())
    }

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        hints = get_type_hints(command, include_extras=True)
        first, _, *others = (
            parameter.replace(annotation=hints[name])
            for name, parameter in signature(command).parameters.items()
        )
        parameters = [
            first,
            *(each.parameter for each in spelled.values()),
            *(other.replace(kind=Parameter.KEYWORD_ONLY) for other in others),
        ]

        @functools.wraps(command)
        def wrapped(*args: Any, **said: Any) -> Result:
            chosen = {}
            for name, each in spelled.items():
                value = said.pop(name, None)
                chosen[name] = each.default if value is None else each.read(value)
            return command(*args, chosen=chosen, **said)

        whole = signature(command).replace(parameters=parameters)
        wrapped.__signature__ = whole  # type: ignore[attr-defined]
        wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
        return wrapped

    return decorate


def taken(section: type, chosen: Chosen) -> Chosen:
    """The values of this configuration's fields, which are removed from those that were chosen."""
    return {field.name: chosen.pop(field.name) for field in fields(section) if field.name in chosen}


def data_config(data: str, chosen: Chosen) -> DataConfig:
    """The part of the configuration that says which data; a table must have a target."""
    values = taken(DataConfig, chosen)
    if not DataConfig(name=data).is_table:
        splits = max(1, describe(data).splits)
        if not 0 <= values["split"] < splits:
            raise ValueError(f"{data} has splits 0 to {splits - 1}.")
        return DataConfig(name=data, **values)
    if not values["target"]:
        raise ValueError(f"Which column of {data} is to be predicted? Say --target NAME.")
    # Wherever the run is looked at from, this is the file that it means.
    return DataConfig(name=str(Path(data).resolve()), **values)


def existing_of(*, resume: bool, overwrite: bool) -> Existing:
    """What to do with what is in the folder already; two ways of treating it are refused."""
    if resume and overwrite:
        raise ValueError("--resume goes on with it, --overwrite replaces it: choose one.")
    return "resume" if resume else "overwrite" if overwrite else "refuse"


Data = Annotated[
    str,
    typer.Argument(help="A known set (covary data list), or a .csv, .tsv, .jsonl, .parquet file."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with what is in the folder, if anything is.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")]
PerSampleCovariance = Annotated[
    str | None,
    typer.Option(
        "--covariance",
        help=f"How it is stored: {PER_SAMPLE_HELP}.",
        show_default="tracked, or full where tracked ones are poor",
    ),
]
