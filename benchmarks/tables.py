"""Tables of the documentation, drawn from results/*.json and never typed by hand.

    python -m benchmarks.tables

A page says ``<!-- table: name -->`` where a table goes; everything up to ``<!-- end -->`` is
replaced. A test fails when a page and the stored results differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.results import ROOT, load

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(value: float) -> str:
    return f"{100 * value:.{2 if value < 0.01 else 1 if value < 0.1 else 0}f}%"


def speed() -> str:
    steps = load("bench")["training step"]
    return markdown(
        ["training step", "times the plain network", "times faster than the literal equations"],
        [
            [name, f"{row['over plain']:.1f}", f"{row['literal over it']:.1f}"]
            for name, row in steps.items()
        ],
    )


def growth(quantity: str) -> str:
    table = load("bench")[quantity]
    names = list(next(iter(table.values())))
    return markdown(
        [quantity, *names],
        [
            [value, *(f"{row[name]:.1f}" for name in names)]
            for value, row in sorted(table.items(), key=lambda item: int(item[0]))
        ],
    )


def sampling() -> str:
    return markdown(
        [
            "network",
            "noise",
            "test accuracy",
            "mean, average error",
            "covariance, average error",
            "covariance, worst error",
        ],
        [
            [
                row["network"],
                f"{row['noise']:g}",
                "untrained" if row["accuracy"] is None else f"{row['accuracy']:.3f}",
                percent(row["mean error"]),
                percent(row["covariance error"]),
                percent(row["worst covariance error"]),
            ]
            for row in load("against_sampling")["networks"]
        ],
    )


def quadrature() -> str:
    rows = load("quadrature_accuracy")
    sigmas = list(next(iter(rows.values())))
    return markdown(
        ["activation, nodes", *(f"sigma = {sigma}" for sigma in sigmas)],
        [[name, *(f"{row[sigma]:.0e}" for sigma in sigmas)] for name, row in rows.items()],
    )


def demo() -> str:
    measured = load("digits")
    return markdown(
        ["test digits", *(f"{name} network" for name in measured)],
        [
            [quantity, *(f"{numbers[quantity]:.3f}" for numbers in measured.values())]
            for quantity in next(iter(measured.values()))
        ],
    )


def training() -> str:
    measured = load("training")
    epochs = measured["epoch over plain"]
    outside = measured["outside forward, backward and optimizer"]
    table = measured["table"]
    rows = [
        [f"epoch, {kind} covariance, over that of the plain network", f"{epochs[kind]:.1f}"]
        for kind in ("diagonal", "shared", "full")
    ]
    rows += [
        [f"time outside forward, backward and optimizer, {kind}", percent(outside[kind])]
        for kind in ("shared", "full")
    ]
    size = f"csv of {table['rows']:,} rows, {table['columns']} columns"
    rows.append([f"{size}: peak memory", f"{table['peak memory of the process, MB']:,} MB"])
    rows.append([f"{size}: rows per second, training", f"{table['rows per second, training']:,}"])
    rows.append(
        [
            f"{size}: rows per second, file to trained network",
            f"{table['rows per second, from file to trained']:,}",
        ]
    )
    return markdown(["training loop", "measured"], rows)


def replicas() -> str:
    return markdown(
        ["UCI set", "splits", "times faster together", "largest difference of predictions"],
        [
            [
                row["dataset"],
                str(row["splits"]),
                f"{row['times faster']:.1f}",
                f"{max(row['difference of means'], row['difference of stddevs']):.0e} deviations",
            ]
            for row in load("replicas")
        ],
    )


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "training": training,
    "replicas": replicas,
    "speed": speed,
    "speed by width": lambda: growth("width"),
    "speed by batch": lambda: growth("batch"),
    "sampling": sampling,
    "quadrature": quadrature,
}
_PLACE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The page with every table as the stored results have it."""
    return _PLACE.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


def main() -> None:
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = filled(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"updated {Path(page).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
