"""What the head should say at every output position: the collected evidence, or the whole distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from drafts.errors import InvalidValueError
from drafts.trunk import Trunk
from osd.learn.losses import SparseTarget, draft_index
from osd.learn.pretrain_config import PretrainConfig
from osd.learn.pretrain_data import Answer
from osd.lent import Lent

Goals = Callable[[Sequence[Answer]], SparseTarget]
"""The target's distribution at all output positions of a batch, one answer after the other."""


def goals(trunk: Trunk, lent: Lent, config: PretrainConfig) -> Goals:
    """How ``config.support`` gives the target's distribution.

    Raises:
        InvalidValueError: ``full`` where the head does not read the target's last layer, from which alone
            the distribution can be had again, or where its final norm is of another kind.
    """
    if config.support == "top":
        return top_goals(draft_index(trunk.token_ids, trunk.shape.vocab_size))
    if lent.last_layer is None:
        raise InvalidValueError("support", "full", f"top for {lent.name}: {lent.obstacle}")
    if trunk.shape.feature_layers[-1] != lent.layers:
        raise InvalidValueError(
            "support",
            "full",
            f"top, or layers up to the last ({lent.layers}), not {trunk.shape.feature_layers}",
        )
    return full_goals(trunk, lent.output, lent.last_layer["final_norm"])


def top_goals(to_draft: torch.Tensor) -> Goals:
    """The evidence: the target's most probable ids, all else one outcome."""

    def goal(batch: Sequence[Answer]) -> SparseTarget:
        return SparseTarget.from_evidence(
            torch.cat([a.top_ids for a in batch]), torch.cat([a.top_logprobs for a in batch]), to_draft
        )

    return goal


def full_goals(trunk: Trunk, output: torch.Tensor, norm: torch.Tensor) -> Goals:
    """The distribution over the whole draft vocabulary, from the target's last hidden state.

    Only the draft vocabulary's logits are computed: the evidence's first log-probability beside the same
    id's logit gives the normaliser over all ids.

    Args:
        trunk: The head; its last features are the target's last layer.
        output: The target's output matrix ``[vocab, H]``.
        norm: Weight of the target's final RMSNorm.
    """
    rows, shape = output[trunk.token_ids].contiguous(), trunk.shape

    def goal(batch: Sequence[Answer]) -> SparseTarget:
        last = torch.cat([a.features[a.prompt_length - 1 :, -shape.hidden_size :] for a in batch]).float()
        hidden = F.rms_norm(last, (shape.hidden_size,), norm, shape.norm_eps)
        first = torch.cat([a.top_ids[:, 0] for a in batch]).long()
        log_total = (hidden * output[first]).sum(-1) - torch.cat(
            [a.top_logprobs[:, 0] for a in batch]
        ).float()
        probs = (hidden @ rows.T - log_total[:, None]).exp()
        inside = probs.sum(-1)
        probs = probs / inside.clamp_min(1.0)[:, None]  # the evidence is rounded to half precision
        index = torch.arange(len(rows)).expand(len(last), -1)
        return SparseTarget(index, probs, (1.0 - inside).clamp_min(0.0))

    return goal
