"""``covary serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from covary.cli.common import DataDir, Debug, RunPath, quoted, reported, say, wrong_use
from covary.cli.predict import Conformal, Coverage, Level, Risk, check_answering

Host = Annotated[
    str,
    typer.Option(
        "--host",
        help="Address to listen at. Any but loopback needs a token, in $COVARY_TOKEN.",
    ),
]
Port = Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0 is any that is free.")]
Body = Annotated[
    float, typer.Option("--max-body", min=0, help="Megabytes of a request's body (413).")
]
Rows = Annotated[int, typer.Option("--max-rows", min=1, help="Rows or images of a request (422).")]
Queue = Annotated[
    int, typer.Option("--queue", min=1, help="Requests that may wait at a time (429).")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0, help="Seconds that a request may take (503).")
]
Batch = Annotated[int, typer.Option("--batch-rows", min=1, help="Rows computed together.")]
Wait = Annotated[
    float,
    typer.Option("--batch-ms", min=0, help="Milliseconds that the first request waits for others."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="That compute.", show_default="a core less than there are"
    ),
]
Log = Annotated[
    bool, typer.Option("--log/--no-log", help="A line for each request on standard output.")
]


@reported
def serve(
    run: RunPath,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    level: Level = 0.9,
    conformal: Conformal = False,
    risk: Risk = None,
    coverage: Coverage = None,
    max_body: Body = 4.0,
    max_rows: Rows = 1000,
    queue: Queue = 128,
    timeout: Timeout = 10.0,
    batch_rows: Batch = 256,
    batch_ms: Wait = 2.0,
    threads: Threads = None,
    requests: Log = True,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Serve a run by HTTP, with a page to try it at /.

    POST /predict takes rows as JSON, or an image as JSON or PNG; /docs has the rest. Requests of
    all connections are computed together. Standard output has an object of JSON for each request,
    without the data.

    Of a table or of images. When files of the run change, it is loaded again, and no request is
    dropped; what cannot be loaded changes nothing.

    Examples:

    - `covary serve runs/houses`
    - `COVARY_TOKEN=$(openssl rand -hex 24) covary serve runs/mnist --host 0.0.0.0`
    """
    check_answering(level, risk, coverage)
    from covary.server import Limits
    from covary.server import serve as run_server

    with wrong_use():
        limits = Limits(
            body=int(max_body * 2**20), rows=max_rows, queue=queue, seconds=timeout,
            batch=batch_rows, wait=batch_ms / 1000,
        )  # fmt: skip
    _use_threads(threads)
    run_server(
        run, host=host, port=port, limits=limits, requests=requests, level=level,
        conformal=conformal, risk=risk, coverage=coverage, data_dir=data_dir,
        started=lambda url, served: say(
            f"{quoted(run)} (model {served.digest[:12]}) is at {url} until Ctrl-C."
        ),
    )  # fmt: skip


def _use_threads(threads: int | None) -> None:
    """One core is left to connections, as far as torch was not told otherwise."""
    import torch

    torch.set_num_threads(threads or max(1, torch.get_num_threads() - 1))
