"""What a server counts, as Prometheus reads it."""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

# Upper ends of the bins of seconds.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# The last rows, whose scores are compared with those of held-out ones; of fewer than the least
# there is nothing to say.
_LAST, _LEAST = 2048, 30


class Counts:
    """Requests, times, rows, and scores of the last rows; all on the event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.rows = self.asked = self.reloads = self.failed_reloads = 0
        self._bins, self._seconds, self._timed = [0] * (len(_SECONDS) + 1), 0.0, 0
        self._scores: dict[str, deque[float]] = {}

    def request(self, path: str, status: int, seconds: float) -> None:
        """A request was answered; those with predictions are timed."""
        self.requests[path, status] += 1
        if path in ("/predict", "/explain") and status == 200:
            self._bins[bisect.bisect_left(_SECONDS, seconds)] += 1
            self._seconds += seconds
            self._timed += 1

    def answered(self, rows: int, asked: int, **scores: Iterable[float]) -> None:
        """Rows were predicted; for how many someone is to be asked, and scores of each."""
        self.rows += rows
        self.asked += asked
        for name, values in scores.items():
            self._scores.setdefault(name, deque(maxlen=_LAST)).extend(values)

    def forget_scores(self) -> None:
        """Those of an earlier model are not to be compared."""
        self._scores.clear()

    def drift(self, held_out: dict[str, NDArray[np.float64]]) -> dict[str, float]:
        """The largest difference of distribution functions, 0 to 1, of each score."""
        return {
            name: _difference(np.array(self._scores[name]), values)
            for name, values in held_out.items()
            if len(self._scores.get(name, ())) >= _LEAST
        }

    def text(
        self,
        held_out: dict[str, NDArray[np.float64]],
        *,
        digest: str,
        waiting: int,
        batches: int,
    ) -> str:
        """All of it, in the text format of Prometheus."""
        lines = _described("requests_total", "counter", "Requests answered, by path and status.")
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'covary_requests_total{{path="{path}",status="{status}"}} {count}')
        name = "request_seconds"
        lines += _described(name, "histogram", "Time of requests that were answered.")
        total = 0
        for most, count in zip((*_SECONDS, "+Inf"), self._bins, strict=True):
            total += count
            lines.append(f'covary_{name}_bucket{{le="{most}"}} {total}')
        lines += [f"covary_{name}_sum {self._seconds:.6f}", f"covary_{name}_count {self._timed}"]
        for name, kind, meaning, value in (
            ("rows_total", "counter", "Rows or images predicted.", self.rows),
            ("asked_rows_total", "counter", "Of these, those flagged to ask someone.", self.asked),
            ("batches_total", "counter", "Batches computed.", batches),
            ("waiting_requests", "gauge", "Requests being read, waiting or computed.", waiting),
            ("reloads_total", "counter", "Models loaded in place of an earlier one.", self.reloads),
            ("failed_reloads_total", "counter", "Models that did not load.", self.failed_reloads),
        ):
            lines += [*_described(name, kind, meaning), f"covary_{name} {value}"]
        share = self.asked / self.rows if self.rows else 0.0
        lines += _described("asked_share", "gauge", "Share of rows flagged to ask someone.")
        lines.append(f"covary_asked_share {share:.6f}")
        told = f"Largest difference of distribution functions, last {_LAST} rows and held-out rows."
        lines += _described("score_drift", "gauge", told)
        for score, drift in self.drift(held_out).items():
            lines.append(f'covary_score_drift{{score="{score}"}} {drift:.6f}')
        lines += _described("model_info", "gauge", "The model that answers, by its digest.")
        lines.append(f'covary_model_info{{digest="{digest}"}} 1')
        return "\n".join(lines) + "\n"


def _described(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP covary_{name} {meaning}", f"# TYPE covary_{name} {kind}"]


def _difference(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The statistic of Kolmogorov and Smirnov, of two samples (n,) and (m,)."""
    points = np.concatenate([one, other])
    shares = [
        np.searchsorted(np.sort(each), points, side="right") / len(each) for each in (one, other)
    ]
    return float(np.abs(shares[0] - shares[1]).max())
