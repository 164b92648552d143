"""Recorders that stand in for CUDA graphs where there is no GPU, and the targets that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from osd.serve.graphs import GraphedTarget, Replay, Work
from osd.serve.products import LINEAR
from osd.serve.target import PassOutput, PassRow
from tests.tiny import tiny_model


class RepeatingRecorder:
    """Does the work again over the same buffers.

    As with CUDA graphs, a result is overwritten by the next replay, and spoilt as soon as another graph
    runs, because graphs share their pool.
    """

    def __init__(self) -> None:
        self.results: list[Tensor] = []

    def trace(self, work: Work, buffers: Sequence[Tensor]) -> Callable[..., Tensor]:
        return lambda *given: work(given)

    def record(self, work: Work, buffers: Sequence[Tensor]) -> Replay:
        graph = self.trace(work, buffers)
        addresses = [buffer.data_ptr() for buffer in buffers]
        result = graph(*buffers)  # a warm-up too, whose writes must leave no trace
        self.results.append(result)

        def replay() -> Tensor:
            assert addresses == [buffer.data_ptr() for buffer in buffers]
            for other in self.results:
                other.fill_(float("nan"))
            return result.copy_(graph(*buffers))

        return replay


class TracedRecorder(RepeatingRecorder):
    """As strict as a CUDA graph: Python runs once, and every number and shape it saw is frozen.

    Reading a value on the host while recording fails.
    """

    def trace(self, work: Work, buffers: Sequence[Tensor]) -> Callable[..., Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            return make_fx(lambda *given: work(given))(*buffers)


class RefusingRecorder(RepeatingRecorder):
    """Records ``count`` passes and then fails."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def record(self, work: Work, buffers: Sequence[Tensor]) -> Replay:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no memory left for a graph")
        return super().record(work, buffers)


class SpoiltTarget(GraphedTarget):
    """Its static pass is wrong."""

    def static_pass(self, *arguments: Any) -> Tensor:
        return super().static_pass(*arguments) + 1.0


def graphed(kind: str = "llama", cls: type[GraphedTarget] = GraphedTarget, **options: Any) -> GraphedTarget:
    options = {"recorder": RepeatingRecorder(), "budget": 0.0, **options}
    target = cls(options.pop("model", None) or tiny_model(kind), name=kind, feature_layers=None, **options)
    target.plan.product = lambda name, count: LINEAR  # which product is fastest is not the question here
    return target


def packed(target: GraphedTarget, cache: Any, rows: Sequence[PassRow]) -> PassOutput:
    """The same pass by the packed forward: keys, values and features are written again, and equal."""
    recorder, target.recorder = target.recorder, None
    try:
        return target.forward(cache, rows)
    finally:
        target.recorder = recorder
