"""The target's probabilities that are kept for learning."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from osd.serve import evidence
from osd.serve.evidence import keep_evidence


@pytest.mark.parametrize("size", [256, 300])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_way_keeps_the_most_probable_tokens(monkeypatch, size: int, compiled: bool):
    if not compiled:
        monkeypatch.setattr(evidence, "ranker", lambda: None)
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(1)) * 3
    rows = [SimpleNamespace(keep_evidence=keep, evidence=[]) for keep in (True, False, True)]
    keep_evidence(logits, list(zip(rows, [[0, 2], [1], [4]], strict=True)), 16)  # type: ignore[arg-type]
    assert rows[1].evidence == []
    for row, indices in ((rows[0], [0, 2]), (rows[2], [4])):
        ids, logprobs = row.evidence[0]
        top = logits[indices].log_softmax(-1).topk(16)
        assert ids.dtype == torch.int32
        assert logprobs.dtype == torch.float16
        assert torch.equal(ids.long(), top.indices)
        torch.testing.assert_close(logprobs.float(), top.values, atol=1e-3, rtol=1e-3)
