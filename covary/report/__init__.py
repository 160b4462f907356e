"""One self-contained HTML page that shows what a trained network is unsure of.

``write`` reads the files of a run directory and nothing else, so a page can be made again on any
machine, without the data, the network or a GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from covary.report.reading import ReportError, Results, read
from covary.runs import Run

__all__ = ["ReportError", "Results", "read", "write", "write_verification"]


def write(run: Run | Path, *, out: Path | None = None) -> Path:
    """Write the page and its figures, and return where the page is.

    Args:
        run: one that was evaluated, or its folder.
        out: the page to write; ``report.html`` in the run directory if None. Figures go beside it,
            to ``figures/<name>.png`` and ``.svg``.

    Raises:
        ReportError: if the run was not evaluated.
        FileError: if one of its files cannot be read.
        ImportError: if one of the libraries that draw the page is missing.
    """
    _check_libraries()
    from covary.report import page  # matplotlib and jinja2 are loaded only when a page is made

    results = read(run)
    return page.write(results, Path(out) if out else results.run.path / "report.html")


def write_verification(run: Run | Path) -> Path:
    """Write the figures of ``covary verify`` to ``figures/`` in the run, and return that folder.

    Raises as ``write``; a ReportError if the run was not verified.
    """
    _check_libraries()
    from covary.report import drawing, figures_verify

    run = run if isinstance(run, Run) else Run(run)
    measured = run.verification or run.spikes
    if measured is None:
        raise ReportError(f"{run.path} was not verified yet: run `covary verify {run.path}` first.")
    for figure in figures_verify.drawings(measured):
        drawing.save(figure, run.path / "figures")
    return run.path / "figures"


def _check_libraries() -> None:
    needed = {"matplotlib": "matplotlib", "jinja2": "jinja2", "PIL": "pillow", "tomlkit": "tomlkit"}
    missing = [package for name, package in needed.items() if not importlib.util.find_spec(name)]
    if missing:
        raise ImportError(
            f"covary.report needs {', '.join(missing)}: pip install 'covary[report]'."
        )
