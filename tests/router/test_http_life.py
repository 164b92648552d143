from __future__ import annotations

import httpx
import pytest
from starlette.testclient import TestClient

from drafts.errors import BusyError, PolydraftError
from router.app.deferred import DeferredEngine
from router.app.http import create_app
from tests.router.fake_engine import FakeEngine
from tests.router.http_rig import CHAT, TEXT, body, error_of, events, whole
from tests.router.serving import live_server, wait_until


def test_b05_a_client_that_hangs_up_frees_its_slot_streaming_or_not() -> None:
    engine = FakeEngine(delay=0.01, slots=2)
    long = body(CHAT, max_tokens=100_000, ignore_eos=True)
    with live_server(engine) as url, httpx.Client(base_url=url, timeout=20) as client:
        for _ in range(50):
            with client.stream("POST", CHAT, json={**long, "stream": True}) as response:
                assert next(response.iter_lines()).startswith("data: ")
            wait_until(lambda: engine.running == 0)
        for path in (CHAT, TEXT):
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body(path, max_tokens=100_000, ignore_eos=True), timeout=0.3)
            wait_until(lambda: engine.running == 0)
        assert client.post(CHAT, json=body(CHAT)).status_code == 200
        assert "polydraft:num_requests_in_flight 0.0" in client.get("/metrics").text


def test_b05_a_client_that_leaves_before_the_first_byte_is_noticed() -> None:
    engine = FakeEngine(delay=0.01, slots=1)
    with live_server(engine) as url, httpx.Client(base_url=url, timeout=20) as client:
        long = body(CHAT, max_tokens=100_000, ignore_eos=True, stream=True)
        with client.stream("POST", CHAT, json=long) as holder:
            next(holder.iter_lines())
            with client.stream("POST", CHAT, json=long):
                pass
        wait_until(lambda: engine.running == 0)


def test_errors_of_the_engine_keep_status_and_code_and_unexpected_ones_tell_nothing() -> None:
    problems = {
        "busy": BusyError("full"),
        "boom": RuntimeError("secret"),
        "odd": PolydraftError("step failed"),
    }
    client = TestClient(
        create_app(FakeEngine(fail=lambda prompt: problems.get(prompt))), raise_server_exceptions=False
    )
    busy = client.post(CHAT, json=body(CHAT, "busy"))
    assert error_of(busy, 503)["code"] == "busy"
    assert int(busy.headers["Retry-After"]) > 0
    assert "secret" not in error_of(client.post(CHAT, json=body(CHAT, "boom")), 500)["message"]
    assert error_of(client.post(CHAT, json=body(CHAT, "odd")), 500)["type"] == "server_error"
    chunks = events(client.post(CHAT, json=body(CHAT, "busy", stream=True)))
    assert chunks[-1]["error"]["code"] == "busy"


def test_ready_turns_true_only_when_the_engine_has_loaded() -> None:
    gate: list[FakeEngine] = []

    def load() -> FakeEngine:
        wait_until(lambda: bool(gate))
        return gate[0]

    deferred = DeferredEngine(load, model_name="soon").start()
    client = TestClient(create_app(deferred))
    assert client.get("/health").status_code == 200
    assert (client.get("/ready").status_code, client.get("/ready").json()["model"]) == (503, "soon")
    assert error_of(client.post(CHAT, json=body(CHAT)), 503)["code"] == "not_ready"
    assert "polydraft:engine_ready 0.0" in client.get("/metrics").text
    gate.append(FakeEngine())
    wait_until(lambda: deferred.ready)
    assert client.get("/ready").status_code == 200
    assert whole(client, CHAT)[1] == "stop"
    deferred.close()
    deferred.close()
    assert gate[0].closed == 1
    assert client.get("/ready").status_code == 503


def test_the_event_loop_stays_free_while_answers_are_generated() -> None:
    engine = FakeEngine(delay=0.05, slots=64)
    with live_server(engine) as url, httpx.Client(base_url=url, timeout=20) as client:
        long = body(CHAT, max_tokens=100_000, ignore_eos=True, stream=True)
        streams = [client.stream("POST", CHAT, json=long) for _ in range(45)]
        for stream in streams:
            stream.__enter__()
        wait_until(lambda: engine.running == 45)
        assert client.get("/health").status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)
        wait_until(lambda: engine.running == 0)
