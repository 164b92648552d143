"""What only a CUDA device can show: recorded passes, no waiting for the device, bfloat16."""

from __future__ import annotations

import pytest
import torch

from drafts.proposal import Proposal
from osd.serve.graphs import CudaRecorder, GraphedTarget
from osd.serve.load import build_target
from osd.serve.target import PassRow
from osd.serve.verify import verify_batch
from osd.types import SamplingParams
from tests.osd.engine_rig import Branching, Client, Forced, greedy, make_engine, prompts
from tests.osd.passes import feed, plain_logits, random_text
from tests.osd.recorders import packed
from tests.tiny import VOCAB, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def on_gpu(kind: str = "llama", dtype: torch.dtype = torch.float32) -> GraphedTarget:
    target = build_target(tiny_model(kind).to("cuda", dtype), name=kind)
    assert isinstance(target, GraphedTarget)
    assert isinstance(target.recorder, CudaRecorder)
    return target


@pytest.mark.parametrize("kind", ["llama", "llama-bias", "llama3-rope", "qwen3", "gemma"])
def test_recorded_pass_equals_the_packed_one(kind: str) -> None:
    target = on_gpu(kind)
    cache = target.make_cache(4, 300, keep_features=True)
    for slot in range(4):
        cache.acquire()
        feed(target, cache, slot, random_text(20 + 70 * slot, seed=slot))
    replays = target.replays
    for turn in range(6):
        rows = [
            PassRow(slot, cache.lengths[slot], random_text(4, seed=9 * turn + slot), (-1, -1, 0))
            for slot in range(turn % 4 + 1)
        ]
        found = target.forward(cache, rows).logits
        assert float((found - packed(target, cache, rows).logits).abs().max()) <= TOLERANCE
    assert target.replays == replays + 6


def test_a_replayed_text_equals_the_plain_models() -> None:
    target = on_gpu()
    cache = target.make_cache(1, 128, keep_features=False)
    cache.acquire()
    text = random_text(60, seed=2)
    found = feed(target, cache, 0, text, chunk=5)
    assert float((found - plain_logits(target.reference, text)).abs().max()) <= TOLERANCE
    assert len(target.graphs(cache)) == 1


def test_a_replayed_pass_never_waits_for_the_device() -> None:
    """Between the tokens of two steps the host may only queue work; then one copy brings the tokens."""
    target = on_gpu()
    cache = target.make_cache(2, 64, keep_features=True)
    for _ in range(2):
        cache.acquire()
    rows = [PassRow(0, 0, [3, 4, 5], (-1, -1)), PassRow(1, 0, [6])]
    expected = target.forward(cache, rows).logits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = target.forward(cache, rows).logits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


def test_greedy_verification_on_the_device_equals_the_hosts() -> None:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0))
    proposals = [Proposal.chain([int(row.argmax()) for row in logits[:3]], "x", [0.5] * 3), Proposal()]
    shared = ([0, 4], proposals, [SamplingParams(temperature=0.0)] * 2, [None] * 2, [0, 0])
    assert verify_batch(logits.cuda(), *shared) == verify_batch(logits, *shared)


@pytest.mark.parametrize("source", [None, Forced, Branching])
def test_engine_gives_the_text_that_the_plain_model_gives_on_the_cpu(source: type[Forced] | None) -> None:
    asked = prompts(7, seed=3, lengths=(5, 40, 9))
    answers = [greedy(prompt, 20) for prompt in asked]
    wanted = {tuple(prompt): [*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)}

    def script(row, limit):
        text = wanted[tuple(row.tokens[: row.prompt_length])]
        return text[len(row.tokens) : len(row.tokens) + limit]

    target = on_gpu()
    client = Client(make_engine(source(script) if source else None, target=target, slots=3, evidence_k=8))
    for index, prompt in enumerate(asked):
        client.submit(f"r{index}", prompt, max_tokens=20)
    found = client.run()
    assert [list(found[f"r{index}"]) for index in range(len(asked))] == answers
    assert target.replays > 10


def test_bfloat16_stays_close_to_the_plain_model() -> None:
    target = on_gpu("qwen3", torch.bfloat16)
    cache = target.make_cache(1, 64, keep_features=True)
    cache.acquire()
    text = random_text(20, seed=9)
    found, expected = feed(target, cache, 0, text, chunk=7), plain_logits(target.reference, text)
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) <= 0.05 * float(expected.abs().max())


def test_graphs_off_launches_every_kernel() -> None:
    target = build_target(tiny_model().to("cuda"), name="off", graphs="off")
    assert not isinstance(target, GraphedTarget)
