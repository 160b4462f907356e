"""``covary serve``: a run behind an HTTP address."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from benchmarks import serving_fuzz
from covary import data, runs
from covary.runs import RunError
from covary.server import Limits, Served, running
from covary.server.batching import Batcher
from covary.server.counting import Counts
from covary.server.guard import is_loopback
from covary.server.http import MOST_HEAD
from covary.server.served import stamps_of
from covary.serving import Predictor
from tests.commands import covary, trained_run
from tests.servers import HOSTILE, frame, live, row, trained

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def prices(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("prices"), "<i>price")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("kinds"), "kind")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return trained_run(tmp_path_factory.mktemp("digits"), "digits", epochs=8, hidden=(32,)).path


@pytest.fixture(scope="module")
def table(prices):
    with live(prices, rows=20, body=20_000, seconds=5.0) as found:
        yield found


@pytest.fixture(scope="module")
def pictures(digits):
    with live(digits) as found:
        yield found


def rows_of(table, count: int) -> list[dict[str, Any]]:
    new = frame(count, seed=1).drop(columns=["<i>price", "kind", "country"])
    new["garden"] = new["garden"] == "true"
    return json.loads(new.to_json(orient="records"))


def test_rows_are_answered_as_the_predictor_does(prices, table):
    """All at once and one by one, over connections at the same time."""
    rows = rows_of(table, 12)
    rows[3]["income"], rows[4]["<b>city</b>"], rows[5]["rooms"] = 5000.0, "Rome", None
    expected = Predictor.load(prices)({name: [one[name] for one in rows] for name in rows[0]})
    whole = table.client.post("/predict", json=rows).json()
    assert whole["model"] == runs.open(prices).weights
    found = whole["predictions"]
    for name, values in expected.items():
        told = [one[name] for one in found]
        if values.dtype.kind == "f":
            np.testing.assert_allclose(told, values, rtol=1e-6)
        else:
            assert told == values.tolist()
    assert found[3]["reason"] == "income: off the data"
    assert "unseen 'Rome'" in found[4]["reason"]

    def ask(i: int) -> None:
        apart[i] = httpx.post(f"{table.url}/predict", json=[rows[i]]).json()["predictions"][0]

    apart: dict[int, dict[str, Any]] = {}
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for each in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            each(thread)
    for i, one in enumerate(found):
        for name, value in one.items():
            is_text = isinstance(value, str)
            assert apart[i][name] == (value if is_text else pytest.approx(value, rel=1e-4))


def test_classes_come_with_sets_and_probabilities(kinds):
    with live(kinds) as server:
        (found,) = server.client.post("/predict", json=[row()]).json()["predictions"]
        assert set(found["set"]) <= {HOSTILE, "a|b", "low"}
        assert found["prediction"] in found["set"]
        assert sum(found["probabilities"].values()) == pytest.approx(1, abs=1e-6)
        assert found["probability"] == found["probabilities"][found["prediction"]]
        assert found["flag"] in ("answer", "ask someone")
        explained = server.client.post("/explain", json=[row(income=9000.0)]).json()
        (told,) = explained["explanation"]
        assert told["variance"]["distance"] > 0
        schema = server.client.get("/schema").json()
        assert schema["classes"] == sorted([HOSTILE, "a|b", "low"])
        assert schema["targets"] == [{"name": "kind"}]


def test_images_in_every_form_are_answered_as_the_predictor_does(digits, pictures):
    images = data.load("digits").x_test[:3].numpy()
    expected = Predictor.load(digits)(images)["probability"]
    ask = lambda body: pictures.client.post("/predict", json=body.tolist())  # noqa: E731
    for form in (images, images[:, 0], images / 255, images.transpose(0, 2, 3, 1)):
        found = [one["probability"] for one in ask(form).json()["predictions"]]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    for one in (images[0], images[0, 0]):
        assert len(ask(one).json()["predictions"]) == 1
    file = io.BytesIO()
    Image.fromarray(images[0, 0]).save(file, "PNG")
    headers = {"content-type": "image/png"}
    found = pictures.client.post("/predict", content=file.getvalue(), headers=headers).json()
    assert found["predictions"][0]["probability"] == pytest.approx(expected[0], rel=1e-4)
    assert set(found["predictions"][0]["probabilities"]) == set(map(str, range(10)))


def test_variances_are_the_sum_of_their_parts(prices, table):
    reply = table.client.post("/explain", json=[row(income=400.0, income_error=5.0)]).json()
    (said,), (told,) = reply["predictions"], reply["explanation"]
    assert sum(told["variance"].values()) == pytest.approx(said["std"] ** 2, rel=1e-5)
    assert min(told["variance"].values()) > 0
    x, density = np.array(told["x"]), np.array(told["density"])
    assert np.trapezoid(density, x) == pytest.approx(1, abs=0.1)
    exact = table.client.post("/explain", json=[row(income_error=0.0)]).json()["explanation"]
    assert exact[0]["variance"]["input errors"] == exact[0]["variance"]["distance"] == 0
    refused = table.client.post("/explain", json=[row(), row()])
    assert refused.status_code == 422


BAD_BODIES = {
    "nothing": ("", "is no JSON"),
    "no JSON": ("[{", "is no JSON"),
    "an object": ("{}", "The body is an object; send a list of rows"),
    "an empty list": ("[]", "is an empty list"),
    "a number": ("[1]", "Row 1 is a number"),
    "NaN": ('[{"income": NaN}]', "NaN is no number of JSON; send null"),
    "a name": ('[{"incom": 1}]', "no value for 'income' (did you mean 'incom'?)"),
    "too deep": ("[" * 9000, "nested too deeply"),
    "bytes": (b"\xff\xfe\xfd", "UTF-8"),
    "huge": (json.dumps([row(rooms=7)]).replace("7", "1e999"), "infinite or beyond"),
    "many digits": (json.dumps([row(income=10**400)]), "infinite or beyond"),
    "too many digits": ("[" + "1" * 5000 + "]", "a whole number of thousands of digits; send"),
    "a list": (json.dumps([row(income=[1])]), "column 'income' holds values of type list"),
    "a text": (json.dumps([row(rooms="many")]), "the first 'many'"),
    "half a letter": (json.dumps([row(**{"<b>city</b>": "\ud800"})]), "lone surrogate"),
    "an error": (json.dumps([row(income_error=-1)]), "negative"),
    "too many": (json.dumps([row()] * 21), "21 rows, and 20 are taken at a time"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_rows_are_refused_with_a_sentence(name, table):
    body, told = BAD_BODIES[name]
    reply = table.client.post("/predict", content=body, headers=JSON)
    assert reply.status_code == 422
    assert told in reply.json()["error"]
    assert list(reply.json()) == ["error"]


BAD_IMAGES = {
    "ragged": ("[[[1, 2], [3]]]", "Lists of the body differ in length"),
    "a text": ('[[["a"]]]', "a text among its pixels"),
    "truth": ("[[[true]]]", "true or false among its pixels"),
    "the shape": (json.dumps([[[0] * 9] * 8]), "the run takes 8 x 8 pixels"),
    "too bright": (json.dumps([[[256] * 8] * 8]), "has the value 256"),
    "too large": (json.dumps([[[10**30] * 8] * 8]), "no number from 0 to 255"),
    "no floats": (json.dumps([[[1.5] * 8] * 8]), "has the value 1.5"),
    "too many": (json.dumps([[[0] * 8] * 8] * 1001), "1,001 images, and 1,000 are taken"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_bad_images_are_refused_with_a_sentence(name, pictures):
    body, told = BAD_IMAGES[name]
    reply = pictures.client.post("/predict", content=body, headers=JSON)
    assert reply.status_code == 422
    assert told in reply.json()["error"]


def test_what_is_no_png_is_refused_without_an_address_of_memory(pictures):
    headers = {"content-type": "image/png"}
    reply = pictures.client.post("/predict", content=b"GIF89a", headers=headers)
    assert reply.status_code == 422
    assert reply.json()["error"] == "The image is not a readable PNG file."


def test_long_bodies_are_refused_however_long_they_say_they_are(table):
    whole = b"[" + b" " * 30_000 + b"]"
    for content in (whole, iter([whole])):  # the second without a length
        reply = table.client.post("/predict", content=content, headers=JSON)
        assert reply.status_code == 413
        assert reply.headers["connection"] == "close"
        assert "longer than 20,000 bytes" in reply.json()["error"]


def test_types_and_compressed_bodies_are_refused(table):
    for headers, told in (
        ({"content-type": "text/plain"}, "send application/json"),
        ({"content-type": "image/png"}, "send application/json"),
        ({}, "send application/json"),
        ({**JSON, "content-encoding": "gzip"}, "is compressed"),
    ):
        reply = table.client.post("/predict", content=b"[]", headers=headers)
        assert reply.status_code == 415
        assert told in reply.json()["error"]


def test_other_pages_and_methods(table):
    assert table.client.get("/nothing").status_code == 404
    assert table.client.get("/predict/").status_code == 404
    assert table.client.get("/../../etc/passwd").status_code == 404
    assert table.client.get("/predict").status_code == 405
    assert "error" in table.client.put("/health").json()
    assert table.client.get("/health").json() == {"status": "ok"}
    ready = table.client.get("/ready").json()
    assert ready == {"status": "ready", "model": table.serving.served.digest}
    assert table.client.get("/").headers["x-content-type-options"] == "nosniff"


def test_nothing_of_the_pages_comes_from_elsewhere(table):
    assert next(iter(table.client.get("/openapi.json").json()["paths"])) == "/predict"
    policy = table.client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path in ("/", "/docs"):
        text = table.client.get(path).text
        assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", text)
        assert "onerror" not in text
        assert "income" not in text or path == "/docs"


def test_pages_of_the_web_cannot_ask_a_server_without_a_token(table):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        assert table.client.get("/schema", headers={"host": host}).status_code == 403
    for host in ("localhost", "localhost:1", "127.0.0.1", "[::1]:80", "LOCALHOST."):
        assert table.client.get("/schema", headers={"host": host}).status_code == 200


def test_a_token_is_needed_for_all_but_the_page_and_probes(prices, digits):
    token = "a-token-of-many-letters"
    with live(digits, token=token) as server:
        get = lambda path, given: server.client.get(  # noqa: E731
            path, headers=None if given is None else {"authorization": given}
        )
        for path in ("/", "/health", "/ready"):
            assert get(path, None).status_code == 200
        for path in ("/schema", "/metrics", "/docs", "/openapi.json", "/predict", "/nothing"):
            for given in (
                None,
                "Bearer",
                f"Bearer {token}x",
                f"Basic {token}",
                token,
                "Bearer \xe9",
            ):
                reply = get(path, given if given is None else given.encode("latin-1"))
                assert reply.status_code == 401, path
                assert "Authorization: Bearer TOKEN" in reply.json()["error"]
        assert get("/schema", f"Bearer {token}").status_code == 200
        # Whoever knows the token may come by any name.
        headers = {"authorization": f"Bearer {token}", "host": "models.example"}
        assert server.client.get("/schema", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("token", "host", "told"),
    [
        ("", "0.0.0.0", "set a token that clients have to send"),
        ("", "::", "COVARY_TOKEN="),
        ("short", "127.0.0.1", "16 printable characters"),
        ("sixteen letters\n!", "127.0.0.1", "printable"),
        ("sixteen letters \u00e9", "127.0.0.1", "ASCII"),
    ],
)
def test_tokens_that_keep_nobody_out(token, host, told):
    with pytest.raises(RunError, match=re.escape(told)):
        running.checked_token(token, host)


def test_which_hosts_are_this_machine():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")))
    assert not any(
        map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "", "localhost.x"))
    )


def test_a_full_queue_and_an_answer_that_takes_too_long(prices):
    with live(prices, seconds=0.4, queue=2) as server:
        go = threading.Event()
        compute = server.serving.batcher._compute
        server.serving.batcher._compute = lambda items: go.wait(5) and compute(items)
        statuses = []

        def ask():
            reply = httpx.post(f"{server.url}/predict", json=[row()])
            statuses.append((reply.status_code, reply.headers.get("retry-after"), reply.text))

        waiting = [threading.Thread(target=ask) for _ in range(2)]
        for thread in waiting:
            thread.start()
        while server.serving.pending < 2:
            time.sleep(0.01)
        refused = server.client.post("/predict", json=[row()])
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "2 requests wait" in refused.json()["error"]
        assert server.client.get("/health").status_code == 200
        for thread in waiting:
            thread.join()
        assert [each[:2] for each in statuses] == [(503, "1")] * 2
        assert "No answer within 0.4 seconds" in statuses[0][2]
        go.set()
        server.serving.batcher._compute = compute
        server.serving.limits = Limits()
        assert server.client.post("/predict", json=[row()]).status_code == 200
        assert server.serving.pending == 0


def test_a_body_that_does_not_come_is_not_waited_for(prices):
    with live(prices, seconds=0.3) as server, socket.create_connection(server.address) as wire:
        head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        wire.sendall(f"{head}Content-Length: 100\r\n\r\n[".encode())
        assert wire.recv(4096).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nLong: ",
        b"GET /",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n[\r\n0\r\nLong: ",
    ],
    ids=["header", "path", "trailer"],
)
def test_what_comes_before_or_after_a_body_has_a_limit(prices, begin):
    with live(prices) as server, socket.create_connection(server.address, 20) as wire:
        answer = b""
        with contextlib.suppress(ConnectionError):  # it hangs up while we send
            wire.sendall(begin)
            for _ in range(100):
                wire.sendall(b"a" * 2**16)
            pytest.fail("6 MB were taken")
        with contextlib.suppress(ConnectionError):
            answer = wire.recv(4096)
        assert b" 200 " not in answer
        assert server.client.get("/health").status_code == 200


def told_by(server: Any, sent: bytes) -> bytes:
    """All that a server answers on a connection, which it is asked to close."""
    answer = b""
    with socket.create_connection(server.address, 20) as wire:
        with contextlib.suppress(ConnectionError):  # it hangs up while we send
            wire.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while some := wire.recv(2**16):
                answer += some
    return answer


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 400), (10_000, 400), (200_000, 400)])
def test_a_head_of_the_limit_is_taken_and_no_longer_one(table, more, status):
    known = b"/healthHostlocalhostConnectioncloseLong", 3 * len(b": \r\n")
    value = b"a" * (MOST_HEAD - len(known[0]) - known[1] + more)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nLong: "
    answer = told_by(table, head + value + b"\r\n\r\n")
    is_whole = more < 2**16  # else the connection is reset, as more was sent than was read
    assert answer.startswith(b"HTTP/1.1 %d" % status) or not is_whole
    assert b" 200 " not in answer or status == 200
    if status == 400 and is_whole:
        told = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert told == {
            "error": "The first line and the headers, or trailers, are longer than 65,536 bytes."
        }


@pytest.mark.parametrize("pieces", [1, 7])
def test_an_offer_of_another_protocol_is_passed_over(table, pieces):
    """As clients of Java make it; a body is no request, and what follows it is one."""
    body = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    sent = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent += b"Content-Length: %d\r\n" % len(body) + offer + b"\r\n" + body
    good = json.dumps([row()]).encode()
    sent += sent.partition(b"Content-Length")[0] + b"Content-Length: %d\r\n" % len(good)
    sent += offer + b"\r\n" + good
    sent += b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.create_connection(table.address, 20) as wire:
        size = -(-len(sent) // pieces)
        for start in range(0, len(sent), size):
            wire.sendall(sent[start : start + size])
            time.sleep(0.05 * (pieces > 1))
        answer = b"".join(iter(lambda: wire.recv(2**16), b""))
    statuses = [int(each[:3]) for each in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [422, 200, 200]
    assert b'"predictions"' in answer


def test_a_tunnel_is_no_request(table):
    sent = b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\n\r\n"
    answer = told_by(table, sent)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b" 200 " not in answer


def test_what_was_taken_is_answered_before_the_server_ends(prices):
    with live(prices) as server:
        compute, began = server.serving.batcher._compute, threading.Event()

        def slowly(items):
            began.set()
            time.sleep(0.5)
            return compute(items)

        server.serving.batcher._compute = slowly
        found = []
        ask = lambda: found.append(httpx.post(f"{server.url}/predict", json=[row()]))  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        began.wait(5)
        while server.serving.pending < 3:
            time.sleep(0.01)
        server.server.should_exit = True
        for thread in threads:
            thread.join()
        assert [reply.status_code for reply in found] == [200] * 3


def wait_for(what, seconds: float = 20.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_files_that_change_while_they_are_read_are_no_model(prices, tmp_path, monkeypatch):
    run = Path(shutil.copytree(prices, tmp_path / "served"))
    load, times = Predictor.load, 0

    def changed(*args, **options):
        nonlocal times
        found = load(*args, **options)
        if times > 0:
            path = run / "schema.json"
            path.write_text(path.read_text() + " " * times)
        times -= 1
        return found

    monkeypatch.setattr(Predictor, "load", changed)
    times = 2
    with pytest.raises(runs.RunError, match="changed while they were read"):
        Served.load(run)
    times = 1  # as when it is fitted for the first time
    assert Served.load(run).stamps == stamps_of(run)


def test_a_new_model_is_loaded_without_a_dropped_request(prices, tmp_path, caplog):
    """Then a damaged one, which changes nothing, and the first one again."""
    caplog.set_level(logging.INFO, "covary.server")
    other = trained(tmp_path, "<i>price", "--seed", 1)
    for each in (prices, other):
        Predictor.load(each)
    run = Path(shutil.copytree(prices, tmp_path / "served"))
    first, second = (runs.open(each).weights for each in (prices, other))
    with live(run, look=0.05) as server:
        statuses, models, go_on = [], set(), True

        def ask():
            with httpx.Client(base_url=server.url) as client:
                while go_on:
                    reply = client.post("/predict", json=[row()])
                    statuses.append(reply.status_code)
                    models.add(reply.json()["model"])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        digest = lambda: server.serving.served.digest  # noqa: E731
        exchange(other, run)
        wait_for(lambda: digest() == second)
        whole = (run / "model.safetensors").read_bytes()
        (run / "new").write_bytes(whole[: len(whole) // 2])
        (run / "new").replace(run / "model.safetensors")
        wait_for(lambda: server.serving.trouble)
        ready = server.client.get("/ready")
        assert ready.status_code == 200
        assert ready.json()["model"] == second
        assert "the earlier model answers" in ready.json()["trouble"]
        exchange(prices, run)
        wait_for(lambda: digest() == first and not server.serving.trouble)
        go_on = False
        for thread in threads:
            thread.join()
        assert set(statuses) == {200}
        assert models == {first, second}
        text = server.client.get("/metrics").text
        assert "covary_reloads_total 2" in text
        assert "covary_failed_reloads_total 1" in text
    told = [record.getMessage() for record in caplog.records]
    assert {"reloaded", "reload failed", "stopped"} <= set(told)
    (failed,) = [record for record in caplog.records if record.getMessage() == "reload failed"]
    assert "model.safetensors is not a readable safetensors file" in failed.about["error"]


def exchange(source: Path, run: Path) -> None:
    for name in ("predictor.safetensors", "model.safetensors"):
        shutil.copy(source / name, run / "new")
        (run / "new").replace(run / name)


def test_a_signal_loads_the_run_again(prices):
    with live(prices, look=0.05) as server:
        before = server.serving.served
        server.serving.reload_soon()
        wait_for(lambda: server.serving.served is not before)
        assert server.serving.counts.reloads == 1


def test_an_end_does_not_wait_for_a_run_that_is_loaded_again(prices):
    steps_done: list[int] = []

    def slow(steps):
        for step in steps(range(3_000), "errors"):
            steps_done.append(step)
            time.sleep(0.01)

    with live(prices, look=0.01) as server:
        server.serving._load = slow
        server.serving.reload_soon()
        while not steps_done:
            time.sleep(0.01)
    assert len(steps_done) < 3_000


def test_a_network_of_nan_is_refused(prices, tmp_path):
    from safetensors.torch import load_file, save_file

    run = Path(shutil.copytree(prices, tmp_path / "run"))
    weights = load_file(run / "model.safetensors")
    save_file({k: v * float("nan") if "weight" in k else v for k, v in weights.items()},
              run / "model.safetensors")  # fmt: skip
    with pytest.raises(Exception, match=r"NaN|finite|nan"):
        Served.load(run)


def test_the_log_has_no_data(table, caplog):
    caplog.set_level(logging.INFO, "covary.server")
    table.client.post("/predict?secret=4711", json=[row(income=4711.4711)])
    table.client.post("/predict", content='[{"income": "4711"', headers=JSON)
    table.client.get("/4711")
    wait_for(lambda: len(caplog.records) >= 3)
    about = [record.about for record in caplog.records]
    assert "4711" not in json.dumps(about)
    assert about[0]["path"] == "/predict"
    assert about[0]["rows"] == 1
    assert about[0]["model"] == table.serving.served.digest
    assert [each["status"] for each in about] == [200, 422, 404]
    assert about[2]["path"] == "other"


def test_an_error_of_the_server_is_one_sentence(prices, caplog):
    caplog.set_level(logging.INFO, "covary.server")
    with live(prices) as server:
        compute = server.serving.batcher._compute

        def fails(items):
            raise ZeroDivisionError("4711")

        server.serving.batcher._compute = fails
        reply = server.client.post("/predict", json=[row()])
        assert reply.status_code == 500
        assert reply.json() == {"error": "The server failed at this request; its log says where."}
        server.serving.batcher._compute = compute
        assert server.client.post("/predict", json=[row()]).status_code == 200
    (error,) = [record.about for record in caplog.records if record.getMessage() == "error"]
    assert error["error"] == "ZeroDivisionError"
    assert "4711" not in json.dumps(error)
    assert any("fails" in place for place in error["where"])


def test_metrics_count_requests_rows_and_drift(prices):
    with live(prices) as server:
        like = rows_of(server, 40)
        far = [one | {"income": 900.0} for one in like]
        drift = lambda text: float(re.search(r'drift{score="novelty"} (\S+)', text)[1])  # noqa: E731
        server.client.post("/predict", json=like)
        near = server.client.get("/metrics").text
        server.client.post("/predict", json=far)
        server.client.post("/predict", json=[])
        text = server.client.get("/metrics").text
        assert drift(near) < 0.3
        assert drift(text) > 0.4
        assert 'covary_requests_total{path="/predict",status="200"} 2' in text
        assert 'covary_requests_total{path="/predict",status="422"} 1' in text
        assert "covary_rows_total 80" in text
        assert "covary_request_seconds_count 2" in text
        asked = int(re.search(r"covary_asked_rows_total (\d+)", text)[1])
        assert 40 <= asked <= 80
        assert f"covary_asked_share {asked / 80:.6f}" in text
        for line in text.splitlines():
            assert re.fullmatch(r'# (HELP|TYPE) covary_\w+ .+|covary_\w+({.*"})? [-+.\de]+', line)


def test_times_fall_into_their_bins():
    counts = Counts()
    for seconds in (0.001, 0.03, 0.03, 100.0):
        counts.request("/predict", 200, seconds)
    counts.request("/predict", 422, 0.001)
    text = counts.text({}, digest="d", waiting=0, batches=0)
    bins = dict(re.findall(r'bucket{le="(\S+)"} (\d+)', text))
    assert bins["0.005"] == "1"
    assert bins["0.05"] == "3"
    assert bins["10.0"] == "3"
    assert bins["+Inf"] == "4"


# Batches


def batched(scenario, compute, **options):
    """What a scenario of a batcher gives, and the batches that were computed."""
    seen = []

    def computed(items):
        seen.append(list(items))
        return compute(items)

    async def run():
        batcher = Batcher(computed, **{"most": 4, "wait": 0.05, **options})
        batcher.start()
        try:
            return await scenario(batcher)
        finally:
            await batcher.close()

    return asyncio.run(run()), seen


def double(items):
    return [2 * item for item in items]


def test_what_comes_together_is_computed_together():
    async def scenario(batcher):
        return await asyncio.gather(*(batcher(i, size=1, kind="k") for i in range(10)))

    found, seen = batched(scenario, double)
    assert found == [2 * i for i in range(10)]
    assert [len(batch) for batch in seen] == [4, 4, 2]


def test_kinds_and_large_items_are_batches_of_their_own():
    async def scenario(batcher):
        given = [(0, 1, "a"), (1, 1, "b"), (2, 1, "b"), (3, 9, "b"), (4, 1, "b")]
        asked = (batcher(item, size=size, kind=kind) for item, size, kind in given)
        return await asyncio.gather(*asked)

    found, seen = batched(scenario, double)
    assert found == [0, 2, 4, 6, 8]
    assert seen == [[0], [1, 2], [3], [4]]


def test_an_item_that_fails_fails_alone():
    def compute(items):
        if 2 in items:
            raise ValueError("two")
        return double(items)

    async def scenario(batcher):
        asked = (batcher(i, size=1, kind="k") for i in range(4))
        return await asyncio.gather(*asked, return_exceptions=True)

    found, _ = batched(scenario, compute)
    assert [found[i] for i in (0, 1, 3)] == [0, 2, 6]
    assert isinstance(found[2], ValueError)


def test_what_nobody_waits_for_is_not_computed():
    async def scenario(batcher):
        first = asyncio.ensure_future(batcher(1, size=1, kind="k"))
        second = asyncio.ensure_future(batcher(2, size=1, kind="k"))
        await asyncio.sleep(0.01)
        first.cancel()
        return await second

    found, seen = batched(scenario, double)
    assert found == 4
    assert seen == [[2]]


def test_what_nobody_waits_for_is_not_computed_alone_either():
    def compute(items):
        time.sleep(0.1)
        if len(items) > 1:
            raise ValueError("together")
        return double(items)

    async def scenario(batcher):
        asked = [asyncio.ensure_future(batcher(i, size=1, kind="k")) for i in range(4)]
        await asyncio.sleep(0.05)  # they are computed together
        asked[2].cancel()
        return [await each for i, each in enumerate(asked) if i != 2]

    found, seen = batched(scenario, compute)
    assert found == [0, 2, 6]
    assert seen == [[0, 1, 2, 3], [0], [1], [3]]


def test_what_comes_while_it_ends_is_told_so():
    def compute(items):
        time.sleep(0.2)
        return double(items)

    async def scenario(batcher):
        first = asyncio.ensure_future(batcher(1, size=9, kind="k"))
        await asyncio.sleep(0.05)
        ending = asyncio.ensure_future(batcher.close())
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="ended"):
            await asyncio.wait_for(batcher(2, size=1, kind="k"), 5)
        await ending
        batcher._task = None
        return await first

    found, seen = batched(scenario, compute)
    assert found == 2
    assert seen == [[1]]


def test_what_was_taken_is_computed_before_the_end():
    async def scenario(batcher):
        asked = [asyncio.ensure_future(batcher(i, size=1, kind=i)) for i in range(5)]
        await asyncio.sleep(0)
        await batcher.close()
        with pytest.raises(RuntimeError, match="ended"):
            await batcher(9, size=1, kind="k")
        batcher._task = None
        return [each.result() for each in asked]

    found, _ = batched(scenario, double)
    assert found == [0, 2, 4, 6, 8]


# The command


def test_the_command_serves_until_a_signal(digits):
    token = "a-token-of-many-letters"
    command = [sys.executable, "-c", "from covary.cli import app; app()", "serve", str(digits)]
    process = subprocess.Popen(
        [*command, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COVARY_TOKEN": token, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout
    started = json.loads(process.stdout.readline())
    assert started["event"] == "started"
    headers = {"authorization": f"Bearer {token}"}
    image = [[0] * 8] * 8
    reply = httpx.post(f"{started['url']}predict", json=image, headers=headers)
    assert reply.status_code == 200
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] for line in lines] == ["request", "stopped"]
    assert f"is at {started['url']} until Ctrl-C" in said
    assert token not in out + said


def test_a_port_in_use_and_a_host_without_a_token(digits, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = covary("serve", digits, "--port", port, code=1)
        assert f"Port {port} of 127.0.0.1 is in use. Choose another (--port)" in flat(said)
    monkeypatch.delenv("COVARY_TOKEN", raising=False)
    assert "set a token" in flat(covary("serve", digits, "--host", "0.0.0.0", code=1))
    monkeypatch.setenv("COVARY_TOKEN", "a-token-of-many-letters")
    said = flat(covary("serve", digits, "--host", "no.such.host.invalid", code=1))
    assert "no address 'no.such.host.invalid'" in said


def flat(text: str) -> str:
    return " ".join(text.split())


def test_runs_that_cannot_be_served(digits, tmp_path):
    said = flat(covary("serve", tmp_path / "nothing", "--port", 0, code=1))
    assert "no run" in said or "is not there" in said
    run = Path(shutil.copytree(digits, tmp_path / "run"))
    (run / "model.safetensors").unlink()
    said = flat(covary("serve", run, "--port", 0, code=1))
    assert "is not trained to its end" in said
    said = flat(covary("serve", digits, "--port", 0, "--level", 1, code=2))
    assert "--level" in said
    assert "wait must be" in flat(covary("serve", digits, "--batch-ms", 1e6, code=2))


def test_a_missing_library_is_named():
    code = """
import sys
sys.modules["fastapi"] = None
from covary.cli import app
app(["serve", "nothing"])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "covary serve needs fastapi: pip install 'covary[serve]'" in flat(ran.stderr)


# Requests that no client should send


@pytest.mark.parametrize("name", ["table", "pictures"])
def test_fuzzed_requests_are_refused_or_answered(name, request, monkeypatch):
    server = request.getfixturevalue(name)
    schema = server.client.get("/schema").json()
    # So that bodies that never come are told soon.
    monkeypatch.setattr(server.serving, "limits", replace(server.serving.limits, seconds=1.0))
    found = asyncio.run(serving_fuzz.fuzzed(server.address, schema, 110, seed=0))
    found["sound request afterwards"] = "200"
    assert serving_fuzz.broken_promises({name: found}) == []
    assert len(found["outcomes"]) == len(serving_fuzz.KINDS)
    assert server.client.get("/health").status_code == 200
    wait_for(lambda: server.serving.pending == 0)
