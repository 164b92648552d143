"""FlashSpec behind the worker protocol: its prompt-lookup drafter, one request after the other.

No smaller model shares the target's tokenizer, so lookup is the drafter that it can use here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from protocol import serve


def start(options: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """Load the target and the engine over it."""
    import flashspec
    import torch
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import NgramDrafter, TargetModel
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, options["dtype"])
    device = torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype)
    config = FlashSpecConfig(
        device="cpu",
        drafter_strategy="bandit",
        bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(temperature=0.0),
    )
    target = TargetModel(options["model"], device, dtype, model=model)
    engine = SpeculativeEngine(config, [NgramDrafter()], target)
    return lambda block: answer(engine, block), {"version": flashspec.__version__}


def answer(engine: Any, block: dict[str, Any]) -> dict[str, Any]:
    """Answer a block in turn; the library reports no time of the first token."""
    import torch

    found = []
    begin = time.perf_counter()
    for ids in block["prompts"]:
        started = time.perf_counter()
        result = engine.generate(
            torch.tensor([ids]), max_new_tokens=block["max_tokens"], eos_token_ids=block["eos"]
        )
        tokens = result.output_ids[0, : result.n_tokens_generated].tolist()
        seconds = time.perf_counter() - started
        found.append({"tokens": tokens, "ttft": None, "seconds": seconds, "passes": len(result.arm_steps)})
    return {"answers": found, "seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    serve(start)
