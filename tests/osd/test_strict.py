"""``numerics: strict``: the same bits, however a pass is put together; and the check that says so."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts.errors import IntegrityError, InvalidValueError
from drafts.native.team import team
from osd.serve import strict_check
from osd.serve.lean import LeanTarget
from osd.serve.load import build_target, load_target
from osd.serve.native import NativeTarget
from osd.serve.strict import Kernel, StrictTarget
from osd.serve.strict_attention import KEYS, QUERIES, units
from osd.serve.strict_check import dependence, pass_dependence, same_bits, strict_target
from osd.serve.target import PassOutput, PassRow
from tests.osd.native_rig import fitting_model
from tests.osd.passes import feed, path_to, plain_logits, random_text
from tests.tiny import tiny_model

LEAN = ["llama", "llama-bias", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LEAN)
def test_every_lean_family_can_be_strict(kind: str, dtype: torch.dtype) -> None:
    target = build_target(tiny_model(kind).to(dtype), name=kind, numerics="strict")
    assert isinstance(target, StrictTarget)
    assert target.forward_kind == "lean"


def test_strict_logits_are_the_plain_models_up_to_rounding() -> None:
    target = build_target(tiny_model(), name="x", numerics="strict")
    text = random_text(150, seed=1)
    cache = target.make_cache(1, 200, keep_features=False)
    found = feed(target, cache, cache.acquire(), text, chunk=37)
    assert float((found - plain_logits(target.reference, text)).abs().max()) <= 1e-4


COMPILED = pytest.mark.skipif(team() is None, reason="torch does not lend its threads here")


@pytest.fixture(
    scope="module",
    params=[
        ("library", torch.float32),
        ("library", torch.bfloat16),
        pytest.param(("compiled", torch.float32), marks=COMPILED),
        pytest.param(("compiled", torch.bfloat16), marks=COMPILED),
    ],
    ids=["library-float32", "library-bfloat16", "compiled-float32", "compiled-bfloat16"],
)
def target(request: pytest.FixtureRequest) -> LeanTarget:
    kind, dtype = request.param
    if kind == "library":
        return strict_target(tiny_model("qwen3").to(dtype), name="tiny", feature_layers=None)
    return NativeTarget(fitting_model("qwen3").to(dtype), name="tiny", feature_layers=None, strict=True)


@pytest.fixture(scope="module")
def alone(target: LeanTarget) -> dict[int, torch.Tensor]:
    """Logits of every position of three texts, a token a pass, nobody beside."""
    found = {}
    for seed in range(3):
        cache = target.make_cache(1, 160, keep_features=False)
        found[seed] = feed(target, cache, cache.acquire(), random_text(140, seed=seed), chunk=1)
    return found


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_chunk_chain_tree_slot_or_neighbour_changes_a_bit(
    target: LeanTarget, alone: dict[int, torch.Tensor], data: st.DataObject
) -> None:
    """A14 in strict: passes of random rows; wrong tokens beside right ones, trees in random shapes."""
    slots = data.draw(st.permutations(range(3)))
    room = data.draw(st.sampled_from([145, 160, 256]))
    cache = target.make_cache(3, room, keep_features=data.draw(st.booleans()))
    for _ in slots:
        cache.acquire()
    texts = [random_text(140, seed=seed) for seed in range(3)]
    for _ in range(data.draw(st.integers(3, 9))):
        rows, kept = [], []
        for seed in data.draw(st.permutations(range(3))):
            start = cache.lengths[slots[seed]]
            if start >= 136 or data.draw(st.booleans()):
                continue
            row, right = random_row(data, slots[seed], start, texts[seed])
            rows.append(row)
            kept.append((seed, right))
        if not rows:
            continue
        output = target.forward(cache, rows)
        for row, offset, (seed, right) in zip(rows, output.offsets, kept, strict=True):
            expected = alone[seed][row.start : row.start + len(right)]
            assert same_bits(output.logits[[offset + node for node in right]], expected)
            cache.commit_path(row.slot, row.start, right)


def random_row(data: st.DataObject, slot: int, start: int, text: list[int]) -> tuple[PassRow, list[int]]:
    """A row over ``text``, and the offsets of its tokens that are the text's own."""
    if data.draw(st.booleans()):
        size = data.draw(st.sampled_from([1, 2, 3, 5, 8, 9, 17, 40]))
        tokens = text[start : min(start + size, 136)]
        return PassRow(slot, start, tokens), list(range(len(tokens)))
    tokens, parents, right = [text[start]], [], [0]
    for _ in range(data.draw(st.integers(1, 9))):
        if data.draw(st.booleans()) and start + len(right) < 139:
            parents.append(right[-1] - 1)
            right.append(len(tokens))
            tokens.append(text[start + len(right) - 1])
        else:
            parents.append(data.draw(st.integers(-1, len(parents) - 1)))
            tokens.append(data.draw(st.integers(3, 127)))
    return PassRow(slot, start, tokens, tuple(parents)), right


def test_features_for_drafts_change_nothing_and_are_themselves_the_same(target: LeanTarget) -> None:
    text = random_text(30, seed=5)
    whole, none = (target.make_cache(1, 64, keep_features=keep) for keep in (True, False))
    by_one = target.make_cache(1, 64, keep_features=True)
    logits = [
        feed(target, cache, cache.acquire(), text, chunk)
        for cache, chunk in ((whole, 30), (none, 30), (by_one, 1))
    ]
    assert same_bits(logits[0], logits[1])
    assert same_bits(logits[0], logits[2])
    assert whole.features is not None
    assert by_one.features is not None
    assert same_bits(whole.features[0, :30], by_one.features[0, :30])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_token_attends_once_over_its_own_path(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 200))
    size = data.draw(st.integers(1, 20))
    parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(size - 1))
    row = PassRow(2, start, [0] * size, data.draw(st.sampled_from([parents, None])))
    found = units([row], [7], room=data.draw(st.sampled_from([start + size, 512])))
    assert sorted(token for unit in found for token in unit.tokens) == list(range(7, 7 + size))
    for unit in found:
        assert 1 <= len(unit.tokens) <= QUERIES
        assert unit.slot == 2
        for token, seen in zip(unit.tokens, unit.seen, strict=True):
            offset = token - 7
            path = list(range(offset + 1)) if row.parents is None else path_to(row.parents, offset)
            assert seen == start + len(path)
            assert unit.length == -(-seen // KEYS) * KEYS
            places = range(unit.length) if unit.places is None else unit.places
            assert list(places[:seen]) == [*range(start), *(start + node for node in path)]
            assert len(places) == unit.length


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_models_without_a_lean_forward_are_refused(kind: str) -> None:
    with pytest.raises(InvalidValueError, match=r"target\.numerics: got 'strict'.*lean forward"):
        build_target(tiny_model(kind), name=kind, numerics="strict")


def test_strict_excludes_the_generic_forward_and_unknown_words_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"target\.numerics.*not asked for"):
        build_target(tiny_model(), name="x", forward="generic", numerics="strict")
    with pytest.raises(InvalidValueError, match=r"target\.numerics: got 'exact'.*fast, strict"):
        load_target(numerics="exact")


def place_dependent(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found = F.linear(x, weight)
    found[-1] *= 1 + 1e-6
    return found


def neighbour_dependent(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight) + 1e-6 * x.float().mean().to(x.dtype)


@pytest.mark.parametrize("product", [place_dependent, neighbour_dependent])
def test_a_kernel_that_is_not_row_by_row_is_passed_over_or_refused(
    product, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = Kernel("bad", 8, product), Kernel("good", 8, F.linear)
    monkeypatch.setattr(strict_check, "KERNELS", (bad, good))
    assert strict_target(tiny_model(), name="x", feature_layers=None).kernel is good
    monkeypatch.setattr(strict_check, "KERNELS", (bad,))
    with pytest.raises(InvalidValueError, match=r"target\.numerics: got 'strict'.*bad: a row of the qkv"):
        strict_target(tiny_model(), name="x", feature_layers=None)


def test_the_check_sees_attention_that_depends_on_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(queries, pair, mask, scaling):
        return F.scaled_dot_product_attention(queries, *pair, mask, scale=scaling) + 1e-6 * queries.mean()

    monkeypatch.setattr(strict_check, "attend", spoilt)
    target = StrictTarget(tiny_model(), name="x", feature_layers=None)
    assert "attention over 64 keys" in str(dependence(target))


@pytest.mark.parametrize("fault", ["logits", "keys"])
def test_the_check_sees_passes_that_depend_on_neighbours(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StrictTarget.forward

    def spoilt(self, cache, rows):
        output = whole(self, cache, rows)
        if len(rows) < 2:
            return output
        if fault == "keys":
            cache.pairs[0][0, rows[1].slot, :, rows[1].start] *= 1 + 1e-6
            return output
        return PassOutput(output.logits * (1 + 1e-6), output.offsets)

    monkeypatch.setattr(StrictTarget, "forward", spoilt)
    assert "depend on chunks" in str(dependence(StrictTarget(tiny_model(), name="x", feature_layers=None)))


@COMPILED
def test_compiled_passes_are_strict_where_the_model_allows_them() -> None:
    target = build_target(fitting_model(), name="tiny", numerics="strict")
    assert isinstance(target, NativeTarget)
    assert target.strict
    assert isinstance(build_target(tiny_model(), name="tiny", numerics="strict"), StrictTarget)
    assert isinstance(
        build_target(fitting_model(), name="tiny", numerics="strict", forward="lean"), StrictTarget
    )


@COMPILED
def test_compiled_passes_that_depend_on_neighbours_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = NativeTarget.forward

    def spoilt(self, cache, rows):
        output = whole(self, cache, rows)
        return output if len(rows) < 2 else PassOutput(output.logits * (1 + 1e-6), output.offsets)

    monkeypatch.setattr(NativeTarget, "forward", spoilt)
    assert "depend on chunks" in str(
        pass_dependence(NativeTarget(fitting_model(), name="tiny", feature_layers=None, strict=True))
    )
    assert isinstance(build_target(fitting_model(), name="tiny", numerics="strict"), StrictTarget)


@COMPILED
def test_the_engine_is_told_how_much_a_strict_pass_holds() -> None:
    strict = build_target(fitting_model(), name="tiny", numerics="strict")
    assert isinstance(strict, NativeTarget)
    assert strict.most_tokens == strict.limit


@COMPILED
def test_a_strict_pass_never_falls_back_to_the_library() -> None:
    target = NativeTarget(fitting_model(), name="tiny", feature_layers=None, strict=True)
    target.limit = 8
    cache = target.make_cache(1, 64, keep_features=False)
    with pytest.raises(IntegrityError, match="9 tokens; strict ones hold 8"):
        target.forward(cache, [PassRow(cache.acquire(), 0, list(range(9)))])
