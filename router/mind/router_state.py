"""What traffic has added to a prototype, as JSON."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from router.mind.prototype import Prototype


def saved_prototype(prototype: Prototype) -> dict[str, Any]:
    """Count and mean of traffic (float32, little-endian, base64)."""
    raw = prototype.traffic_mean.astype("<f4").tobytes()
    return {"count": prototype.traffic_count, "mean": base64.b64encode(raw).decode("ascii")}


def restore_prototype(prototype: Prototype, saved: dict[str, Any]) -> None:
    """Put it back; ignored where the embedder has changed or the values are not finite."""
    mean = np.frombuffer(base64.b64decode(saved["mean"]), dtype="<f4")
    if mean.shape == prototype.traffic_mean.shape and np.isfinite(mean).all():
        prototype.traffic_mean = mean.astype(np.float32)
        prototype.traffic_count = float(saved["count"])
