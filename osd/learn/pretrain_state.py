"""A trunk's training between two epochs, on disk: weights, optimiser and reports, for a run that was killed.

Nothing random is in it: every draw of the training follows from the seed and the step's number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafts.checkpoint import load_tensors, save_tensors
from drafts.errors import CheckpointError
from drafts.trunk import Trunk
from osd.learn.pretrain_config import PretrainConfig
from osd.learn.pretrain_data import Answer
from osd.learn.simulate import Simulated


@dataclass(frozen=True)
class Epoch:
    """Report after an epoch.

    Attributes:
        number: Epochs done.
        loss: Mean loss over the epoch.
        seconds: Since training began, time between runs left out.
        labels: Figures per label on held-back answers.
    """

    number: int
    loss: float
    seconds: float
    labels: dict[str, Simulated]

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Epoch:
        """From what ``asdict`` and JSON made of it."""
        labels = {
            label: Simulated(
                figures["positions"],
                figures["first_token"],
                tuple(figures["by_depth"]),
                tuple(figures["tau"]),
            )
            for label, figures in fields["labels"].items()
        }
        return cls(fields["number"], fields["loss"], fields["seconds"], labels)


def identity(trunk: Trunk, answers: Sequence[Answer], held: Sequence[Answer], config: PretrainConfig) -> str:
    """Hash of everything that decides a training: settings, first weights, and answers in their order."""
    digest = hashlib.sha256(json.dumps(config.as_dict()).encode())
    digest.update(f"{asdict(trunk.shape)} {trunk.fingerprint()}".encode())
    for answer in [*answers, *held]:
        digest.update(answer.tokens.numpy().tobytes())
        digest.update(answer.features[-1].numpy().tobytes())
    return digest.hexdigest()[:16]


def save_training(
    path: Path,
    made_by: str,
    trunk: Trunk,
    optimiser: torch.optim.Optimizer,
    product: str,
    reports: Sequence[Epoch],
) -> None:
    """Write the state after an epoch; whole or not at all.

    Raises:
        CheckpointError: The file cannot be written.
    """
    tensors = {f"trunk.{name}": tensor for name, tensor in trunk.tensors.items()}
    for number, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{name}": tensor for name, tensor in state.items()}
    facts = {"identity": made_by, "product": product, "reports": [asdict(report) for report in reports]}
    save_tensors(path, tensors, {"training": json.dumps(facts)})


def load_training(
    path: Path, made_by: str, trunk: Trunk, optimiser: torch.optim.Optimizer
) -> tuple[str, list[Epoch]]:
    """Put a saved state into ``trunk`` and ``optimiser``; returns the product's name and the reports.

    Raises:
        CheckpointError: The file is damaged, or belongs to another training.
    """
    tensors, metadata = load_tensors(path)
    try:
        facts = json.loads(metadata["training"])
        if facts["identity"] != made_by:
            raise CheckpointError(
                f"{path}: was left by a training with other answers or settings; repeat that command to "
                "finish it, or remove the file"
            )
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            part, name = key.split(".", 1)
            if part == "trunk":
                trunk.tensors[name].data.copy_(tensor)
            else:
                number, name = name.split(".", 1)
                state.setdefault(int(number), {})[name] = tensor
        optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
        return facts["product"], [Epoch.from_dict(report) for report in facts["reports"]]
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: does not hold a training ({error})") from error
