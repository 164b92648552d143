"""Package data: the shipped trunk of the embedded target and where it comes from."""

from __future__ import annotations

from pathlib import Path

TRUNK = Path(__file__).with_name("trunk.safetensors")
"""The trunk for the embedded target."""

TRUNK_PROVENANCE = "trunk.provenance.json"
"""Name of the file beside a trunk that says how it was made."""
