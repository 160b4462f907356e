"""One self-contained HTML page that shows what a trained network is unsure of.

``write`` reads the files of a run directory and nothing else, so a page can be made again on any
machine, without the data, the network or a GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from covary.report.files import ReportError
from covary.report.reading import Results, read

__all__ = ["ReportError", "Results", "read", "write"]

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
    missing = [package for name, package in _NEEDED.items() if not importlib.util.find_spec(name)]
    if missing:
        raise ImportError(
            f"covary.report needs {', '.join(missing)}: pip install 'covary[report]'."
        )
    from covary.report import page  # matplotlib and jinja2 are loaded only when a page is made

    results = read(Path(run_dir))
    target = Path(out) if out is not None else results.directory / "report.html"
    return page.write(results, target)
