"""The rule for all rows at once: the walk's own answers, and one read by the host.

Nothing here needs an accelerator: the batched rule is asked on a processor, and a device without values
("meta") refuses whatever would have to look at one.
"""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts.proposal import ROOT, Proposal
from osd.serve import verify as verify_module
from osd.serve.device_choice import SampledRow, answers, sampled_rows
from osd.serve.device_noise import ROWS_AT_ONCE
from osd.serve.noise import RequestNoise
from osd.serve.processor import LogitsProcessor
from osd.serve.shaping import TargetNumericsError
from osd.serve.verify import target_token, verify_batch
from osd.types import SamplingParams
from tests import host_reads
from tests.osd.toy_target import A11, GREEDY, chain, tree

SHAPES = [
    GREEDY,
    A11,
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1e-3),
    SamplingParams(temperature=0.5, top_k=1),
    SamplingParams(temperature=1.5, top_k=5, top_p=0.7123),
    SamplingParams(temperature=0.8, top_p=0.9501),
    SamplingParams(temperature=2.0, top_p=0.9999, min_p=0.0201),
    SamplingParams(temperature=1.0, min_p=0.1003),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=1e-9),
]


def a_pass(seed, size, requests=14, scale=3.0):
    """Logits, and the arguments of a verification of chains and trees, some of whose guesses are right."""
    rng = random.Random(seed)
    params = [rng.choice(SHAPES) for _ in range(requests)]
    noises = [RequestNoise(rng.randrange(-(2**63), 2**64), rng.randrange(3), size) for _ in params]
    positions = [rng.choice([0, 5, 2**33]) for _ in params]
    parents = [[rng.randrange(ROOT, i) for i in range(rng.randrange(6))] for _ in params]
    offsets = [sum(1 + len(nodes) for nodes in parents[:index]) for index in range(requests)]
    rows = sum(1 + len(nodes) for nodes in parents)
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale
    proposals = []
    for index, nodes in enumerate(parents):
        tokens = []
        for depth, parent in zip(tree([0] * len(nodes), nodes).depths, nodes, strict=True):
            before = logits[offsets[index] + 1 + parent]
            truth = target_token(before, params[index], noises[index], positions[index] + depth - 1)
            tokens.append(truth if rng.random() < 0.7 else rng.randrange(size))
        proposals.append(tree(tokens, nodes))
    return logits, offsets, proposals, params, noises, positions


@pytest.fixture
def batched(monkeypatch):
    """Verification as on an accelerator."""
    monkeypatch.setattr(verify_module, "on_accelerator", lambda logits: True)


@given(
    seed=st.integers(0, 10**6), size=st.sampled_from([2, 7, 50, 333]), scale=st.sampled_from([0.5, 3.0, 20.0])
)
@settings(max_examples=60, deadline=None)
def test_every_row_gets_the_token_that_the_walk_finds(seed, size, scale):
    logits, offsets, proposals, params, noises, positions = a_pass(seed, size, scale=scale)
    asked = sampled_rows([True] * len(params), offsets, proposals, params, noises, positions)
    tokens, peaks = answers(logits, asked).tolist()
    wanted = logits.argmax(-1).tolist()
    for row, request, noise, position in asked:
        wanted[row] = target_token(logits[row], request, noise, position)
    assert tokens == wanted
    assert peaks == logits.max(-1).values.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_verdicts_are_those_of_the_walk(seed, batched, monkeypatch):
    found = verify_batch(*(passed := a_pass(seed, 60)))
    monkeypatch.undo()
    assert found == verify_batch(*passed)
    assert any(verdict.accepted for verdict in found)


def test_a_vocabulary_of_real_size_and_more_rows_than_fit_at_once():
    logits = torch.randn(ROWS_AT_ONCE + 3, 49_152, generator=torch.Generator().manual_seed(1)) * 2.0
    shapes = [SHAPES[2 + index % (len(SHAPES) - 2)] for index in range(len(logits))]
    for params in (shapes, [SHAPES[6]] * len(logits)):
        asked = [SampledRow(i, params[i], RequestNoise(i, 0, 49_152), 3 * i) for i in range(len(logits))]
        wanted = [target_token(logits[row], *rest) for row, *rest in asked]
        assert answers(logits, asked)[0].tolist() == wanted


def test_equal_scores_rank_by_id_as_in_the_walk():
    logits = torch.randint(-2, 3, (200, 40), generator=torch.Generator().manual_seed(2)).float()
    asked = [SampledRow(i, SHAPES[4 + i % 6], RequestNoise(i, 0, 40), i) for i in range(200)]
    wanted = [target_token(logits[row], *rest) for row, *rest in asked]
    assert answers(logits, asked)[0].tolist() == wanted


def test_masked_tokens_are_never_chosen_and_extreme_scores_do_not_overflow():
    logits = torch.full((len(SHAPES), 20), -math.inf)
    logits[:, 4], logits[:, 11] = 3e38, -3e38
    asked = [SampledRow(i, SHAPES[i], RequestNoise(i, 0, 20), 0) for i in range(1, len(SHAPES))]
    assert answers(logits, asked)[0].tolist() == [4.0] * len(SHAPES)


def test_a_row_gets_the_same_answer_alone_and_beside_others():
    logits, offsets, proposals, params, noises, positions = a_pass(5, 333, requests=40)
    asked = sampled_rows([True] * 40, offsets, proposals, params, noises, positions)
    together = answers(logits, asked)[0]
    for item in asked:
        alone = answers(logits[item.row : item.row + 1], [item._replace(row=0)])
        assert alone[0].item() == together[item.row].item()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", SHAPES)
def test_a18_a_bad_row_fails_its_request_and_no_other(bad, params, batched):
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(3))
    logits[1, 7] = bad
    noises = [RequestNoise(1, 0, 30)] * 3
    first = int(target_token(logits[0], params, noises[0], 2))
    found = verify_batch(
        logits, [0, 2, 3], [chain([first]), Proposal(), Proposal()], [params] * 3, noises, [2, 0, 0]
    )
    assert isinstance(found[0], TargetNumericsError)
    assert found[0].position == 3
    assert [verdict.emitted for verdict in found[1:]] == [
        (target_token(logits[row], params, noises[0], 0),) for row in (2, 3)
    ]


# --- waits


def test_nothing_is_read_before_the_answers_are_complete():
    """On a device that holds no values every read, every mask as an index and every copy back raises."""
    logits, offsets, proposals, _, noises, positions = a_pass(7, 50, requests=30)
    asked = sampled_rows([True] * 30, offsets, proposals, SHAPES * 3, noises, positions)
    found = answers(logits.to("meta"), asked)
    assert (found.device.type, found.shape) == ("meta", (2, len(logits)))


@pytest.mark.parametrize("params", [[GREEDY], SHAPES[1:], SHAPES], ids=["greedy", "sampled", "mixed"])
def test_the_host_reads_once_a_pass(params, batched):
    logits, offsets, proposals, _, noises, positions = a_pass(8, 50, requests=20)
    chosen = [params[index % len(params)] for index in range(20)]
    watched = host_reads.watched(logits)
    found = verify_batch(watched, offsets, proposals, chosen, noises, positions)
    assert host_reads.counts == {"tolist": 1}
    assert len(found) == 20


def test_a_request_with_a_processor_is_walked_beside_the_others(batched):
    """What depends on the path so far is judged row by row; it costs the others nothing."""
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(4))
    own = SamplingParams(temperature=1.0, presence_penalty=1.0)
    params, noises = [SHAPES[6], own, GREEDY], [RequestNoise(index, 0, 30) for index in range(3)]
    processors = [None, LogitsProcessor(own, (), (), 30), None]
    proposals = [chain([3, 4]), chain([5]), Proposal()]
    found = verify_batch(logits, [0, 3, 5], proposals, params, noises, [0, 4, 9], processors=processors)
    processor = LogitsProcessor(own, (), (), 30)
    assert found[1].emitted[0] == target_token(logits[3], own, noises[1], 4, processor)
    assert found[0].emitted[0] == target_token(logits[0], SHAPES[6], noises[0], 0)
    assert found[2].emitted == (int(logits[5].argmax()),)
