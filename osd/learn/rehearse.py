"""What drafts would have done on recorded answers: verified text tells what is accepted, no target is needed.

Answers come in the order of serving, and each is scored before it teaches anything, so figures are honest
forecasts (prequential evaluation) of a deployment that sees the same traffic.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from drafts.bank import Expert
from drafts.config import DraftsConfig
from drafts.expert_key import FIRST_KIND
from drafts.kinds.base import DraftRow, MemorySource
from drafts.kinds.lookup import LookupSource
from drafts.kinds.ngram import NgramSource
from drafts.registry import Registry
from drafts.trunk import Trunk
from osd.learn.config import LearnConfig
from osd.learn.head import TrainableHead
from osd.learn.pretrain_data import Answer
from osd.learn.scheduler import LearningScheduler
from osd.learn.simulate import answer_flags, chain_counts
from osd.types import (
    BASE_DOMAIN,
    Assignment,
    FinishedRecord,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TargetEvidence,
)

Table = dict[str, dict[str, float]]
"""Mean accepted length by draft (outer) and label of the requests (inner)."""


@dataclass
class Chains:
    """One answer decoded with chains of one draft.

    Attributes:
        tokens: Tokens emitted after prefill's own.
        lengths: Target passes by length of the chain they verified.
        ask_ms: Milliseconds of asking the draft, all passes together; 0 where it was not timed.
    """

    tokens: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    ask_ms: float = 0.0

    @property
    def passes(self) -> int:
        """Target passes."""
        return sum(self.lengths.values())


@dataclass(frozen=True)
class Drafted:
    """Answers of one traffic in order, with the domain that each was routed to.

    Attributes:
        answers: The target's answers.
        domains: Domain of every answer.
        names: All domains there are, the base domain among them.
    """

    answers: Sequence[Answer]
    domains: Sequence[str]
    names: Sequence[str]


def memory_chains(
    source: MemorySource, domain: str, tokens: Sequence[int], prompt_length: int, depth: int
) -> Chains:
    """One answer by chains of at most ``depth`` from one source, as the domain's requests see it."""
    row = DraftRow("rehearsed", domain, list(tokens[: prompt_length + 1]), prompt_length)
    found = Chains(tokens=max(len(tokens) - prompt_length - 1, 0))
    while len(row.tokens) < len(tokens):
        begin = time.perf_counter()
        chain = source.propose([row], [depth])[0].tokens
        found.ask_ms += (time.perf_counter() - begin) * 1e3
        found.lengths[len(chain)] = found.lengths.get(len(chain), 0) + 1
        at = len(row.tokens)
        truth = tokens[at : at + len(chain)]
        right = next((i for i, (x, y) in enumerate(zip(chain, truth, strict=False)) if x != y), len(truth))
        row.tokens.extend(tokens[at : at + right + 1])
    return found


def rehearse_memories(drafted: Drafted, config: DraftsConfig, depth: int) -> dict[str, list[Chains]]:
    """Chains of every answer: the request's own text alone, and with memories of several cuts.

    ``own_memory`` is the domain's own, ``shared_memory`` one for all traffic that may hold as many bytes as
    all of them, and ``other_memory`` that of another domain (the others take turns); the last is left out
    where all requests go to one domain.
    """
    lookup = LookupSource(config.lookup)
    own = NgramSource(config.ngram, base=BASE_DOMAIN)
    bound = config.ngram.max_bytes * len(drafted.names)
    shared = NgramSource(
        config.ngram.model_copy(update={"shared": True, "max_bytes": bound}), base=BASE_DOMAIN
    )
    for name in drafted.names:
        own.add_domain(name)
    used = sorted(set(drafted.domains))
    found: dict[str, list[Chains]] = {"lookup": [], "own_memory": [], "shared_memory": []}
    if len(used) > 1:
        found["other_memory"] = []
    for number, (answer, domain) in enumerate(zip(drafted.answers, drafted.domains, strict=True)):
        tokens, prompt = answer.tokens.tolist(), answer.prompt_length
        others = [name for name in used if name != domain]
        ways: dict[str, tuple[MemorySource, str]] = {
            "lookup": (lookup, domain),
            "own_memory": (own, domain),
            "shared_memory": (shared, domain),
        }
        if others:
            ways["other_memory"] = own, others[number % len(others)]
        for name, (source, memory) in ways.items():
            found[name].append(memory_chains(source, memory, tokens, prompt, depth))
        own.teach(domain, tokens, prompt)
        shared.teach(domain, tokens, prompt)
    return found


def head_chains(
    trunk: Trunk,
    embedding: torch.Tensor,
    output: torch.Tensor,
    answers: Sequence[Answer],
    depth: int,
    expert: Expert | None = None,
) -> list[list[Chains]]:
    """Chains of every answer by the head alone, for chains of 1, 2, … ``depth`` (outer)."""
    flags = answer_flags(trunk, embedding, output, answers, depth, expert=expert)
    found: list[list[Chains]] = []
    for k in range(1, depth + 1):
        counts = [chain_counts(right, k) for right in flags]
        found.append([Chains(tokens, {k: passes}) for tokens, passes in counts])
    return found


def mean_accepted_length(chains: Sequence[Chains]) -> float:
    """Tokens per target pass over answers; 1 where none needed a pass."""
    passes = sum(item.passes for item in chains)
    return sum(item.tokens for item in chains) / passes if passes else 1.0


def train_experts(
    head: TrainableHead, config: LearnConfig, answers: Sequence[Answer], domains: Sequence[str]
) -> dict[str, Expert]:
    """Experts after learning from ``answers`` in order, by the serving learner with time as it needs.

    What is returned is what would be served: updates that the guard refused are not in it.
    """
    registry = Registry(None, keep=2)
    scheduler = LearningScheduler({FIRST_KIND: head}, registry, config.model_copy(update={"enabled": True}))
    for answer, domain in zip(answers, domains, strict=True):
        scheduler.take(record_of(answer, domain))
        scheduler.drain()
    experts: dict[str, Expert] = {}
    for domain in dict.fromkeys(domains):
        version = registry.current(domain)
        experts[domain] = head.served(domain) if version is None else version.tensors
    return experts


def record_of(answer: Answer, domain: str) -> FinishedRecord:
    """The finished request that a server would have made of a recorded answer."""
    tokens = answer.tokens.tolist()
    prompt = tuple(tokens[: answer.prompt_length])
    return FinishedRecord(
        request=GenerationRequest("rehearsed", prompt, SamplingParams.model_validate({"temperature": 0.0})),
        domain=domain,
        assignment=Assignment(domain),
        output_ids=tuple(tokens[answer.prompt_length :]),
        finish=FinishReason.STOP,
        rounds=(),
        versions=(),
        evidence=TargetEvidence(answer.top_ids, answer.top_logprobs),
        features=answer.features,
        seconds=0.0,
        routing_wait=0.0,
        first_token_seconds=0.0,
        total_seconds=0.0,
    )


def expert_table(
    trunk: Trunk,
    embedding: torch.Tensor,
    output: torch.Tensor,
    experts: Mapping[str, Expert],
    answers: Sequence[Answer],
    depth: int,
) -> Table:
    """Every expert alone on the answers of every label, chains of ``depth``."""
    return {
        name: _by_label(answers, head_chains(trunk, embedding, output, answers, depth, expert)[-1])
        for name, expert in experts.items()
    }


def memory_table(source: NgramSource, names: Sequence[str], answers: Sequence[Answer], depth: int) -> Table:
    """Every domain's memory alone, without the requests' own text, on the answers of every label."""
    alone = NgramSource(source.config.model_copy(update={"own_weight": 0.0, "base_weight": 0.0}), source.base)
    alone.load_state(source.state())
    found: Table = {}
    for name in names:
        chains = [memory_chains(alone, name, a.tokens.tolist(), a.prompt_length, depth) for a in answers]
        found[name] = _by_label(answers, chains)
    return found


def _by_label(answers: Sequence[Answer], chains: Sequence[Chains]) -> dict[str, float]:
    groups: dict[str, list[Chains]] = {}
    for answer, item in zip(answers, chains, strict=True):
        groups.setdefault(answer.label, []).append(item)
    return {label: mean_accepted_length(group) for label, group in sorted(groups.items())}
