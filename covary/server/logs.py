"""What a server says: an object of JSON in each line of standard output, without the data."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_logger = logging.getLogger("covary.server")


class _AsJson(logging.Formatter):
    """A record as a line: when, what, and what is known of it."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(
            timespec="milliseconds"
        )
        about = getattr(record, "about", {})
        found = {"time": when, "event": record.getMessage(), **about}
        if record.exc_info and record.exc_info[1] is not None:
            found |= {"event": "error", **told_error(record.exc_info[1])}
        return json.dumps(found)


def told_error(error: BaseException) -> dict[str, Any]:
    """What an error is, and where it was raised; its message may have data in it."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    where = [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames]
    return {"error": type(error).__name__, "where": where}


def log(event: str, **about: Any) -> None:
    """Say that something happened."""
    _logger.info(event, extra={"about": about})


def say_all(requests: bool) -> None:
    """Send all to standard output; without ``requests``, not those."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_AsJson())
    if not requests:
        handler.addFilter(lambda record: record.getMessage() != "request")
    for name, level in (("covary.server", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
