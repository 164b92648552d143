"""EAGLE-3 as vLLM runs it, from a checkpoint's names and config alone: nothing of ``drafts`` is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class Eagle3Reference:
    """One draft read from a folder; whole texts are computed anew for every token, without a cache."""

    def __init__(self, folder: Path, embedding: torch.Tensor) -> None:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.config = {**config.get("transformer_layer_config", {}), **config}
        self.w = load_file(folder / "model.safetensors")
        self.embedding = embedding

    def chain(self, tokens: list[int], features: torch.Tensor, steps: int) -> list[int]:
        """Greedy draft tokens behind ``tokens``; features ``[len(tokens) - 1, F]`` of all but the last."""
        config, w = self.config, self.w
        assert config["fc_norm"]
        assert not config["norm_before_residual"]
        assert not config["norm_output"]
        chunks = features.float().chunk(len(config["eagle_aux_hidden_state_layer_ids"]), dim=-1)
        normed = [self.norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)]
        hidden = torch.cat(normed, dim=-1) @ w["fc.weight"].T
        read, chain = tokens[1:], []
        for _ in range(steps):
            before_norm = self.layer(self.embedding[torch.tensor(read)], hidden)[-1:]
            logits = self.norm(before_norm, "norm") @ w["lm_head.weight"].T
            draft_id = int(logits.argmax())
            chain.append(draft_id + int(w["d2t"][draft_id]))
            read, hidden = [*read, chain[-1]], torch.cat((hidden, before_norm))
        return chain

    def layer(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        w, heads = self.w, self.config["num_attention_heads"]
        groups, size = self.config["num_key_value_heads"], self.config["head_dim"]
        x = torch.cat(
            (self.norm(embeds, "layers.0.input_layernorm"), self.norm(hidden, "layers.0.hidden_norm")), -1
        )
        q, k, v = (
            (x @ w[f"layers.0.self_attn.{part}_proj.weight"].T).view(len(x), -1, size).transpose(0, 1)
            for part in "qkv"
        )
        k, v = (y.repeat_interleave(heads // groups, 0) for y in (k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True
        )
        after = hidden + attended.transpose(0, 1).flatten(1) @ w["layers.0.self_attn.o_proj.weight"].T
        x = self.norm(after, "layers.0.post_attention_layernorm")
        gate, up = (x @ w[f"layers.0.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return after + (torch.nn.functional.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.w[f"{name}.weight"]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        steps = torch.arange(0, size, 2) / size
        angles = torch.arange(x.shape[1])[:, None] / self.config["rope_theta"] ** steps
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)
        return x * cos + half * sin
