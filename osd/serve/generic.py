"""The generic forward: any Hugging Face causal LM over the slot cache, behind the same interface."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from drafts.errors import InvalidValueError
from osd.serve.cache import SlotCache
from osd.serve.facts import adopt_facts, checked_length
from osd.serve.layout import Group, PassLayout
from osd.serve.target import PassOutput, PassRow, TargetModel


class GenericTarget(TargetModel):
    """A model whose own forward does the work, given masks and positions per row.

    Args:
        model: The Hugging Face model.
        name: What it was loaded from.
        feature_layers: See :class:`~osd.serve.target.TargetModel`.

    Raises:
        InvalidValueError: The model keeps a state that slots of keys and values cannot hold.
    """

    forward_kind = "generic"

    def __init__(self, model: Any, *, name: str, feature_layers: Sequence[int] | None) -> None:
        adopt_facts(self, model, name, feature_layers)
        self._accepted = set(inspect.signature(model.forward).parameters)
        if "position_ids" not in self._accepted:
            raise unsupported(name, "its forward takes no positions (ALiBi or recurrent)")
        self._shapes = _key_shapes(model, name, self._cache_argument)
        self._windows = _windows(model.config.get_text_config(), name)
        self._decoder = _decoder_layers(model, len(self._shapes))

    @property
    def _cache_argument(self) -> str:
        return "cache" if "cache" in self._accepted else "past_key_values"

    def make_cache(self, slots: int, max_length: int, keep_features: bool) -> SlotCache:
        """See :meth:`TargetModel.make_cache`."""
        if keep_features and self._decoder is None:
            raise unsupported(self.name, "its decoder layers were not found, so hidden states cannot be kept")
        return SlotCache(
            layers=len(self._shapes),
            slots=slots,
            kv_heads=[heads for heads, _ in self._shapes],
            max_length=checked_length(max_length, self.max_positions),
            head_dim=[width for _, width in self._shapes],
            feature_width=self.feature_width if keep_features else 0,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, cache: SlotCache, rows: Sequence[PassRow]) -> PassOutput:
        """See :meth:`TargetModel.forward`. Each attention group is one call of the model."""
        layout = PassLayout(cache, rows, self.device)
        logits = torch.empty(layout.logit_count, self.vocab_size, dtype=torch.float32, device=self.device)
        first = dict(zip((row.slot for row in layout.rows), layout.offsets, strict=True))
        for group in layout.groups():
            found, kept = self._call(cache, layout, group)
            for index, row in enumerate(group.rows):
                wanted = len(row.tokens) - row.logits_from
                at = first[row.slot]
                begin = row.logits_from - kept
                logits[at : at + wanted] = found[index, begin : begin + wanted]
        return PassOutput(logits, layout.offsets)

    def _call(self, cache: SlotCache, layout: PassLayout, group: Group) -> tuple[Tensor, int]:
        """Logits ``[B, kept tokens, vocab]`` of one group, and the offset of the first kept token."""
        batch, width = len(group.rows), group.width
        gather = group.gather.to(self.device)
        kept = min(min(row.logits_from for row in group.rows), width - 1)
        arguments: dict[str, Any] = {
            "input_ids": layout.tokens[gather].view(batch, width),
            "position_ids": layout.positions[gather].view(batch, width),
            "attention_mask": self._mask(layout, group),
            "use_cache": True,
            self._cache_argument: _PassCache(cache, layout, group),
        }
        if "logits_to_keep" in self._accepted:
            arguments["logits_to_keep"] = width - kept
        else:
            kept = 0
        hooks, states = self._listen(cache)
        try:
            found = self.reference(**arguments).logits
        finally:
            for hook in hooks:
                hook.remove()
        if cache.features is not None:
            packed, padded = (index.to(self.device) for index in group.places)
            features = torch.cat([states[layer] for layer in self.feature_layers], -1)
            cache.features[layout.slots[packed], layout.places[packed]] = features.flatten(0, 1)[padded]
        return found, kept

    def _mask(self, layout: PassLayout, group: Group) -> Any:
        """Additive mask ``[B, 1, width, length]``, one a layer type where the model has several."""
        seen = group.mask()
        masks: dict[str, Tensor] = {}
        for kind, window in self._windows.items():
            allowed = seen
            if window is not None:
                allowed = seen & (group.distances() < window)
            blocked = torch.zeros(allowed.shape, dtype=self.dtype)
            blocked.masked_fill_(~allowed, torch.finfo(self.dtype).min)
            masks[kind] = blocked[:, None].to(self.device)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _listen(self, cache: SlotCache) -> tuple[list[Any], dict[int, Tensor]]:
        """Hooks on the decoder layers whose output is kept, and where they put it."""
        states: dict[int, Tensor] = {}
        if cache.features is None or self._decoder is None:
            return [], states

        def keep(layer: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                states[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        return [
            self._decoder[layer - 1].register_forward_hook(keep(layer)) for layer in self.feature_layers
        ], states


class _PassCache(Cache):  # type: ignore[misc]
    """The slot cache as transformers sees it during one call."""

    def __init__(self, cache: SlotCache, layout: PassLayout, group: Group) -> None:
        super().__init__(layers=[_PassLayer(pair, layout, group) for pair in cache.pairs])


class _PassLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's rows of the slot cache; sliding layers too keep every key and slide by mask."""

    is_sliding = False

    def __init__(self, pair: Tensor, layout: PassLayout, group: Group) -> None:
        super().__init__()
        self._group = group
        device = pair.device
        packed, padded = group.places
        self._padded = padded.to(device)
        self._slots = layout.slots[packed.to(device)]
        self._places = layout.places[packed.to(device)]
        span = slice(group.slot, group.slot + len(group.rows))
        self._pair = pair
        self.keys, self.values = pair[:, span, :, : group.length]
        self.is_initialized = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the rows are preallocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new entries ``[B, kv_heads, width, head_dim]``; return all that the rows read."""
        for index, states in enumerate((key_states, value_states)):
            packed = states.transpose(1, 2).flatten(0, 1)[self._padded]
            self._pair[index][self._slots, :, self._places] = packed
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """Keys read and their offset."""
        return self._group.length, 0

    def get_seq_length(self, *_: Any) -> int:
        """Entries before this pass of the longest row; positions are always given, so only a size."""
        return self._group.length - self._group.width

    def get_max_length(self) -> int:
        """Room of a row."""
        return int(self._pair.shape[3])

    get_max_cache_shape = get_max_length


def unsupported(name: str, reason: str) -> InvalidValueError:
    """The error for a model that cannot be served, with the reason."""
    return InvalidValueError(
        "target.model", name, f"allowed are causal models with keys and values per token; refused: {reason}"
    )


def _key_shapes(model: Any, name: str, argument: str) -> list[tuple[int, int]]:
    """``(kv_heads, head_dim)`` of every layer, read from a two-token pass."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            cache = DynamicCache(config=model.config)
            model(input_ids=ids, use_cache=True, **{argument: cache})
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise unsupported(name, f"it does not run with a key-value cache ({error})") from error
    shapes: list[tuple[int, int]] = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != 2:
            raise unsupported(name, f"layer {index} keeps a {type(layer).__name__}, not keys per token")
        if keys.shape != values.shape:
            raise unsupported(
                name, f"layer {index} has keys {tuple(keys.shape)} but values {tuple(values.shape)}"
            )
        shapes.append((int(keys.shape[1]), int(keys.shape[3])))
    if not shapes:
        raise unsupported(name, "it fills no key-value cache (recurrent state)")
    return shapes


def _windows(config: Any, name: str) -> dict[str, int | None]:
    """Attention window by layer type, ``None`` for full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if not kinds:
        return {"sliding_attention": window} if window else {"full_attention": None}
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise unsupported(name, f"its layers of type {kind!r} have no mask over slots")
    return {kind: known[kind] for kind in kinds}


def _decoder_layers(model: Any, count: int) -> Any:
    """The list of decoder layers, ``None`` if there is none of that length."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    return None
