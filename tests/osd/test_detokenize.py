import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from osd.serve.detokenize import OutputStream, TextStream, special_ids
from osd.types import FinishReason, SamplingParams

TEXT = "Grüße aus Москва! 世界へ 😀👩‍👩‍👧 naïve café, 3 < 4; ha ha ha ha\n\n  done."


@functools.cache
def byte_level():
    """Byte-level BPE whose merges cross characters, as in GPT-2 and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "the cat and the hat 😀😀😀 世世"] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens(["<tool>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@functools.cache
def byte_fallback():
    """Pieces with a space marker and single bytes for the rest, as in Llama 2 and Gemma."""
    pieces = [
        "<end>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehinot.,!",
        "▁the",
        "▁ha",
        "he",
    ]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<end>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("$^"), "isolated")
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def whole(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def utf8(tokenizer, text):
    """``text`` in tokens of one byte each."""
    if tokenizer is byte_fallback():
        return tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text.encode()])
    return [tokenizer.backend_tokenizer.token_to_id(c) for c in _as_byte_chars(text)]


def _as_byte_chars(text):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


@given(ids=st.lists(st.integers(0, 341), max_size=60))
@settings(max_examples=300, deadline=None)
def test_b01_joined_pieces_are_the_decoded_whole_for_any_byte_level_tokens(ids):
    stream = TextStream(byte_level())
    assert "".join(map(stream.push, ids)) + stream.flush() == whole(byte_level(), ids)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_b01_joined_pieces_are_the_decoded_whole_with_byte_fallback(data):
    tokenizer = byte_fallback()
    letters = st.integers(257, len(tokenizer) - 1).map(lambda i: [i])
    chars = st.sampled_from("é世😀я").map(lambda c: utf8(tokenizer, c))
    drawn = data.draw(st.lists(st.one_of(letters, chars, st.just([0])), max_size=20))
    ids = [token for tokens in drawn for token in tokens]
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.flush() == whole(tokenizer, ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_b01_a_split_character_never_shows_as_a_replacement(make):
    tokenizer = make()
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in utf8(tokenizer, TEXT)]
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == list(TEXT)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_b01_streamed_and_whole_text_agree_where_the_limit_cuts_a_character(make, max_tokens):
    tokenizer = make()
    text = "é世😀"
    ids = utf8(tokenizer, text)
    params = SamplingParams(max_tokens=max_tokens)
    streamed, at_once = (OutputStream(tokenizer, params, None) for _ in range(2))
    pushes = [streamed.push([i]) for i in ids]
    assert sum(push.kept for push in pushes) == at_once.push(ids).kept == max_tokens
    assert "".join(push.delta for push in pushes) == streamed.text == at_once.text
    complete = text.encode()[:max_tokens].decode(errors="ignore")
    assert streamed.text.rstrip("\ufffd") == complete
    assert ("\ufffd" in streamed.text) == (len(complete.encode()) < max_tokens)


def test_invalid_bytes_do_not_take_back_characters_already_shown():
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer)
    ids = [*utf8(tokenizer, "世"), *tokenizer.convert_tokens_to_ids(["<0xFF>", "a"])]
    assert [stream.push(i) for i in ids] == ["", "", "世", "", "\ufffda"]


def test_text_before_a_split_character_in_the_same_token_is_shown_at_once():
    tokenizer = byte_level()
    texts = {i: whole(tokenizer, [i]) for i in range(len(tokenizer))}
    token, text = next((i, t) for i, t in texts.items() if t.endswith("\ufffd") and t[0] != "\ufffd")
    assert TextStream(tokenizer).push(token) == text.rstrip("\ufffd")


def test_a_long_run_of_replacement_characters_does_not_grow_the_window():
    tokenizer = byte_level()
    ids = utf8(tokenizer, "\ufffd" * 200)
    stream = TextStream(tokenizer)
    pieces = []
    for i in ids:
        pieces.append(stream.push(i))
        assert len(stream._window) <= 64
    assert "".join(pieces) + stream.flush() == whole(tokenizer, ids)


def test_special_tokens_show_nothing_and_added_text_tokens_do():
    tokenizer = byte_level()
    end, tool = tokenizer.convert_tokens_to_ids(["<end>", "<tool>"])
    assert special_ids(tokenizer) == {end}
    output = OutputStream(tokenizer, SamplingParams(ignore_eos=True), [end])
    assert output.push([end, tool, end]).delta == "<tool>"


@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 6), max_size=60),
    max_tokens=st.integers(1, 80),
)
@settings(max_examples=200, deadline=None)
def test_b04_no_part_of_a_stop_string_is_sent_and_blocks_do_not_matter(data, sizes, max_tokens):
    tokenizer = byte_level()
    ids = tokenizer(TEXT).input_ids
    start = data.draw(st.integers(0, len(TEXT) - 2))
    stop = TEXT[start : start + data.draw(st.integers(1, 9))]
    params = SamplingParams(stop=(stop,), max_tokens=max_tokens)
    results = []
    for cuts in (sizes, [1] * len(ids), [len(ids)]):
        output = OutputStream(tokenizer, params, None)
        kept, sent, rest = 0, "", list(ids)
        for size in [*cuts, len(ids)]:
            push = output.push(rest[:size])
            rest = rest[size:]
            kept += push.kept
            sent += push.delta
            if push.finish is not FinishReason.LENGTH:
                assert TEXT[: TEXT.index(stop)].startswith(sent)
        assert sent + output.close() == output.text
        results.append((kept, output.text, output.finish))
    assert results[0] == results[1] == results[2]
    kept, text, finish = results[0]
    full = whole(tokenizer, ids[:kept])
    if stop in full:
        assert (text, finish) == (full[: full.index(stop)], FinishReason.STOP)
        assert stop not in whole(tokenizer, ids[: kept - 1])
    else:
        assert (text, finish) == (full, FinishReason.LENGTH if kept == max_tokens else None)


def test_a01_the_end_token_is_counted_and_its_text_is_not_shown():
    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    ids = tokenizer("the cat").input_ids
    output = OutputStream(tokenizer, SamplingParams(), [end])
    assert output.push([*ids, end, *ids]) == (len(ids) + 1, "the cat", FinishReason.STOP)
    assert output.push(ids) == (0, "", FinishReason.STOP)
    assert output.text == "the cat"


def test_closing_early_sends_what_was_held_back():
    tokenizer = byte_level()
    output = OutputStream(tokenizer, SamplingParams(stop=("hat!",)), None)
    output.push(tokenizer("the hat").input_ids)
    assert output.text == "the "
    assert output.close() == "hat"
    assert output.text == "the hat"
