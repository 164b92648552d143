"""Structured output under speculation: valid JSON every time, equal to plain decoding (A20)."""

import functools
import itertools
import json

import numpy as np
import pytest
import torch

from drafts.errors import InvalidValueError
from drafts.proposal import EMPTY, POINT_MASS, ROOT, DraftDistribution, Proposal
from osd.serve.grammar import Grammar, GrammarCompiler, GrammarError
from osd.serve.load import build_target
from osd.serve.processor import LogitsProcessor
from osd.serve.verify import target_token, verify
from osd.types import FinishReason, ResponseFormat, SamplingParams
from tests.osd.engine_rig import Branching, Client, Forced, LetterTokenizer, make_engine
from tests.router.tiny_engine import SPECIAL, byte_tokenizer
from tests.tiny import tiny_model

V, END = len(SPECIAL) + 256, 2
INTEGER = {"type": "integer", "minimum": -9, "maximum": 99}
WORD = {"type": "string", "pattern": "^[a-f]{1,3}$"}
KIND = {"enum": ["one", "two", 3, None, True]}
PLAIN = {
    "integer": INTEGER,
    "word": WORD,
    "kind": KIND,
    "const": {"const": {"a": [1, 2]}},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "either": {"anyOf": [WORD, INTEGER]},
}


def obj(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def array(items, most):
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def schemas():
    """Fifty schemas of bounded texts."""
    pairs = list(itertools.product(PLAIN.values(), PLAIN.values()))
    found = [obj(a=first, b=second) for first, second in pairs[:22]]
    found += [obj(only=item) for item in PLAIN.values()]
    found += [array(item, 3) for item in PLAIN.values()]
    found += [obj(deep=obj(x=item, y=array(item, 2))) for item in PLAIN.values()]
    found += list(PLAIN.values())
    return found


SCHEMAS = schemas()


@functools.cache
def tokenizer():
    return byte_tokenizer()


@functools.cache
def compiler():
    return GrammarCompiler(tokenizer(), V, {END})


@functools.cache
def tiny():
    return build_target(tiny_model("llama", vocab_size=V), name="bytes")


def wanted(schema=None):
    if schema is None:
        return ResponseFormat(kind="json_object")
    return ResponseFormat(kind="json_schema", json_schema=schema)


def ids(text):
    return tokenizer()(text)["input_ids"]


def text_of(tokens):
    return bytes(tokenizer().decode(tokens), "utf-8").decode()


def row(tokens):
    """Logits over bytes that depend on the last two tokens; white space is unlikely, so texts stay short."""
    last = [0, 0, *tokens][-2:]
    generator = torch.Generator().manual_seed(1000 * last[0] + last[1])
    logits = torch.randn(V, generator=generator) * 2
    logits[ids(" \n\t\r")] -= 8
    return logits


def rows(tokens, proposal):
    paths = [list(tokens)]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return torch.stack([row(path) for path in paths])


def answer(params, propose=None, limit=150):
    """Tokens up to the first end token, plain or verifying."""
    grammar = compiler().compile(params.response_format)
    processor = LogitsProcessor(params, (), {END}, V, grammar=grammar)
    out = []
    while END not in out and len(out) < limit:
        if propose is None:
            out.append(target_token(row(out), params, None, len(out), processor))
            processor.advance(out[-1])
        else:
            proposal = propose(out)
            out += verify(rows(out, proposal), proposal, params, None, len(out), None, processor).emitted
    return out[: out.index(END) + 1] if END in out else out


def forced(right):
    """Trees of right tokens, each with a sibling that the grammar forbids, tokens behind the end included."""
    behind = [*right, *ids("}]"), END, *ids("x"), END]

    def propose(out):
        chain = behind[len(out) : len(out) + 5]
        tokens, parents, at = [], [], ROOT
        for token in chain:
            tokens += [1, token]
            parents += [at, at]
            at = len(tokens) - 1
        n = len(tokens)
        return Proposal(tuple(tokens), tuple(parents), ("forced",) * n, (0.5,) * n)

    return propose


@pytest.mark.parametrize("index", range(50))
def test_a20_fifty_schemas_give_valid_json_equal_to_plain(index):
    params = SamplingParams(response_format=wanted(SCHEMAS[index]), max_tokens=200)
    plain = answer(params)
    assert plain[-1] == END
    matches(json.loads(text_of(plain[:-1])), SCHEMAS[index])
    assert answer(params, forced(plain)) == plain
    wrong = [token for token in plain[:-1] for _ in range(2)]
    assert answer(params, forced(wrong)) == plain


def matches(value, schema):
    """The few keywords that :data:`SCHEMAS` use, checked without the library under test."""
    if "anyOf" in schema:
        assert isinstance(value, str | int)
    elif "enum" in schema:
        assert value in schema["enum"]
    elif "const" in schema:
        assert value == schema["const"]
    elif schema["type"] == "object":
        assert list(value) == schema["required"]
        for name, item in value.items():
            matches(item, schema["properties"][name])
    elif schema["type"] == "array":
        assert 1 <= len(value) <= schema["maxItems"]
        for item in value:
            matches(item, schema["items"])
    elif schema["type"] == "integer":
        assert -9 <= value <= 99
    else:
        kinds = {"string": str, "boolean": bool, "null": type(None)}
        assert isinstance(value, kinds[schema["type"]])


def test_there_are_fifty_schemas():
    assert len({json.dumps(schema) for schema in SCHEMAS}) == 50


# --- in the engine


def engine(source=None, **changes):
    return make_engine(source, target=tiny(), tokenizer=tokenizer(), **changes)


ASKED = [None, SCHEMAS[0], obj(deep=obj(x=WORD, y=array(KIND, 2))), array(INTEGER, 3)]
SHORT = {"logit_bias": {ids(c)[0]: -100.0 for c in " \n\t\r"}}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "min_p": 0.01}])
def test_a20_forced_drafts_and_trees_leave_the_answer_of_plain_decoding(sampling):
    client = Client(engine())
    for index, schema in enumerate(ASKED):
        client.submit(
            str(index), ids(f"q{index}"), response_format=wanted(schema), max_tokens=60, **SHORT, **sampling
        )
    expected = client.run()
    texts = {name: outcome.text for name, outcome in client.outcomes.items()}
    for index in range(1, len(ASKED)):
        assert client.outcomes[str(index)].record.finish is FinishReason.STOP
        matches(json.loads(texts[str(index)]), ASKED[index])

    def script(row, limit):
        at = row.output_length
        return [*expected.get(row.request_id, ()), *ids("}}"), END, 7, END][at : at + 4]

    for source, k in ((Forced, 4), (Branching, None)):
        speculating = engine(source(script), fixed_k=k)
        client = Client(speculating)
        for index, schema in enumerate(ASKED):
            client.submit(
                str(index),
                ids(f"q{index}"),
                response_format=wanted(schema),
                max_tokens=60,
                **SHORT,
                **sampling,
            )
        client.submit("free", ids("hello"), max_tokens=10)
        got = client.run()
        assert {name: got[name] for name in expected} == expected
        for name, text in texts.items():
            assert client.texts[name] == client.outcomes[name].text == text
        assert sum(r.accepted for o in client.outcomes.values() for r in o.record.rounds) > 20


def test_a20_a_stop_string_or_stop_token_before_the_grammars_end_wins():
    schema = {"const": {"key": "value", "more": [1, 2, 3]}}
    whole = [*ids('{"key":"value","more":[1,2,3]}'), END, 9]
    source = Forced(lambda row, limit: whole[row.output_length : row.output_length + 4])
    for stop in ({"stop": ("al",)}, {"stop_token_ids": tuple(ids("l"))}):
        client = Client(engine(source))
        client.submit("a", ids("q"), response_format=wanted(schema), max_tokens=60, **SHORT, **stop)
        client.run()
        outcome = client.outcomes["a"]
        assert outcome.record.finish is FinishReason.STOP
        assert outcome.text == '{"key":"v' + ("" if "stop" in stop else "a")
        assert text_of(outcome.record.output_ids) == '{"key":"val'


def test_a20_the_length_limit_may_cut_json_and_min_tokens_does_not_prolong_a_finished_text():
    client = Client(engine())
    client.submit("cut", ids("q"), response_format=wanted({"const": "abcdef"}), max_tokens=3)
    client.submit("done", ids("q"), response_format=wanted({"const": 12}), max_tokens=9, min_tokens=9)
    client.run()
    assert client.outcomes["cut"].record.finish is FinishReason.LENGTH
    assert client.outcomes["cut"].text == '"ab'
    assert client.outcomes["done"].record.finish is FinishReason.STOP
    assert client.outcomes["done"].text == "12"


def test_a20_a_grammar_that_breaks_fails_its_request_alone():
    client = Client(engine())
    client.submit("bad", ids("q"), response_format=wanted(obj(a=WORD)), max_tokens=40)
    client.submit("good", ids("q"), response_format=wanted(obj(a=WORD)), max_tokens=40, **SHORT)
    client.submit("free", ids("q"), max_tokens=12, ignore_eos=True)
    client.engine.step()
    rows = {row.request.request_id: row for row in client.engine.rows}

    def broken(token):
        raise GrammarError("response_format: the grammar cannot go on: too complex")

    rows["bad"].processor.grammar.advance = broken
    client.run()
    assert client.outcomes["bad"].record.finish is FinishReason.ERROR
    assert client.outcomes["bad"].error.status == 500
    assert client.outcomes["good"].record.finish is FinishReason.STOP
    assert len(client.outcomes["free"].record.output_ids) == 12


# --- the grammar itself


def test_after_an_end_token_only_end_tokens_are_allowed_and_nothing_is_an_error():
    grammar = compiler().compile(wanted({"const": {}}))
    for token in ids("{}"):
        assert not grammar.allowed()[1]
        grammar.advance(token)
    for _ in range(2):
        mask, ending = grammar.allowed()
        assert ending
        assert mask.nonzero().flatten().tolist() == [END]
        grammar.advance(END)
    grammar.advance(50)
    assert grammar.allowed()[0].nonzero().flatten().tolist() == [END]


def test_a_token_outside_the_grammar_is_a_typed_error():
    grammar = compiler().compile(wanted({"const": 12}))
    with pytest.raises(GrammarError, match="response_format"):
        grammar.advance(ids("x")[0])


def test_a_broken_matcher_stays_an_error_and_prunes_nothing_silently():
    grammar = compiler().compile(wanted({"const": 12}))
    with pytest.raises(GrammarError):
        grammar.advance(ids("x")[0])
    with pytest.raises(GrammarError):
        grammar.allowed()
    assert len(grammar.prune(Proposal.chain(ids("12"), "x", [0.5, 0.5]))) == 0


def test_pruning_drops_exactly_the_nodes_that_the_grammar_forbids():
    grammar = compiler().compile(wanted({"enum": ["ab", "ac"]}))
    a, b, c, d, quote = (ids(char)[0] for char in 'abcd"')
    tokens = (quote, d, a, b, c, d, quote, END)
    parents = (ROOT, ROOT, 0, 2, 2, 2, 4, 6)
    pruned = grammar.prune(Proposal(tokens, parents, tuple("stuvwxyz"), (0.5,) * 8))
    pruned.check()
    assert pruned.tokens == (quote, a, b, c, quote)
    assert pruned.parents == (ROOT, 0, 1, 1, 3)
    assert pruned.sources == tuple("suvwy")
    told = Proposal(tokens, parents, tuple("stuvwxyz"), (0.5,) * 8, (POINT_MASS,) * 8)
    assert grammar.prune(told).distributions == (POINT_MASS,) * 5
    for token in ids('"ab"'):
        grammar.advance(token)
    assert len(grammar.prune(Proposal.chain([a, END], "x", [0.5, 0.5]))) == 0


def test_a11_a_drawn_proposal_is_given_up_rather_than_chosen_by_what_was_drawn():
    grammar = compiler().compile(wanted({"enum": ["ab", "ac"]}))
    q = DraftDistribution(np.array([*ids('"'), *ids("a")]), np.array([0.5, 0.5]))
    for first in ('"', "a"):
        assert grammar.prune(Proposal.chain(ids(first), "head", [0.5], [q])) is EMPTY


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#/definitions/missing"}, "missing"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"const": object()}, "JSON"),
    ],
)
def test_a20_a_schema_that_cannot_be_compiled_is_refused_with_the_librarys_reason(schema, reason):
    with pytest.raises(InvalidValueError, match=reason) as caught:
        compiler().compile(wanted(schema))
    assert caught.value.field.startswith("response_format")
    assert caught.value.status == 400


def test_targets_whose_tokens_cannot_be_constrained_are_refused():
    with pytest.raises(InvalidValueError, match=r"response_format.*fast tokenizer"):
        GrammarCompiler(LetterTokenizer(), 128, {2}).compile(wanted())
    with pytest.raises(InvalidValueError, match=r"response_format.*end token"):
        GrammarCompiler(tokenizer(), V, ()).compile(wanted())


def test_a_compiled_schema_is_kept_and_every_request_begins_at_its_start():
    first, second = (compiler().compile(wanted({"const": 12})) for _ in range(2))
    first.advance(ids("1")[0])
    assert not torch.equal(first.allowed()[0], second.allowed()[0])
    assert isinstance(second, Grammar)
