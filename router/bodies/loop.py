"""The engine's thread: steps while there is work, sleeps while there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from osd.serve.engine import IDLE_WAIT, Engine


class EngineLoop:
    """Runs an engine core on its own thread until it is told to stop.

    Args:
        core: The engine.
        housekeeping: Called on the engine's thread between steps; must decide quickly that there is
            nothing to do.
    """

    def __init__(self, core: Engine, housekeeping: Callable[[], None] = lambda: None) -> None:
        self._core = core
        self._housekeeping = housekeeping
        self._stopping = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._beat = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._running is not None and not self._running.done()

    @property
    def seconds_since_beat(self) -> float:
        """Seconds since the last step border; large when a step is stuck."""
        return time.monotonic() - self._beat

    def start(self, thread: ThreadPoolExecutor) -> None:
        """Run on ``thread`` from now on; it is shut down at the end."""
        self._thread = thread
        self._running = thread.submit(self._run)

    def stop(self, timeout: float | None = None) -> None:
        """Finish what runs and waits, then end the thread."""
        self._core.intake.close()
        self._stopping.set()
        self._core.intake.wake()
        if self._running is not None and self._thread is not None:
            wait([self._running], timeout)
            self._thread.shutdown(wait=False)

    def _run(self) -> None:
        while True:
            self._beat = time.monotonic()
            worked = self._core.step()
            self._housekeeping()
            if self._stopping.is_set() and not self._core.rows and not len(self._core.intake):
                return
            if not worked:
                self._core.intake.wait(IDLE_WAIT)
