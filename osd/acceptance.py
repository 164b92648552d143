"""How often a draft is accepted: closed forms of the two verification rules, for learning and for tests."""

from __future__ import annotations

import torch


def coupled_acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Chance that ``argmax(log p + g)`` and ``argmax(log q + g)`` are the same token for shared Gumbel g.

    J(p, q) = sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) (Daliri, Musco, Suresh, arXiv 2408.07978), between
    (1 - TV) / (1 + TV) and 1 - TV. This is the acceptance of a sampled head under drafter-invariant
    verification. Ranking tokens by p / q makes every inner sum two partial sums, so the cost is that of a
    sort and not of V squared.

    Args:
        p: Target distributions, float [..., V], each summing to 1.
        q: Draft distributions, float [..., V].

    Returns:
        float64 [...].
    """
    p, q = p.double(), q.double()
    order = (p / q).nan_to_num(nan=0.0, posinf=torch.inf).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    p_above = p.cumsum(-1)
    q_below = (q.flip(-1).cumsum(-1).flip(-1) - q).clamp_min(0.0)
    share = 1.0 / (p_above / p + q_below / q)
    return torch.where((p > 0) & (q > 0), share, 0.0).sum(-1)


def rejection_acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Acceptance of rejection sampling: sum_x min(p_x, q_x) = 1 - TV (Leviathan et al., arXiv 2211.17192).

    Args:
        p: Target distributions, float [..., V].
        q: Draft distributions the proposals were drawn from, float [..., V].

    Returns:
        float64 [...].
    """
    return torch.minimum(p.double(), q.double()).sum(-1)
