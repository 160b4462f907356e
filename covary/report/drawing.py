"""How every figure looks, and how it goes into a file or into the page.

Figures are drawn once, in the light colours. Within the page each colour is a CSS variable, so that
figures follow the theme; see ``inline_svg``.
"""

from __future__ import annotations

import io
import re
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from covary.files import write_atomically
from covary.report.words import number, percent, short, shown_of
from covary.runs.predictions import Array

# Told apart by any colour vision, and legible on white; page.css has their twins for dark pages.
INK, RULE, BLUE, ORANGE = "#1c2127", "#dfe3e8", "#0b6bb8", "#cf4a0c"
TEAL, PURPLE, AMBER, SLATE = "#00806a", "#8a4fa3", "#a06a00", "#68727d"
_VARIABLES = {INK: "currentColor", RULE: "var(--rule)", BLUE: "var(--blue)"}
_VARIABLES |= {ORANGE: "var(--orange)", TEAL: "var(--teal)", PURPLE: "var(--purple)"}
_VARIABLES |= {AMBER: "var(--amber)", SLATE: "var(--slate)", "#ffffff": "var(--page)"}
COLOURS = (BLUE, ORANGE, TEAL, PURPLE, AMBER, SLATE)
_MARKERS = "o^sDv"
Look = tuple[str, str, str]  # colour, dash and marker
TEST, WRONG = (BLUE, "-", "o"), (ORANGE, "--", "D")
# Looks of out-of-distribution sets, in their order.
OOD = ((TEAL, "-.", "s"), (PURPLE, ":", "^"), (AMBER, "-", "v"), (SLATE, "--", "D"))

WIDTH = 4.9  # inches: 350 points, which a phone shows at full size


@contextmanager
def house_style() -> Iterator[None]:
    """Settings of matplotlib as in ``house.mplstyle``, whatever the user's own; those come back."""
    style = Path(__file__).with_name("house.mplstyle")
    with matplotlib.rc_context(fname=style), warnings.catch_warnings():
        # Names of data in other scripts: the picture has boxes, and the words beside it the names.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
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


def lay_out(figure: Figure) -> None:
    """Give the axes all the room that their words leave."""
    # The figure does not keep the layout engine, which would run again for each file. Labels need
    # more room to the panel before them than to the edge of the figure.
    ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.02, wspace=0.05).execute(figure)


def canvas(height: float = 3.3, *, rows: Sequence[float] = (1.0,)) -> list[Axes]:
    """A column of axes on an empty figure, ``rows`` high in relation to each other."""
    ratios = {"height_ratios": list(rows)}
    grid = _figure(height).subplots(len(rows), squeeze=False, sharex=True, gridspec_kw=ratios)
    return list(grid[:, 0])


def grid_of_panels(
    rows: int, columns: int, height: float, *, widths: Sequence[float] | None = None
) -> tuple[Axes, list[list[Axes]]]:
    """Panels on an empty figure, below axes of no height that title and legend stand on.

    On a panel itself they would push it aside.
    """
    figure = _figure(height)
    heights = [0.01, *[1.0] * rows]
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=heights, width_ratios=widths)
    top = figure.add_subplot(grid[0, :])
    top.set_axis_off()
    places = [[grid[row + 1, column] for column in range(columns)] for row in range(rows)]
    return top, [[figure.add_subplot(place) for place in row] for row in places]


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    return figure


def drawn(
    axes: Axes,
    name: str,
    *,
    suffix: str = "",
    columns: int = 2,
    handles: Sequence[Line2D] | None = None,
    **facts: Any,
) -> Drawing:
    """The figure of some axes, its topmost, with the words that ``figures.toml`` has for it.

    Args:
        axes: title and legend go above them.
        name: of its words, and with the suffix of the figure.
        suffix: tells figures of one kind apart.
        columns: of the legend.
        handles: of the legend; by default what has a label.
        facts: of which the words are made.
    """
    told = {
        key: " ".join(_TEMPLATES.from_string(text).render(facts).split())
        for key, text in _figure_words()[name].items()
    }
    axes.set(**{key: text for key, text in told.items() if key in ("xlabel", "ylabel")})
    head(axes, told["title"], columns=columns, handles=handles)
    return Drawing(name + suffix, told["alt"], told.get("caption", ""), _figure_of(axes))


@cache
def _figure_words() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("figures.toml").read_text(encoding="utf-8"))


_TEMPLATES = jinja2.Environment(undefined=jinja2.StrictUndefined)
_TEMPLATES.filters |= {"number": number, "percent": percent, "short": short}
_TEMPLATES.globals["shown_of"] = shown_of


def head(
    axes: Axes, title: str, *, columns: int = 2, handles: Sequence[Line2D] | None = None
) -> None:
    """Put the title above the axes, and the legend between them; then lay out the figure."""
    shown: Sequence[Any] = axes.get_legend_handles_labels()[0] if handles is None else handles
    place = (0.0, 7.0 + 14 * -(-len(shown) // columns))
    look: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    text = axes.annotate(title, (0, 1), place, fontsize=10.5, fontweight="bold", **look)
    legend = axes.legend(handles=shown, ncols=columns, loc="lower left", borderaxespad=0.0)
    legend.set_bbox_to_anchor((0, 1.03), transform=axes.transAxes)
    legend.set_visible(bool(shown))
    figure = _figure_of(axes)
    lay_out(figure)
    # Both begin where the labels of the axes do, in line with the caption.
    boxes = [box for each in figure.axes if (box := each.get_tightbbox()) is not None]
    start = axes.transAxes.inverted().transform((min(box.x0 for box in boxes), 0.0))[0]
    text.xy = (start, 1)
    legend.set_bbox_to_anchor((start, 1.03), transform=axes.transAxes)


def _figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def legend_inside(axes: Axes, **options: Any) -> None:
    """A legend within the axes, framed, so that lines of the grid do not look like its own."""
    axes.legend(frameon=True, borderpad=0.3, **options)


def look(number: int) -> tuple[str, str]:
    """Colour and marker of one of up to 30 things; no two are alike."""
    return COLOURS[number % len(COLOURS)], _MARKERS[number // len(COLOURS) % len(_MARKERS)]


def swatch(label: str, colour: str, dash: str = "-", marker: str = "") -> Line2D:
    """An entry of a legend."""
    style: Any = dash
    return Line2D([], [], color=colour, marker=marker, markersize=5, label=label, linestyle=style)


def name_panel(axes: Axes, text: str) -> None:
    """What one of several panels shows."""
    axes.set_title(text, loc="left", fontsize=8.5, pad=4)


def few_ticks(axes: Axes, which: str = "xy") -> None:
    """About three ticks on these axes, as small panels have room for."""
    for name in which:
        getattr(axes, f"{name}axis").set_major_locator(ticker.MaxNLocator(3))


def percentages(axes: Axes, which: str = "xy") -> None:
    """Shares as percentages on these axes."""
    for name in which:
        getattr(axes, f"{name}axis").set_major_formatter(ticker.PercentFormatter(1.0))


def identity(axes: Axes, *values: Array) -> None:
    """A dotted line on which both axes agree, as far as these values go."""
    if any(each.size for each in values):
        pooled = np.concatenate([each.ravel() for each in values])
        ends = [pooled.min(), pooled.max()]
        axes.plot(ends, ends, ":", color=SLATE, lw=1.2, zorder=0)


def points(axes: Axes, x: Any, y: Any, error: Any, colour: str = BLUE, **look: Any) -> None:
    """Marks with bars, of many numbers unless ``fmt`` has a line."""
    usual: dict[str, Any] = {"fmt": "o", "elinewidth": 0.7}
    if look.get("fmt", "o") == "o":
        usual |= {"mew": 0, "alpha": 0.7, "ecolor": SLATE}
    axes.errorbar(x, y, error, color=colour, **usual | look)


def against(axes: Axes, name: str, x: Array, y: Array, error: Array, **look: Any) -> None:
    """A small panel of this name on which x and y should agree."""
    points(axes, x, y, error, **look)
    identity(axes, x, y)
    few_ticks(axes)
    name_panel(axes, name)


def line(axes: Axes, x: Any, y: Any, style: str, colour: str, **look: Any) -> None:
    """A line, or marks, of one colour."""
    axes.plot(x, y, style, color=colour, **look)


def log_axis(axes: Axes, which: str = "x", subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """A logarithmic axis with plain numbers: the house style parses no mathematics."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def some(count: int, most: int) -> Array:
    """(k,) which of so many to show, as more would hide each other: always the same ones."""
    return np.random.default_rng(0).permutation(count)[:most]


def save(drawing: Drawing, folder: Path, *, svg: bool = True) -> None:
    """Write ``<name>.png`` and, if wanted, ``<name>.svg`` on white."""
    picture, box = io.BytesIO(), drawing.figure.bbox_inches.padded(0.12)
    with house_style():
        drawing.figure.savefig(picture, format="png", dpi=160, facecolor="white", bbox_inches=box)
    write_atomically(folder / f"{drawing.name}.png", picture.getvalue())
    if svg:
        head, body = _split(drawing.svg)
        white = '<rect width="100%" height="100%" fill="#ffffff"/>'
        write_atomically(folder / f"{drawing.name}.svg", f"{head}{white}{body}".encode())


def inline_svg(drawing: Drawing) -> str:
    """SVG to stand within HTML: colours of the page, its font, and ids of its own.

    It is hidden from screen readers; what contains it is to be labelled with ``drawing.alt``.
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
