"""Structured output: which tokens may come next so that the answer is a JSON text of the request's schema.

The grammar is llguidance's. Verification follows the accepted path only, so a matcher is advanced with
emitted tokens and never taken back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import llguidance
import numpy as np
import orjson
import torch
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from drafts.errors import InvalidValueError, PolydraftError
from drafts.proposal import EMPTY, POINT_MASS, ROOT, Proposal
from osd.types import ResponseFormat

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,24}"
"""White space between two JSON tokens: any, but no endless run, which weak models fall into."""

KEPT = 64
"""Compiled schemas kept for requests with the same."""


class GrammarError(PolydraftError):
    """The grammar of one request broke while it was answered; only that request fails."""

    code = "grammar"


class Grammar:
    """The constraint of one request at its present position.

    Args:
        matcher: llguidance's matcher, fresh.
        vocab_size: Columns of the target's logits.
        end_ids: End tokens of the target.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = np.array(sorted(end_ids), dtype=np.int64)
        self._end_ids = frozenset(end_ids)
        self._ended = False

    def allowed(self) -> tuple[torch.Tensor, bool]:
        """The tokens that may come next, bool [V] on the CPU, and whether only end tokens may.

        Raises:
            GrammarError: The matcher gave up, for example at its limit of complexity.
        """
        self._check()
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        may_end = self._ended or self._matcher.is_stopped()
        if not may_end:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._check()
            found = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            mask[: len(found)] = found
            may_end = self._matcher.is_accepting()
        mask[self._ends] = False
        only_ends = not mask.any()
        mask[self._ends] = may_end
        return torch.from_numpy(mask), only_ends and may_end

    def advance(self, token: int) -> None:
        """``token`` was emitted; after an end token everything is ignored.

        Raises:
            GrammarError: The grammar does not take it here.
        """
        if self._ended or token in self._end_ids:
            self._ended = True
            return
        self._matcher.consume_token(token)
        self._check()

    def prune(self, proposal: Proposal) -> Proposal:
        """The proposal without the nodes that the grammar forbids: they could only be rejected.

        Drawn nodes must not be chosen by what was drawn (rejection sampling would no longer follow the
        target), so a proposal with any is given up.
        """
        if not len(proposal):
            return proposal
        drawn_from = proposal.distributions
        if drawn_from is not None and any(q is not POINT_MASS for q in drawn_from):
            return EMPTY
        paths: list[list[int]] = []
        kept: list[int] = []
        place = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
            path = [*(paths[parent] if parent != ROOT else ()), token]
            paths.append(path)
            if parent in place and self._takes(path):
                place[node] = len(kept)
                kept.append(node)
        if len(kept) == len(proposal):
            return proposal
        return Proposal(
            tuple(proposal.tokens[node] for node in kept),
            tuple(place[proposal.parents[node]] for node in kept),
            tuple(proposal.sources[node] for node in kept),
            tuple(proposal.confidence[node] for node in kept),
            None if drawn_from is None else tuple(drawn_from[node] for node in kept),
        )

    def _takes(self, path: list[int]) -> bool:
        if self._ended or self._matcher.is_stopped():
            return False
        return self._end_ids.isdisjoint(path) and self._matcher.validate_tokens(path) == len(path)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().split("\n<state>")[0]
            raise GrammarError(f"response_format: the grammar cannot go on: {reason}")


class GrammarCompiler:
    """Compiles response formats for one tokenizer; safe from any thread.

    The tokenizer's tables are made once, at the first request that needs them (about a second for a large
    vocabulary), so call :meth:`compile` off the engine's thread.

    Args:
        tokenizer: The target's tokenizer.
        vocab_size: Columns of the target's logits.
        end_ids: End tokens of the target.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._lock = threading.Lock()
        self._tables: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, llguidance.LLMatcher] = OrderedDict()

    def compile(self, wanted: ResponseFormat) -> Grammar:
        """The grammar of a response format, at its start.

        Raises:
            InvalidValueError: A schema that cannot be compiled (with the library's reason), or a target
                whose tokens cannot be constrained.
        """
        schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema
        try:
            key = orjson.dumps(schema)
        except (TypeError, ValueError) as error:
            raise InvalidValueError(
                "response_format.json_schema", schema, f"JSON values ({error})"
            ) from error
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is None:
                matcher = self._matcher(key, schema)
                self._compiled[key] = matcher
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return Grammar(matcher.deep_copy(), self._vocab_size, self._end_ids)

    def _matcher(self, key: bytes, schema: dict[str, Any]) -> llguidance.LLMatcher:
        tables = self._tokens()
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            key.decode(), overrides={"whitespace_pattern": WHITESPACE}
        )
        matcher = llguidance.LLMatcher(tables, grammar, log_level=0)
        if matcher.is_error():
            reason = llguidance.LLMatcher.validate_grammar(grammar, tables) or matcher.get_error()
            raise InvalidValueError("response_format", schema, f"a schema that compiles: {reason}")
        return matcher

    def _tokens(self) -> llguidance.LLTokenizer:
        if self._tables is None:
            if not self._end_ids:
                raise InvalidValueError("response_format", "json", "a target that has an end token")
            if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
                raise InvalidValueError(
                    "response_format", type(self._tokenizer).__name__, "a target with a fast tokenizer"
                )
            try:
                self._tables = from_tokenizer(
                    self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._end_ids)
                )
            except Exception as error:
                allowed = f"a tokenizer that llguidance reads: {error}"
                raise InvalidValueError("response_format", type(self._tokenizer).__name__, allowed) from error
        return self._tables
