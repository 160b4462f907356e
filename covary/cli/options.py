"""Options of commands: those of configurations, made from their fields, and those of several.

What an option of a configuration is called, which values it takes and how it is explained stands
with the field (``covary.runs.config``, ``covary.training.config``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from inspect import Parameter, signature
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

from covary.cli import common
from covary.runs.config import PER_SAMPLE, DataConfig, ModelConfig
from covary.training import TrainingConfig

NETWORK, TRAINING = "Network", "Training"
Result = TypeVar("Result")
Chosen = dict[str, Any]


def option(panel: str, name: str, help_text: str, **more: Any) -> Any:
    """An option under a heading of its own in ``--help``."""
    return typer.Option(name, rich_help_panel=panel, help=help_text, **more)


def described(section: type, name: str) -> Any:
    """The option for a field of a configuration."""
    found = {field.name: field for field in fields(section)}[name].metadata
    more = {key: found[key] for key in ("min",) if key in found}
    return option(found["panel"], _flag(name, found), found["help"], **more)


def _flag(name: str, metadata: Any) -> str:
    return str(metadata.get("flag", f"--{name.replace('_', '-')}"))


class Spelled(NamedTuple):
    """How a field of a configuration is written on the command line."""

    parameter: Parameter
    read: Callable[[Any], Any]  # what was said -> the value of the field


def _spelled(section: type, field: Field[Any], *, usual: bool) -> Spelled:
    """Numbers with commas between them, names by repeating the option, all else as it is."""
    kind = get_type_hints(section)[field.name]
    default = field.default if usual and field.default is not MISSING else None
    said: Any = kind if default is not None else kind | None
    read: Callable[[Any], Any] = _as_said
    if get_origin(kind) is tuple:
        of, default = get_args(kind)[0], None
        said = list[str] | None if of is str else str | None
        flag = _flag(field.name, field.metadata)
        read = _names if of is str else functools.partial(common.numbers, kind=of, option=flag)
    annotation = Annotated[said, described(section, field.name)]
    place = Parameter.KEYWORD_ONLY
    return Spelled(Parameter(field.name, place, default=default, annotation=annotation), read)


def _as_said(value: Any) -> Any:
    return value


def _names(said: list[str] | None) -> tuple[str, ...]:
    return tuple(said or ())


def configured(*sections: type, defaults: Sequence[type] = ()) -> Callable[..., Any]:
    """Give a command an option for each described field of these configurations.

    They take the place of its second parameter, ``chosen``, which gets their values by name: None
    for what was not said, but for fields of ``defaults``, which have their usual values then.
    """
    spelled = [
        _spelled(section, field, usual=section in defaults)
        for section in sections
        for field in fields(section)
        if "help" in field.metadata
    ]

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        hints = get_type_hints(command, include_extras=True)
        first, _, *others = (
            parameter.replace(annotation=hints[name])
            for name, parameter in signature(command).parameters.items()
        )
        parameters = [
            first,
            *(each.parameter for each in spelled),
            *(other.replace(kind=Parameter.KEYWORD_ONLY) for other in others),
        ]

        @functools.wraps(command)
        def wrapped(*args: Any, **said: Any) -> Result:
            chosen = {
                parameter.name: read(said.pop(parameter.name, parameter.default))
                for parameter, read in spelled
            }
            return command(*args, chosen=chosen, **said)

        whole = signature(command).replace(parameters=parameters)
        wrapped.__signature__ = whole  # type: ignore[attr-defined]
        wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
        return wrapped

    return decorate


Data = Annotated[
    str, typer.Argument(help="A known set (covary data list), or a .csv, .tsv, .parquet file.")
]
PerSampleCovariance = Annotated[
    str | None,
    typer.Option(
        "--covariance",
        help=f"How it is held: {', '.join(PER_SAMPLE)}.",
        show_default="tracked, or full where tracked ones are poor",
    ),
]
AttackedCovariance = Annotated[
    str | None,
    typer.Option(
        "--covariance",
        help=f"How it is held: {', '.join(PER_SAMPLE)}.",
        show_default="tracked if it was so in training, else full",
    ),
]
Hidden = Annotated[str | None, described(ModelConfig, "hidden")]
Trunk = Annotated[str | None, described(ModelConfig, "trunk")]
Noise = Annotated[str | None, described(ModelConfig, "noise")]
Epochs = Annotated[int | None, described(TrainingConfig, "epochs")]
BatchSize = Annotated[int | None, described(TrainingConfig, "batch_size")]
LearningRate = Annotated[float | None, described(TrainingConfig, "lr")]
WeightDecay = Annotated[float | None, described(TrainingConfig, "weight_decay")]
Schedule = Annotated[str | None, described(TrainingConfig, "schedule")]
Validation = Annotated[float, described(DataConfig, "validation")]
Split = Annotated[int, described(DataConfig, "split")]
