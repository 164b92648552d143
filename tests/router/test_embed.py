"""Embedding: blank and long texts, the cache, and many threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from drafts.errors import InvalidValueError
from router.mind.embed import Embedder, SentenceEncoder, single_threaded
from router.mind.instruction import LONG_WORDS, is_blank, views
from tests.router.fakes import DIMENSION, WordEncoder

BLANK = ["", " ", "\n", "\u200b", "\x00", "\u3000\t"]


@pytest.fixture(scope="session")
def minilm() -> SentenceEncoder:
    return SentenceEncoder()


def test_b19_no_text_gives_no_row():
    assert Embedder(WordEncoder()).embed_many([]).shape == (0, DIMENSION)


@pytest.mark.parametrize("text", BLANK)
def test_b19_blank_text_is_explicitly_nothing(text):
    encoder = WordEncoder()
    embedder = Embedder(encoder)
    assert is_blank(text)
    assert embedder.embed(text) is None
    rows = embedder.embed_many([text, "word", text])
    assert not rows[0].any()
    assert np.isclose(np.linalg.norm(rows[1]), 1.0)
    assert encoder.calls == [["word"]]


def test_b21_a_text_without_direction_is_nothing_and_never_nan():
    class Broken(WordEncoder):
        def encode(self, texts):
            rows = super().encode(texts)
            rows[:] = np.nan if "nan" in texts[0] else 0.0
            return rows

    for text in ("nan", "zero"):
        assert Embedder(Broken()).embed(text) is None


def test_a_text_encoded_alone_has_the_vector_that_the_library_gives_it(minilm):
    texts = ["Translate this to German: good morning", "x", "one two three " * 400]
    whole = minilm._model.encode(texts, batch_size=1, normalize_embeddings=True)
    assert np.allclose(minilm.encode(texts), whole, atol=1e-6)


def test_cache_answers_repeats_and_forgets_the_least_recently_used():
    encoder = WordEncoder()
    embedder = Embedder(encoder, cache_size=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        embedder.embed(text)
    assert [call[0] for call in encoder.calls] == ["a", "b", "c", "b"]
    embedder.embed_many(["x", "x", "x"])
    assert encoder.calls[-1] == ["x"]


def test_short_prompts_are_read_whole_and_long_ones_by_their_instruction():
    short = "Summarize: a few words only"
    assert views(short) == (short,)
    article = " ".join(f"word{i}" for i in range(2000))
    head_tail, instruction = views(f"Summarize the following text:\n{article}")
    assert instruction == "Summarize the following text"
    assert "word1999" in head_tail
    assert len(head_tail.split()) < LONG_WORDS
    *_, last = views(f"{article}\nTranslate this to Spanish please.")
    assert last == "Translate this to Spanish please."
    assert len(views(article)) == 1


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "word " * 20_000, "\ud800 lone surrogate", "a: " * 5000, "日本" * 999]
)
def test_huge_and_odd_texts_are_bounded_work(text):
    assert sum(len(view) for view in views(text)) <= 20_000
    vector = Embedder(WordEncoder()).embed(text.encode("utf-8", "replace").decode())
    assert vector is not None
    assert np.isfinite(vector).all()


def test_single_threaded_binds_its_own_thread_only():
    before = torch.get_num_threads()
    seen: list[int] = []

    def worker() -> None:
        single_threaded()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    after = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    after.start()
    after.join()
    assert seen == [1, before]
    assert torch.get_num_threads() == before


@pytest.mark.real_models
def test_b17_thirty_two_threads_give_the_vectors_of_one(minilm):
    texts = [f"{'word ' * (i % 90)}prompt number {i}" for i in range(64)]
    alone = Embedder(minilm).embed_many(texts)
    shared = Embedder(minilm, cache_size=16)
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(shared.embed, texts))
    np.testing.assert_allclose(np.stack(together), alone, atol=1e-5)


@pytest.mark.real_models
def test_minilm_is_normalised_and_knows_similar_from_different(minilm):
    rows = Embedder(minilm).embed_many(
        ["Write a Python function", "Code me a method in Java", "The cat sleeps"]
    )
    assert rows.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    assert rows[0] @ rows[1] > rows[0] @ rows[2]


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidValueError, match=r"router\.embedder"):
        SentenceEncoder(str(tmp_path))
