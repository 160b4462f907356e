"""One self-contained HTML page that shows what a trained network is unsure of.

``write`` reads the files of a run directory and nothing else, so a page can be made again on any
machine, without the data, the network or a GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from covary.report.files import ReportError
from covary.report.reading import Results, read
from covary.report.spikes import read_spikes
from covary.report.verification import read_verification

__all__ = ["ReportError", "Results", "read", "write", "write_verification"]

_NEEDED = {"matplotlib": "matplotlib", "jinja2": "jinja2", "PIL": "pillow", "tomlkit": "tomlkit"}


def write(run_dir: Path, *, out: Path | None = None) -> Path:
    """Write the page and its figures, and return where the page is.

    Args:
        run_dir: a run directory that was evaluated (``evaluation.json`` and ``predictions.npz``).
        out: the page to write; ``report.html`` in the run directory if None. Figures go beside it,
            to ``figures/<name>.png`` and ``.svg``.

    Raises:
        ReportError: if the run was not evaluated, or one of its files cannot be read.
        ImportError: if one of the libraries that draw the page is missing.
    """
    _check_libraries()
    from covary.report import page  # matplotlib and jinja2 are loaded only when a page is made

    results = read(Path(run_dir))
    target = Path(out) if out is not None else results.directory / "report.html"
    return page.write(results, target)


def write_verification(run_dir: Path) -> Path:
    """Write the figures of ``covary verify`` to ``figures/`` in the run, and return that folder.

    Raises:
        ReportError: if the run was not verified, or one of its files cannot be read.
        ImportError: if one of the libraries that draw is missing.
    """
    _check_libraries()
    from covary.report import drawing, figures_spikes, figures_verify

    verification, spikes = read_verification(Path(run_dir)), read_spikes(Path(run_dir))
    folder = Path(run_dir) / "figures"
    if verification is not None:
        figures = figures_verify.drawings(verification)
    elif spikes is not None:
        figures = figures_spikes.drawings(spikes)
    else:
        raise ReportError(f"{run_dir} was not verified yet: run `covary verify {run_dir}` first.")
    for figure in figures:
        drawing.save(figure, folder)
    return folder


def _check_libraries() -> None:
    missing = [package for name, package in _NEEDED.items() if not importlib.util.find_spec(name)]
    if missing:
        raise ImportError(
            f"covary.report needs {', '.join(missing)}: pip install 'covary[report]'."
        )
