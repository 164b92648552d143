"""The environment of the peers: made on first use, apart from the project's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from osd.serve.embedded import default_cache_dir
from peer_arms.measured import ArmUnavailableError

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
OPTIONAL = ("arctic-inference==0.3.0", "flashspec==0.3.1")
"""What single arms need. Installed by themselves and without their dependencies, which are there already."""

UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Come with vLLM, are built for another torch than its CPU build, and break its import."""


def default_venv() -> Path:
    """Where the environment is made unless told otherwise."""
    return default_cache_dir() / "peers-venv"


def interpreter(venv: Path) -> Path:
    """The environment's Python."""
    return venv / "bin" / "python"


def ensure_venv(venv: Path) -> Path:
    """Make the environment unless it is there and whole; returns its interpreter. Takes minutes and 3 GB.

    Raises:
        ArmUnavailableError: pip could not install vLLM; the message holds its last lines.
    """
    python, done = interpreter(venv), venv / ".complete"
    wanted = REQUIREMENTS.read_text(encoding="utf-8") + "\n".join(OPTIONAL)
    if python.exists() and done.exists() and done.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making the peers' environment in {venv} (minutes, 3 GB) ...", flush=True)
    venv.parent.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(venv)])
    _run([*_pip(python), "install", "--requirement", str(REQUIREMENTS)])
    _run([*_pip(python), "uninstall", "--yes", *UNWANTED])
    for package in OPTIONAL:
        try:
            _run([*_pip(python), "install", "--no-deps", package])
        except ArmUnavailableError as error:
            print(f"without {package}: {error}", flush=True)
    done.write_text(wanted, encoding="utf-8")
    return python


def threads() -> int:
    """Threads of a peer: as many as torch takes in this process."""
    cores = len(os.sched_getaffinity(0))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(wanted), cores) if wanted.isdigit() and int(wanted) else cores


def vllm_environment(venv: Path) -> dict[str, str]:
    """Variables for vLLM on a CPU as its installation guide advises, in one process.

    Its worker processes would get these OpenMP settings from vLLM; here the engine runs in the worker
    itself, because vLLM's own scheduler process spins while idle and would slow the other arms.
    ``KMP_BLOCKTIME`` (ms) is vLLM's own value: threads sleep 5 ms after the last parallel region.
    """
    cores = sorted(os.sched_getaffinity(0))[: threads()]
    libraries = [*_found(_TCMALLOC, 1), *map(str, venv.glob("lib/libiomp5.so"))]
    places = ",".join(map(str, cores))
    return {
        "LD_PRELOAD": ":".join(libraries),
        "OMP_NUM_THREADS": str(len(cores)),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{places}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(venv / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(venv / "inductor-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def preloaded(venv: Path) -> list[str]:
    """Names of the libraries that vLLM runs with, for the result."""
    return [Path(path).name for path in vllm_environment(venv)["LD_PRELOAD"].split(":") if path]


_TCMALLOC = tuple(
    f"/usr/lib/{folder}{name}"
    for folder in ("x86_64-linux-gnu/", "aarch64-linux-gnu/", "", "../lib64/")
    for name in ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
)


def _found(paths: tuple[str, ...], count: int) -> list[str]:
    return [path for path in paths if Path(path).exists()][:count]


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise ArmUnavailableError(f"{' '.join(command[1:5])} failed: {last}")
