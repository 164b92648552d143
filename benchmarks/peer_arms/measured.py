"""What an arm measures: one block of prompts, answered its way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.app.traffic import TrafficItem


class ArmUnavailableError(Exception):
    """An arm that cannot run here; the message is the reason that the result reports."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of the comparison, the same for every arm.

    Attributes:
        item: The line of traffic; its ``label`` groups the results.
        ids: Token ids of the whole prompt, chat template applied.
    """

    item: TrafficItem
    ids: tuple[int, ...]

    @property
    def index(self) -> int:
        """Place in the traffic."""
        return self.item.index


@dataclass(frozen=True)
class Answer:
    """One arm's answer to one prompt.

    Attributes:
        tokens: Emitted tokens, the one that ended the answer included.
        seconds: From its submission to its end.
        ttft: From its submission to its first token, ``None`` where the arm cannot tell.
        passes: Target passes that emitted one of its tokens, prefill's included; ``None`` where unknown.
    """

    tokens: tuple[int, ...]
    seconds: float
    ttft: float | None = None
    passes: int | None = None


@dataclass(frozen=True)
class BlockRun:
    """One arm's run over one block.

    Attributes:
        answers: By index of the prompt.
        seconds: Wall time of the block, prefill included.
    """

    answers: Mapping[int, Answer] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers.values())

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the block; 0 for none."""
        return self.tokens / self.seconds if self.seconds else 0.0


class PeerArm(Protocol):
    """One way to answer a block with a number of requests in flight."""

    note: str
    """How it is run, for the reader of the result."""

    def run(self, block: Sequence[Prompt], max_tokens: int) -> BlockRun:
        """Answer every prompt of the block greedily.

        Raises:
            ArmUnavailableError: It cannot run here.
        """
        ...

    def close(self) -> None:
        """Give back what it holds; harmless when called twice."""
        ...
