from __future__ import annotations

from starlette.testclient import TestClient

from router.app.http import create_app
from router.config import ServerConfig
from tests.router.fake_engine import FakeEngine
from tests.router.http_rig import CHAT, body, error_of, whole


def test_b28_two_apps_in_one_process_keep_their_metrics_apart(engine: FakeEngine) -> None:
    first, second = TestClient(create_app(engine)), TestClient(create_app(engine))
    whole(first, CHAT)
    assert "request_success_total{" in first.get("/metrics").text
    assert "request_success_total{" not in second.get("/metrics").text


def test_domains_are_listed_registered_and_removed(client: TestClient) -> None:
    names = [row["name"] for row in client.get("/v1/domains").json()["data"]]
    assert names == ["base", "math", "code"]
    created = client.post(
        "/v1/domains", json={"name": "poems", "description": "verse", "examples": ["a sonnet"]}
    )
    assert created.status_code == 201
    assert created.json()["name"] == "poems"
    assert "requests" in created.json()
    error_of(client.post("/v1/domains", json={"name": "poems"}))
    error_of(client.post("/v1/domains", json={"name": "x", "exampels": []}))
    assert client.delete("/v1/domains/poems").json()["deleted"] is True
    assert "code" in error_of(client.delete("/v1/domains/poems"), 404)["message"]


def test_unknown_paths_methods_models_and_bodies_get_the_same_error_shape(client: TestClient) -> None:
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get(CHAT), 405)
    assert error_of(client.post(CHAT, json=body(CHAT, model="other")), 404)["code"] == "model_not_found"
    assert (
        "not JSON"
        in error_of(client.post(CHAT, content=b"{", headers={"content-type": "application/json"}))["message"]
    )


def test_a_body_over_the_limit_is_refused_with_the_limit() -> None:
    client = TestClient(create_app(FakeEngine(), ServerConfig(max_request_bytes=1024)))
    assert "1024 bytes" in error_of(client.post(CHAT, json=body(CHAT, "x" * 2000)), 413)["message"]
    assert whole(client, CHAT)[1] == "stop"
