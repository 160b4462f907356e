"""The figure of a comparison with other methods: Comparison -> Drawing."""

from __future__ import annotations

from covary.compare import Comparison
from covary.report import drawing as draw
from covary.report.words import number
from covary.uncertainty.metrics import METRICS


@draw.house_style()
def drawings(comparison: Comparison) -> list[draw.Drawing]:
    """How good predictions are, against the seconds of fitting; of each group the best method."""
    metric = METRICS["nll" if comparison.task == "classification" else "crps"]
    best: dict[str, tuple[float, float, str]] = {}
    for row in comparison.rows:
        known = [row.summary.get(key) for key in (metric.name, "fit_seconds")]
        value, seconds = (None if one is None else one.mean for one in known)
        if value is not None and seconds:
            found = value, seconds, row.method
            best[row.group] = min(found, best.get(row.group, found))
    if not best:
        return []
    (axes,) = draw.canvas(4.2)
    handles = []
    for place, (value, seconds, name) in enumerate(best.values()):
        colour, marker = draw.look(place)
        draw.line(axes, [seconds], [value], marker, colour, ms=5.0)
        handles.append(draw.swatch(name, colour, "", marker))
    draw.log_axis(axes)
    said = [f"{name} {number(v)} in {number(s)} s" for v, s, name in best.values()]
    return [draw.drawn(axes, "comparison", handles=handles, metric=metric, said=said)]
