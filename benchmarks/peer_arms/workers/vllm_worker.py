"""vLLM behind the worker protocol: one engine, stepped with a set number of requests in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from protocol import serve


def start(options: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """Load the engine in this process: its own core process would spin while it waits."""
    import vllm
    from vllm import EngineArgs, LLMEngine

    arguments = EngineArgs(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=options["max_length"],
        max_num_seqs=options["max_num_seqs"],
        speculative_config=options["speculative"],
        enforce_eager=options["eager"],
        seed=0,
        disable_log_stats=True,
    )
    engine = LLMEngine.from_engine_args(arguments)
    return lambda block: answer(engine, block), {"version": vllm.__version__}


def answer(engine: Any, block: dict[str, Any]) -> dict[str, Any]:
    """Answer a block of token-id prompts greedily; times in seconds from a request's own submission.

    A request's passes are the steps that gave it a token: the target was run once for each of them.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine.reset_prefix_cache()
    params = SamplingParams(
        temperature=0.0,
        max_tokens=block["max_tokens"],
        stop_token_ids=block["eos"],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    waiting = deque(enumerate(block["prompts"]))
    begun: dict[str, float] = {}
    found: list[dict[str, Any]] = [{} for _ in block["prompts"]]
    begin = time.perf_counter()
    running = 0
    while waiting or running:
        while waiting and running < block["concurrency"]:
            place, ids = waiting.popleft()
            begun[str(place)] = time.perf_counter()
            engine.add_request(str(place), {"prompt_token_ids": ids}, params)
            found[place] = {"tokens": [], "ttft": None, "seconds": 0.0, "passes": 0}
            running += 1
        for output in engine.step():
            now = time.perf_counter() - begun[output.request_id]
            entry = found[int(output.request_id)]
            tokens = list(output.outputs[0].token_ids)
            if tokens:
                entry["passes"] += 1
                entry["tokens"] += tokens
                entry["ttft"] = now if entry["ttft"] is None else entry["ttft"]
            if output.finished:
                entry["seconds"] = now
                running -= 1
    return {"answers": found, "seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    serve(start)
