from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from router.app.http import create_app
from tests.router.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return TestClient(create_app(engine), raise_server_exceptions=False)
