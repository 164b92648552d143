"""The adapters of one draft model: a LoRA adapter per domain, by peft (Hu et al. 2106.09685).

B starts at zero, hence a new adapter *is* the model. Adapters reach keys and values, unlike the deltas of
the ``eagle`` head, so whoever keeps a cache compares :meth:`AdapterBank.stamp` and rebuilds.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from drafts.bank import Expert
from drafts.errors import CheckpointError, InvalidValueError, UnknownNameError
from drafts.version_checks import check_finite, check_same_form

BASE = "__base__"
"""What peft calls the model without an adapter in a mixed batch."""

FINGERPRINT = "base_model"
"""Name of the tensor that says which weights an adapter belongs to."""

_BLANK = "blank"
_PREFIX = "base_model.model."


class AdapterBank:
    """Adapters on all linear layers but the output matrix; adding or dropping one moves no other.

    Args:
        model: The draft model; peft puts its layers into it.
        rank: Rank of every adapter.

    Attributes:
        model: The model with adapters: called as before, with ``adapter_names``, one a row.
        fingerprint: int64 ``[4]``, of the model's own weights.
    """

    def __init__(self, model: Any, rank: int) -> None:
        self.rank = rank
        self.fingerprint = fingerprint(model)
        self._config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = get_peft_model(model, self._config, adapter_name=_BLANK).eval()
        self.model.requires_grad_(False)
        self._slots: dict[str, str] = {}
        self._trained: set[str] = set()
        self._stamps: dict[str, int] = {}
        self._made = 0

    def __contains__(self, domain: str) -> bool:
        return domain in self._slots

    @property
    def domains(self) -> list[str]:
        """Domains that have an adapter."""
        return list(self._slots)

    @property
    def bytes_per_expert(self) -> int:
        """Memory of one adapter."""
        return sum(t.numel() * t.element_size() for t in self._parameters(_BLANK).values())

    def name(self, domain: str) -> str:
        """What a row of ``domain`` is run with; the model itself while nothing was trained."""
        return self._slots[domain] if domain in self._trained else BASE

    def stamp(self, domain: str) -> int:
        """Changes whenever the domain is served with other weights."""
        return self._stamps.get(domain, 0)

    def add(self, domain: str, parent: str | None = None) -> None:
        """Give ``domain`` an adapter: a copy of ``parent``'s or the model unchanged; one it has stays."""
        if domain in self._slots:
            return
        slot, self._made = f"expert{self._made}", self._made + 1
        with torch.random.fork_rng(devices=[]):
            self.model.add_adapter(slot, self._config)
        self.model.requires_grad_(False)
        self._slots[domain] = slot
        source = self._slots.get(parent or "", _BLANK)
        self._copy(self._parameters(source), slot)
        if parent in self._trained:
            self._trained.add(domain)
        self._renew(domain)

    def drop(self, domain: str) -> None:
        """Forget a domain's adapter."""
        slot = self._slots.pop(domain, None)
        if slot is not None:
            self._trained.discard(domain)
            self.model.delete_adapter(slot)
            self._renew(domain)

    def tensors(self, domain: str) -> Expert:
        """A copy of the domain's adapter, with the model's fingerprint."""
        if domain not in self._slots:
            raise UnknownNameError("domain", domain, self.domains)
        found = {name: t.detach().clone() for name, t in self._parameters(self._slots[domain]).items()}
        return {**found, FINGERPRINT: self.fingerprint.clone()}

    def load(self, domain: str, tensors: Expert) -> None:
        """Serve ``tensors`` as the domain's adapter from now on.

        Raises:
            UnknownNameError: The domain has no adapter.
            CheckpointError: A tensor is missing, unknown, of another shape or not finite, or the adapter
                belongs to other weights; nothing has changed.
        """
        if domain not in self._slots:
            raise UnknownNameError("domain", domain, self.domains)
        self.check(tensors)
        self._copy({n: t for n, t in tensors.items() if n != FINGERPRINT}, self._slots[domain])
        if any(bool(t.any()) for n, t in tensors.items() if n.endswith("lora_B")):
            self._trained.add(domain)
        else:
            self._trained.discard(domain)
        self._renew(domain)

    def check(self, tensors: Expert) -> None:
        """Raise :class:`CheckpointError` unless ``tensors`` could be loaded (cases A27, A29)."""
        wanted = {**self._parameters(_BLANK), FINGERPRINT: self.fingerprint}
        try:
            check_same_form("adapter", tensors, wanted)
            check_finite("adapter", tensors)
        except InvalidValueError as error:
            raise CheckpointError(str(error)) from error
        if not torch.equal(tensors[FINGERPRINT].cpu(), self.fingerprint):
            raise CheckpointError("adapter: it was trained on other weights than this draft model's")

    def run(self, tensors: Expert, **inputs: Any) -> Any:
        """The model's output under ``tensors``, which need not be served; differentiable in them.

        What is served is not touched: the tensors stand in for the blank adapter during this call, on the
        device of ``input_ids`` wherever they lie.
        """
        device, names = inputs["input_ids"].device, self._full_names
        own = {names[name]: t.to(device) for name, t in tensors.items() if name != FINGERPRINT}
        inputs["adapter_names"] = [_BLANK] * len(inputs["input_ids"])
        return torch.func.functional_call(self.model, own, (), inputs)

    @cached_property
    def _full_names(self) -> dict[str, str]:
        """Parameters of the blank adapter in the model by their names in an expert; they never change."""
        end = f".{_BLANK}.weight"
        return {
            name.removeprefix(_PREFIX).removesuffix(end): name
            for name, _ in self.model.named_parameters()
            if name.endswith(end)
        }

    def _parameters(self, slot: str) -> Expert:
        """One adapter's parameters by module and part."""
        end = f".{slot}.weight"
        return {
            name.removeprefix(_PREFIX).removesuffix(end): parameter.data
            for name, parameter in self.model.named_parameters()
            if name.endswith(end)
        }

    def _copy(self, tensors: Expert, slot: str) -> None:
        for name, tensor in self._parameters(slot).items():
            tensor.copy_(tensors[name])

    def _renew(self, domain: str) -> None:
        self._stamps[domain] = self._stamps.get(domain, 0) + 1


def write_peft(folder: Path, tensors: Expert, base: str) -> None:
    """Write an adapter as ``peft.PeftModel.from_pretrained(base, folder)`` takes it.

    Args:
        folder: An existing folder.
        tensors: What :meth:`AdapterBank.tensors` gave.
        base: Folder or hub name of the model that it belongs to.
    """
    own = {name: tensor for name, tensor in tensors.items() if name != FINGERPRINT}
    rank = next(len(tensor) for name, tensor in own.items() if name.endswith("lora_A"))
    LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=sorted({name.split(".")[-2] for name in own}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    ).save_pretrained(folder)
    named = {f"{_PREFIX}{name}.weight": tensor.contiguous() for name, tensor in own.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def fingerprint(model: Any) -> torch.Tensor:
    """int64 ``[4]`` of all weights' names, shapes and first values: reads little, tells models apart."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
    words = [digest.digest()[i : i + 8] for i in range(0, 32, 8)]
    return torch.tensor([int.from_bytes(word, "big", signed=True) for word in words])
