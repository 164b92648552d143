from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from router.app.server import listen
from tests.router.serving import wait_until

SCRIPT = """
import sys
from router.app.server import run
from router.config import ServerConfig
from tests.router.fake_engine import FakeEngine

class Engine(FakeEngine):
    def close(self):
        super().close()
        print("closed", self.closed, flush=True)

run(lambda: Engine(delay=0.02), ServerConfig(port=int(sys.argv[1])), log_level="warning")
print("left", flush=True)
"""

FAILING = """
from drafts.errors import InvalidValueError
from router.app.server import run
from router.config import ServerConfig

def load():
    raise InvalidValueError("target.model", "nope", "an existing folder")

try:
    run(load, ServerConfig(port=0), log_level="warning")
except InvalidValueError as error:
    print("told:", error)
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True, cwd=root
    )


def free_port() -> int:
    with listen("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_b30_sigterm_lets_streams_finish_then_saves_and_leaves_with_zero() -> None:
    port = free_port()
    server = start(SCRIPT, str(port))
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: answers(url), seconds=120)
    body = {
        "messages": [{"role": "user", "content": "go"}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 150,
    }
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body | {"ignore_eos": True}, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    output, _ = server.communicate(timeout=60)
    assert output.split() == ["closed", "1", "left"]
    assert server.returncode == 0


def test_a_second_signal_leaves_at_once() -> None:
    port = free_port()
    server = start(SCRIPT.replace("super().close()", "import time; time.sleep(600)"), str(port))
    wait_until(lambda: answers(f"http://127.0.0.1:{port}"), seconds=120)
    server.send_signal(signal.SIGTERM)
    wait_until(lambda: not answers(f"http://127.0.0.1:{port}"), seconds=60)
    time.sleep(1.0)
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_target_that_cannot_be_loaded_ends_the_server_with_its_reason() -> None:
    output, _ = start(FAILING).communicate(timeout=120)
    assert "told: target.model: got 'nope'; an existing folder" in output
