import pytest
import torch
from floor_parts.machine import bandwidth, flops, readers, weight_bytes
from floor_parts.passes import group_of
from floor_parts.steps import Stopwatch, split


def test_every_reader_touches_all_weights_and_gives_a_speed() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(64, 32).to(dtype), torch.randn(32, 64).to(dtype)]
        assert weight_bytes(weights) == 2 * 64 * 32 * weights[0].element_size()
        speeds = bandwidth(weights, seconds=0.0)
        assert set(speeds) == set(readers(weights))
        assert min(speeds.values()) > 0
    assert flops(torch.float32, size=64, repeats=1) > 0


@pytest.mark.parametrize(
    ("name", "shapes", "group"),
    [
        ("aten::mm", [[1, 8], [8, 24]], "product: qkv"),
        ("mkldnn::_linear_pointwise", [[4, 8], [24, 8], []], "product: qkv"),
        ("aten::bmm", [[3, 1, 8], [3, 8, 5]], "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [], "attention"),
        ("aten::_fused_rms_norm", [[1, 8]], "norms"),
        ("aten::addcmul_", [[1, 8]], "rope"),
        ("aten::silu", [[1, 8]], "activation"),
        ("aten::copy_", [[1, 8]], "copies"),
        ("aten::add", [[1, 8]], "elementwise"),
        ("aten::view", [[1, 8]], "views"),
        ("aten::empty", [], "rest"),
    ],
)
def test_operators_are_grouped_by_weight_and_name(name: str, shapes: list[list[int]], group: str) -> None:
    assert group_of(name, shapes, {frozenset((24, 8)): "qkv"}) == group


def test_the_stopwatch_times_methods_and_puts_them_back() -> None:
    class Core:
        def __init__(self) -> None:
            self.target = Target()
            self.worker = Worker()

        def _commit(self) -> None:
            self._keep_evidence()

        def _keep_evidence(self) -> None:
            pass

        def step(self) -> str:
            self._commit()
            self.worker.work()
            return self.target.forward()

    class Target:
        def forward(self) -> str:
            return "logits"

    class Worker:
        def work(self) -> None:
            pass

    core = Core()
    watch = Stopwatch(core)
    assert core.step() == "logits"
    assert set(watch.seconds) == {"commit", "evidence", "target pass", "learning"}
    assert watch.seconds["commit"] >= watch.seconds["evidence"] > 0
    watch.release()
    before = dict(watch.seconds)
    core.step()
    assert watch.seconds == before


def test_parts_of_a_step_add_up_to_it() -> None:
    parts = split({"commit": 0.3, "evidence": 0.1, "target pass": 0.5, "learning": 0.4}, busy=1.0, steps=10)
    assert parts == pytest.approx(
        {"commit": 20.0, "evidence": 10.0, "target pass": 50.0, "rest": 20.0, "learning": 40.0}
    )
