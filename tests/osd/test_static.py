import logging
import random

import pytest
import torch

from drafts.errors import IntegrityError
from osd.serve.graphs import GraphedTarget
from osd.serve.layout import visible
from osd.serve.load import build_target, checked_graphs
from osd.serve.probe import probe
from osd.serve.static import (
    GRAIN,
    MOST_TOKENS,
    WIDTHS,
    Bucket,
    StaticTable,
    bucket_for,
    lengths,
    row_counts,
    scratch_place,
    seen_bits,
    visible_bits,
)
from osd.serve.target import PassRow
from tests.osd.engine_rig import Branching, Client, Forced, check_kept, greedy, make_engine, prompts
from tests.osd.passes import check_refusals, feed, plain_logits, plain_states, random_text
from tests.osd.recorders import (
    RefusingRecorder,
    SpoiltTarget,
    TracedRecorder,
    graphed,
    packed,
)
from tests.tiny import VOCAB, tiny_model

LEAN = ["llama", "llama-bias", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma"]
TOLERANCE = 1e-4


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= TOLERANCE)


def random_parents(draw: random.Random, nodes: int) -> tuple[int, ...]:
    return tuple(draw.randrange(-1, index) for index in range(nodes))


def test_visibility_from_bits_is_the_layouts() -> None:
    draw = random.Random(0)
    for _ in range(50):
        nodes = draw.randrange(0, 32)
        parents = random_parents(draw, nodes) if draw.random() < 0.7 else None
        row = PassRow(0, draw.randrange(0, 20), [1] * (nodes + 1), parents)
        length = row.start + nodes + 1 + draw.randrange(40)
        found = visible_bits(torch.full((nodes + 1,), row.start), torch.tensor(seen_bits(row)), length)
        assert torch.equal(found, visible([row], nodes + 1, length)[0])


def test_buckets_cover_their_passes_and_no_bucket_reads_the_scratch_place() -> None:
    target = graphed()
    for slots, room in ((1, 16), (3, 255), (5, 256), (8, 257), (33, 1000)):
        cache = target.make_cache(slots, room, keep_features=False)
        assert row_counts(slots)[-1] == slots
        assert room <= lengths(cache)[-1] <= scratch_place(cache) == cache.pairs[0].shape[3] - 1
        assert lengths(cache)[-1] % GRAIN == 0
        draw = random.Random(slots)
        for _ in range(100):
            count = draw.randrange(1, min(room, 40))
            row = PassRow(draw.randrange(slots), draw.randrange(room - count + 1), [1] * count)
            bucket = bucket_for(cache, [row])
            fits = row.slot + 1, count, row.start + count
            if bucket is None:
                assert count > WIDTHS[-1] or (row.slot + 1) * count > MOST_TOKENS / 4
            else:
                assert bucket.covers(Bucket(*fits))
                assert bucket.tokens <= MOST_TOKENS


@pytest.mark.parametrize("kind", LEAN)
def test_static_pass_equals_the_packed_one_on_random_batches(kind: str) -> None:
    """Chains, trees and short chunks of random rows, in random order, buckets growing and shrinking."""
    target = graphed(kind)
    cache = target.make_cache(5, 290, keep_features=True)
    draw = random.Random(1)
    for slot in range(5):
        cache.acquire()
        feed(target, cache, slot, random_text(draw.choice([1, 40, 80, 250]), seed=slot))
    replays = target.replays
    for turn in range(12):
        slots = draw.sample(range(5), draw.randrange(1, 6))
        rows: list[PassRow] = []
        for slot in slots:
            nodes = draw.randrange(0, 7)
            parents = random_parents(draw, nodes) if draw.random() < 0.5 else None
            tokens = random_text(nodes + 1, seed=100 + 7 * turn + slot)
            rows.append(PassRow(slot, cache.lengths[slot], tokens, parents, draw.randrange(nodes + 2)))
        found = target.forward(cache, rows)
        written = [
            [pair[:, row.slot, :, row.start : row.start + len(row.tokens)].clone() for pair in cache.pairs]
            for row in rows
        ]
        assert cache.features is not None
        kept = cache.features.clone()
        expected = packed(target, cache, rows)
        assert found.offsets == expected.offsets
        assert found.logits.dtype == torch.float32
        assert found.logits.numel() == 0 or close(found.logits, expected.logits)
        for row, pairs in zip(rows, written, strict=True):
            end = row.start + len(row.tokens)
            for pair, before in zip(cache.pairs, pairs, strict=True):
                assert close(pair[:, row.slot, :, row.start : end], before)
            assert close(cache.features[row.slot, row.start : end], kept[row.slot, row.start : end])
            if row.parents is None and draw.random() < 0.5:
                cache.commit(row.slot, end)
    assert target.replays == replays + 12


def test_a10_a_tree_after_a_chain_and_a_chain_after_a_tree_leave_no_trace() -> None:
    """One frozen bucket is used by both, so that stale visibility would show."""
    target = graphed(recorder=TracedRecorder())
    cache = target.make_cache(1, 64, keep_features=False)
    slot = cache.acquire()
    text = random_text(40, seed=5)
    feed(target, cache, slot, text[:9], chunk=4)
    expected = plain_logits(target.reference, text)
    wrong = [(token + 1) % VOCAB for token in text]
    for start in range(9, 33, 3):
        tree = PassRow(
            slot, start, [text[start], wrong[start + 1], text[start + 1], text[start + 2]], (-1, -1, 1)
        )
        output = target.forward(cache, [tree])
        assert close(output.logits[[0, 2, 3]], expected[start : start + 3])
        cache.commit_path(slot, start, [0, 2])
        chain = PassRow(slot, start + 2, [text[start + 2], text[start + 3], wrong[start + 4], 3])
        output = target.forward(cache, [chain])
        assert close(output.logits[:2], expected[start + 2 : start + 4])
        cache.commit(slot, start + 3)
    assert target.graphs(cache) == [Bucket(1, 4, GRAIN), Bucket(1, 1, GRAIN)]


def test_padding_and_recording_change_nothing_but_scratch_places() -> None:
    """Rows that the pass leaves out, shorter rows and free rows keep every entry."""
    target = graphed()
    cache = target.make_cache(4, 60, keep_features=True)
    for slot in range(3):
        cache.acquire()
        feed(target, cache, slot, random_text(10 + slot, seed=slot))
    before = [pair.clone() for pair in cache.pairs]
    assert cache.features is not None
    features = cache.features.clone()
    rows = [PassRow(2, 12, [5]), PassRow(0, 10, [5, 6, 7])]
    target.forward(cache, rows)
    assert Bucket(4, 3, GRAIN) in target.graphs(cache)
    scratch = scratch_place(cache)
    for row in rows:
        written = slice(row.start, row.start + len(row.tokens))
        for pair, old in zip(cache.pairs, before, strict=True):
            assert not torch.equal(pair[:, row.slot, :, written], old[:, row.slot, :, written])
            pair[:, row.slot, :, written] = old[:, row.slot, :, written]
        features[row.slot, written] = cache.features[row.slot, written]
    for pair, old in zip(cache.pairs, before, strict=True):
        assert torch.equal(pair[..., :scratch, :], old[..., :scratch, :])
    assert torch.equal(cache.features[:, :scratch], features[:, :scratch])


def test_features_are_the_residual_stream() -> None:
    target = graphed("gemma")
    cache = target.make_cache(2, 40, keep_features=True)
    cache.acquire()
    text = random_text(14, seed=6)
    feed(target, cache, 0, text, chunk=5)
    assert target.replays == 3
    assert cache.features is not None
    assert close(cache.features[0, :14], plain_states(target.reference, text, target.feature_layers))


def test_results_stay_when_the_next_pass_runs() -> None:
    target = graphed()
    cache = target.make_cache(1, 40, keep_features=False)
    cache.acquire()
    first = target.forward(cache, [PassRow(0, 0, [3, 4])]).logits
    copy = first.clone()
    cache.commit(0, 2)
    target.forward(cache, [PassRow(0, 2, [5, 6])])
    target.forward(cache, [PassRow(0, 2, [5])])
    assert torch.equal(first, copy)


def test_long_chunks_wide_batches_and_caches_without_scratch_are_packed() -> None:
    target = graphed()
    cache = target.make_cache(16, 64, keep_features=False)
    for _ in range(16):
        cache.acquire()
    target.forward(cache, [PassRow(0, 0, [1] * 33)])
    target.forward(cache, [PassRow(slot, 0, [1] * 20) for slot in range(16)])
    assert target.replays == 0
    target.forward(cache, [PassRow(slot, 0, [1] * 16) for slot in range(16)])
    assert target.replays == 1
    other = build_target(target.reference, name="other").make_cache(1, 64, keep_features=False)
    other.acquire()
    target.forward(other, [PassRow(0, 0, [1])])
    assert target.replays == 1


def test_refuses_what_the_packed_pass_refuses() -> None:
    target = graphed()
    cache = target.make_cache(2, 32, keep_features=False)
    cache.acquire()
    check_refusals(target, cache)
    with pytest.raises(IntegrityError, match="not active"):
        target.forward(cache, [PassRow(1, 0, [1])])


def test_a18_nan_in_one_row_stays_in_that_row_and_leaves_with_it() -> None:
    target = graphed()
    cache = target.make_cache(2, 32, keep_features=False)
    text = random_text(6, seed=8)
    for slot in (0, 1):
        cache.acquire()
        feed(target, cache, slot, text)
    for pair in cache.pairs:
        pair[:, 0, :, 0] = float("nan")
    output = target.forward(cache, [PassRow(0, 6, [3]), PassRow(1, 6, [3, 4])])
    assert bool(output.logits[0].isnan().any())
    expected = plain_logits(target.reference, [*text, 3, 4])[-2:]
    assert close(output.logits[1:], expected)
    cache.release(0)
    assert close(target.forward(cache, [PassRow(0, 6, [3, 4])]).logits, expected)
    cache.acquire()
    assert close(feed(target, cache, 1, text, chunk=3), plain_logits(target.reference, text))


def test_recorded_passes_are_bounded_and_a_larger_one_serves() -> None:
    target = graphed(most_graphs=1)
    cache = target.make_cache(4, 300, keep_features=False)
    for _ in range(4):
        cache.acquire()
    rows = [PassRow(slot, 0, [5, 6, 7]) for slot in range(4)]
    target.forward(cache, rows)
    assert target.graphs(cache) == [Bucket(4, 3, GRAIN)]
    small = [PassRow(1, 0, [5])]
    assert close(target.forward(cache, small).logits, packed(target, cache, small).logits)
    assert target.replays == 2
    target.forward(cache, [PassRow(0, 0, [5] * 4)])
    assert (target.replays, len(target.graphs(cache))) == (2, 1)


def test_a_failed_recording_ends_recording_not_serving(caplog: pytest.LogCaptureFixture) -> None:
    target = graphed(recorder=RefusingRecorder(1))
    cache = target.make_cache(1, 64, keep_features=False)
    cache.acquire()
    text = random_text(20, seed=3)
    with caplog.at_level(logging.WARNING):
        found = [feed(target, cache, 0, text[:8], chunk=2)]
        for begin, end in ((8, 14), (14, 16), (16, 20)):
            found.append(target.forward(cache, [PassRow(0, begin, text[begin:end])]).logits)
            cache.commit(0, end)
    assert close(torch.cat(found), plain_logits(target.reference, text))
    assert target.graphs(cache) == [Bucket(1, 2, GRAIN)]
    assert caplog.text.count("no memory left for a graph") == 1


def test_recordings_of_a_cache_go_with_it() -> None:
    target = graphed()
    cache = target.make_cache(1, 32, keep_features=False)
    cache.acquire()
    target.forward(cache, [PassRow(0, 0, [1])])
    assert len(target._recorded) == 1
    del cache
    assert len(target._recorded) == 0


def test_common_passes_are_recorded_at_load() -> None:
    target = graphed()
    cache = target.make_cache(2, 64, keep_features=False)
    target.prepare(cache)
    ready = set(target.graphs(cache))
    assert {Bucket(rows, width, GRAIN) for rows in (1, 2) for width in (1, 4, 8)} <= ready
    none = target.make_cache(2, 64, keep_features=False)
    target.prepare(none, budget=0.0)
    assert target.graphs(none) == []


def test_probe_passes_and_a_wrong_static_pass_is_never_used(caplog: pytest.LogCaptureFixture) -> None:
    assert probe(graphed("qwen3")).ok
    spoilt = graphed(cls=SpoiltTarget)
    assert not probe(spoilt).ok
    with caplog.at_level(logging.WARNING):
        checked_graphs(spoilt)
    assert "recorded passes not used" in caplog.text
    assert spoilt.recorder is None
    assert probe(spoilt).ok


def test_bfloat16_stays_close_to_the_packed_pass() -> None:
    model = tiny_model("qwen3").to(torch.bfloat16)
    target = graphed(model=model)
    cache = target.make_cache(1, 64, keep_features=True)
    cache.acquire()
    text = random_text(20, seed=9)
    found, expected = feed(target, cache, 0, text, chunk=7), plain_logits(model, text)
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) <= 0.05 * float(expected.abs().max())


def test_table_holds_the_rows_and_padding() -> None:
    target = graphed()
    cache = target.make_cache(2, 32, keep_features=False)
    cache.acquire()
    cache.acquire()
    rows = [PassRow(1, 0, [7, 8, 9], (-1, -1), logits_from=1), PassRow(0, 0, [5])]
    table = StaticTable(cache, rows, Bucket(2, 4, GRAIN))
    scratch = scratch_place(cache)
    assert table.values.tolist() == [
        [5, 0, 0, 0, 7, 8, 9, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, scratch, scratch, scratch, 0, 1, 2, scratch],
        [0] * 8,
        [1, 1, 1, 1, 1, 3, 5, 1],
        [5, 6, 0, 0, 0, 0, 0, 0],
    ]
    assert (table.offsets, table.wanted) == ([0, 2], 3)


@pytest.mark.parametrize("source", [None, Forced, Branching])
def test_engine_over_recorded_passes_gives_the_plain_text(source: type[Forced] | None) -> None:
    """Rows join and leave, are compacted, and verify chains or trees; evidence and features are kept."""
    asked = prompts(5, seed=3, lengths=(5, 40, 9))
    answers = [greedy(prompt, 12) for prompt in asked]
    wanted = {tuple(prompt): [*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)}

    def script(row, limit):
        text = wanted[tuple(row.tokens[: row.prompt_length])]
        ahead = text[len(row.tokens) : len(row.tokens) + limit]
        return ahead if len(row.tokens) % 3 else [(token + 1) % VOCAB for token in ahead]

    target = graphed()
    client = Client(
        make_engine(
            source(script) if source else None, target=target, slots=2, evidence_k=8, prefill_chunk=24
        )
    )
    for index, prompt in enumerate(asked):
        client.submit(f"r{index}", prompt, max_tokens=12)
    found = client.run()
    assert [list(found[f"r{index}"]) for index in range(len(asked))] == answers
    assert target.replays > 3
    if source is not None:
        record = client.outcomes["r0"].record
        if record.features is not None:
            check_kept(record, asked[0])


def test_graphs_are_for_gpus() -> None:
    assert not isinstance(build_target(tiny_model(), name="cpu", graphs="auto"), GraphedTarget)
