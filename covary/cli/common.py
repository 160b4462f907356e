"""What every command does alike: errors as one sentence, exit codes, JSON, tables, progress."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from covary.training import StoppedError
from covary.training.log import without_nan

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")]
ForeignData = Annotated[
    list[str] | None,
    typer.Option("--ood", help="Foreign data: a known set or a table; repeat for several."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on standard output, nothing else.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Decides everything that is random.")]
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir", help="Where data are looked for first (then $COVARY_DATA, then the cache)."
    ),
]

# Processes that a strategy starts run the same command; one voice is enough.
_is_first = os.environ.get("LOCAL_RANK", "0") == "0"
# Results go to standard output, all that is said on the way to standard error.
results = Console(quiet=not _is_first)
voice = Console(stderr=True, quiet=not _is_first)


def reported(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Turn what a command raises into one sentence and an exit code.

    2 for wrong use, 1 for failure, 130 for Ctrl-C, as shells have it; ``--debug`` lets errors
    through.
    """

    @functools.wraps(command)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except StoppedError as stopped:
            say(f"{stopped} Go on with the same command and --resume.")
            raise typer.Exit(130) from None
        except KeyboardInterrupt:
            say("Interrupted.")
            raise typer.Exit(130) from None
        except (ValueError, RuntimeError, OSError, ImportError, MemoryError) as error:
            if kwargs.get("debug"):
                raise
            fail(str(error) or type(error).__name__)
            raise typer.Exit(1) from None
        except Exception as error:
            if kwargs.get("debug"):
                raise
            fail(f"{type(error).__name__}: {error} (run again with --debug to see where)")
            raise typer.Exit(1) from None

    return wrapped


def fail(sentence: str) -> None:
    """Say what went wrong."""
    voice.print(f"[bold red]error:[/] {_escape(sentence)}", highlight=False, soft_wrap=True)


def say(sentence: str, style: str | None = None) -> None:
    """Tell the person at the terminal, not the program that reads the result."""
    voice.print(_escape(sentence), style=style, highlight=False, soft_wrap=True)


def show_json(content: Any) -> None:
    """The result for machines."""
    if _is_first:
        text = json.dumps(without_nan(content), indent=1, ensure_ascii=False, allow_nan=False)
        sys.stdout.write(text + "\n")


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1
) -> None:
    """The result for people; the first ``left`` columns hold words, the rest numbers."""
    table = Table(title=_escape(title), title_justify="left")
    for i, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if i < left else "right"
        table.add_column(_escape(column), justify=justify, overflow="fold", no_wrap=i == 0)
    for row in rows:
        table.add_row(*map(_escape, row))
    results.print(table)


def progress(items: Sequence[Any], name: str) -> Iterator[Any]:
    """The items, with a bar on a terminal that says how far they are."""
    if not voice.is_terminal:
        yield from items
    else:
        yield from track(items, f"{name:20}", console=voice, transient=True)


def numbers(text: str | None, kind: Callable[[str], Any], option: str) -> tuple[Any, ...] | None:
    """``"392,196"`` -> (392, 196); None stays None, an empty text is ()."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return tuple(kind(part) for part in parts)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a number, or several with commas between them.", param_hint=option
        ) from None


def quoted(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@contextmanager
def wrong_use() -> Iterator[None]:
    """Values that no run can have are wrong use (exit code 2), not failure."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
