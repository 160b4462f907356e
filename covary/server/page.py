"""The page of a server: one file, in which nothing is of the run; its script asks for that."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files


def _packaged(room: str, name: str) -> str:
    return (files(f"covary.{room}") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE = _packaged("report", "page.css") + _packaged("server", "page.css")
_SCRIPT = _packaged("server", "page.js")
PAGE = _packaged("server", "page.html").replace("/*style*/", _STYLE).replace("/*script*/", _SCRIPT)
# The browser runs this script alone, whatever else came to stand in the page.
POLICY = (
    f"default-src 'none'; style-src {_digest(_STYLE)}; script-src {_digest(_SCRIPT)}; "
    "connect-src 'self'; img-src blob: data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEAD, _, _ = PAGE.partition("<body")
PLAIN = (
    _HEAD.replace("{", "{{").replace("}", "}}")
    + "<body class=plain><main><h1>{title}</h1>\n{content}</main></body>\n</html>\n"
)
