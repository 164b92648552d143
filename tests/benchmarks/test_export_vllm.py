"""Exported drafts in vLLM itself, in the environment that ``make peers-venv`` makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from peer_arms.measured import Prompt
from peer_arms.process import ProcessArm
from peer_arms.venv import default_venv, interpreter, vllm_environment

from drafts.eagle3 import FORMATS, SPECULATIVE_TOKENS, read_eagle3
from osd.learn.simulate import mean_accepted_length, right_flags
from osd.serve.embedded import embedded_folder
from router.app import export as app
from router.app.traffic import TrafficItem
from router.config import load_config

pytestmark = [pytest.mark.slow, pytest.mark.real_models, pytest.mark.timeout(1200)]


@pytest.mark.skipif(
    not (default_venv() / ".complete").exists(), reason="vLLM is not installed here: make peers-venv"
)
@pytest.mark.parametrize("form", FORMATS)
def test_a21_vllm_accepts_as_much_of_an_exported_draft_as_we_do(tmp_path: Path, form: str) -> None:
    config, folder = load_config("demo"), tmp_path / "draft"
    app.export("math", form, folder, config, None, approximate=True)
    target, tokenizer = app.load_plain_target(config)
    answers = app.greedy_answers(target, tokenizer, app.prompts_of("base", config))
    said = [answer.tokens[answer.prompt_length :].tolist() for answer in answers]
    head = read_eagle3(folder)
    flags = right_flags(head.trunk, target.embedding, head.output, answers, SPECULATIVE_TOKENS)
    ours = mean_accepted_length(flags, SPECULATIVE_TOKENS)

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
