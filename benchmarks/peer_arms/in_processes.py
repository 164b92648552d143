"""The arms of vLLM and FlashSpec, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_arms.measured import ArmUnavailableError
from peer_arms.process import ProcessArm
from peer_arms.venv import ensure_venv, threads, vllm_environment

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SPECULATIVE: dict[str, dict[str, Any] | None] = {
    "vllm": None,
    "vllm_ngram": NGRAM,
    "vllm_suffix": {"method": "suffix"},
}
"""vLLM's ``speculative_config`` by arm; suffix decoding keeps vLLM's defaults."""


@dataclass
class PeerProcesses:
    """Starts the arms that run in the peers' environment.

    Args:
        venv: The environment's folder; made on first use.
        model: Folder of the target.
        dtype: Number type of weights and computation.
        max_length: Most tokens of prompt and answer together.
        logs: Folder for what the workers print.
        eager: Run vLLM without compilation.
    """

    venv: Path
    model: Path
    dtype: str
    max_length: int
    logs: Path
    eager: bool = False

    def __post_init__(self) -> None:
        self._failure: ArmUnavailableError | None = None

    def arm(self, name: str, concurrency: int, eos: Sequence[int]) -> ProcessArm:
        """Start an arm.

        Raises:
            ArmUnavailableError: With the reason.
        """
        python = self._python()
        if name == "flashspec":
            environment = {"OMP_NUM_THREADS": str(threads()), "HF_HUB_OFFLINE": "1"}
            note = "FlashSpec with its prompt-lookup drafter, one after the other"
            return ProcessArm(
                python,
                "flashspec_worker.py",
                {"model": str(self.model), "dtype": self.dtype},
                environment,
                self.logs / f"{name}.log",
                concurrency=concurrency,
                eos=eos,
                note=note,
            )
        if self.eager:
            return self._vllm(python, name, concurrency, eos, eager=True)
        try:
            return self._vllm(python, name, concurrency, eos, eager=False)
        except ArmUnavailableError as error:
            print(f"  {name} does not start with compilation ({error}); without it now", flush=True)
            return self._vllm(python, name, concurrency, eos, eager=True)

    def _vllm(
        self, python: Path, name: str, concurrency: int, eos: Sequence[int], *, eager: bool
    ) -> ProcessArm:
        speculative = SPECULATIVE[name]
        options: dict[str, Any] = {
            "model": str(self.model),
            "dtype": self.dtype,
            "max_length": self.max_length,
            "max_num_seqs": max(16, concurrency),
            "speculative": speculative,
            "eager": eager,
        }
        kind = "no speculation" if speculative is None else f"speculative_config {speculative}"
        kind += ", without compilation" if eager else ""
        return ProcessArm(
            python,
            "vllm_worker.py",
            options,
            vllm_environment(self.venv),
            self.logs / f"{name}.log",
            concurrency=concurrency,
            eos=eos,
            note=f"vLLM's CPU build, {kind}, {concurrency} in flight",
        )

    def _python(self) -> Path:
        """The interpreter; an installation that failed once is not tried again in this run."""
        if self._failure is not None:
            raise self._failure
        try:
            return ensure_venv(self.venv)
        except ArmUnavailableError as error:
            self._failure = error
            raise
