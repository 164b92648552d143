"""Small tables from the host to wherever the tensors are, without a wait."""

from __future__ import annotations

import torch


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` on ``device``; a copy to an accelerator is queued behind what runs there.

    A plain copy out of pageable memory makes the host wait until all that is queued has run.

    Args:
        values: A tensor on the host, not written to afterwards.
        device: Where it is wanted.
    """
    if device.type == "cpu":
        return values
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
