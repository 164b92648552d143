"""Laws of experts: none moves another, full ones can be anything, the registry's version is what serves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts.bank import TABLE, Expert, ExpertBank, expert_logits, expert_mlp
from drafts.compiled_head import CompiledHead
from drafts.kinds.eagle import EagleSource
from drafts.native.low_rank import padded_rank
from drafts.native.team import team
from drafts.registry import Registry
from drafts.trunk import Trunk
from drafts.versions import VersionFollower
from tests.drafts import head_rig
from tests.drafts.head_rig import tiny_trunk
from tests.drafts.test_compiled_head import SHAPE, agree, drafted, make_row, make_source, teach

needs_team = pytest.mark.skipif(team() is None, reason="torch does not lend its threads here")

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "clone", "drop", "load"]), st.integers(0, 5), st.integers(0, 5)),
    min_size=1,
    max_size=10,
)


def apply(source: EagleSource, operation: str, which: int, other: int) -> str:
    """One change of the bank; the domain it is about."""
    domain = f"x{which}"
    if operation == "add":
        source.add_domain(domain)
    elif operation == "clone":
        source.add_domain(domain, f"x{other}")
    elif operation == "drop":
        source.drop_domain(domain)
    else:
        teach(source, domain, 100 + other)
    return domain


def packed_addresses(source: EagleSource, domain: str) -> list[int]:
    assert isinstance(source.forward, CompiledHead)
    slot = source.bank.index(domain)
    deltas, matrices = source.forward.experts.tables([slot]) or (None, None)
    assert deltas is not None
    assert matrices is not None
    return [*deltas[:, 0, 0].tolist(), *matrices[:, 0].tolist()]


@needs_team
@settings(max_examples=20, deadline=None)
@given(OPERATIONS)
def test_no_change_of_one_expert_moves_another_or_changes_a_bit_of_its_output(operations) -> None:
    source = make_source()
    for seed, domain in enumerate(("kept", "also kept")):
        teach(source, domain, seed)
    kept = {domain: source.bank.tensors(domain) for domain in ("kept", "also kept")}
    slots = {domain: source.bank.index(domain) for domain in kept}
    addresses = {domain: packed_addresses(source, domain) for domain in kept}
    first = drafted(source, [make_row(1, 6, "kept"), make_row(2, 6, "also kept")], [3, 3])
    hidden = torch.randn(2, SHAPE.hidden_size, generator=torch.Generator().manual_seed(0))
    by_library = source.bank.mlp(hidden, list(slots.values()))
    for operation in operations:
        apply(source, *operation)
    for domain, tensors in kept.items():
        assert source.bank.index(domain) == slots[domain]
        assert packed_addresses(source, domain) == addresses[domain]
        for name, tensor in source.bank.tensors(domain).items():
            assert torch.equal(tensor, tensors[name])
    assert drafted(source, [make_row(1, 6, "kept"), make_row(2, 6, "also kept")], [3, 3]) == first
    assert torch.equal(source.bank.mlp(hidden, list(slots.values())), by_library)


def test_within_its_capacity_a_bank_stays_where_it_is() -> None:
    bank = ExpertBank(tiny_trunk(), rank=2, capacity=4)
    head_rig.random_expert(bank, "kept", 1)
    view = bank.view(bank.index("kept"))
    assert view is not None
    before = {name: tensor.data_ptr() for name, tensor in view.items()}
    bank.add("clone", "kept")
    bank.add("new")
    bank.drop("clone")
    head_rig.random_expert(bank, "loaded", 2)
    after = bank.view(bank.index("kept"))
    assert after is not None
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == before


def changed(trunk: Trunk, seed: int) -> tuple[Trunk, torch.Tensor, Expert]:
    """A trunk with another MLP and output, the output's change, and a full expert that makes it so."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    hidden, inner, ids = SHAPE.hidden_size, SHAPE.intermediate_size, len(trunk.token_ids)
    both, down, output = draw(hidden, 2 * inner), draw(inner, hidden), draw(hidden, ids)
    eye = torch.eye(hidden)
    expert = {
        "gate_up_a": eye,
        "gate_up_b": both,
        "down_a": down,
        "down_b": eye,
        "output_a": eye,
        "output_b": output,
        "output_bias": draw(ids),
        TABLE: trunk.token_ids.to(torch.int32),
    }
    tensors = {
        **trunk.tensors,
        "gate_up": trunk.tensors["gate_up"] + both.T,
        "down": trunk.tensors["down"] + down.T,
        "output_bias": trunk.tensors["output_bias"] + expert["output_bias"],
    }
    return Trunk(SHAPE, trunk.token_ids, tensors), output.T, expert


def test_a_full_expert_can_be_any_copy_of_mlp_and_output() -> None:
    source = make_source(rank="full", compile_passes=False)  # type: ignore[arg-type]
    other, change, expert = changed(source.trunk, 4)
    source.add_domain("copy")
    source.bank.load("copy", expert)
    hidden = torch.randn(5, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))
    slots = [source.bank.index("copy")] * 5
    found = source.bank.mlp(hidden, slots)
    wanted = expert_mlp(other, hidden, None)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    logits = source.bank.logits(source.output, hidden, slots)
    torch.testing.assert_close(
        logits, expert_logits(other, source.output + change, hidden, None), rtol=1e-4, atol=1e-4
    )


@needs_team
def test_full_experts_run_compiled_too() -> None:
    sources = [make_source(rank="full", compile_passes=compiled) for compiled in (True, False)]  # type: ignore[arg-type]
    for source in sources:
        teach(source, "full", 3)
    rows = [[make_row(1, 6, "full"), make_row(2, 9, "other")] for _ in sources]
    agree(*(drafted(source, batch, [3, 3]) for source, batch in zip(sources, rows, strict=True)))


@needs_team
def test_memory_of_an_expert_is_told_in_both_forms_and_let_go() -> None:
    source = make_source(rank=6)
    teach(source, "math", 1)
    assert source.describe("math")["expert_bytes"] == source.bank.bytes_per_expert
    assert source.describe("math")["packed_bytes"] == 0
    drafted(source, [make_row(1, 6, "math")], [2])
    hidden, inner, ids = SHAPE.hidden_size, SHAPE.intermediate_size, len(source.trunk.token_ids)
    tiles = [32 * -(-size // 32) for size in (2 * inner, hidden, ids)]
    padded = padded_rank(6)
    ranks = [6, 6, padded + 1]
    bytes_of_b = sum(2 * rank * outputs for rank, outputs in zip(ranks, tiles, strict=True))
    assert source.describe("math")["packed_bytes"] == 2 * padded * (hidden + inner + hidden) + bytes_of_b
    assert source.describe("other")["packed_bytes"] == 0
    slot = source.bank.index("math")
    source.drop_domain("math")
    assert source.forward.expert_bytes(slot) == 0


@needs_team
@pytest.mark.parametrize("compiled", [True, False])
def test_drafts_are_those_of_the_very_version_the_registry_names(compiled: bool) -> None:
    source, registry = make_source(compile_passes=compiled), Registry(None)
    source.add_domain("math")
    versions = VersionFollower(registry, source.bank)

    def alone(tensors: Expert) -> list:
        """What a fresh source with that version drafts."""
        fresh = make_source(compile_passes=compiled)
        fresh.load_state({"math": tensors})
        return drafted(fresh, [make_row(3, 7, "math")], [3])

    published: list[Expert] = [source.bank.tensors("math")]
    registry.publish("math", published[0], reason="born")
    versions.adopt()
    for seed in range(3):
        donor = make_source(compile_passes=False)
        teach(donor, "math", seed)
        published.append(donor.bank.tensors("math"))
        before = drafted(source, [make_row(3, 7, "math")], [3])
        registry.publish("math", published[-1], reason="better")
        assert drafted(source, [make_row(3, 7, "math")], [3]) == before
        versions.adopt()
        assert versions.served("math") == len(published) - 1
        assert drafted(source, [make_row(3, 7, "math")], [3]) == alone(published[-1]) != before
    registry.rollback("math")
    versions.adopt()
    assert drafted(source, [make_row(3, 7, "math")], [3]) == alone(published[-2])
    current = registry.current("math")
    assert current is not None
    for name, tensor in source.bank.tensors("math").items():
        assert torch.equal(tensor, current.tensors[name])
