from __future__ import annotations

import pytest
import torch

from drafts.bank import NO_EXPERT, ExpertBank
from drafts.errors import CheckpointError, UnknownNameError
from tests.drafts.head_rig import random_expert, tiny_trunk


def test_a_new_expert_is_the_trunk() -> None:
    bank = ExpertBank(tiny_trunk(), rank=2)
    bank.add("math")
    x, output = torch.randn(3, 16), torch.randn(25, 16)
    assert torch.equal(bank.mlp(x, [bank.index("math")] * 3), bank.mlp(x, [NO_EXPERT] * 3))
    tensors = bank.tensors("math")
    bank.load("math", tensors)
    assert torch.equal(bank.logits(output, x, [1] * 3), bank.logits(output, x, [NO_EXPERT] * 3))


def test_adding_beyond_capacity_and_dropping_move_no_other_expert() -> None:
    bank = ExpertBank(tiny_trunk(), rank=2, capacity=2)
    for n in range(7):
        random_expert(bank, f"d{n}", n)
    before = {d: (bank.index(d), bank.tensors(d)) for d in bank.domains}
    bank.drop("d3")
    bank.add("child", parent="d5")
    assert bank.index("child") == before["d3"][0]
    assert torch.equal(bank.tensors("child")["down_b"], before["d5"][1]["down_b"])
    for domain, (slot, tensors) in before.items():
        if domain != "d3":
            assert bank.index(domain) == slot
            for name, tensor in bank.tensors(domain).items():
                assert torch.equal(tensor, tensors[name])


def test_a_slot_freed_and_reused_starts_as_the_trunk() -> None:
    bank = ExpertBank(tiny_trunk(), rank=2, capacity=1)
    random_expert(bank, "old", 1)
    bank.drop("old")
    bank.add("new")
    assert not bank.tensors("new")["output_b"].any()
    assert bank.view(bank.index("new")) is None


@pytest.mark.parametrize("fault", ["lacks", "adds", "shape", "nan", "no table", "other table"])
def test_a21_a27_a29_an_unfit_expert_is_refused_by_name_and_changes_nothing(fault: str) -> None:
    bank = ExpertBank(tiny_trunk(), rank=2)
    random_expert(bank, "math", 1)
    before = bank.tensors("math")
    bad = bank.tensors("math")
    name = "down_a"
    if fault == "lacks":
        del bad[name]
    elif fault == "adds":
        name = "extra"
        bad[name] = torch.zeros(1)
    elif fault == "shape":
        bad[name] = bad[name].T
    elif fault == "nan":
        bad[name][0, 0] = float("nan")
    else:
        name = "token_ids"
        bad[name] = bad[name].flip(0)
        if fault == "no table":
            del bad[name]
    with pytest.raises(CheckpointError, match=name):
        bank.load("math", bad)
    for key, tensor in bank.tensors("math").items():
        assert torch.equal(tensor, before[key])


def test_loading_an_unknown_domain_names_the_known_ones() -> None:
    bank = ExpertBank(tiny_trunk(), rank=2)
    random_expert(bank, "math", 1)
    with pytest.raises(UnknownNameError, match="math"):
        bank.load("code", bank.tensors("math"))


def test_tensors_returned_are_copies() -> None:
    bank = ExpertBank(tiny_trunk(), rank=2)
    random_expert(bank, "math", 1)
    taken = bank.tensors("math")
    taken["down_b"].zero_()
    assert bank.tensors("math")["down_b"].any()


def test_bytes_per_expert_counts_the_deltas() -> None:
    bank = ExpertBank(tiny_trunk(), rank=2)
    expected = 2 * (16 + 48 + 24 + 16 + 16 + 25) + 25
    assert bank.bytes_per_expert == 4 * expected
