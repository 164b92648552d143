"""A tiny head and rows for it."""

from __future__ import annotations

import torch

from drafts.bank import ExpertBank
from drafts.kinds.base import DraftRow
from drafts.kinds.eagle import EagleSource
from drafts.trunk import HeadShape, Trunk

SHAPE = HeadShape(
    hidden_size=16,
    intermediate_size=24,
    heads=4,
    kv_heads=2,
    head_dim=4,
    norm_eps=1e-5,
    rope_theta=10000.0,
    feature_layers=(1, 2, 3),
    vocab_size=50,
)
IDS = torch.arange(1, 50, 2)


def tiny_trunk(seed: int = 0) -> Trunk:
    trunk = Trunk.fresh(SHAPE, IDS, seed)
    trunk.tensors["output_bias"].normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    return trunk


def matrices(seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(50, 16, generator=generator), torch.randn(50, 16, generator=generator)


def source(trunk: Trunk | None = None, **options: object) -> EagleSource:
    trunk = trunk or tiny_trunk()
    embedding, output = matrices()
    bank = ExpertBank(trunk, rank=2, capacity=2)
    settings: dict[str, object] = {"time_products": False, **options}
    return EagleSource(trunk=trunk, bank=bank, embedding=embedding, output_weight=output, **settings)  # type: ignore[arg-type]


def row(length: int, seed: int, domain: str = "base", prompt: int = 3) -> DraftRow:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (length,), generator=generator).tolist()
    features = torch.randn(400, SHAPE.feature_width, generator=generator)
    return DraftRow(f"r{seed}", domain, tokens, prompt, features=features)


def random_expert(bank: ExpertBank, domain: str, seed: int, scale: float = 0.5) -> None:
    bank.add(domain)
    tensors = bank.tensors(domain)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = torch.randn(tensor.shape, generator=generator) * scale
    bank.load(domain, tensors)
