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
from drafts.data import TRUNK
from drafts.eagle3 import FORMATS, SPECULATIVE_TOKENS
from drafts.registry import Registry
from drafts.trunk import Trunk
from osd.learn.simulate import mean_accepted_length, right_flags
from osd.serve.embedded import embedded_folder
from router.app import export as app
from router.app.traffic import TrafficItem
from router.config import load_config

pytestmark = [pytest.mark.slow, pytest.mark.real_models, pytest.mark.timeout(1200)]


NOISE = 0.25
"""Of the expert's matrices: it then drafts plainly worse than the trunk, and far better than nothing."""

DOMAIN = "math"


def without_bias(file: Path) -> Trunk:
    """The shipped trunk without the bias of its outputs, which EAGLE-3 does not have, saved to ``file``."""
    trunk = Trunk.load(TRUNK)
    trunk.tensors["output_bias"].zero_()
    trunk.save(file)
    return Trunk.load(file)


def publish_expert(state: Path, trunk: Trunk, rank: int | Literal["full"]) -> Expert:
    """An expert far from the trunk, served by :data:`DOMAIN` in the state folder."""
    bank = ExpertBank(trunk, rank, capacity=1)
    bank.add(DOMAIN)
    expert = bank.tensors(DOMAIN)
    generator = torch.Generator().manual_seed(4)
    for name in expert:
        if name.endswith("_b"):
            expert[name] = NOISE * torch.randn(expert[name].shape, generator=generator)
    registry = Registry(state / "versions", trunk=trunk.fingerprint())
    registry.publish(DOMAIN, expert, reason="made for this test")
    return expert


@pytest.mark.skipif(
    not (default_venv() / ".complete").exists(), reason="vLLM is not installed here: make peers-venv"
)
@pytest.mark.parametrize("form", FORMATS)
def test_a21_vllm_accepts_as_much_of_an_exported_expert_as_we_do(tmp_path: Path, form: str) -> None:
    demo, folder, state = load_config("demo"), tmp_path / "draft", tmp_path / "state"
    trunk = without_bias(tmp_path / "trunk.safetensors")
    eagle = demo.drafts.eagle.model_copy(update={"trunk": str(tmp_path / "trunk.safetensors")})
    config = demo.model_copy(update={"drafts": demo.drafts.model_copy(update={"eagle": eagle})})
    expert = publish_expert(state, trunk, eagle.rank)
    exported = app.export(DOMAIN, form, folder, config, state, approximate=False)
    assert (exported.version, exported.lost) == (Registry(state / "versions").current(DOMAIN).number, None)

    target, tokenizer = app.load_plain_target(config)
    answers = app.greedy_answers(target, tokenizer, app.prompts_of("base", config))
    said = [answer.tokens[answer.prompt_length :].tolist() for answer in answers]

    def tau(deltas: Expert | None) -> float:
        output = target.output_weight[trunk.token_ids].float()
        flags = right_flags(trunk, target.embedding.float(), output, answers, SPECULATIVE_TOKENS, deltas)
        return mean_accepted_length(flags, SPECULATIVE_TOKENS)

    ours = tau(expert)
    assert tau(None) > 1.1 * ours, "vLLM with the bare trunk would pass for the expert"

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
    assert ours > 1.3
