"""What a server takes at most, and the refusal of what is beyond it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a server takes at most.

    A body is in memory from when it comes until it is answered, so all of them take at most
    ``queue * body`` bytes.

    Attributes:
        body: bytes of a request's body.
        rows: rows or images in a request.
        queue: requests that are being read, wait or are computed; others are refused (429).
        seconds: that a request may take.
        batch: rows that are computed together.
        wait: seconds that the first request of a batch waits for others.
    """

    body: int = 4 * 2**20
    rows: int = 1000
    queue: int = 128
    seconds: float = 10.0
    batch: int = 256
    wait: float = 0.002

    def __post_init__(self) -> None:
        for name in ("body", "rows", "queue", "seconds", "batch"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}.")
        if not 0 <= self.wait <= self.seconds:
            raise ValueError(
                f"wait must be from 0 to the time of a request, {self.seconds:g} seconds, got "
                f"{self.wait:g}."
            )


class Refused(Exception):  # noqa: N818 - no error of the server's
    """A request that gets no prediction: the status of HTTP, and one sentence."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
