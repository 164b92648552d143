"""Where a result comes from: enough to run it again."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "polydraft",
    "torch",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "scikit-learn",
    "numpy",
)


ELSEWHERE = re.compile(r"(^|[=,\s])(?:~|\.\.)?/(?:[^=,\s/]*/)*")
"""Folders of paths that do not lie below the working folder, in an argument, a list or ``name=path``."""


def provenance(seed: int | None, **extra: Any) -> dict[str, Any]:
    """Commit, command line of this process, seed, versions and machine of this run.

    Files outside the working folder are told by their names alone: a result says what was run, and not on
    whose machine.

    Args:
        seed: The run's seed.
        **extra: Anything else that shaped the run, for example the config's path.
    """
    return {
        "commit": commit(),
        "command": command_line(),
        "seed": seed,
        "versions": versions(),
        "machine": machine(),
        **{
            name: without_folders(value) if isinstance(value, str) else value for name, value in extra.items()
        },
    }


def command_line() -> str:
    """This process's own command line, see :func:`without_folders`."""
    return shlex.join(map(without_folders, [Path(sys.argv[0]).name, *sys.argv[1:]]))


def without_folders(word: str) -> str:
    """``word`` with paths outside the working folder cut to their last part."""
    return ELSEWHERE.sub(r"\1", word)


def commit() -> str:
    """The source tree's commit, ``+`` appended when files differ from it; ``unknown`` for a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, cores, memory (GiB) and accelerator."""
    import psutil
    import torch

    accelerator = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "accelerator": accelerator,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
