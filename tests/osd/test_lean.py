import pytest
import torch

from drafts.errors import InvalidValueError
from osd.serve.lean import LeanTarget, lean_obstacle
from osd.serve.products import ProductPlan
from osd.serve.target import PassRow
from tests.osd.passes import (
    check_kept_path,
    check_refusals,
    feed,
    path_to,
    plain_logits,
    plain_states,
    random_text,
)
from tests.tiny import tiny_model

LEAN = ["llama", "llama-bias", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma"]
TOLERANCE = 1e-4


def make(kind: str = "llama", **changes: object) -> LeanTarget:
    model = tiny_model(kind, **changes)
    assert lean_obstacle(model) is None
    return LeanTarget(model, name=kind, feature_layers=None)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE)


@pytest.mark.parametrize("kind", LEAN)
def test_logits_equal_the_plain_models(kind: str) -> None:
    target = make(kind)
    cache = target.make_cache(1, 128, keep_features=False)
    slot = cache.acquire()
    text = random_text(90, seed=1)
    assert close(feed(target, cache, slot, text, chunk=40), plain_logits(target.reference, text))


@pytest.mark.parametrize("kind", LEAN)
def test_fused_weights_leave_the_plain_model_as_it_was(kind: str) -> None:
    text = random_text(20, seed=2)
    expected = plain_logits(tiny_model(kind), text)
    assert torch.equal(plain_logits(make(kind).reference, text), expected)


def test_plain_model_shares_the_fused_storage() -> None:
    target = make()
    fused = target.weights()["qkv"][0].plain
    query = target.reference.model.layers[0].self_attn.q_proj.weight
    assert query.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()


@pytest.mark.parametrize("pattern", ["RRR", "RRW", "RWR", "WWW", ""])
@pytest.mark.parametrize("prompt", [1, 9])
def test_a10_verified_logits_equal_a_cache_free_forward(pattern: str, prompt: int) -> None:
    """64 rounds of chains of which a prefix is right; wrong tokens must leave no trace."""
    target = make()
    cache = target.make_cache(1, 400, keep_features=False)
    slot = cache.acquire()
    text = random_text(prompt + 64 * 4, seed=3)
    noise = random_text(64 * 4, seed=4)
    done = prompt - 1
    feed(target, cache, slot, text[:done])
    expected = plain_logits(target.reference, text)
    for turn in range(64):
        right = len(pattern) - len(pattern.lstrip("R"))
        tokens = [text[done]]
        for offset, mark in enumerate(pattern, start=1):
            true = text[done + offset]
            tokens.append(true if mark == "R" else (true + 1 + noise[turn] % 100) % 128)
        output = target.forward(cache, [PassRow(slot, done, tokens)])
        assert close(output.logits[: right + 1], expected[done : done + right + 1])
        cache.commit(slot, done + right + 1)
        done += right + 1


def test_a25_rows_of_unequal_length_join_one_by_one_and_in_chunks() -> None:
    """Rows of 1, 2, 17, 200 and 500 tokens with trees of 0, 1, 5 and 12 nodes beside a chunked prefill."""
    target = make()
    cache = target.make_cache(5, 560, keep_features=True)
    lengths = [17, 1, 200, 2]
    texts = [random_text(length, seed=10 + i) for i, length in enumerate(lengths)]
    trees = [(), (-1,), (-1, -1, 0, 0, 2), (-1, 0, 1, -1, 3, 3, 2, 5, -1, 8, 9, 10)]
    late = random_text(500, seed=20)
    for slot, text in enumerate(texts):
        assert cache.acquire() == slot
        feed(target, cache, slot, text[:-1])
    joining = cache.acquire()
    for round_number, begin in enumerate(range(0, len(late), 125)):
        chunk = late[begin : begin + 125]
        rows = [PassRow(joining, begin, chunk, logits_from=len(chunk) - 1)]
        for slot, text in enumerate(texts):
            parents = trees[(slot + round_number) % 4]
            nodes = random_text(len(parents), seed=30 + slot)
            rows.append(PassRow(slot, len(text) - 1, [text[-1], *nodes], parents))
        output = target.forward(cache, rows)
        assert close(output.logits[:1], plain_logits(target.reference, late[: begin + len(chunk)])[-1:])
        for row, offset in zip(rows[1:], output.offsets[1:], strict=True):
            assert row.parents is not None
            for node in range(len(row.tokens)):
                path = [row.tokens[at] for at in path_to(row.parents, node)]
                expected = plain_logits(target.reference, texts[row.slot][:-1] + path)[-1:]
                assert close(output.logits[offset + node : offset + node + 1], expected)
        cache.commit(joining, begin + len(chunk))
        for slot, text in enumerate(texts):
            cache.commit(slot, len(text))
            text.append(random_text(1, seed=99 + slot + round_number)[0])
    cache.check()


def test_rows_in_any_order_give_the_same_logits() -> None:
    target = make()
    cache = target.make_cache(3, 64, keep_features=False)
    rows = []
    for slot, length in enumerate((5, 9, 3)):
        cache.acquire()
        text = random_text(length, seed=slot)
        feed(target, cache, slot, text)
        rows.append(PassRow(slot, length, random_text(slot + 1, seed=50 + slot)))
    straight = target.forward(cache, rows)
    turned = target.forward(cache, [rows[2], rows[0], rows[1]])
    for index, row in enumerate((2, 0, 1)):
        count = len(rows[row].tokens)
        a, b = turned.offsets[index], straight.offsets[row]
        assert close(turned.logits[a : a + count], straight.logits[b : b + count])


def test_a_gap_between_the_slots_of_a_pass_does_not_matter() -> None:
    target = make()
    cache = target.make_cache(3, 64, keep_features=False)
    texts = [random_text(length, seed=length) for length in (8, 4, 6)]
    for slot, text in enumerate(texts):
        cache.acquire()
        feed(target, cache, slot, text)
    output = target.forward(cache, [PassRow(0, 8, [5]), PassRow(2, 6, [7, 9])])
    assert close(output.logits[:1], plain_logits(target.reference, [*texts[0], 5])[-1:])
    assert close(output.logits[1:], plain_logits(target.reference, [*texts[2], 7, 9])[-2:])


def test_commit_path_continues_as_the_kept_chain() -> None:
    check_kept_path(make(), close)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_features_are_the_residual_stream_before_the_final_norm(kind: str) -> None:
    target = make(kind)
    cache = target.make_cache(1, 32, keep_features=True)
    slot = cache.acquire()
    text = random_text(12, seed=6)
    feed(target, cache, slot, text, chunk=5)
    assert cache.features is not None
    assert target.feature_layers == (1, 2, 3)
    assert target.feature_width == cache.features.shape[-1] == 3 * target.hidden_size
    assert close(cache.features[slot, :12], plain_states(target.reference, text, target.feature_layers))


def test_only_the_logits_asked_for_come_back() -> None:
    target = make()
    cache = target.make_cache(2, 32, keep_features=False)
    cache.acquire()
    cache.acquire()
    text = random_text(8, seed=7)
    rows = [PassRow(0, 0, text, logits_from=8), PassRow(1, 0, text, logits_from=6)]
    output = target.forward(cache, rows)
    assert output.offsets == [0, 0]
    assert close(output.logits, plain_logits(target.reference, text)[6:])
    none = target.forward(cache, rows[:1])
    assert none.logits.shape == (0, target.vocab_size)
    assert cache.lengths == [0, 0]


def test_forward_refuses_a_slot_twice_and_a_wrong_start() -> None:
    target = make()
    cache = target.make_cache(1, 32, keep_features=False)
    cache.acquire()
    check_refusals(target, cache)


def test_a18_nan_in_one_row_stays_in_that_row() -> None:
    target = make()
    cache = target.make_cache(2, 32, keep_features=False)
    cache.acquire()
    cache.acquire()
    text = random_text(6, seed=8)
    for slot in (0, 1):
        feed(target, cache, slot, text)
    for pair in cache.pairs:
        pair[:, 0, :, 2] = float("nan")
    output = target.forward(cache, [PassRow(0, 6, [3]), PassRow(1, 6, [3])])
    assert bool(output.logits[0].isnan().any())
    assert close(output.logits[1:], plain_logits(target.reference, [*text, 3])[-1:])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("gemma2", "model type"), ("mistral-sliding", "sliding window 8"), ("qwen2-sliding", "layer types")],
)
def test_models_that_are_not_lean_are_named_with_the_reason(kind: str, reason: str) -> None:
    assert reason in (lean_obstacle(tiny_model(kind)) or "")


def test_dynamic_rope_is_not_lean() -> None:
    assert "dynamic" in (lean_obstacle(tiny_model("llama-dynamic-rope")) or "")


def test_cache_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"max_length: got 1025; 1\.\.1024"):
        make().make_cache(1, 1025, keep_features=False)


def test_feature_layers_outside_the_model_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="feature_layers"):
        LeanTarget(tiny_model(), name="x", feature_layers=[1, 4])


def test_measured_costs_never_fall_with_the_token_count() -> None:
    costs = make().measure_costs([4, 1, 2, 32], context=16, budget=0.5)
    assert list(costs) == [1, 2, 4, 32]
    assert list(costs.values()) == sorted(costs.values())
    assert min(costs.values()) > 0


def test_bfloat16_stays_close_to_the_plain_model() -> None:
    model = tiny_model("qwen3").to(torch.bfloat16)
    target = LeanTarget(model, name="bf16", feature_layers=None)
    cache = target.make_cache(1, 64, keep_features=True)
    slot = cache.acquire()
    text = random_text(20, seed=9)
    found, expected = feed(target, cache, slot, text, chunk=7), plain_logits(model, text)
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) <= 0.05 * float(expected.abs().max())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_equals_the_plain_model() -> None:
    model = tiny_model("llama").to("cuda")
    target = LeanTarget(model, name="cuda", feature_layers=None)
    cache = target.make_cache(2, 64, keep_features=True)
    cache.acquire()
    cache.acquire()
    text = random_text(20, seed=9)
    found = feed(target, cache, 0, text, chunk=7)
    assert float((found - plain_logits(model, text)).abs().max()) <= 1e-3
    assert isinstance(target.plan, ProductPlan)
