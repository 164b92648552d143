from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drafts.errors import CheckpointError, IntegrityError
from osd.learn.buffer import DomainBuffer
from osd.learn.config import BufferConfig
from osd.learn.record import BufferRecord


def record(number: int, rows: int = 4, created: float | None = None) -> BufferRecord:
    return BufferRecord(
        number=number,
        created=time.time() if created is None else created,
        version=number % 3,
        greedy=bool(number % 2),
        positions=torch.arange(rows, dtype=torch.int32),
        hidden=torch.full((rows, 8), float(number)).half(),
        emitted=torch.full((rows,), number, dtype=torch.int32),
        top_ids=torch.zeros(rows, 4, dtype=torch.int32),
        top_logprobs=torch.zeros(rows, 4).half(),
        right=torch.zeros(rows, dtype=torch.bool),
        boundaries=torch.arange(number % 4, dtype=torch.int32),
    )


def filled(count: int, **options: object) -> DomainBuffer:
    buffer = DomainBuffer(BufferConfig(**options))  # type: ignore[arg-type]
    for number in range(count):
        buffer.add(record(number))
    return buffer


def numbers(records: list[BufferRecord]) -> list[int]:
    return [r.number for r in records]


def test_every_nth_record_is_held_back_and_never_drawn() -> None:
    buffer = filled(60, hold_back=5, held_records=3)
    assert numbers(buffer.held) == [47, 52, 57]
    drawn = {r.number for r, _ in buffer.draw(5000)}
    assert not drawn & set(range(2, 60, 5))
    assert drawn <= set(numbers(buffer.training))
    buffer.check()


@pytest.mark.parametrize("policy", ["recency", "fifo", "reservoir"])
@given(sizes=st.lists(st.integers(0, 400), max_size=40))
@settings(max_examples=30, deadline=None)
def test_the_books_balance_whatever_arrives(policy: str, sizes: list[int]) -> None:
    buffer = DomainBuffer(BufferConfig(max_bytes=64 * 1024, policy=policy))  # type: ignore[arg-type]
    for number, rows in enumerate(sizes):
        buffer.add(record(number, rows))
        buffer.check()
    assert buffer.arrived == len(sizes)


def test_fifo_keeps_the_newest_and_reservoir_a_sample_of_all() -> None:
    fifo = filled(2000, max_bytes=64 * 1024, policy="fifo")
    sample = filled(2000, max_bytes=64 * 1024, policy="reservoir")
    assert min(numbers(fifo.training)) > 500
    assert min(numbers(sample.training)) < 500


def test_recency_draws_newer_records_more_often() -> None:
    """200 records, half-life 20: the newest 40 hold 75 % of the weight; fails by chance below 1e-9."""
    buffer = filled(200, policy="recency", recency_half_life=20)
    share = sum(r.number >= 160 for r, _ in buffer.draw(4000)) / 4000
    assert 0.68 < share < 0.82


def test_old_records_expire() -> None:
    buffer = DomainBuffer(BufferConfig(max_age_seconds=100.0))
    for number in range(10):
        buffer.add(record(number, created=1000.0 + number))
    buffer.expire(1105.0)
    assert numbers(buffer.training) == [5, 6, 8, 9]
    buffer.expire(99999.0)
    assert buffer.draw(5) == []


def test_state_survives_a_file_and_a_restart(tmp_path: Path) -> None:
    buffer = filled(23)
    save_file(buffer.state(), tmp_path / "buffer.safetensors")
    again = DomainBuffer(buffer.config)
    again.load_state(load_file(tmp_path / "buffer.safetensors"))
    again.check()
    assert again.arrived == 23
    assert numbers(again.training) == numbers(buffer.training)
    assert numbers(again.held) == numbers(buffer.held)
    for one, two in zip(buffer.training, again.training, strict=True):
        assert (one.created, one.version, one.greedy) == (two.created, two.version, two.greedy)
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, two.tensors()[name])
            assert tensor.dtype == two.tensors()[name].dtype


def test_an_empty_buffer_survives_too() -> None:
    again = DomainBuffer(BufferConfig())
    again.load_state(DomainBuffer(BufferConfig()).state())
    assert again.arrived == 0


def test_a_damaged_state_is_refused() -> None:
    state = filled(9).state()
    del state["training.hidden"]
    with pytest.raises(CheckpointError, match=r"training\.hidden"):
        DomainBuffer(BufferConfig()).load_state(state)


def breakages() -> Iterator[DomainBuffer]:
    both = filled(9)
    both.training.append(both.held[0])
    yield both
    fat = filled(5, max_bytes=64 * 1024)
    fat.training += [record(100, 3000), record(101, 3000)]
    yield fat
    many = filled(5, held_records=2)
    many.held += [record(n) for n in range(50, 53)]
    yield many


@pytest.mark.parametrize("buffer", list(breakages()))
def test_the_audit_notices(buffer: DomainBuffer) -> None:
    with pytest.raises(IntegrityError):
        buffer.check()


def test_a_child_has_the_records_and_goes_its_own_way() -> None:
    buffer = filled(12)
    child = buffer.copy()
    child.add(record(12))
    buffer.purge()
    assert len(child.training) + len(child.held) == 13
    assert not buffer.training
    assert not buffer.held


def test_records_of_another_trunk_or_width_are_refused_and_those_of_an_unnamed_one_are_taken() -> None:
    buffer = DomainBuffer(BufferConfig(), trunk="00ff")
    buffer.add(record(0))
    state = buffer.state()
    for other, width, message in (
        (DomainBuffer(BufferConfig(), trunk="00fe"), None, "trunk 00ff, this deployment has 00fe"),
        (DomainBuffer(BufferConfig(), trunk="00ff"), 5, "width"),
    ):
        with pytest.raises(CheckpointError, match=message):
            other.load_state(state, width)
        assert (other.training, other.held, other.arrived) == ([], [], 0)
    without = DomainBuffer(BufferConfig())
    without.load_state(state)
    assert (without.trunk, without.copy().trunk, without.arrived) == ("00ff", "00ff", 1)
    del state["trunk"]
    named = DomainBuffer(BufferConfig(), trunk="00fe")
    named.load_state(state)
    assert (named.trunk, named.arrived) == ("00fe", 1)
