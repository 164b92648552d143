from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafts.bank import expert_logits, expert_mlp
from drafts.data import TRUNK, TRUNK_PROVENANCE
from drafts.errors import CheckpointError
from drafts.product import FORMS, TimedProduct
from drafts.trunk import Trunk
from tests.drafts.head_rig import SHAPE, matrices, tiny_trunk


def rewrite(path: Path, change: object) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path, metadata=metadata)


def test_a_saved_trunk_loads_with_its_table_and_shape(tmp_path: Path) -> None:
    trunk = tiny_trunk()
    trunk.save(tmp_path / "trunk.safetensors")
    loaded = Trunk.load(tmp_path / "trunk.safetensors")
    assert loaded.shape == SHAPE
    assert torch.equal(loaded.token_ids, trunk.token_ids)
    for name, tensor in trunk.tensors.items():
        torch.testing.assert_close(loaded.tensors[name], tensor, atol=2e-3, rtol=2e-3)
    assert not list(tmp_path.glob("*.part"))


def test_a21_a_trunk_without_its_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trunk.safetensors"
    tiny_trunk().save(path)
    rewrite(path, lambda tensors: tensors.pop("token_ids"))
    with pytest.raises(CheckpointError, match="token_ids"):
        Trunk.load(path)


def test_a21_a_trunk_with_a_permuted_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trunk.safetensors"
    tiny_trunk().save(path)
    rewrite(path, lambda tensors: tensors.update(token_ids=tensors["token_ids"].flip(0).contiguous()))
    with pytest.raises(CheckpointError, match="token_ids"):
        Trunk.load(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trunk.safetensors"
    tiny_trunk().save(path)
    rewrite(path, lambda tensors: tensors.pop("qkv"))
    with pytest.raises(CheckpointError, match="qkv"):
        Trunk.load(path)


def test_a_damaged_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = tmp_path / "trunk.safetensors"
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(CheckpointError, match=r"trunk\.safetensors"):
        Trunk.load(path)


def test_fingerprint_changes_with_any_weight() -> None:
    one, two = tiny_trunk(), tiny_trunk()
    assert one.fingerprint() == two.fingerprint()
    two.tensors["down"][0, 0] += 1
    assert one.fingerprint() != two.fingerprint()


def test_every_product_form_equals_the_plain_one() -> None:
    for rows in (1, 2, 5):
        x, weight = torch.randn(rows, 16), torch.randn(12, 16)
        for form in FORMS:
            torch.testing.assert_close(form(x, weight), x @ weight.T)


def test_a_timed_product_gives_the_same_head() -> None:
    trunk, (_, output) = tiny_trunk(), matrices()
    hidden, output = torch.randn(3, 16), output[trunk.token_ids]
    plain = expert_logits(trunk, output, expert_mlp(trunk, hidden, None), None)
    trunk.product = TimedProduct([*trunk.matrices(), output], int8=False)
    timed = expert_logits(trunk, output, expert_mlp(trunk, hidden, None), None)
    torch.testing.assert_close(plain, timed)


def test_eight_bit_products_are_close_and_never_used_where_a_gradient_is_needed() -> None:
    x, weight = torch.randn(3, 64), torch.randn(48, 64)
    product = TimedProduct([weight])
    exact = x @ weight.T
    assert (product.in_int8(x, weight) - exact).abs().max() < 0.03 * exact.abs().max()
    product.table[weight.shape] = [product.in_int8] * 33
    wanted = x.clone().requires_grad_(True)
    assert torch.equal(product(wanted, weight), torch.nn.functional.linear(wanted, weight))
    other = torch.randn(48, 64)
    assert torch.equal(product.in_int8(x, other), torch.nn.functional.linear(x, other))


def test_a21_the_shipped_trunk_loads_and_its_provenance_names_it() -> None:
    loaded = Trunk.load(TRUNK)
    facts = json.loads(TRUNK.with_name(TRUNK_PROVENANCE).read_text())
    assert facts["fingerprint"] == loaded.fingerprint()
    assert facts["draft_vocabulary"] == len(loaded.token_ids) == 8192
    assert 2 in loaded.token_ids
    assert TRUNK.stat().st_size < 12_000_000
    assert not re.search(r'"/|[A-Z]:\\\\', TRUNK.with_name(TRUNK_PROVENANCE).read_text())
