"""What all commands share: errors as one sentence, exit codes, JSON, tables, progress.

Names of columns, classes and files come from other people. All that is printed goes through
``printable``, so that no escape sequence in a name reaches the terminal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from rich.text import Text

from covary.files import escaped, without_nan
from covary.progress import is_first_process
from covary.training import StoppedError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")]
OodData = Annotated[
    list[str] | None,
    typer.Option(
        "--ood", help="Out-of-distribution data: a known set or a table; repeat for several."
    ),
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

Cells = tuple[str, ...]  # below each other, the header first

MOST_SEEDS = 100
# Errors whose message is enough to know what went wrong.
_EXPECTED = (ValueError, RuntimeError, OSError, ImportError, MemoryError)
# Processes that a strategy starts run the same command; only the first of them prints.
_is_first = is_first_process()
# Results go to standard output, all that is said on the way to standard error.
results = Console(quiet=not _is_first)
voice = Console(stderr=True, quiet=not _is_first)


def reported(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Turn what a command raises into one sentence and an exit code.

    2 for wrong use, 1 for failure, 130 for Ctrl-C and 141 for a closed pipe, as shells have it;
    ``--debug`` lets errors through.
    """

    @functools.wraps(command)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:  # as by ``| head``: nobody reads on, and nobody wants to be told
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except typer.BadParameter as error:
            error.message = printable(error.message)
            raise
        except StoppedError as stopped:
            say(f"{stopped} Go on with the same command, with --resume (in place of --overwrite).")
            raise typer.Exit(130) from None
        except KeyboardInterrupt:
            say("Interrupted.")
            raise typer.Exit(130) from None
        except Exception as error:
            if kwargs.get("debug"):
                raise
            if isinstance(error, _EXPECTED):
                fail(str(error) or type(error).__name__)
            else:
                fail(f"{type(error).__name__}: {error} (run again with --debug to see where)")
            raise typer.Exit(1) from None

    return wrapped


# Control characters but for tab and line feed, separators of lines and paragraphs, marks that turn
# the order of letters around, and halves of characters that no terminal can show.
_UNPRINTABLE = (
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with characters that would move a terminal ``escaped``."""
    return escaped(text, _UNPRINTABLE)


def fail(sentence: str) -> None:
    """Say what went wrong."""
    voice.print(Text.assemble(("error:", "bold red"), f" {printable(sentence)}"), soft_wrap=True)


def say(sentence: str, style: str = "") -> None:
    """Tell the person at the terminal, not the program that reads the result."""
    voice.print(Text(printable(sentence), style=style), soft_wrap=True)


def show_json(content: Any) -> None:
    """The result for machines."""
    if _is_first:
        text = json.dumps(without_nan(content), indent=1, ensure_ascii=False, allow_nan=False)
        sys.stdout.write(printable(text) + "\n")


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1
) -> None:
    """The result for people; the first ``left`` columns hold words, the rest numbers.

    Words are not broken: cells are wrapped between them, and columns for which there is no room go
    to a table of their own, below, with the first ones again.
    """
    cells = [[_in_one_line(cell) for cell in row] for row in (columns, *rows)]
    for i, group in enumerate(_groups(list(zip(*cells, strict=True)), left)):
        words = _in_one_line(f"{title} (continued)" if i else title)
        results.print(_fitted(words, results.width), style="italic")
        results.print(_table(group, left))


def _groups(columns: Sequence[Cells], left: int) -> list[list[Cells]]:
    """Which columns fit beside each other; the first ``left`` are in every group."""
    first = list(columns[:left])
    groups = [first]
    for column in columns[left:]:
        wider = [*groups[-1], column]
        if groups[-1] == first or _width(map(_longest_word, wider)) <= results.width:
            groups[-1] = wider
        else:
            groups.append([*first, column])
    return groups


def _longest_word(cells: Cells) -> int:
    return max(cell_len(piece.rstrip()) for cell in cells for piece in _pieces(cell))


def _width(columns: Iterable[int]) -> int:
    """Width of a table: columns of these widths, a space on both sides of each, and lines."""
    return 1 + sum(width + 3 for width in columns)


def _table(columns: Sequence[Cells], left: int) -> Table:
    widths = [max(map(cell_len, cells)) for cells in columns]
    least = list(map(_longest_word, columns))
    while _width(widths) > results.width and max(widths) > 1:
        # of the columns that can give way the widest does; if none can, long words are cut
        giving = [i for i in range(len(widths)) if widths[i] > least[i]] or range(len(widths))
        widths[max(giving, key=lambda i: widths[i])] -= 1
    table = Table()
    header, *rows = zip(*columns, strict=True)
    for i, cell in enumerate(map(_fitted, header, widths)):
        table.add_column(cell, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_fitted, row, widths))
    return table


def _fitted(cell: str, width: int) -> Text:
    return Text("\n".join(_wrapped(cell, width)))


def _in_one_line(text: str) -> str:
    return printable(text.replace("\n", "\\n").replace("\t", " "))


def _pieces(text: str) -> list[str]:
    """Words with the space behind them; paths in parts, numbers with their error bars whole."""
    return re.findall(r"(?:[^\s/]| ± )+/*\s*|/+\s*", text) or [""]


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most this width."""
    lines = [""]
    for piece in _pieces(text):
        if cell_len((lines[-1] + piece).rstrip()) <= width:
            lines[-1] += piece
        elif cell_len(piece.rstrip()) <= width:
            lines.append(piece)
        else:
            lines += chop_cells(piece, width)
    return [line.rstrip() for line in lines if line.strip()] or [""]


def decimal(value: float | None, digits: int, nothing: str = "undefined") -> str:
    """A number with so many digits behind the point, as a cell of a table."""
    return nothing if value is None else f"{value:,.{digits}f}"


def progress(items: Sequence[Any], name: str) -> Iterator[Any]:
    """The items, with a bar on a terminal that says how far they are."""
    if not voice.is_terminal:
        yield from items
    else:
        yield from track(items, f"{escape(printable(name)):20}", console=voice, transient=True)


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


def seeds(text: str, option: str) -> tuple[int, ...]:
    """``"3"`` -> (0, 1, 2), so many of them; ``"0,1,5"`` -> these; ``"5,"`` -> (5,)."""
    found = numbers(text, int, option) or ()
    if "," not in text and found:
        found = tuple(range(found[0])) if found[0] <= MOST_SEEDS else ()
    if not found or min(found) < 0:
        raise typer.BadParameter(
            f"{text!r} is neither a number of seeds, 1 to {MOST_SEEDS} (3 is 0, 1 and 2), nor a "
            "list of seeds from 0 on (0,1,5; one alone with a comma behind it: 5,).",
            param_hint=option,
        )
    return found


def quoted(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


@contextmanager
def wrong_use() -> Iterator[None]:
    """Values that no run can have are wrong use (exit code 2), not failure."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
