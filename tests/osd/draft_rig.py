"""Real draft sources over the tiny target: lookup, ngram and an eagle with a fresh trunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from drafts.bank import ExpertBank
from drafts.kinds.base import Source
from drafts.kinds.eagle import EagleSource
from drafts.kinds.lookup import LookupSource
from drafts.kinds.ngram import NgramSource
from drafts.mixture import Mixture
from drafts.registry import Registry
from drafts.trunk import HeadShape, Trunk
from drafts.versions import VersionFollower
from tests.osd.engine_rig import target
from tests.tiny import COMMON, VOCAB


def eagle(model: Any = None) -> EagleSource:
    """An eagle of the tiny target, or of another of its sizes."""
    model = model or target()
    shape = HeadShape(
        hidden_size=model.hidden_size,
        intermediate_size=48,
        heads=COMMON["num_attention_heads"],
        kv_heads=COMMON["num_key_value_heads"],
        head_dim=8,
        norm_eps=1e-6,
        rope_theta=10000.0,
        feature_layers=model.feature_layers,
        vocab_size=VOCAB,
    )
    trunk = Trunk.fresh(shape, torch.arange(3, VOCAB, 2), seed=1).to(model.device)
    return EagleSource(
        trunk=trunk,
        bank=ExpertBank(trunk, rank=2),
        embedding=model.embedding,
        output_weight=model.output_weight,
        time_products=False,
    )


def mixture(
    names: Sequence[str], model: Any = None, clock: Callable[[], float] = time.perf_counter, **more: Source
) -> Mixture:
    """The named sources, and ``more`` of the caller's own, for two domains."""
    made: dict[str, Callable[[], Source]] = {
        "lookup": LookupSource,
        "ngram": NgramSource,
        "eagle": lambda: eagle(model),
    }
    built = Mixture({**more, **{name: made[name]() for name in names}}, clock=clock)
    for domain in ("base", "math"):
        built.add_domain(domain)
    return built


class Releases:
    """Publishes new versions of a mixture's eagle while it serves; every one is noise on the one before."""

    def __init__(self, drafts: Mixture, domain: str = "base") -> None:
        self._bank = drafts.sources["eagle"].bank  # type: ignore[attr-defined]
        self._registry, self._domain = Registry(None), domain
        self._generator = torch.Generator().manual_seed(1)
        drafts.versions = VersionFollower(self._registry, self._bank)
        self._registry.publish(domain, self._bank.tensors(domain), reason="born")

    def publish(self) -> None:
        """The next version; the engine adopts it at its next step border."""
        noisy = {
            name: tensor + torch.randn(tensor.shape, generator=self._generator)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in self._bank.tensors(self._domain).items()
        }
        self._registry.publish(self._domain, noisy, reason="noise")
