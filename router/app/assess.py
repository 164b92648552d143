"""Does routed speculation pay on a user's own traffic? Told before anything is deployed.

The target answers the prompts once. Everything else is computed from the recorded answers: what each draft
would have had accepted, each request scored before it teaches, and what that makes of the measured cost of
the target's passes.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafts.bank import ExpertBank
from drafts.errors import InvalidValueError
from drafts.kinds.base import DraftRow, Guess
from drafts.kinds.eagle import EagleSource
from drafts.trunk import Trunk
from osd.learn.head import EagleHead
from osd.learn.pretrain_data import Answer, load_shards
from osd.learn.rehearse import (
    Chains,
    Drafted,
    head_chains,
    rehearse_memories,
    train_experts,
)
from osd.serve.collect import Prompt, collect
from osd.serve.target import TargetModel
from osd.types import BASE_DOMAIN, Assignment
from router.app.traffic import TrafficItem
from router.app.verdicts import Costs, option, verdicts
from router.bodies.parts import build_drafts
from router.bodies.prompts import PromptBuilder
from router.config import PolydraftConfig
from router.mind.router import Router

DEPTH = 4
"""Chain length, as in the papers' figures."""

TIMED_CALLS = 50
"""Calls of the head of which the fastest counts: a disturbance only ever adds time."""


@dataclass(frozen=True)
class AssessSettings:
    """Options of an assessment.

    Attributes:
        max_tokens: Longest answer.
        experts: Whether experts are trained: on the first two thirds of the answers, judged on the rest.
        seed: Of the bootstrap.
    """

    max_tokens: int = 64
    experts: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Routed:
    """One prompt of the traffic with the router's verdict."""

    item: TrafficItem
    ids: tuple[int, ...]
    text: str
    assignment: Assignment


def assess(
    config: PolydraftConfig,
    items: Sequence[TrafficItem],
    settings: AssessSettings,
    target: TargetModel,
    tokenizer: Any,
    router: Router,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Assess traffic; see the module.

    Args:
        config: The deployment.
        items: The prompts, in the order of serving; labels are only compared with domains.
        settings: Options.
        target: The loaded target.
        tokenizer: Its tokenizer.
        router: The config's router, which learns nothing here.
        say: Told what is being done.

    Returns:
        ``routing``, ``options`` (figures by way of drafting), ``domains`` (the same by domain) and
        ``verdicts``, all JSON.

    Raises:
        InvalidValueError: No prompt fits, or no answer is longer than one token.
    """
    limit = min(config.engine.max_length, target.max_positions)
    routed = route(items, PromptBuilder(tokenizer, limit - settings.max_tokens), router)
    if not routed:
        raise InvalidValueError("traffic", len(items), f"a prompt that fits {limit} tokens with its answer")
    say(f"the target answers {len(routed)} prompts")
    answers, domains = answered(target, routed, settings.max_tokens)
    if not answers:
        raise InvalidValueError("traffic", len(routed), "an answer of at least two tokens")
    say("drafts are rehearsed on the answers")
    drafted = Drafted(answers, domains, [BASE_DOMAIN, *(domain.name for domain in config.domains)])
    ways = rehearse_memories(drafted, config.drafts, DEPTH)
    costs = Costs(target.measure_costs(range(1, DEPTH + 2)))
    head: RehearsedHead | None = None
    source = head_of(config, target, tokenizer)
    if source is not None:
        costs = Costs(costs.pass_ms, head_call_ms(source, answers[0]))
        head = rehearsed(source)
        by_length = head_chains(head.trunk, head.embedding, head.output, answers, DEPTH)
        ways["trunk"] = max(by_length, key=costs.head_speed)
    result: dict[str, Any] = {
        "routing": routing_figures(routed, len(items)),
        "options": {"plain": option([], costs), **_options(ways, costs)},
        "domains": {
            name: _options(_only(ways, [at for at, domain in enumerate(domains) if domain == name]), costs)
            for name in dict.fromkeys(domains)
        },
        "pass_ms": {str(count): ms for count, ms in costs.pass_ms.items()},
        "head_depth_ms": costs.head_ms,
    }
    experts: dict[str, list[Chains]] = {}
    if settings.experts and head is not None:
        say("experts are trained")
        experts = rehearse_experts(config, head, drafted)
        result["experts"] = _options(experts, costs)
    result["verdicts"] = verdicts(ways, experts, costs, settings.seed)
    return result


def route(items: Sequence[TrafficItem], prompts: PromptBuilder, router: Router) -> list[Routed]:
    """The prompts that fit, with the domain that each would be served by."""
    found: list[Routed] = []
    for item in items:
        try:
            ids, text = prompts.build(None, item.messages, True)
        except InvalidValueError:
            continue
        found.append(Routed(item, ids, text, router.route(text)))
    return found


def routing_figures(routed: Sequence[Routed], asked: int) -> dict[str, Any]:
    """Prompts by domain, share of unknown ones, and purity where there are labels.

    Purity is the share of labelled prompts whose label is the most frequent one of their domain.
    """
    count = Counter(one.assignment.domain for one in routed)
    labels: dict[str, Counter[str]] = {}
    for one in routed:
        if one.item.label is not None:
            labels.setdefault(one.assignment.domain, Counter())[one.item.label] += 1
    labelled = sum(row.total() for row in labels.values())
    return {
        "prompts": len(routed),
        "left_out": asked - len(routed),
        "domains": dict(count.most_common()),
        "unknown_share": sum(not one.assignment.known for one in routed) / len(routed),
        "labels": {domain: dict(row.most_common()) for domain, row in labels.items()},
        "purity": sum(max(row.values()) for row in labels.values()) / labelled if labelled else None,
    }


def answered(
    target: TargetModel, routed: Sequence[Routed], max_tokens: int
) -> tuple[list[Answer], list[str]]:
    """The target's greedy answers in order, and the domain of each; those of one token are left out."""
    prompts = [Prompt(one.assignment.domain, str(at), one.text, one.ids) for at, one in enumerate(routed)]
    with tempfile.TemporaryDirectory() as folder:
        answers = load_shards(collect(target, prompts, Path(folder), max_tokens=max_tokens))
    answers.sort(key=lambda answer: int(answer.source))
    return answers, [answer.label for answer in answers]


def head_of(config: PolydraftConfig, target: TargetModel, tokenizer: Any) -> EagleSource | None:
    """The deployment's head; ``None`` where it has none or none that fits the target."""
    if "eagle" not in config.drafts.sources:
        return None
    parts = build_drafts(
        config,
        target,
        tokenizer,
        sources=("eagle",),
        learn=False,
        versions_dir=None,
        on_event=lambda event: None,
        add_own=False,
    )
    source = parts.mixture.sources.get("eagle")
    return source if isinstance(source, EagleSource) else None


def head_call_ms(head: EagleSource, answer: Answer) -> float:
    """Milliseconds of one depth of the head for one row; the fastest of some calls, as passes are timed."""
    tokens = answer.tokens.tolist()
    row = DraftRow("timed", BASE_DOMAIN, tokens, answer.prompt_length, features=answer.features.float())

    def likeliest(index: int, guesses: Sequence[Guess]) -> int:
        return guesses[0][0]

    times: list[float] = []
    depth = min(DEPTH, head.max_depth)
    for _ in range(TIMED_CALLS):
        begin = time.perf_counter()
        head.draft([row], [depth], likeliest)
        times.append((time.perf_counter() - begin) * 1e3 / depth)
    return min(times)


@dataclass(frozen=True)
class RehearsedHead:
    """The head in float32 beside the recorded answers, which are on the processor whatever serves.

    Attributes:
        trunk: Its trunk.
        embedding: The target's embedding ``[vocab, H]``.
        output: The target's output rows of the draft vocabulary ``[V, H]``.
    """

    trunk: Trunk
    embedding: torch.Tensor
    output: torch.Tensor


def rehearsed(head: EagleSource) -> RehearsedHead:
    """What of a head is rehearsed, see :class:`RehearsedHead`."""
    return RehearsedHead(head.trunk.to("cpu"), head.embedding.cpu().float(), head.output.cpu().float())


def rehearse_experts(
    config: PolydraftConfig, head: RehearsedHead, drafted: Drafted
) -> dict[str, list[Chains]]:
    """The last third of the answers by trunk, routed experts and one shared expert, chains of :data:`DEPTH`.

    The experts learned from the first two thirds: routed ones each from its domain's answers, the shared
    one from all of them, so that both saw the same positions.
    """
    cut = 2 * len(drafted.answers) // 3
    early, late = drafted.answers[:cut], drafted.answers[cut:]
    trunk = head.trunk

    def chains(answers: Sequence[Answer], expert: dict[str, torch.Tensor] | None) -> list[Chains]:
        return head_chains(trunk, head.embedding, head.output, answers, DEPTH, expert)[-1]

    def trained(domains: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
        bank = ExpertBank(trunk, config.drafts.eagle.rank)
        for domain in dict.fromkeys(domains):
            bank.add(domain)
        learner = EagleHead(trunk, bank, head.embedding, head.output)
        return train_experts(learner, config.learn, early, domains)

    own = trained(drafted.domains[:cut])
    shared = trained([BASE_DOMAIN] * cut)
    routed = [
        chains([answer], own.get(domain))[0]
        for answer, domain in zip(late, drafted.domains[cut:], strict=True)
    ]
    return {
        "trunk": chains(late, None),
        "routed_experts": routed,
        "shared_expert": chains(late, shared.get(BASE_DOMAIN)),
    }


def _options(ways: Mapping[str, Sequence[Chains]], costs: Costs) -> dict[str, dict[str, Any]]:
    return {name: option(chains, costs, name) for name, chains in ways.items()}


def _only(ways: Mapping[str, Sequence[Chains]], places: Sequence[int]) -> dict[str, list[Chains]]:
    return {name: [chains[at] for at in places] for name, chains in ways.items()}
