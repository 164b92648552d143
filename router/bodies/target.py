"""The target that a deployment's config names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafts.data import TRUNK
from drafts.trunk import Trunk
from osd.serve.embedded import EMBEDDED
from osd.serve.load import load_target
from osd.serve.target import TargetModel
from router.config import PolydraftConfig


def configured_target(
    config: PolydraftConfig, layers: Sequence[int] | None, **changes: str
) -> tuple[TargetModel, Any]:
    """Load the target and its tokenizer, see :func:`osd.serve.load.load_target`.

    Args:
        config: The deployment.
        layers: Layers whose hidden states are kept; :func:`trunk_layers` of the deployment to serve it.
        changes: Settings of ``target`` that are other ones this time.
    """
    wanted = config.target.model_copy(update=changes)
    return load_target(
        wanted.model,
        wanted.device,
        wanted.dtype,
        wanted.forward,
        wanted.cache_dir,
        layers,
        quantization=wanted.quantization,
        numerics=wanted.numerics,
        graphs=wanted.graphs,
    )


def trunk_layers(config: PolydraftConfig) -> tuple[int, ...] | None:
    """Target layers that the deployment's trunk reads and the target has to keep; ``None``: no trunk.

    Raises:
        CheckpointError: A trunk file that cannot be used.
    """
    own = (name for domain in config.domains for name in domain.sources or ())
    path = config.drafts.eagle.trunk
    if "eagle" not in {*config.drafts.sources, *own}:
        return None
    if path == EMBEDDED:
        return Trunk.read_shape(TRUNK).feature_layers if config.target.model == EMBEDDED else None
    return Trunk.read_shape(Path(path)).feature_layers
