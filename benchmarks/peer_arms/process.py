"""Arms in processes of their own: started with the environment of their engine, killed whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peer_arms.measured import Answer, ArmUnavailableError, BlockRun, Prompt

WORKERS = Path(__file__).parent / "workers"
START_SECONDS = 1200.0
"""Longest start: the first one compiles kernels."""

BLOCK_SECONDS = 3600.0
"""Longest block; a worker that needs more is taken for stuck."""


class ProcessArm:
    """A worker of ``workers/``: one JSON object a line, in and out.

    The worker and all it starts form a process group, which :meth:`close` kills; the worker itself also
    ends with this process, should that be killed.

    Args:
        python: Interpreter of the worker's environment.
        worker: File name of the worker.
        options: What the worker starts with.
        environment: Variables beyond this process's own.
        log: File for what the worker prints.
        concurrency: Requests in flight.
        eos: Tokens that end an answer.
        note: How it is run.

    Raises:
        ArmUnavailableError: It does not start; the message is the worker's own reason.
    """

    def __init__(
        self,
        python: Path,
        worker: str,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        *,
        concurrency: int,
        eos: Sequence[int],
        note: str,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.concurrency = concurrency
        self.eos = sorted(eos)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [str(python), str(WORKERS / worker), json.dumps(dict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            facts = self._answer(start_seconds)
        except BaseException:
            self.close()
            raise
        self.note = f"{note}, version {facts['version']}"

    def run(self, block: Sequence[Prompt], max_tokens: int) -> BlockRun:
        """Have the worker answer the block; the engine of this process must be at rest."""
        request = {
            "prompts": [list(prompt.ids) for prompt in block],
            "concurrency": self.concurrency,
            "max_tokens": max_tokens,
            "eos": self.eos,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ArmUnavailableError(f"its process is gone ({error})") from None
        result = self._answer(BLOCK_SECONDS)
        answers = {
            prompt.index: Answer(tuple(a["tokens"]), a["seconds"], a["ttft"], a["passes"])
            for prompt, a in zip(block, result["answers"], strict=True)
        }
        return BlockRun(answers, result["seconds"])

    def close(self) -> None:
        """Kill the worker and everything it started; harmless when called twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise ArmUnavailableError(f"no answer within {seconds:.0f} s") from None
        if line is None:
            raise ArmUnavailableError(f"its process ended with status {self._process.wait()}; see its log")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise ArmUnavailableError(str(message["error"]).replace(str(Path.home()), "~")[:500])
        return message
