"""The head over whole answers, several steps deep: training-time test of EAGLE-3 (2503.01840, section 3).

Step 0 reads true features; step i reads the head's own output of step i - 1, as it will have to when it
proposes several tokens. Its attention sees the keys of step 0 up to its base position and, of every later
step, only the entry that belongs to the same base: exactly what the draft cache holds while serving.

Index rule (case A28): base ``a`` of an answer is pair ``prompt_length - 2 + a``; at step ``i`` it predicts
output position ``a + i``. So the first output token is learned, from the last prompt position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from drafts.bank import Expert, expert_mlp
from drafts.trunk import Product, Trunk


class Text(Protocol):
    """What the unroll needs of a record: tokens ``[L]``, prompt length, features ``[L - 1, F]``."""

    @property
    def tokens(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def prompt_length(self) -> int: ...  # noqa: D102
    @property
    def features(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def output_length(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Unrolled:
    """Outputs of the head at N packed bases (all answers of the batch, one after the other).

    Attributes:
        hidden: One ``[N, H]`` per step: layer output before the final norm; fewer rows in later steps if
            only a share of the bases went deeper.
        bases: One int64 index per step: which of the N bases each row of ``hidden`` is.
        positions: int64 ``[N]``, the base's output position ``a``.
        remaining: int64 ``[N]``, output tokens from the base on; step i is labelled where i < remaining.
        rows: int64 ``[N]``, which answer of the batch.
    """

    hidden: list[torch.Tensor]
    bases: list[torch.Tensor]
    positions: torch.Tensor
    remaining: torch.Tensor
    rows: torch.Tensor


def unroll(
    trunk: Trunk,
    embedding: torch.Tensor,
    texts: Sequence[Text],
    steps: int,
    expert: Expert | None = None,
    deeper: float = 1.0,
    generator: torch.Generator | None = None,
) -> Unrolled:
    """Run ``steps`` steps of the trunk over ``texts``; differentiable in the trunk's tensors.

    Args:
        trunk: The head.
        embedding: The target's embedding ``[vocab, H]``, frozen.
        texts: Answers of at least one output token and two prompt tokens.
        steps: Steps of the unroll, 1 or more.
        deeper: Share of the bases that run the steps after the first, drawn at random.
        expert: Deltas to apply, none for the trunk itself.
        generator: Of that draw; torch's own by default.
    """
    pairs = [len(text.tokens) - 2 for text in texts]
    bases = [text.output_length for text in texts]
    width, longest = max(pairs), max(bases)
    positions = torch.cat([torch.arange(n) for n in pairs])
    pair_row = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(pairs))
    base_row = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(bases))
    base_index = torch.cat([torch.arange(n) for n in bases])
    base_pair = base_index + torch.tensor([t.prompt_length - 2 for t in texts])[base_row]
    starts = torch.tensor([0, *pairs[:-1]]).cumsum(0)
    padded = torch.zeros(len(texts), width + steps + 2, dtype=torch.int64)
    for row, text in enumerate(texts):
        padded[row, : len(text.tokens)] = text.tokens

    trunk.reach(width + steps)
    hidden = trunk.fuse(torch.cat([t.features[:n] for t, n in zip(texts, pairs, strict=True)]).float())
    hidden = hidden.float()
    inputs = trunk.layer_input(embedding[padded[pair_row, positions + 1]], hidden)
    keys, values = trunk.keys_values(inputs, positions)
    context = _Context(trunk, len(texts), width, longest, base_row, base_index, base_pair)
    context.fill(keys, values, pair_row, positions)
    at = starts[base_row] + base_pair
    hidden, inputs = hidden[at], inputs[at]
    lengths = torch.tensor(bases)[base_row] - base_index
    result = Unrolled([], [], base_index, lengths, base_row)
    chosen = torch.arange(len(base_row))
    for step in range(steps):
        if step == 1 and deeper < 1.0:
            chosen = (torch.rand(len(base_row), generator=generator) < deeper).nonzero()[:, 0]
            hidden, base_row, base_pair = hidden[chosen], base_row[chosen], base_pair[chosen]
            context.keep(chosen)
        if step:
            tokens = padded[base_row, base_pair + 1 + step]
            inputs = trunk.layer_input(embedding[tokens], hidden)
            queries, keys, values = trunk.queries_keys_values(inputs, base_pair + step)
            context.extend(keys, values)
        else:
            queries = trunk.queries(inputs, base_pair)
        after = trunk.after_attention(hidden, context.attend(queries)).float()
        hidden = expert_mlp(trunk, after, expert).float()
        result.hidden.append(hidden)
        result.bases.append(chosen)
    return result


class _Context:
    """Padded keys and values of step 0 and the diagonal entries of later steps."""

    def __init__(
        self,
        trunk: Trunk,
        rows: int,
        width: int,
        longest: int,
        base_row: torch.Tensor,
        base_index: torch.Tensor,
        base_pair: torch.Tensor,
    ) -> None:
        shape = trunk.shape
        self.groups, self.per_group, self.dim = shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim
        self.rows, self.width, self.longest = rows, width, longest
        self.at = (base_row, base_index)
        last = torch.full((rows, longest), -1)
        last[self.at] = base_pair
        self.hidden_from = torch.arange(width)[None, None] > last.clamp_min(0)[:, :, None]
        self.later: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fill(self, k: torch.Tensor, v: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> None:
        """Scatter packed keys and values of step 0 into ``[rows, G, width, D]``."""
        blank = torch.zeros(self.rows, self.width, self.groups, self.dim)
        self.keys = blank.index_put((row, position), k.float()).transpose(1, 2)
        self.values = blank.index_put((row, position), v.float()).transpose(1, 2)

    def keep(self, chosen: torch.Tensor) -> None:
        """Go on with some of the bases only; before the first :meth:`extend`."""
        self.at = (self.at[0][chosen], self.at[1][chosen])

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add a later step's entries ``[N, G, D]``, one per base."""
        self.later.append((k.float(), v.float()))

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries ``[N, A, D]`` -> attended values ``[N, A * D]``."""
        scale = self.dim**-0.5
        grouped = queries.float().reshape(-1, self.groups, self.per_group, self.dim)
        blank = torch.zeros(self.rows, self.longest, self.groups, self.per_group, self.dim)
        padded = blank.index_put(self.at, grouped).permute(0, 2, 3, 1, 4)
        flat = padded.reshape(self.rows, self.groups, self.per_group * self.longest, self.dim)
        scores = (flat @ self.keys.transpose(-1, -2) * scale).view(
            self.rows, self.groups, self.per_group, self.longest, self.width
        )
        scores = scores.masked_fill(self.hidden_from[:, None, None], float("-inf"))
        own = [self._spread((grouped * k[:, :, None]).sum(-1) * scale) for k, _ in self.later]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1)
        first = weights[..., : self.width].reshape(self.rows, self.groups, -1, self.width) @ self.values
        mixed = first.view(self.rows, self.groups, self.per_group, self.longest, self.dim)
        out = mixed.permute(0, 3, 1, 2, 4)[self.at]
        for i, (_, v) in enumerate(self.later):
            weight = weights[..., self.width + i].permute(0, 3, 1, 2)[self.at]
            out = out + weight[..., None] * v[:, :, None]
        return out.flatten(1)

    def _spread(self, score: torch.Tensor) -> torch.Tensor:
        """Packed scores ``[N, G, A / G]`` -> padded ``[rows, G, A / G, longest, 1]``."""
        blank = torch.zeros(self.rows, self.longest, self.groups, self.per_group)
        return blank.index_put(self.at, score).permute(0, 2, 3, 1)[..., None]


def bf16_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` with bfloat16 operands and float32 result: 2.5 times faster where AVX-512 has it."""
    return F.linear(x.bfloat16(), weight.bfloat16()).float()


def fastest_product(width: int) -> Product:
    """The faster of the plain and the bfloat16 product on this machine, by timing one shape."""
    from time import perf_counter

    x, weight = torch.randn(512, width), torch.randn(4 * width, width)
    best: dict[Product, float] = {}
    for product in (F.linear, bf16_product):
        for _ in range(4):
            start = perf_counter()
            product(x, weight)
            best[product] = min(best.get(product, 1e9), perf_counter() - start)
    return min(best, key=lambda p: best[p])
