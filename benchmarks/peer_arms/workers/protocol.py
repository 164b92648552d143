"""One JSON object a line: what a worker process reads and writes. Standard library only.

A worker lives in the environment of the engine it runs, so nothing of this project is imported here. While
it waits for the next line it blocks in a read: it takes no processor time from the arm that runs then.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

_DIE_WITH_PARENT = 1


def serve(start: Callable[[dict[str, Any]], tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]]) -> None:
    """Start the engine with the options of the command line, then answer blocks until the input ends.

    Args:
        start: Takes the options; returns what answers a block, and facts for the result.
    """
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the engine prints must not end up among the answers

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        answer, facts = start(json.loads(sys.argv[1]))
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True, **facts})
    for line in sys.stdin:
        try:
            say(answer(json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})
