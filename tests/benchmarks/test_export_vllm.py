"""Exported drafts in vLLM itself, in the environment that ``make peers-venv`` makes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from peer_arms.measured import Prompt
from peer_arms.process import ProcessArm
from peer_arms.venv import default_venv, interpreter, vllm_environment

from drafts.bank import Expert, ExpertBank
from drafts.eagle3 import FORMATS, SPECULATIVE_TOKENS, read_eagle3
from drafts.registry import Registry
from drafts.trunk import Trunk
from osd.learn.simulate import mean_accepted_length, right_flags
from osd.serve.embedded import embedded_folder
from router.app import export as app
from router.app.traffic import TrafficItem
from router.bodies.parts import load_trunk
from router.config import load_config

SCALE = 0.1
"""Of the deltas: enough to be seen in what is accepted, and little enough that something is."""

pytestmark = [pytest.mark.slow, pytest.mark.real_models, pytest.mark.timeout(1200)]


def publish_expert(trunk: Trunk, rank: int | Literal["full"], state: Path) -> Expert:
    """An expert of random deltas, served for maths from a state folder."""
    bank = ExpertBank(trunk, rank)
    bank.add("math")
    generator = torch.Generator().manual_seed(0)
    expert = {
        name: SCALE * torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        for name, tensor in bank.tensors("math").items()
    }
    registry = Registry(state / "versions", trunk=trunk.fingerprint())
    registry.publish("math", bank.tensors("math"), reason="born")
    registry.publish("math", expert, reason="random")
    return expert


@pytest.mark.skipif(
    not (default_venv() / ".complete").exists(), reason="vLLM is not installed here: make peers-venv"
)
@pytest.mark.parametrize("form", FORMATS)
def test_a21_vllm_accepts_as_much_of_an_exported_draft_as_we_do(tmp_path: Path, form: str) -> None:
    config, folder, state = load_config("demo"), tmp_path / "draft", tmp_path / "state"
    target, tokenizer = app.load_plain_target(config)
    trunk = load_trunk(config, target)
    assert trunk is not None
    expert = publish_expert(trunk, config.drafts.eagle.rank, state)
    app.export("math", form, folder, config, state, approximate=True)
    answers = app.greedy_answers(target, tokenizer, app.prompts_of("base", config))
    said = [answer.tokens[answer.prompt_length :].tolist() for answer in answers]

    def tau(trunk: Trunk, output: torch.Tensor, expert: Expert | None = None) -> float:
        flags = right_flags(trunk, target.embedding, output, answers, SPECULATIVE_TOKENS, expert)
        return mean_accepted_length(flags, SPECULATIVE_TOKENS)

    head, reduced = read_eagle3(folder), target.output_weight[trunk.token_ids]
    ours, served, bare = tau(head.trunk, head.output), tau(trunk, reduced, expert), tau(trunk, reduced)
    assert abs(served - bare) > 0.1, "an expert that changes nothing could be left out unseen"
    assert ours == pytest.approx(served, rel=0.05), "only the bias is lost, which EAGLE-3 lacks"

    options = {
        "model": str(embedded_folder()),
        "dtype": "float32",
        "max_length": 1024,
        "max_num_seqs": 8,
        "speculative": {
            "method": "eagle3",
            "model": str(folder),
            "num_speculative_tokens": SPECULATIVE_TOKENS,
        },
        "eager": True,
    }
    prompts = [
        Prompt(TrafficItem(i, i, ()), tuple(answer.tokens[: answer.prompt_length].tolist()))
        for i, answer in enumerate(answers)
    ]
    log = tmp_path / "vllm.log"
    arm = ProcessArm(
        interpreter(default_venv()),
        "vllm_worker.py",
        options,
        vllm_environment(default_venv()),
        log,
        concurrency=1,
        eos=sorted(target.eos_token_ids),
        note=form,
        start_seconds=600.0,
    )
    try:
        run = arm.run(prompts, app.ANSWER_TOKENS)
    finally:
        arm.close()
    theirs = [run.answers[i] for i in range(len(answers))]
    equal = [list(answer.tokens) == tokens for answer, tokens in zip(theirs, said, strict=True)]
    assert sum(equal) >= len(equal) - 1, "one near tie at most may part two engines"
    tokens = sum(len(answer.tokens) - 1 for answer in theirs)
    passes = sum((answer.passes or 0) - 1 for answer in theirs)
    assert tokens / passes == pytest.approx(ours, rel=0.03)
    assert ours > 1.5
