"""How the rows of a pass attend over the slot cache, without copying or expanding keys."""

from __future__ import annotations

import torch

from osd.serve.decoder import Part
from osd.serve.layout import Group, PassLayout


def attention_parts(layout: PassLayout, share: int, dtype: torch.dtype) -> list[Part]:
    """What depends on the rows, prepared once for all layers of a pass.

    Args:
        layout: The pass.
        share: Query heads to a key-value head.
        dtype: Of the queries.
    """
    device = layout.tokens.device
    return [_part(group, share, dtype, device) for group in layout.groups()]


def _part(group: Group, share: int, dtype: torch.dtype, device: torch.device) -> Part:
    mask = gather = packed = padded = None
    if not group.is_plain:
        seen = group.mask()
        additive = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        mask = additive.repeat_interleave(share, dim=1)[:, None].to(device)
    if not group.is_dense:
        gather = group.gather.to(device)
        packed, padded = (places.to(device) for places in group.places)
    return Part(
        slot=group.slot,
        batch=len(group.rows),
        width=group.width,
        length=group.length,
        first=group.packed[0],
        mask=mask,
        gather=gather,
        packed=packed,
        padded=padded,
    )
