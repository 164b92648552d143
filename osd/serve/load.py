"""Loading a target: from a folder, a hub name or the embedded package, to a probed, runnable model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drafts.errors import InvalidValueError
from osd.serve.embedded import EMBEDDED, embedded_folder, embedded_weights
from osd.serve.facts import resolve_device, resolve_dtype
from osd.serve.generic import GenericTarget, unsupported
from osd.serve.graphs import CudaRecorder, GraphedTarget
from osd.serve.lean import LeanTarget, lean_obstacle
from osd.serve.native import NativeTarget, native_obstacle
from osd.serve.native_weights import Exact
from osd.serve.probe import probe
from osd.serve.quantize import quantise
from osd.serve.strict_check import pass_dependence, strict_target
from osd.serve.target import TargetModel

logger = logging.getLogger(__name__)

FORWARDS = ("auto", "native", "lean", "generic")
NUMERICS = ("fast", "strict")
GRAPHS = ("auto", "off")


def load_target(
    model: str = EMBEDDED,
    device: str = "auto",
    dtype: str = "auto",
    forward: str = "auto",
    cache_dir: Path | None = None,
    feature_layers: Sequence[int] | None = None,
    quantization: str = "none",
    numerics: str = "fast",
    graphs: str = "auto",
) -> tuple[TargetModel, Any]:
    """Load a target and its tokenizer, choose the forward, and probe it.

    Args:
        model: ``embedded``, a folder, or a Hugging Face hub name.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        forward: ``generic``, ``lean``, ``native`` (lean with its small passes compiled), or ``auto``: the
            last of these that the model and the machine allow and that proves equal.
        cache_dir: Where the embedded target is converted to.
        feature_layers: Layers whose hidden states are kept, see :class:`TargetModel`.
        quantization: ``none``, or ``int8`` for :mod:`osd.serve.quantize`.
        numerics: ``fast``, or ``strict``: the same bits whatever else a pass computes.
        graphs: ``auto`` records decode passes on a CUDA device, ``off`` does not.

    Raises:
        InvalidValueError: The model is not there, is no causal LM, or cannot be served over slots.
        CheckpointError: The embedded target could not be converted.
    """
    if forward not in FORWARDS:
        raise InvalidValueError("target.forward", forward, f"one of {', '.join(FORWARDS)}")
    if numerics not in NUMERICS:
        raise InvalidValueError("target.numerics", numerics, f"one of {', '.join(NUMERICS)}")
    if numerics == "strict" and quantization != "none":
        raise InvalidValueError(
            "target.numerics", numerics, f"fast where target.quantization is {quantization}"
        )
    if graphs not in GRAPHS:
        raise InvalidValueError("target.graphs", graphs, f"one of {', '.join(GRAPHS)}")
    place = resolve_device(device)
    number = resolve_dtype(dtype, place)
    folder = str(embedded_folder(cache_dir)) if model == EMBEDDED else _checked(model)
    plain = _load_plain(folder, model, number).to(place)
    if quantization == "int8":
        quantise(plain, model)
    elif quantization != "none":
        raise InvalidValueError("target.quantization", quantization, "none or int8")
    tokenizer = _tokenizer(folder, model, local_only=model == EMBEDDED)
    target = build_target(
        plain,
        name=model,
        forward=forward,
        feature_layers=feature_layers,
        numerics=numerics,
        graphs=graphs,
        exact=embedded_weights(Path(folder)) if model == EMBEDDED else None,
    )
    return target, tokenizer


def load_tokenizer(model: str = EMBEDDED, cache_dir: Path | None = None) -> Any:
    """The target's tokenizer from the files on this machine, without its weights.

    Raises:
        InvalidValueError: It is not there.
        CheckpointError: The embedded target could not be converted.
    """
    folder = str(embedded_folder(cache_dir)) if model == EMBEDDED else model
    return _tokenizer(folder, model, local_only=True)


def _tokenizer(folder: str, model: str, local_only: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=local_only)
    except (OSError, ValueError) as error:
        raise InvalidValueError("target.model", model, f"its tokenizer cannot be loaded ({error})") from error


def build_target(
    plain: Any,
    *,
    name: str,
    forward: str = "auto",
    feature_layers: Sequence[int] | None = None,
    numerics: str = "fast",
    graphs: str = "auto",
    exact: Exact | None = None,
) -> TargetModel:
    """A probed target over an already loaded Hugging Face model.

    Args:
        plain: The model.
        name: What it was loaded from.
        forward: As for :func:`load_target`.
        feature_layers: As for :func:`load_target`.
        numerics: As for :func:`load_target`.
        graphs: As for :func:`load_target`.
        exact: float32 weights by name that a bfloat16 model was rounded from, where they are at hand.

    Raises:
        InvalidValueError: The model cannot be served by the forward or with the numerics asked for.
    """
    plain.eval().requires_grad_(False)
    obstacle = "not asked for" if forward == "generic" else lean_obstacle(plain)
    if numerics == "strict":
        return _strict(plain, name, feature_layers, obstacle, forward, exact)
    if obstacle is None:
        lean = _lean(plain, name, feature_layers, graphs, forward, exact)
        result = probe(lean)
        if result.ok:
            return lean
        obstacle = f"logits differ by {result.worst:.3g} (allowed {result.allowed:.3g}) in: {result.where}"
        logger.warning("%s: lean forward not used, %s", name, obstacle)
    if forward in ("lean", "native"):
        raise InvalidValueError("target.forward", forward, f"use auto or generic for this model: {obstacle}")
    logger.info("%s: generic forward (%s)", name, obstacle)
    target = GenericTarget(plain, name=name, feature_layers=feature_layers)
    try:
        result = probe(target)
    except InvalidValueError:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise unsupported(name, f"it does not run over slots ({type(error).__name__}: {error})") from error
    if not result.ok:
        raise unsupported(
            name,
            f"its logits over slots differ from its own by {result.worst:.3g} "
            f"(allowed {result.allowed:.3g}) in: {result.where}",
        )
    return target


def _strict(
    plain: Any,
    name: str,
    feature_layers: Sequence[int] | None,
    obstacle: str | None,
    forward: str,
    exact: Exact | None,
) -> TargetModel:
    """Strict numerics need the lean forward: no other leaves the shapes of a pass to us.

    Compiled passes are strict by the way they compute, and far faster than a library's kernels over blocks of
    one shape, which serve where those are not to be had.
    """
    if obstacle is None and forward != "lean" and native_obstacle(plain) is None:
        native = NativeTarget(plain, name=name, feature_layers=feature_layers, exact=exact, strict=True)
        native.most_tokens = native.most
        result, fault = probe(native), pass_dependence(native)
        if result.ok and fault is None:
            return native
        logger.warning("%s: strict numerics not by compiled passes: %s", name, fault or result.where)
    if obstacle is None:
        target = strict_target(plain, name=name, feature_layers=feature_layers)
        result = probe(target)
        if result.ok:
            return target
        obstacle = f"logits differ by {result.worst:.3g} (allowed {result.allowed:.3g}) in: {result.where}"
    raise InvalidValueError(
        "target.numerics", "strict", f"fast for {name!r}, which the lean forward does not run ({obstacle})"
    )


def _lean(
    plain: Any,
    name: str,
    feature_layers: Sequence[int] | None,
    graphs: str,
    forward: str,
    exact: Exact | None,
) -> LeanTarget:
    """The lean target, with whatever makes its small passes faster here and proves equal.

    Raises:
        InvalidValueError: ``native`` is asked for and not possible.
    """
    device = plain.get_input_embeddings().weight.device
    if device.type == "cuda" and graphs != "off" and forward != "native":
        recorder = CudaRecorder(device)
        return checked_graphs(
            GraphedTarget(plain, name=name, feature_layers=feature_layers, recorder=recorder)
        )
    obstacle = "not asked for" if forward == "lean" else native_obstacle(plain)
    if obstacle is None:
        target = NativeTarget(plain, name=name, feature_layers=feature_layers, exact=exact)
        result = probe(target)
        if result.ok:
            if forward == "auto":
                target.fit()
            return target
        obstacle = f"logits differ by {result.worst:.3g} (allowed {result.allowed:.3g}) in: {result.where}"
        logger.warning("%s: passes are not compiled, %s", name, obstacle)
    if forward == "native":
        raise InvalidValueError("target.forward", "native", f"use auto or lean for this model: {obstacle}")
    return LeanTarget(plain, name=name, feature_layers=feature_layers)


def checked_graphs(target: GraphedTarget) -> GraphedTarget:
    """``target``, every pass packed from now on if the recorded ones do not prove equal."""
    result = probe(target)
    if not result.ok:
        logger.warning(
            "%s: recorded passes not used, logits differ by %.3g (allowed %.3g) in: %s",
            target.name,
            result.worst,
            result.allowed,
            result.where,
        )
        target.stop_recording()
    return target


def hf_model(target: TargetModel) -> Any:
    """The plain Hugging Face model of ``target``: same weights, same storage, same dtype.

    For comparisons with ``model.generate`` and for verification by a forward without our cache.
    """
    return target.reference


def _checked(model: str) -> str:
    """``model`` if it is a folder or may be a hub name."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidValueError("target.model", model, "a folder with a config.json")
        return str(path)
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or not model:
        raise InvalidValueError("target.model", model, "'embedded', an existing folder, or a hub name")
    return model


def _load_plain(folder: str, name: str, dtype: Any) -> Any:
    """The Hugging Face model; never runs code that came with the weights."""
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": name == EMBEDDED}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        if config.is_encoder_decoder:
            raise unsupported(name, "it is an encoder-decoder")
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"  # fused kernels leave the cap out
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    except InvalidValueError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise InvalidValueError(
            "target.model", name, f"a loadable causal language model ({error})"
        ) from error
