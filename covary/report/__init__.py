"""One self-contained HTML page that shows what a trained network is unsure of.

``write`` reads the files of a run directory and nothing else, so a page can be made again on any
machine, without the data, the network or a GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from covary.report.reading import ReportError, Results, read
from covary.runs import Run, SpikingVerification

__all__ = ["ReportError", "Results", "read", "write", "write_verification"]

_NEEDED = {"matplotlib": "matplotlib", "jinja2": "jinja2", "PIL": "pillow", "tomlkit": "tomlkit"}


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
    target = Path(out) if out is not None else results.directory / "report.html"
    return page.write(results, target)


def write_verification(run: Run | Path) -> Path:
    """Write the figures of ``covary verify`` to ``figures/`` in the run, and return that folder.

    Raises:
        ReportError: if the run was not verified.
        FileError: if one of its files cannot be read.
        ImportError: if one of the libraries that draw is missing.
    """
    _check_libraries()
    from covary.report import drawing, figures_spikes, figures_verify

    run = run if isinstance(run, Run) else Run(run)
    measured, folder = run.verification or run.spikes, run.path / "figures"
    if measured is None:
        raise ReportError(f"{run.path} was not verified yet: run `covary verify {run.path}` first.")
    figures = (
        figures_spikes.drawings(measured)
        if isinstance(measured, SpikingVerification)
        else figures_verify.drawings(measured)
    )
    for figure in figures:
        drawing.save(figure, folder)
    return folder


def _check_libraries() -> None:
    missing = [package for name, package in _NEEDED.items() if not importlib.util.find_spec(name)]
    if missing:
        raise ImportError(
            f"covary.report needs {', '.join(missing)}: pip install 'covary[report]'."
        )
