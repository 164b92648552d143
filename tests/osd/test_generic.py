import pytest
import torch

from drafts.errors import InvalidValueError
from osd.serve.generic import GenericTarget
from osd.serve.lean import LeanTarget
from osd.serve.target import PassRow
from tests.osd.passes import feed, path_to, plain_logits, plain_states, random_text
from tests.tiny import tiny_model

KINDS = [
    "llama",
    "qwen2",
    "qwen2-sliding",
    "mistral-sliding",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt-neox",
]


def make(kind: str) -> GenericTarget:
    return GenericTarget(tiny_model(kind), name=kind, feature_layers=None)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a25_unequal_rows_trees_and_chunks_equal_the_plain_model(kind: str) -> None:
    target = make(kind)
    cache = target.make_cache(3, 128, keep_features=True)
    texts = [random_text(length, seed=length) for length in (23, 1, 12)]
    for slot, text in enumerate(texts):
        cache.acquire()
        if len(text) > 1:
            feed(target, cache, slot, text[:-1], chunk=9)
    late = random_text(50, seed=77)
    joining = PassRow(1, 0, late, logits_from=48)
    tree = (-1, -1, 0, 1, 3)
    nodes = random_text(5, seed=5)
    rows = [
        joining,
        PassRow(2, 11, [texts[2][-1], *nodes], tree),
        PassRow(0, 22, [texts[0][-1], 3], logits_from=1),
    ]
    output = target.forward(cache, rows)
    assert output.offsets == [0, 2, 8]
    assert close(output.logits[:2], plain_logits(target.reference, late)[48:])
    assert close(output.logits[8:], plain_logits(target.reference, [*texts[0], 3])[-1:])
    for node in range(6):
        path = [rows[1].tokens[at] for at in path_to(tree, node)]
        expected = plain_logits(target.reference, texts[2][:-1] + path)[-1:]
        assert close(output.logits[2 + node : 3 + node], expected)
    cache.commit_path(2, 11, [0, 2, 4, 5])
    committed = texts[2] + [nodes[1], nodes[3], nodes[4]]
    after = target.forward(cache, [PassRow(2, 15, [8, 9])])
    assert close(after.logits, plain_logits(target.reference, [*committed, 8, 9])[-2:])
    assert cache.features is not None
    assert close(cache.features[2, :15], plain_states(target.reference, committed, target.feature_layers))


def test_a10_rejected_tokens_leave_no_trace() -> None:
    target = make("gemma2")
    cache = target.make_cache(1, 200, keep_features=False)
    slot = cache.acquire()
    text = random_text(100, seed=3)
    expected = plain_logits(target.reference, text)
    done = 0
    while done < 96:
        tokens = [text[done], text[done + 1], (text[done + 2] + 1) % 128, 5]
        output = target.forward(cache, [PassRow(slot, done, tokens)])
        assert close(output.logits[:2], expected[done : done + 2])
        done += 2
        cache.commit(slot, done)


def test_generic_and_lean_agree_on_logits_and_features() -> None:
    model = tiny_model("qwen3")
    lean = LeanTarget(model, name="lean", feature_layers=None)
    generic = GenericTarget(model, name="generic", feature_layers=None)
    text = random_text(30, seed=4)
    caches = [target.make_cache(1, 64, keep_features=True) for target in (lean, generic)]
    found = []
    for target, cache in zip((lean, generic), caches, strict=True):
        found.append(feed(target, cache, cache.acquire(), text, chunk=11))
    assert close(found[0], found[1])
    assert caches[0].features is not None
    assert caches[1].features is not None
    assert close(caches[0].features, caches[1].features)


def test_no_logits_asked_for_gives_none() -> None:
    target = make("llama")
    cache = target.make_cache(1, 32, keep_features=False)
    cache.acquire()
    output = target.forward(cache, [PassRow(0, 0, [1, 2, 3], logits_from=3)])
    assert output.logits.shape == (0, target.vocab_size)
    cache.commit(0, 3)
    after = target.forward(cache, [PassRow(0, 3, [4])])
    assert close(after.logits, plain_logits(target.reference, [1, 2, 3, 4])[-1:])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bloom", "positions"),
        ("mamba", "positions"),
        ("recurrent-gemma", "layer 0 keeps a LinearAttentionLayer"),
    ],
)
def test_models_without_keys_per_token_or_positions_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        make(kind)
