"""How large the library is, and how many of its files name one thing: ``python -m tests.sizes``.

What one would have to touch to add a thing is counted on things that are there: the files of
``covary/`` in whose code (docstrings and comments aside) the name of an ordinary one stands.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "covary"
CORE = ("activations", "covariance", "nn", "passes", "rules", "sources")

# kind -> an ordinary one, and in how many files it should stand at most
ADDITIONS = {
    "moment activation": ("mish", 2),
    "score": ("predictive_entropy", 1),
    "metric": ("brier", 1),
    "data set": ("cifar100", 1),
    "option of a covariance": ("exact_width", 4),
}


def sources(*rooms: str) -> list[Path]:
    """All files of the wheel that are Python, or those of these rooms."""
    places = [PACKAGE / room for room in rooms] or [PACKAGE]
    return sorted(path for place in places for path in place.rglob("*.py"))


def lines(paths: list[Path]) -> int:
    """Lines of these files, whatever is in them."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def wheel_lines() -> int:
    """Lines of the wheel."""
    return lines(sources())


def core_lines() -> int:
    """Lines of the core: the files at the root and the rooms of ``CORE``."""
    return lines(sorted(PACKAGE.glob("*.py"))) + lines(sources(*CORE))


def long_functions(most: int) -> dict[str, int]:
    """Functions of more lines than this, of ``reproduction/`` too: where -> how many.

    Signature and docstring count.
    """
    return {
        f"{path.relative_to(ROOT)}: {node.name}": length
        for path in (*sources(), *sorted((ROOT / "reproduction").rglob("*.py")))
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > most
    }


def files_that_name(name: str) -> list[str]:
    """Files in whose code this name stands, as a name of Python in any case or as a string."""
    return [
        str(path.relative_to(PACKAGE)) for path in sources() if name in set(_names(_tree(path)))
    ]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _names(tree: ast.Module) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                yield name.lower()
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name.lower()
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name.lower()
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield text.lower()


def report() -> str:
    """All of it, in a few lines."""
    rows = [f"wheel: {wheel_lines():,} lines", f"core: {core_lines():,} lines"]
    rows += [f"{length} lines: {name}" for name, length in long_functions(80).items()]
    for kind, (one, _) in ADDITIONS.items():
        files = files_that_name(one)
        rows.append(f"{kind} ({one}): {len(files)} files: {', '.join(files)}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(report())
