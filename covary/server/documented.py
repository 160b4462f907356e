"""What the interface says of itself: OpenAPI, and a page of it that needs nothing else."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

from covary.server.bodies import JSON, PNG
from covary.server.page import PLAIN

DESCRIPTION = (
    "Predictions of a covary run, with how sure each is and when to ask someone. Errors are an "
    "object with one sentence, `error`."
)
_TOLD = {
    400: "The request is no HTTP that this server understands.",
    404: "There is no such page; /docs has those that there are.",
    405: "This page takes another method; /docs says which.",
    500: "The server failed at this request; its log says where.",
}
_BODIES: dict[str, dict[str, Any]] = {
    JSON: {
        "schema": {"type": "array", "items": {}},
        "examples": {
            "rows of a table": {"value": [{"income": 3.2, "city": "Oslo"}]},
            "one image of 2 x 2 pixels": {"value": [[[0, 128], [255, 64]]]},
        },
    },
    PNG: {"schema": {"type": "string", "format": "binary"}},
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": told,
        "content": {
            JSON: {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}
        },
    }
    for status, told in {
        401: "the token is missing or wrong",
        403: "a server without a token was asked by another name than localhost",
        408: "the body did not come in time",
        413: "the body is too long",
        415: "the body is of another type, or compressed",
        422: "the rows cannot be read, or are too many",
        429: "too many requests wait: try again",
        503: "there was no time for an answer",
    }.items()
}
_ANSWERS = {
    "description": "for each row `prediction`, its error bar or probabilities, `novelty`, `flag`, "
    "`reason`; and the digest of the `model`",
    "content": {JSON: {"schema": {"type": "object"}}},
}
PREDICT: dict[str, Any] = {
    "summary": "Predict rows of a table, or images",
    "description": "Rows are a list of objects, by the names of the columns (`/schema` has "
    "them), null where a value is missing. Images are nested lists of numbers (whole ones from 0 "
    "to 255, or floating point numbers from 0 to 1), or one PNG. Predictions are in the order of "
    "the rows.",
    "openapi_extra": {"requestBody": {"required": True, "content": _BODIES}},
    "responses": {200: _ANSWERS},
}
EXPLAIN: dict[str, Any] = {
    **PREDICT,
    "summary": "Predict one row or image, and say what the answer is made of",
    "description": "As `/predict`, of one row. `explanation` has, for each target, points of its "
    "density (`x`, `density`), and the parts of its variance; of classes, the parts of the "
    "variance of the predicted one's calibrated logit.",
}


def told(status: int) -> str:
    """A sentence for a status that the framework gave."""
    return _TOLD.get(status, "The request was refused.")


def page(openapi: dict[str, Any]) -> str:
    """The interface to read."""
    parts = [f"<p>{_marked(DESCRIPTION)}</p>"]
    for path, methods in openapi["paths"].items():
        for method, about in methods.items():
            parts.append(f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>")
            words = (f"{about['summary']}.", about.get("description", ""))
            parts += [f"<p>{_marked(each)}</p>" for each in words if each]
    parts.append("<h2>Bodies</h2>")
    for kind, form in _BODIES.items():
        for name, example in form.get("examples", {"one image": {"value": "a PNG file"}}).items():
            told = json.dumps(example["value"])
            parts.append(f"<h3>{escape(kind)}: {escape(name)}</h3><pre>{escape(told)}</pre>")
    rows = {200: _ANSWERS, **REFUSALS}.items()
    cells = (f"<th scope=row>{s}</th><td>{_marked(each['description'])}</td>" for s, each in rows)
    listed = "".join(f"<tr>{each}</tr>" for each in cells)
    parts.append(f"<h2>Answers</h2><table><tbody>{listed}</tbody></table>")
    return PLAIN.format(title="covary serve: the interface", content="\n".join(parts))


def _marked(text: str) -> str:
    """Text as HTML, with what stands between backticks as code."""
    return re.sub("`(.*?)`", r"<code>\1</code>", escape(text))
