"""The command line of ``benchmarks/drafts.py``, and how its parts are put together."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from draft_arms.domains import domain_costs, expert_forms
from draft_arms.engine import DraftArm, Ready
from draft_arms.figures import arm_figures, differing, length_gains, ratios, routing
from draft_arms.matrix import Drafts, answers_to, snapshot, specialisation
from draft_arms.order import Asked, in_blocks, in_order
from draft_arms.plans import ARMS, MOST_NODES, make_plans, with_label_domains
from draft_arms.run import run_blocks
from draft_arms.show import show
from drafts.errors import InvalidValueError
from drafts.kinds.eagle import EagleSource
from drafts.trunk import Trunk
from osd.serve.controller import StepCosts
from router.app.provenance import provenance
from router.app.traffic import TrafficItem, read_traffic
from router.bodies.embedded import COST_COUNTS
from router.bodies.prompts import PromptBuilder
from router.bodies.target import configured_target, trunk_layers
from router.config import PolydraftConfig, load_config
from router.mind.router import Router

ROUTED = "trees"


def parse_arguments(arguments: Sequence[str] | None = None, description: str = "") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traffic", nargs="+", default=["examples/traffic/mixed.jsonl"])
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--limit", type=int, help="requests read from each file")
    parser.add_argument("--labels", help="a list; all labels of the traffic by default")
    parser.add_argument("--per-label", type=int, default=300, help="most requests of a label")
    parser.add_argument("--examples", type=int, default=5, help="requests that declare an undeclared label")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--arms", default=",".join(ARMS), help="a list; all by default")
    parser.add_argument("--block", type=int, default=12, help="requests of a block")
    parser.add_argument("--turn", type=int, default=1, help="requests of a label that come one after another")
    parser.add_argument(
        "--memory-bytes", type=int, help="bound of a domain's memory, instead of the config's"
    )
    parser.add_argument("--shared-rates", default="0.3,1,3", help="multiples of learn.rate tried for shared")
    parser.add_argument("--rates", default="1", help="multiples of learn.rate tried for routed arms")
    parser.add_argument("--pilot", type=int, default=20, help="requests of a label before one is chosen")
    parser.add_argument("--nodes", type=int, default=MOST_NODES, help="most nodes of a tree in a step")
    parser.add_argument(
        "--repeats", type=int, default=60, help="draft steps timed for each number of domains"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--arms-only", action="store_true", help="arms and matrix")
    only.add_argument("--domains-only", action="store_true", help="the price of domains")
    found = parser.parse_args(arguments)
    found.arms, found.labels = _listed(found.arms), _listed(found.labels)
    for name in ("rates", "shared_rates"):
        try:
            setattr(found, name, [float(rate) for rate in _listed(getattr(found, name))] or [1.0])
        except ValueError:
            option = "--" + name.replace("_", "-")
            raise InvalidValueError(option, getattr(found, name), "a list of numbers") from None
    for name in ("per_label", "examples", "max_tokens", "block", "turn", "pilot", "nodes", "repeats"):
        if getattr(found, name) < 1:
            raise InvalidValueError("--" + name.replace("_", "-"), getattr(found, name), "at least 1")
    if found.block < 2:
        raise InvalidValueError("--block", found.block, "at least 2: else an arm would route from memory")
    return found


def _listed(text: str | None) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def by_label(
    files: Sequence[str], limit: int | None, count: int, labels: Sequence[str]
) -> dict[str, list[TrafficItem]]:
    """The first ``count`` requests of every label (or of the named ones); unlabelled by the file's name."""
    groups: dict[str, list[TrafficItem]] = {name: [] for name in labels}
    for file in files:
        for item in read_traffic(file, limit):
            name = item.label or Path(file).stem
            if not labels or name in groups:
                groups.setdefault(name, []).append(item)
    return {name: items[:count] for name, items in groups.items()}


def ready_requests(asked: Sequence[Asked], prompts: PromptBuilder, max_tokens: int) -> list[Ready]:
    """Requests with their tokens; those whose prompt and longest answer do not fit are left out."""
    found = []
    for one in asked:
        try:
            ids, text = prompts.build(None, one.item.messages, True)
        except InvalidValueError:
            continue
        if len(ids) + max_tokens <= prompts.limit:
            found.append(Ready(one, ids, text))
    return found


def measure_arms(arguments: argparse.Namespace) -> dict[str, Any]:
    """The ``arms`` and ``matrix`` parts, and what belongs to them."""
    groups = by_label(arguments.traffic, arguments.limit, arguments.per_label, arguments.labels)
    loaded = _bounded(load_config(arguments.config), arguments.memory_bytes)
    config, groups = with_label_domains(_frozen_router(loaded), groups, arguments.examples)
    target, tokenizer = configured_target(config, trunk_layers(config))
    router = Router.from_config(config.router, config.domains, learn=False)
    try:
        return serve_arms(arguments, config, groups, target, tokenizer, router)
    finally:
        router.close()


def _bounded(config: PolydraftConfig, memory_bytes: int | None) -> PolydraftConfig:
    """Every domain's memory bounded to so many bytes."""
    if memory_bytes is None:
        return config
    ngram = type(config.drafts.ngram)(**{**config.drafts.ngram.model_dump(), "max_bytes": memory_bytes})
    return config.model_copy(update={"drafts": config.drafts.model_copy(update={"ngram": ngram})})


def _frozen_router(config: PolydraftConfig) -> PolydraftConfig:
    """Domains stay as they are, and no arm routes from another's embedding."""
    return config.model_copy(update={"router": config.router.model_copy(update={"cache_size": 1})})


def serve_arms(
    arguments: argparse.Namespace,
    config: PolydraftConfig,
    groups: dict[str, list[TrafficItem]],
    target: Any,
    tokenizer: Any,
    router: Router,
) -> dict[str, Any]:
    """Serve all arms around a loaded target and put the figures together."""
    asked = in_order(groups, turn=arguments.turn)
    prompts = PromptBuilder(tokenizer, min(config.engine.max_length, target.max_positions))
    ready = ready_requests(asked, prompts, arguments.max_tokens)
    by_index = {one.asked.index: one for one in ready}
    blocks = [
        [by_index[one.index] for one in block]
        for block in in_blocks([one.asked for one in ready], arguments.block)
    ]
    longest = max(len(one.ids) for one in ready) + arguments.max_tokens
    measured = target.measure_costs(COST_COUNTS)
    costs = StepCosts(measured)
    arms: dict[str, DraftArm] = {}
    for plan in make_plans(arguments.arms, config, arguments.shared_rates, arguments.nodes, arguments.rates):
        arms[plan.name] = DraftArm(
            plan, target, tokenizer, router, costs, longest, arguments.max_tokens, arguments.seed
        )
        print(f"arm {plan.name} is ready", flush=True)
    copied: list[Drafts] = []

    def at_border() -> None:
        copied.extend(snapshot(arm) for arm in arms.values() if arm.plan.arm == ROUTED)

    served, tried = run_blocks(
        arms, blocks, arguments.pilot, at_border, lambda text: print("  " + text, flush=True)
    )
    result: dict[str, Any] = {"arms": {}}
    chosen = {arm.plan.arm: arm for arm in arms.values()}
    for name, group in served.items():
        result["arms"][name] = {
            "labels": arm_figures(group),
            "learning": chosen[name].learned(),
            "variant": chosen[name].plan.name,
        }
    result["most_nodes"] = arguments.nodes
    result["tried"] = tried
    result["ratios"] = ratios(served, arguments.seed)
    result["routed_minus_shared"] = length_gains(served, arguments.seed)
    if ROUTED in served:
        result["routing"] = routing(served[ROUTED])
    result["answers_that_differ"] = differing(served)
    result["matrix"] = {}
    eagle = chosen[ROUTED].parts.mixture.sources.get("eagle") if ROUTED in chosen else None
    if copied and isinstance(eagle, EagleSource):
        last = answers_to(target, [one for one in ready if one.asked.last], arguments.max_tokens)
        result["matrix"] = specialisation(copied[0], eagle, last)
    result["requests"] = {"served": len(ready), "left_out": len(asked) - len(ready)}
    result["pass_ms"] = {str(count): round(ms, 3) for count, ms in measured.items()}
    return result


def measure_domains(arguments: argparse.Namespace) -> dict[str, Any]:
    """The ``domains`` part, with the shipped trunk."""
    config = load_config(arguments.config)
    with resources.as_file(resources.files("drafts") / "data" / "trunk.safetensors") as file:
        trunk = Trunk.load(file)
    costs = domain_costs(
        trunk, expert_forms(config.drafts.eagle), repeats=arguments.repeats, seed=arguments.seed
    )
    return {"domains": costs}


def main(description: str) -> None:
    """Measure what is asked for; the description is the command's help."""
    arguments = parse_arguments(description=description)
    result: dict[str, Any] = {}
    if not arguments.arms_only:
        result |= measure_domains(arguments)
    if not arguments.domains_only:
        result |= measure_arms(arguments)
    result["provenance"] = provenance(
        arguments.seed,
        config=Path(arguments.config).name,
        traffic=[Path(file).name for file in arguments.traffic],
    )
    show(result)
    text = json.dumps(result, allow_nan=False)
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)
