"""Tiny models with random weights, built in the test: no download, a few milliseconds each."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_model(kind: str = "llama", *, seed: int = 0, scale: float = 0.3, **changes: Any) -> Any:
    """A tiny causal LM of the named family in evaluation mode.

    The weights are drawn with standard deviation ``scale``, far larger than a training start, so that
    attention and position matter and a wrong mask shows in the logits.
    """
    config_name, model_name, extra = FAMILIES[kind]
    config = getattr(transformers, config_name)(**{**COMMON, **extra, **changes})
    eager = getattr(config, "attn_logit_softcapping", None) or kind == "falcon-alibi"
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)._from_config(
        config, **({"attn_implementation": "eager"} if eager else {})
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or "ln_" in name:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(scale * noise)
    return model.eval().requires_grad_(False)


def _family(prefix: str, **extra: Any) -> tuple[str, str, dict[str, Any]]:
    return f"{prefix}Config", f"{prefix}ForCausalLM", extra


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
_GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": _family("Llama"),
    "llama-bias": _family("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama3-rope": _family("Llama", rope_parameters=_LLAMA3_ROPE),
    "llama-dynamic-rope": _family(
        "Llama",
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "mistral": _family("Mistral", sliding_window=None),
    "mistral-sliding": _family("Mistral", sliding_window=8),
    "qwen2": _family("Qwen2"),
    "qwen2-sliding": _family("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": _family("Qwen3", head_dim=16),
    "gemma": _family("Gemma", head_dim=16, hidden_activation="gelu_pytorch_tanh"),
    "gemma2": _family("Gemma2", **_GEMMA),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GEMMA, "layer_types": _GEMMA3_LAYERS}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "gpt-neox": _family("GPTNeoX"),
    "bloom": _family("Bloom"),
    "falcon-alibi": _family("Falcon", alibi=True),
    "mamba": _family("Mamba", state_size=8),
    "recurrent-gemma": _family("RecurrentGemma", lru_width=32, attention_window_size=16),
}
"""Config class, model class and what differs from ``COMMON``, by name."""
