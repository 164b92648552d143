"""What only a CUDA device can show: recorded passes, no waiting for the device, bfloat16."""

from __future__ import annotations

import warnings

import pytest
import torch

from drafts.kinds.base import DraftRow
from drafts.mixture import Mixture
from drafts.proposal import Proposal
from osd.serve.device_choice import answers, sampled_rows
from osd.serve.graphs import CudaRecorder, GraphedTarget
from osd.serve.load import build_target
from osd.serve.noise import RequestNoise
from osd.serve.philox import philox_words
from osd.serve.target import PassRow
from osd.serve.verify import verify_batch
from osd.types import SamplingParams
from tests.osd.draft_rig import eagle
from tests.osd.engine_rig import Branching, Client, Forced, greedy, make_engine, prompts
from tests.osd.passes import feed, plain_logits, random_text
from tests.osd.recorders import packed
from tests.osd.test_device_choice import SHAPES, a_pass
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


def test_the_devices_words_are_the_hosts() -> None:
    positions = torch.tensor([0, 7, 2**40])
    keys = torch.tensor([[42, -1, 2**62], [0, 3, 1]])
    asked = (keys, positions, torch.tensor([0, 1, 2]), torch.arange(2000))
    assert torch.equal(philox_words(*(item.cuda() for item in asked)).cpu(), philox_words(*asked))


@pytest.mark.parametrize("seed", range(4))
def test_sampled_verification_on_the_device_equals_the_hosts(seed: int) -> None:
    logits, *rest = a_pass(seed, 333, requests=30)
    assert verify_batch(logits.cuda(), *rest) == verify_batch(logits, *rest)


def test_verification_waits_for_nothing_but_its_answers() -> None:
    """Greedy and sampled rows, noise that is there already and noise that has to be made."""
    logits, offsets, proposals, _, noises, positions = a_pass(3, 333, requests=30)
    asked = sampled_rows([True] * 30, offsets, proposals, SHAPES * 3, noises, positions)
    there = logits.cuda()
    expected = answers(there, asked)
    later = [item._replace(position=item.position + 100) for item in asked]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = answers(there, asked)
        moved = answers(there, later)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
    assert moved.shape == expected.shape


def test_drafting_waits_once_a_depth() -> None:
    """Greedy and sampled rows of the head; a depth's guesses decide on the host what is read next."""
    target = on_gpu()
    source, depth = eagle(target), 4

    def rows() -> list[DraftRow]:
        generator = torch.Generator().manual_seed(6)
        made = []
        for index in range(3):
            features = torch.randn(64, target.feature_width, generator=generator).cuda()
            made.append(DraftRow(f"r{index}", "base", random_text(9 + index, seed=index), 4, features))
            if index:
                made[-1].temperature, made[-1].noise = 0.9, RequestNoise(index, 0, VOCAB)
        return made

    expected = source.propose(rows(), [depth] * 3)
    again = rows()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            found = source.propose(again, [depth] * 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found == expected
    assert all(len(proposal) == depth for proposal in found)
    assert len([wait for wait in waits if "synchroniz" in str(wait.message)]) == depth


def test_sampled_answers_are_the_same_with_drafts_from_the_head_and_without() -> None:
    target = on_gpu()
    asked = prompts(6, seed=4, lengths=(5, 21, 9))
    texts = []
    for drafter in (None, Mixture({"eagle": eagle(target)})):
        client = Client(make_engine(target=target, drafter=drafter, slots=3))
        for index, prompt in enumerate(asked):
            shape = SHAPES[index % len(SHAPES)].model_dump(include={"temperature", "top_p", "top_k", "min_p"})
            client.submit(f"r{index}", prompt, max_tokens=20, seed=index, **shape)
        texts.append(client.run())
        rounds = [item for outcome in client.outcomes.values() for item in outcome.record.rounds]
    assert texts[0] == texts[1]
    assert len(texts[0]) == len(asked)
    assert any(item.proposed for item in rounds)


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
