"""The trunk: the weights of an EAGLE-3-like head that all domains share, and its forward pieces.

The head is one decoder layer on the target's hidden states (EAGLE-3, Li et al. 2503.01840, section 3).
*Pair* ``t`` joins the target's features of token ``t`` with the embedding of token ``t + 1`` and predicts
token ``t + 2``. Keys and values depend on the pair alone, so reading committed text costs no attention;
only the positions that predict something run the rest of the layer.

Shape letters: N packed positions, H hidden size, F width of the features (chunks of H), I MLP width,
A query heads, G key-value heads, D head dimension, V draft vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drafts.errors import CheckpointError

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``product(x [N, in], weight [out, in]) -> [N, out]``; replaceable by a faster equal one."""

FORMAT = "polydraft-trunk-1"


@dataclass(frozen=True)
class HeadShape:
    """Dimensions of the head, taken from the target's config.

    Attributes:
        hidden_size: Width of the target's residual stream (H).
        intermediate_size: Width of the MLP (I).
        heads: Query heads (A).
        kv_heads: Key-value heads (G).
        head_dim: Width of a head (D).
        norm_eps: Epsilon of every RMSNorm.
        rope_theta: Base of the rotary frequencies.
        feature_layers: Target layers (1-based count of layers passed) whose outputs are the features.
        vocab_size: Rows of the target's embedding, for checking that head and target fit.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    feature_layers: tuple[int, ...]
    vocab_size: int

    @property
    def feature_width(self) -> int:
        """Width of one position's features (F)."""
        return self.hidden_size * len(self.feature_layers)

    def tensor_shapes(self, draft_vocab: int) -> dict[str, tuple[int, ...]]:
        """Shape of every learned tensor for a draft vocabulary of ``draft_vocab`` ids."""
        h, i, d = self.hidden_size, self.intermediate_size, self.head_dim
        return {
            "feature_norm": (len(self.feature_layers), h),
            "fc": (h, self.feature_width),
            "embed_norm": (h,),
            "hidden_norm": (h,),
            "qkv": ((self.heads + 2 * self.kv_heads) * d, 2 * h),
            "attention_out": (h, self.heads * d),
            "mlp_norm": (h,),
            "gate_up": (2 * i, h),
            "down": (h, i),
            "final_norm": (h,),
            "output_bias": (draft_vocab,),
        }


class Trunk:
    """Weights shared by all experts, and the head's forward in three pieces.

    The output matrix is not among them: it is the target's own, restricted to ``token_ids``.

    Args:
        shape: Dimensions.
        token_ids: Target ids of the draft vocabulary, int64 ``[V]``, ascending. No other id is ever
            proposed; the table travels with the trunk and with every expert.
        tensors: Learned tensors by name, shapes as :meth:`HeadShape.tensor_shapes` says.
        product: Matrix product to use.
    """

    def __init__(
        self,
        shape: HeadShape,
        token_ids: torch.Tensor,
        tensors: dict[str, torch.Tensor],
        product: Product = F.linear,
    ) -> None:
        check_token_ids(token_ids, shape.vocab_size)
        expected = shape.tensor_shapes(len(token_ids))
        got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if got != expected:
            wrong = sorted(n for n in {*got, *expected} if got.get(n) != expected.get(n))
            raise CheckpointError(
                f"trunk tensors {wrong}: got {[got.get(n) for n in wrong]}, "
                f"expected {[expected.get(n) for n in wrong]}"
            )
        self.shape = shape
        self.token_ids = token_ids.to(torch.int64)
        self.tensors = tensors
        self.product = product
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=token_ids.device)
        self.frequencies = 1.0 / shape.rope_theta ** (half / shape.head_dim)
        self._turns = self._turn_table(512)

    @classmethod
    def fresh(cls, shape: HeadShape, token_ids: torch.Tensor, seed: int = 0) -> Trunk:
        """An untrained trunk: norms at one, matrices normal with the fan-in's scale."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, size in shape.tensor_shapes(len(token_ids)).items():
            if name.endswith("norm"):
                tensors[name] = torch.ones(size)
            elif name == "output_bias":
                tensors[name] = torch.zeros(size)
            else:
                tensors[name] = torch.randn(size, generator=generator) * 0.5 * size[-1] ** -0.5
        return cls(shape, token_ids, tensors)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm of ``x`` with the weight called ``name``."""
        return F.rms_norm(x, (x.shape[-1],), self.tensors[name], self.shape.norm_eps)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Features ``[N, F]`` -> hidden ``[N, H]``; each chunk is normalised first."""
        shape = self.shape
        chunks = features.reshape(-1, len(shape.feature_layers), shape.hidden_size)
        normed = F.rms_norm(chunks, (shape.hidden_size,), None, shape.norm_eps)
        return self.product((normed * self.tensors["feature_norm"]).flatten(-2), self.tensors["fc"])

    def layer_input(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings of the next tokens and hidden, both ``[N, H]`` -> layer input ``[N, 2H]``."""
        return torch.cat((self.norm(embeds, "embed_norm"), self.norm(hidden, "hidden_norm")), dim=-1)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer input ``[N, 2H]`` at ``positions`` ``[N]`` -> keys and values, each ``[N, G, D]``."""
        shape = self.shape
        start = shape.heads * shape.head_dim
        kv = self.product(x, self.tensors["qkv"][start:])
        keys, values = kv.reshape(-1, 2 * shape.kv_heads, shape.head_dim).chunk(2, dim=-2)
        return self.rotate(keys, positions), values

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Layer input ``[N, 2H]`` at ``positions`` ``[N]`` -> queries ``[N, A, D]``."""
        shape = self.shape
        q = self.product(x, self.tensors["qkv"][: shape.heads * shape.head_dim])
        return self.rotate(q.reshape(-1, shape.heads, shape.head_dim), positions)

    def queries_keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the same positions in one product."""
        shape = self.shape
        both = self.product(x, self.tensors["qkv"])
        heads = both.reshape(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        turned = self.rotate(heads[:, : shape.heads + shape.kv_heads], positions)
        return turned[:, : shape.heads], turned[:, shape.heads :], heads[:, shape.heads + shape.kv_heads :]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary position embedding (half-split layout) of ``x`` ``[N, heads, D]``."""
        turns = self._turns[positions].to(x.dtype)
        cos, sin = turns[:, :, 0], turns[:, :, 1]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def reach(self, positions: int) -> None:
        """Make rotary angles known for absolute positions below ``positions``."""
        if positions > len(self._turns):
            self._turns = self._turn_table(max(positions, 2 * len(self._turns)))

    def _turn_table(self, positions: int) -> torch.Tensor:
        """Cosines and sines, ``[positions, 1, 2, D / 2]``."""
        steps = torch.arange(positions, dtype=torch.float32, device=self.frequencies.device)
        angles = steps[:, None] * self.frequencies
        return torch.stack((angles.cos(), angles.sin()), dim=1)[:, None]

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Residual ``[N, H]`` plus the attention's output ``[N, A * D]`` projected back -> ``[N, H]``."""
        return hidden + self.product(attended, self.tensors["attention_out"])

    def check_fits(self, field: str, matrix: torch.Tensor) -> None:
        """Raise :class:`CheckpointError` unless ``matrix`` ``[vocab, H]`` is of a target like the trunk's."""
        wanted = (self.shape.vocab_size, self.shape.hidden_size)
        if tuple(matrix.shape) != wanted:
            raise CheckpointError(
                f"{field}: shape {tuple(matrix.shape)}, but the trunk was trained for a target with {wanted}"
            )

    def matrices(self) -> list[torch.Tensor]:
        """One matrix of every shape the forward multiplies with, for timing products."""
        start = self.shape.heads * self.shape.head_dim
        qkv = self.tensors["qkv"]
        named = [self.tensors[name] for name in ("fc", "attention_out", "gate_up", "down")]
        return [*named, qkv, qkv[:start], qkv[start:]]

    def fingerprint(self) -> str:
        """Hash of all weights and the id table; buffered hidden states are valid for one trunk only."""
        digest = hashlib.sha256(self.token_ids.cpu().numpy().tobytes())
        for name in sorted(self.tensors):
            digest.update(self.tensors[name].detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def to(self, device: torch.device | str) -> Trunk:
        """The same trunk on another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return Trunk(self.shape, self.token_ids.to(device), moved, self.product)

    def save(self, path: Path) -> None:
        """Write the trunk as one safetensors file, weights in float16."""
        tensors = {n: t.detach().to("cpu", torch.float16).contiguous() for n, t in self.tensors.items()}
        tensors["token_ids"] = self.token_ids.to("cpu", torch.int32)
        part = path.with_suffix(".part")
        save_file(tensors, part, metadata={"format": FORMAT, "shape": json.dumps(asdict(self.shape))})
        part.chmod(0o644)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Trunk:
        """Read what :meth:`save` wrote, as float32.

        Raises:
            CheckpointError: The file is missing, damaged, of another format, or lacks a tensor; the
                message names it.
        """
        shape, tensors = _read(path, lambda file: {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        if "token_ids" not in tensors:
            raise CheckpointError(f"{path.name}: lacks token_ids, the table of the draft vocabulary")
        token_ids = tensors.pop("token_ids").to(torch.int64)
        return cls(shape, token_ids, {n: t.float() for n, t in tensors.items()})

    @staticmethod
    def read_shape(path: Path) -> HeadShape:
        """The dimensions of a trunk in a file, without its weights.

        Raises:
            CheckpointError: The file is missing, damaged or of another format.
        """
        return _read(path, lambda file: {})[0]


def _read(
    path: Path, take: Callable[[Any], dict[str, torch.Tensor]]
) -> tuple[HeadShape, dict[str, torch.Tensor]]:
    """The shape that a trunk's file names, and what ``take`` takes of the file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = take(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error})") from error
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path.name}: format {metadata.get('format')!r}, expected {FORMAT!r}")
    fields = json.loads(metadata["shape"])
    fields["feature_layers"] = tuple(fields["feature_layers"])
    return HeadShape(**fields), tensors


def check_token_ids(token_ids: torch.Tensor, vocab_size: int, name: str = "token_ids") -> None:
    """Refuse a table that is unsorted, repeats an id, or leaves the target's vocabulary (case A21).

    Raises:
        CheckpointError: The message begins with ``name``, what the table is called where it was found.
    """
    if token_ids.ndim != 1 or not len(token_ids):
        raise CheckpointError(f"{name}: shape {tuple(token_ids.shape)}, expected one dimension, not empty")
    if bool((token_ids[1:] <= token_ids[:-1]).any()):
        raise CheckpointError(f"{name}: not strictly ascending; the table was permuted or repeats an id")
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size:
        raise CheckpointError(f"{name}: {int(token_ids[-1])} outside the target's {vocab_size} ids")
