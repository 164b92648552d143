"""From rehearsed drafts to a verdict in words: what each part is expected to bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osd.learn.rehearse import Chains, mean_accepted_length
from router.app.paired import ratio_gain


@dataclass(frozen=True)
class Costs:
    """What a step costs.

    Attributes:
        pass_ms: Milliseconds of a target pass by tokens, 1 upwards without a gap.
        head_ms: Milliseconds of one depth of the head; 0 without one.
    """

    pass_ms: Mapping[int, float]
    head_ms: float = 0.0

    def speed(self, chains: Sequence[Chains], depth_ms: float = 0.0) -> float:
        """Expected tokens per second of decoding, prompts apart.

        Args:
            chains: Rehearsed answers; none is plain decoding.
            depth_ms: What the draft takes for each token, beyond what was timed in rehearsal.
        """
        tokens = sum(item.tokens for item in chains)
        if not tokens:
            return 1e3 / self.pass_ms[1]
        asking = sum(item.ask_ms for item in chains)
        passes = sum(
            count * (self.pass_ms[1 + length] + depth_ms * length)
            for item in chains
            for length, count in item.lengths.items()
        )
        return 1e3 * tokens / (passes + asking)

    def head_speed(self, chains: Sequence[Chains]) -> float:
        """:meth:`speed` with a head that drafts."""
        return self.speed(chains, self.head_ms)


HEADS = ("trunk", "routed_experts", "shared_expert")
"""Ways of drafting whose tokens cost time of the head."""


def speed_of(name: str, chains: Sequence[Chains], costs: Costs) -> float:
    """Expected tokens per second of a way of drafting."""
    return costs.head_speed(chains) if name in HEADS else costs.speed(chains)


def option(chains: Sequence[Chains], costs: Costs, name: str = "") -> dict[str, Any]:
    """Figures of one way of drafting."""
    speed, plain = speed_of(name, chains, costs), costs.speed([])
    return {
        "mean_accepted_length": mean_accepted_length(chains),
        "chain_length": max((length for item in chains for length in item.lengths), default=0),
        "tokens_per_second": speed,
        "gain_tokens_per_second": speed - plain,
        "answers": len(chains),
    }


def verdicts(
    ways: Mapping[str, Sequence[Chains]],
    experts: Mapping[str, Sequence[Chains]],
    costs: Costs,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """By part: whether it pays, by how much, and that in a sentence.

    A part pays if it gains tokens a pass beyond chance (95 %, a bootstrap over requests in pairs) and is
    expected to be faster than what it is compared with.
    """
    found = {"memories": _judge("memories", ways, "own_memory", "lookup", costs, seed)}
    if "other_memory" in ways:
        found["routing"] = _judge("routing", ways, "own_memory", "shared_memory", costs, seed)
        found["own_domain"] = _judge("the right domain", ways, "own_memory", "other_memory", costs, seed)
    if "trunk" in ways:
        found["trunk"] = _judge("trunk", ways, "trunk", "own_memory", costs, seed)
    if experts:
        found["experts"] = _judge("experts", experts, "routed_experts", "trunk", costs, seed)
        found["routed_experts"] = _judge(
            "routed experts", experts, "routed_experts", "shared_expert", costs, seed
        )
    return found


NAMES = {
    "lookup": "the request's own text alone",
    "own_memory": "memories",
    "shared_memory": "one shared memory",
    "other_memory": "another domain's memory",
    "trunk": "the trunk alone",
    "shared_expert": "one shared expert",
}


def _judge(
    part: str, ways: Mapping[str, Sequence[Chains]], mine: str, other: str, costs: Costs, seed: int
) -> dict[str, Any]:
    counts = [[(float(item.tokens), float(item.passes)) for item in ways[name]] for name in (mine, other)]
    gain, low, high = ratio_gain(counts[0], counts[1], seed)
    speeds = [speed_of(name, ways[name], costs) for name in (mine, other)]
    against = NAMES[other]
    numbers = f"{gain:+.2f} tokens a pass (95 % {low:+.2f} … {high:+.2f})"
    pace = f"{speeds[0]:.0f} instead of {speeds[1]:.0f} tokens/s expected"
    pays = low > 0 and speeds[0] > speeds[1]
    if pays:
        words = f"{part}: pay, {numbers} over {against}; {pace}"
    elif low > 0:
        words = f"{part}: {numbers} over {against}, which the time they take eats up; {pace}"
    elif high < 0:
        words = f"{part}: a loss against {against}, {numbers}"
    else:
        words = f"{part}: no gain over {against} beyond chance, {numbers}"
    return {
        "pays": pays,
        "gain": gain,
        "low": low,
        "high": high,
        "tokens_per_second": speeds[0],
        "against_tokens_per_second": speeds[1],
        "words": words,
    }
