"""How every figure looks, and how it goes into a file or into the page.

Figures are drawn once, in the light colours. Within the page each colour is a CSS variable, so that
figures follow the theme; see ``inline_svg``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from covary.files import write_atomically

# Told apart by any colour vision, and legible on white; page.css has their twins for dark pages.
INK, RULE = "#1c2127", "#dfe3e8"
BLUE, ORANGE, TEAL, PURPLE, AMBER, SLATE = (
    "#0b6bb8",
    "#cf4a0c",
    "#00806a",
    "#8a4fa3",
    "#a06a00",
    "#68727d",
)
_VARIABLES = {
    INK: "currentColor",
    RULE: "var(--rule)",
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    TEAL: "var(--teal)",
    PURPLE: "var(--purple)",
    AMBER: "var(--amber)",
    SLATE: "var(--slate)",
    "#ffffff": "var(--page)",
}
FOREIGN = (TEAL, PURPLE, AMBER, SLATE)  # colours of foreign sets, in their order
DASHES = ("-", "--", "-.", ":")

WIDTH = 4.9  # inches: 350 points, which a phone shows at full size
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": SLATE,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.0,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that files look alike everywhere
    "font.size": 9.0,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.borderaxespad": 0.6,  # else handles lie on an axis, or words at a picture's edge
    "legend.borderpad": 0.0,
    "legend.columnspacing": 1.6,
    "legend.edgecolor": "none",
    "legend.facecolor": "#ffffff",
    "legend.fontsize": 8.5,
    "legend.framealpha": 0.85,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "path.simplify": True,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a class may be called $x
    "xtick.color": SLATE,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.color": SLATE,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8.5,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Settings of matplotlib as above, whatever the user's own are; those come back."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # leaves the backend alone
        matplotlib.rcParams.update(_STYLE)
        yield


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure with its words. ``alt`` says in numbers what the figure shows."""

    name: str
    alt: str
    caption: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """An SVG file without a background."""
        text = io.StringIO()
        with house_style():
            # The salt makes ids, and with them the file, the same whenever it is drawn.
            matplotlib.rcParams["svg.hashsalt"] = self.name
            self.figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
        return text.getvalue()


Arguments = ParamSpec("Arguments")


def styled(draw: Callable[Arguments, Drawing]) -> Callable[Arguments, Drawing]:
    """Run a function that draws in the house style."""

    @wraps(draw)
    def in_style(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Drawing:
        with house_style():
            drawing = draw(*args, **kwargs)
            lay_out(drawing.figure)
            _align(drawing.figure)
        return drawing

    return in_style


def lay_out(figure: Figure) -> None:
    """Give the axes all the room that their words leave."""
    # The figure does not keep the layout engine, which would run again for each file. Labels need
    # more room to the panel before them than to the edge of the figure.
    ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.02, wspace=0.05).execute(figure)


def canvas(height: float = 3.3, *, rows: Sequence[float] = (1.0,)) -> tuple[Figure, list[Axes]]:
    """An empty figure of one column of axes, ``rows`` high in relation to each other."""
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(rows), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": list(rows)}
    )
    return figure, list(axes[:, 0])


def head(axes: Axes, title: str, *, columns: int = 2, handles: list[Any] | None = None) -> None:
    """Put the title above the axes, and the legend between them, where it hides no data."""
    if handles is None:
        handles, labels = axes.get_legend_handles_labels()
    else:
        labels = [handle.get_label() for handle in handles]
    rows = -(-len(handles) // columns)
    axes.annotate(
        title,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 7 + 14 * rows),
        textcoords="offset points",
        fontsize=10.5,
        fontweight="bold",
        gid="title",
    )
    if handles:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1.03),
            borderaxespad=0.0,
            ncols=columns,
        )


def _align(figure: Figure) -> None:
    """Let title and legend begin where the labels of the axes do, in line with the caption."""
    axes = figure.axes[0]
    boxes = [box for each in figure.axes if (box := each.get_tightbbox()) is not None]
    start = axes.transAxes.inverted().transform((min(box.x0 for box in boxes), 0.0))[0]
    for title in axes.texts:
        if isinstance(title, Annotation) and title.get_gid() == "title":
            title.xy = (start, 1)
    legend = axes.get_legend()
    if legend is not None:
        legend.set_bbox_to_anchor((start, 1.03), transform=axes.transAxes)


def legend_inside(axes: Axes, **options: Any) -> None:
    """A legend within the axes, framed: no line of the grid passes for one of its own."""
    axes.legend(frameon=True, borderpad=0.3, **options)


def swatch(label: str, colour: str, dash: str = "-", marker: str = "") -> Line2D:
    """An entry of a legend."""
    entry = Line2D([], [], color=colour, marker=marker, markersize=5, label=label)
    entry.set_linestyle(dash)  # type: ignore[arg-type]  # matplotlib names each style it knows
    return entry


def save(drawing: Drawing, folder: Path, *, svg: bool = True) -> None:
    """Write ``<name>.png`` and, if wanted, ``<name>.svg`` on white."""
    with house_style():
        picture = io.BytesIO()
        drawing.figure.savefig(
            picture,
            format="png",
            dpi=160,
            facecolor="white",
            bbox_inches=drawing.figure.bbox_inches.padded(0.12),
        )
    write_atomically(folder / f"{drawing.name}.png", picture.getvalue())
    if not svg:
        return
    head, body = _split(drawing.svg)
    white = '<rect width="100%" height="100%" fill="#ffffff"/>'
    write_atomically(folder / f"{drawing.name}.svg", f"{head}{white}{body}".encode())


def inline_svg(drawing: Drawing) -> str:
    """SVG to stand within HTML: colours of the page, its font, and ids of its own.

    It is hidden from screen readers; what holds it is to be labelled with ``drawing.alt``.
    """
    head, svg = _split(drawing.svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{drawing.name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{drawing.name}-", svg)
    svg = re.sub(r"font: ([^;\"]*?)(\d+(?:\.\d+)?px) [^;\"]*", _page_font, svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    box = " ".join(re.findall(r'viewBox="[^"]*"', head))
    return f'<svg class="plot" {box} aria-hidden="true">{svg}'


def _split(svg: str) -> tuple[str, str]:
    """A file up to the end of its opening svg tag, and what follows."""
    end = svg.index(">", svg.index("<svg")) + 1
    return svg[:end], svg[end:]


def _page_font(found: re.Match[str]) -> str:
    weight = "bold" if re.search(r"bold|[67]00", found[1]) else "normal"
    return f"font-family: inherit; font-weight: {weight}; font-size: {found[2]}"
