"""What every arm is: one part of the drafts more than the arm before it, and one shared draft beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from drafts.errors import InvalidValueError, UnknownNameError
from router.app.traffic import TrafficItem
from router.config import DomainConfig, PolydraftConfig

ARMS = ("lookup", "memory", "trunk", "experts", "trees", "trees_frozen", "shared")
SOURCES = {"lookup": ("lookup",), "memory": ("lookup", "ngram")}
ALL_SOURCES = ("lookup", "ngram", "eagle")
MOST_NODES = 8
"""Most nodes of a tree in a step: few enough that what is compared is drafts and not the width of trees."""

LEARNING = ("experts", "trees", "shared")
WITH_TREES = ("trees", "trees_frozen", "shared")
MOST_RANK = 1024
"""Largest rank that a config takes."""


@dataclass(frozen=True)
class Plan:
    """One arm.

    Attributes:
        arm: Its name in :data:`ARMS`.
        name: Unique name; variants of ``shared`` have names of their own.
        config: Its deployment.
        sources: Who proposes.
        routed: Whether requests are routed to domains; else the base domain serves all of them.
    """

    arm: str
    name: str
    config: PolydraftConfig
    sources: tuple[str, ...]
    routed: bool


def make_plans(
    arms: Sequence[str],
    config: PolydraftConfig,
    rates: Sequence[float],
    nodes: int = MOST_NODES,
    routed_rates: Sequence[float] = (1.0,),
) -> list[Plan]:
    """The arms in the order of :data:`ARMS`, learning ones once for every rate.

    Args:
        arms: Names.
        config: The deployment.
        rates: Multiples of ``learn.rate`` for ``shared``, which is tried with two ranks beside.
        nodes: Most nodes of a tree of any arm.
        routed_rates: The same multiples for the routed arms.

    Raises:
        UnknownNameError: An arm that does not exist.
        InvalidValueError: A rate that is not positive.
    """
    for name in arms:
        if name not in ARMS:
            raise UnknownNameError("--arms", name, list(ARMS))
    for option, multiples in (("--shared-rates", rates), ("--rates", routed_rates)):
        for rate in multiples:
            if not rate > 0:
                raise InvalidValueError(option, rate, "positive multiples of learn.rate")
    bounded = config.drafts.model_copy(update={"max_nodes": nodes})
    config = config.model_copy(update={"drafts": bounded})
    plans: list[Plan] = []
    for arm in [name for name in ARMS if name in arms]:
        if arm == "shared":
            plans += _shared_plans(config, rates)
        else:
            plans += _own_plans(arm, config, routed_rates)
    return plans


def _own_plans(arm: str, config: PolydraftConfig, rates: Sequence[float]) -> list[Plan]:
    sources, one = SOURCES.get(arm, ALL_SOURCES), _deployment(config, arm)
    if arm not in LEARNING or len(rates) == 1:
        rate = rates[0] if arm in LEARNING else 1.0
        return [Plan(arm, arm, _faster(one, rate), sources, arm != "lookup")]
    return [Plan(arm, f"{arm} (rate x {rate:g})", _faster(one, rate), sources, True) for rate in rates]


def _faster(config: PolydraftConfig, rate: float) -> PolydraftConfig:
    learn = config.learn.model_copy(update={"rate": rate * config.learn.rate})
    return config.model_copy(update={"learn": learn})


def _deployment(config: PolydraftConfig, arm: str) -> PolydraftConfig:
    drafts = config.drafts.model_copy(update={"trees": arm in WITH_TREES})
    learn = config.learn.model_copy(update={"enabled": arm in LEARNING})
    return config.model_copy(update={"drafts": drafts, "learn": learn})


def _shared_plans(config: PolydraftConfig, rates: Sequence[float]) -> list[Plan]:
    """One domain with the bytes of all: memory and buffer bounds are their sums.

    The expert is tried with the rank of one expert, which is faster, and with the bytes of all experts.
    """
    count = len(config.domains) + 1
    whole = _deployment(config, "shared")
    drafts, learn = whole.drafts, whole.learn
    memory = drafts.ngram.model_copy(update={"max_bytes": count * drafts.ngram.max_bytes})
    buffer = learn.buffer.model_copy(update={"max_bytes": count * learn.buffer.max_bytes})
    own = drafts.eagle.rank
    plans: list[Plan] = []
    ranks = [own] if own == "full" else [own, min(count * own, MOST_RANK)]
    for rate, rank in product(rates, dict.fromkeys(ranks)):
        eagle = drafts.eagle.model_copy(update={"rank": rank})
        one = whole.model_copy(
            update={
                "domains": (),
                "drafts": drafts.model_copy(update={"ngram": memory, "eagle": eagle}),
                "learn": learn.model_copy(update={"buffer": buffer, "rate": rate * learn.rate}),
            }
        )
        plans.append(Plan("shared", f"shared (rate x {rate:g}, rank {rank})", one, ALL_SOURCES, False))
    return plans


def with_label_domains(
    config: PolydraftConfig, groups: dict[str, list[TrafficItem]], examples: int
) -> tuple[PolydraftConfig, dict[str, list[TrafficItem]]]:
    """One domain for every label, and the requests that are left to serve.

    A label that the config does not declare is declared by its first ``examples`` requests, as an operator
    would, and those are not served. Domains of other names are left out, so that expert and label can be
    set against each other one to one.

    Raises:
        InvalidValueError: A label with too few requests.
    """
    declared = {domain.name: domain for domain in config.domains}
    domains: list[DomainConfig] = []
    left: dict[str, list[TrafficItem]] = {}
    for label, items in groups.items():
        if label in declared:
            domains.append(declared[label])
            left[label] = items
            continue
        texts = tuple(item.text for item in items[:examples])
        domains.append(DomainConfig(name=label, examples=texts))
        left[label] = items[examples:]
    for label, items in left.items():
        if len(items) < 4:
            raise InvalidValueError(f"label {label}", len(items), "at least 4 requests to serve")
    return config.model_copy(update={"domains": tuple(domains)}), left
