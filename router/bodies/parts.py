"""Builds the drafting side of a deployment from its config: sources, bank, registry, learner, mixture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafts import kinds
from drafts.bank import ExpertBank
from drafts.config import ModelConfig
from drafts.cross import CrossAcceptance
from drafts.data import TRUNK
from drafts.errors import InvalidValueError, UnknownNameError
from drafts.expert_key import expert_key
from drafts.kinds.base import Source
from drafts.kinds.eagle import EagleSource
from drafts.kinds.lookup import LookupSource
from drafts.kinds.ngram import NgramSource
from drafts.mixture import Mixture
from drafts.registry import Registry
from drafts.trunk import Trunk
from drafts.versions import Bank, Banks, VersionFollower
from osd.learn.config import LearnConfig
from osd.learn.head import EagleHead, TrainableHead
from osd.learn.scheduler import LearningScheduler
from osd.serve.target import TargetModel
from osd.types import BASE_DOMAIN, Event
from router.bodies.versions import Check
from router.config import DomainConfig, PolydraftConfig

if TYPE_CHECKING:
    from drafts.draft_model import DraftModel
    from drafts.kinds.model import ModelSource

log = logging.getLogger(__name__)

EMBEDDED = "embedded"


@dataclass
class DraftParts:
    """Everything that proposes or learns; engine-independent.

    Attributes:
        own_models: Draft models that domains were registered with while serving.
        configured: Those that the config gives domains.
        left_out: As saved, those that could not be loaded when the deployment started.
    """

    mixture: Mixture
    registry: Registry
    scheduler: LearningScheduler | None = None
    bank: ExpertBank | None = None
    model: ModelSource | None = None
    ngram: NgramSource | None = None
    tokenizer: Any = None
    own_models: dict[str, ModelConfig] = field(default_factory=dict)
    configured: dict[str, ModelConfig] = field(default_factory=dict)
    left_out: dict[str, object] = field(default_factory=dict)

    def draft_of(self, name: str) -> ModelConfig | None:
        """The draft model that a domain brought, if any."""
        return self.own_models.get(name, self.configured.get(name))

    def leave_out(self, name: str, saved: object) -> None:
        """Keep what was saved of a domain's draft model that cannot be loaded now; the base domain's drafts.

        A later start tries again, and the domain's adapters wait for it. To be called before the domain is
        added.
        """
        self.left_out[name] = saved
        if self.model is not None:
            self.model.stand_in(name)

    def load_model(self, config: ModelConfig) -> DraftModel:
        """A draft model that a domain registered while serving brings; nothing of what runs is touched.

        Raises:
            InvalidValueError: It cannot be loaded, its tokens are not the target's (case A22), it is larger
                than what may be resident, or this deployment has no draft models.
        """
        from drafts.kinds.model import load_draft

        if self.model is None:
            raise InvalidValueError(
                "draft.path", config.path, "a draft model only where drafts.sources has model"
            )
        check = partial(self.model.residents.check, "draft.path", config.path)
        model = load_draft(config, self.tokenizer, check)
        check(model.nbytes)
        return model

    def add_domain(self, name: str, own: tuple[ModelConfig, DraftModel] | None = None) -> None:
        """Serve a domain with every source; its expert begins as a copy of the base domain's.

        Called on the engine's thread, or before it runs. A known domain keeps what it has.

        Args:
            name: The domain.
            own: A draft model of its own.
        """
        if own is not None and self.model is not None:
            self.own_models[name] = own[0]
            self.model.attach(name, own[1])
        self.mixture.add_domain(name, parent=BASE_DOMAIN, brings=() if own is None else ("model",))
        if self.scheduler is not None:
            self.scheduler.add_domain(name)
        if self.bank is not None:
            self._expert_version(self.bank, name)
        if self.model is not None and name in self.model:
            self._adapter_version(self.model, name)

    def _expert_version(self, bank: ExpertBank, name: str) -> None:
        """An expert begins with a version: a copy of the base domain's, or the trunk.

        One of another trunk or form than config now names is forgotten. Versions that name no trunk were
        written before any did; they stay where their form fits.
        """
        served = self.registry.current(name)
        if served is not None:
            problem = None
            if served.trunk not in (None, self.registry.trunk):
                problem = f"they belong to trunk {served.trunk} and this deployment has {self.registry.trunk}"
            elif not bank.fits(served.tensors):
                problem = "they are of another form, see drafts.eagle.rank and the trunk's draft vocabulary"
            if problem is not None:
                log.warning("domain %s: its expert's versions are dropped, %s; it starts anew", name, problem)
                self.registry.drop(name)
                served = None
        if served is None and self.registry.current(BASE_DOMAIN) is not None:
            self.registry.clone(BASE_DOMAIN, name)
        elif served is None:
            self.registry.publish(name, bank.tensors(name), reason="born as the trunk")

    def _adapter_version(self, model: ModelSource, name: str) -> None:
        """An adapter begins with a version: a copy of the base domain's where the model is the same.

        One of another draft model or rank than config now names is forgotten.
        """
        key, base = expert_key(name, "model"), expert_key(BASE_DOMAIN, "model")
        served, parent = self.registry.current(key), self.registry.current(base)
        if served is not None and not model.fits(name, served.tensors):
            log.warning(
                "domain %s: the adapter's versions belong to another draft model; it starts anew", name
            )
            self.registry.drop(key)
            served = None
        if served is None and parent is not None and model.fits(name, parent.tensors):
            self.registry.clone(base, key)
        elif served is None:
            self.registry.publish(key, model.tensors(name), reason="born as the draft model")

    def checks(self) -> dict[str, Check]:
        """By kind of expert, what says whether a domain's could be served."""
        found: dict[str, Check] = {}
        if self.bank is not None:
            bank = self.bank
            found["eagle"] = lambda domain, tensors: bank.check(tensors)
        if self.model is not None:
            found["model"] = self.model.check
        return found

    def matrix(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """Cross-acceptance by kind (``experts``, ``memories``), by draft, by domain of the text."""
        found: dict[str, CrossAcceptance] = {}
        if self.scheduler is not None:
            found["experts"] = self.scheduler.cross.matrix
        if self.ngram is not None:
            found["memories"] = self.ngram.cross
        return {kind: cross.figures() for kind, cross in found.items()}

    def matrix_state(self) -> dict[str, Any]:
        """The memories' matrix as JSON; that of experts is part of the learner's history."""
        return {} if self.ngram is None else self.ngram.cross.state()

    def load_matrix(self, state: Mapping[str, Any], known: Sequence[str]) -> None:
        """Restore :meth:`matrix_state` for the domains that are ``known``."""
        if self.ngram is not None:
            self.ngram.cross.load_state(state, known)

    def drop_domain(self, name: str) -> None:
        """Forget a domain's memory, expert, versions and buffer."""
        for models in (self.own_models, self.configured, self.left_out):
            models.pop(name, None)
        self.mixture.drop_domain(name)
        if self.scheduler is not None:
            self.scheduler.drop_domain(name)
        for key in (name, expert_key(name, "model")):
            if key in self.registry.domains():
                self.registry.drop(key)


def build_drafts(
    config: PolydraftConfig,
    target: TargetModel,
    tokenizer: Any,
    *,
    sources: Sequence[str],
    learn: bool,
    versions_dir: Path | None,
    on_event: Callable[[Event], None],
    seed: int = 0,
    add_own: bool = True,
) -> DraftParts:
    """Sources named by ``sources``, their experts, the registry and, if ``learn``, the learner.

    With ``add_own`` also those that only some domains ask for.

    ``seed`` is the deployment's; the learner draws from its buffers by it and by ``learn.seed``.

    Raises:
        UnknownNameError: A source that does not exist.
        InvalidValueError: A draft that does not fit the target.
        CheckpointError: A trunk file that cannot be used.
    """
    built: dict[str, Source] = {}
    own_models = [domain for domain in config.domains if domain.draft is not None]
    own_sources = [name for domain in config.domains for name in domain.sources or ()] if add_own else []
    for name in dict.fromkeys([*sources, *own_sources, *(["model"] if own_models else [])]):
        if name not in kinds.names():
            raise UnknownNameError("drafts.sources", name, kinds.names())
        source = _build_source(name, config, target, tokenizer, own_models)
        if source is not None:
            built[name] = source
    eagle, model = built.get("eagle"), built.get("model")
    trunk = eagle.trunk.fingerprint() if isinstance(eagle, EagleSource) else None
    registry = Registry(versions_dir, keep=config.drafts.keep_versions, trunk=trunk)
    parts = DraftParts(Mixture({}, learn=learn), registry, tokenizer=tokenizer)
    parts.configured = {domain.name: domain.draft for domain in config.domains if domain.draft is not None}
    heads: dict[str, TrainableHead] = {}
    banks: dict[str, Bank] = {}
    if isinstance(eagle, EagleSource):
        parts.bank = banks["eagle"] = eagle.bank
        heads["eagle"] = EagleHead(eagle.trunk, eagle.bank, eagle.embedding, eagle.output)
    if model is not None:
        from drafts.kinds.model import ModelSource
        from osd.learn.model_head import ModelHead

        assert isinstance(model, ModelSource)
        parts.model = banks["model"] = model
        heads["model"] = ModelHead(model, len(tokenizer), target.vocab_size)
    if heads and learn and config.learn.enabled:
        general, own = _learning(config, seed)
        parts.scheduler = LearningScheduler(heads, registry, general, on_event, overrides=own)
    ngram = built.get("ngram")
    parts.ngram = ngram if isinstance(ngram, NgramSource) else None
    versions = VersionFollower(registry, Banks(banks), tuple(banks)) if banks else None
    named = _domain_sources(config, sources, list(built))
    parts.mixture = Mixture(
        built, named, versions, learn, trees=config.drafts.trees, max_nodes=config.drafts.max_nodes
    )
    for domain in (BASE_DOMAIN, *(item.name for item in config.domains)):
        parts.add_domain(domain)
    parts.mixture.swap()
    return parts


def _learning(config: PolydraftConfig, seed: int) -> tuple[LearnConfig, dict[str, LearnConfig]]:
    """The general learning settings and those of domains with overrides, all under the run's seed."""

    def seeded(learn: LearnConfig) -> LearnConfig:
        return learn.model_copy(update={"seed": (learn.seed + seed) % 2**63})

    own: dict[str, LearnConfig] = {}
    for domain in config.domains:
        learn = domain.learner or config.learn
        if domain.buffer is not None:
            learn = learn.model_copy(update={"buffer": domain.buffer})
        if learn is not config.learn:
            own[domain.name] = seeded(learn)
    return seeded(config.learn), own


def _domain_sources(
    config: PolydraftConfig, sources: Sequence[str], built: list[str]
) -> dict[str, tuple[str, ...]]:
    """Sources of every domain that differs from the default, and of the base domain."""
    default = tuple(name for name in sources if name in built)
    chosen = {BASE_DOMAIN: default}
    for domain in config.domains:
        wanted = default if domain.sources is None else domain.sources
        names = tuple(name for name in wanted if name in built)
        if domain.draft is not None:
            names = (*names, *(() if "model" in names else ("model",)))
        chosen[domain.name] = names
    return chosen


def _build_source(
    name: str,
    config: PolydraftConfig,
    target: TargetModel,
    tokenizer: Any,
    own_models: Sequence[DomainConfig],
) -> Source | None:
    if name == "lookup":
        return LookupSource(config.drafts.lookup)
    if name == "ngram":
        return NgramSource(config.drafts.ngram, base=BASE_DOMAIN)
    if name == "eagle":
        return _build_eagle(config, target)
    if name == "model":
        return _build_model(config, tokenizer, own_models)
    return kinds.source_class(name)()


def load_trunk(config: PolydraftConfig, target: TargetModel) -> Trunk | None:
    """The trunk on the target's device; ``None`` where the shipped one belongs to another target.

    Raises:
        CheckpointError: The file cannot be used.
        InvalidValueError: The trunk reads other layers than the target keeps.
    """
    path = config.drafts.eagle.trunk
    if path == EMBEDDED and target.name != EMBEDDED:
        return None
    trunk = Trunk.load(TRUNK if path == EMBEDDED else Path(path))
    if trunk.shape.feature_layers != target.feature_layers:
        raise InvalidValueError(
            "drafts.eagle.trunk", path, f"a trunk that reads target layers {target.feature_layers}"
        )
    return trunk.to(target.device)


def _build_eagle(config: PolydraftConfig, target: TargetModel) -> EagleSource | None:
    """The head over its trunk; left out, loudly, where there is no trunk for the target."""
    trunk = load_trunk(config, target)
    if trunk is None:
        log.warning(
            "drafts.sources: eagle is left out, since the shipped trunk was trained for the embedded "
            "target and not for %s; train one (polydraft pretrain) and name it in drafts.eagle.trunk",
            target.name,
        )
        return None
    return EagleSource(
        trunk=trunk,
        bank=ExpertBank(trunk, rank=config.drafts.eagle.rank),
        embedding=target.embedding,
        output_weight=target.output_weight,
        window=config.drafts.eagle.window,
        max_depth=config.drafts.eagle.max_depth,
    )


def _build_model(
    config: PolydraftConfig, tokenizer: Any, own_models: Sequence[DomainConfig]
) -> Source | None:
    from drafts.kinds.model import ModelSource, load_draft

    shared = config.drafts.model
    source = ModelSource(
        None if shared is None else load_draft(shared, tokenizer),
        config.drafts.max_resident_bytes,
        BASE_DOMAIN,
    )
    for domain in own_models:
        assert domain.draft is not None
        source.attach(domain.name, load_draft(domain.draft, tokenizer))
    return source
