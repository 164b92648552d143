"""What a request does to the target's logits before temperature: bias, penalties, least length, grammar.

All of it depends on the tokens before a position, so its state follows the request's own path: it advances
with every emitted token, never with a step or with a token that was merely proposed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from osd.serve.grammar import Grammar
from osd.types import SamplingParams

FORBIDDEN = -100.0
"""A bias this low takes the token out of the distribution, whatever the temperature."""


def processes_logits(params: SamplingParams) -> bool:
    """Whether a request needs a :class:`LogitsProcessor`; without, its logits are used as they are."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.min_tokens
        or params.response_format is not None
    )


class LogitsProcessor:
    """The logits of one request at its present position.

    Order: ``logit_bias``; ``repetition_penalty`` over prompt and output (Keskar et al. 1909.05858, section
    4.1: positive logits are divided, others multiplied); ``frequency_penalty`` and ``presence_penalty`` over
    the output; then what is forbidden: tokens outside the grammar, and until ``min_tokens`` are out all end
    tokens and ``stop_token_ids``. A text that its grammar has completed may end before ``min_tokens``, since
    nothing else can follow.

    Args:
        params: The request's parameters.
        prompt_ids: Tokens of the prompt.
        end_ids: End tokens of the target.
        vocab_size: Columns of the logits.
        device: Where the logits are.
        grammar: The constraint of ``response_format``, fresh; ``None`` without.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        end_ids: Collection[int],
        vocab_size: int,
        device: torch.device | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        assert (grammar is None) == (params.response_format is None), "a grammar belongs to response_format"
        self.params = params
        self.grammar = grammar
        self.length = 0
        values = [-math.inf if b <= FORBIDDEN else b for b in params.logit_bias.values()]
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(values, dtype=torch.float32, device=device)
        ends = sorted({*end_ids, *params.stop_token_ids})
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64, device=device)] = True
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The processed logits, float32 [V]; ``logits`` (float [V]) stay as they are.

        Raises:
            GrammarError: The grammar's state is broken.
        """
        params = self.params
        out = logits.float()
        if len(self._bias):
            out = out.index_add(0, self._bias_ids, self._bias)
        if self._seen is not None:
            penalty = params.repetition_penalty
            out = torch.where(self._seen, torch.where(out > 0, out / penalty, out * penalty), out)
        if self._counts is not None:
            weighted = params.frequency_penalty * self._counts
            out = out - (weighted + params.presence_penalty * (self._counts > 0).float())
        ending = False
        if self.grammar is not None:
            allowed, ending = self.grammar.allowed()
            out = out.masked_fill(~allowed.to(out.device), -math.inf)
        if self.length < params.min_tokens and not ending:
            out = out.index_fill(0, self._ends, -math.inf)
        return out

    def advance(self, token: int) -> None:
        """``token`` was emitted at the present position.

        Raises:
            GrammarError: The grammar does not take it.
        """
        self.length += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        if self.grammar is not None:
            self.grammar.advance(token)
