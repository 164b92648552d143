"""A domain's draft for another engine: folded, written, read back, and compared on answers of the target."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafts.bank import ExpertBank, expert_logits
from drafts.eagle3 import Eagle3Head, Eagle3Target, fold_expert, obstacle, read_eagle3, write_eagle3
from drafts.errors import CheckpointError, ExportError, InvalidValueError, UnknownNameError
from drafts.expert_key import split_key
from drafts.version_files import read_served, read_version
from osd.learn.pretrain_data import Answer, load_shards
from osd.learn.unroll import unroll
from osd.serve.collect import Prompt, collect
from osd.serve.embedded import EMBEDDED, embedded_folder
from osd.serve.target import TargetModel
from osd.types import BASE_DOMAIN
from router.app.export_adapter import PEFT, export_adapter
from router.app.new_folder import new_folder
from router.app.traffic import read_traffic
from router.bodies.parts import load_trunk
from router.bodies.prompts import PromptBuilder
from router.bodies.target import configured_target, trunk_layers
from router.config import PolydraftConfig
from router.config.packaged import find_traffic

PROMPTS, ANSWER_TOKENS = 8, 48
"""Answers of the target that a written head is compared on, and their longest length."""

SAME = 0.99
"""Least share of equal first tokens of a head that was written exactly; rounding moves near ties only."""


@dataclass(frozen=True)
class Agreement:
    """The written head against the served one, first draft tokens on greedy answers of the target.

    Attributes:
        positions: Output tokens looked at.
        same: Share of positions where both propose the same token.
        served: Share where the served head proposes the target's token.
        written: Share where the written head does.
    """

    positions: int
    same: float
    served: float
    written: float


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: Where.
        version: The expert's version, ``None`` where the domain has none and serves the trunk.
        lost: What was left out, as a sentence; ``None`` for an exact export.
        agreement: How the written head compares; ``None`` for an adapter, which is written as it is.
    """

    folder: Path
    version: int | None
    lost: str | None
    agreement: Agreement | None


def export(
    domain: str, form: str, folder: Path, config: PolydraftConfig, state: Path | None, approximate: bool
) -> Exported:
    """Write a domain's draft; ``folder`` appears whole or not at all.

    Raises:
        UnknownNameError: No such domain in config and state.
        InvalidValueError: ``folder`` holds something already.
        ExportError: The domain's draft cannot be written in this format.
        CheckpointError: Trunk or expert cannot be read.
    """
    served = {} if state is None else read_served(state / "versions")
    known = {BASE_DOMAIN, *(item.name for item in config.domains), *(split_key(key)[0] for key in served)}
    if domain not in known:
        raise UnknownNameError("domain", domain, sorted(known))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidValueError("--out", str(folder), "a folder that does not exist yet or is empty")
    if form == PEFT:
        versions = (state or Path()) / "versions"
        return Exported(folder, export_adapter(domain, folder, config, versions, served), None, None)
    target, tokenizer = load_plain_target(config)
    trunk = load_trunk(config, target)
    if trunk is None:
        raise ExportError(
            domain, form, f"it has no eagle draft: the shipped trunk does not fit {target.name}"
        )
    trunk.check_fits("target", target.output_weight)
    expert = None
    if state is not None and domain in served:
        version = read_version(state / "versions", domain, served[domain])
        if version.trunk not in (None, trunk.fingerprint()):
            raise CheckpointError(
                f"version {version.number} of {domain} belongs to trunk {version.trunk}, not to "
                f"{trunk.fingerprint()} (drafts.eagle.trunk)"
            )
        expert = version.tensors
        ExpertBank(trunk, config.drafts.eagle.rank, capacity=1).check(expert)
    head = fold_expert(trunk, expert, target.output_weight[trunk.token_ids])
    lost = obstacle(head)
    if lost is not None and not approximate:
        raise ExportError(domain, form, f"{lost}; --approximate leaves it out and says what that changes")
    answers = greedy_answers(target, tokenizer, prompts_of(domain, config))
    if not answers:
        raise ExportError(domain, form, "the target's answers to its examples are too short to compare on")
    agreement = _write(folder, head, _facts(target, config), form, target.embedding, answers, lost is None)
    return Exported(folder, served.get(domain), lost, agreement)


def compare(
    served: Eagle3Head, written: Eagle3Head, embedding: torch.Tensor, answers: Sequence[Answer]
) -> Agreement:
    """First draft tokens of two heads at every output position of ``answers``."""
    picks: list[torch.Tensor] = []
    with torch.inference_mode():
        for head in (served, written):
            hidden = unroll(head.trunk, embedding, answers, steps=1).hidden[0]
            picks.append(
                head.trunk.token_ids[expert_logits(head.trunk, head.output, hidden, None).argmax(-1)]
            )
    said = torch.cat([answer.tokens[answer.prompt_length :] for answer in answers])
    one, other = picks
    shares = [float((a == b).float().mean()) for a, b in ((one, other), (one, said), (other, said))]
    return Agreement(len(said), *shares)


def load_plain_target(config: PolydraftConfig) -> tuple[TargetModel, Any]:
    """The target by the generic forward: nothing is compiled or timed for a few answers."""
    return configured_target(config, trunk_layers(config), device="cpu", forward="generic", numerics="fast")


def prompts_of(domain: str, config: PolydraftConfig) -> list[str]:
    """Examples of the domain; packaged traffic where it has none."""
    examples = next((item.examples for item in config.domains if item.name == domain), ())
    if examples:
        return list(examples[:PROMPTS])
    return [item.text for item in read_traffic(find_traffic("mixed"), PROMPTS)]


def greedy_answers(target: TargetModel, tokenizer: Any, texts: Sequence[str]) -> list[Answer]:
    """The target's greedy answers with its hidden states."""
    builder = PromptBuilder(tokenizer, target.max_positions - ANSWER_TOKENS)
    prompts = [Prompt("", "", text, builder.build(text, None, True)[0]) for text in texts]
    with tempfile.TemporaryDirectory() as shards:
        evidence = min(4, target.vocab_size)
        return load_shards(
            collect(
                target, prompts, Path(shards), max_tokens=ANSWER_TOKENS, batch=PROMPTS, evidence_k=evidence
            )
        )


def _facts(target: TargetModel, config: PolydraftConfig) -> Eagle3Target:
    """What the other engine is told of the target; the embedded one is named by its converted folder."""
    model = target.reference
    return Eagle3Target(
        path=str(embedded_folder(config.target.cache_dir)) if target.name == EMBEDDED else target.name,
        architectures=tuple(model.config.architectures or (type(model).__name__,)),
        max_positions=target.max_positions,
    )


def _write(
    folder: Path,
    head: Eagle3Head,
    facts: Eagle3Target,
    form: str,
    embedding: torch.Tensor,
    answers: Sequence[Answer],
    exact: bool,
) -> Agreement:
    """Write beside ``folder``, read back, compare, and only then rename."""
    with new_folder(folder) as part:
        write_eagle3(part, head, facts, form)
        agreement = compare(head, read_eagle3(part), embedding.float(), answers)
        if exact and agreement.same < SAME:
            raise CheckpointError(
                f"{folder.name}: reads back as another head, which agrees with the served one at "
                f"{agreement.same:.1%} of {agreement.positions} positions"
            )
    return agreement
