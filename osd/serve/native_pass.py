"""The target's pass in one piece of compiled code, run by every thread of the team at once.

A pass over a few tokens is a hundred and fifty matrix products of some ten microseconds each: calling them
one by one costs as much as computing them. Here the threads enter once, share out the tiles of each product,
and wait for each other where one needs what another computed. What is cheap (norms, residual sums) every
thread computes for itself instead of waiting, as long as there are few tokens.

The code is numba's; it reads everything through one table of int64: the entries of
:mod:`drafts.native.steps`, then those of :mod:`osd.serve.native_entries`.
"""

from __future__ import annotations

import numba
from numba import types

from drafts.native.calls import call0, call2, floats, integers
from drafts.native.steps import (
    BARRIER,
    CFUNC,
    HIDDEN,
    INNER,
    PRIVATE,
    PRIVATE_STRIDE,
    PRIVATE_X,
    ROUND,
    SHAPE,
    SIZE,
    THREADS,
    add,
    copy,
    enter,
    gated,
    jit,
    multiply,
    norm_rows,
    source_hash,
)
from osd.serve import native_attend, native_entries
from osd.serve.native_attend import attend_all
from osd.serve.native_entries import (
    ATTN_OUT,
    ATTN_OUT_BIAS,
    CHUNK_TABLE,
    DOWN,
    DOWN_BIAS,
    FINAL_NORM,
    GATE_UP,
    GATE_UP_BIAS,
    HEAD_NORM,
    HEAD_WEIGHTS,
    HEADS,
    INPUT,
    INPUT_NORM,
    KEPT,
    KEPT_TABLE,
    LAYERS,
    LOGIT_TABLE,
    LOGIT_TOKENS,
    LOGITS,
    MLP_NORM,
    OUT,
    OUT_STRIDE,
    PAIRS,
    QKV,
    QKV_BIAS,
    QKV_STRIDE,
    SHARED_ACTIVE,
    SHARED_ATTENDED,
    SHARED_DOWN,
    SHARED_PROJECTED,
    SHARED_QKV,
    SHARED_X,
    TOKENS,
    VOCAB_STRIDE,
    WEIGHTS,
    WIDTH,
)

SHARED_FROM = 8
"""Tokens from which threads share out the norms: waiting once more costs less than computing all of them."""


@jit
def _take(a, private, added, place, low, high, keeps):
    """Add what a product put out to this thread's hidden states, and keep them if a draft reads them."""
    hidden = a[HIDDEN]
    for token in range(low, high):
        h = private + 4 * token * hidden
        add(floats(h), floats(added + 4 * token * a[OUT_STRIDE]), hidden)
        if a[ROUND] != 0:
            call2(a[ROUND], h, hidden)
        if place >= 0 and keeps:
            copy(floats(a[KEPT] + 4 * (place * a[TOKENS] + token) * hidden), floats(h), hidden)


def _compiled(sources):
    """The pass; numba keeps compiled code by this file and by what the function closes over."""

    @numba.cfunc(types.void(types.CPointer(types.int64)), **CFUNC)
    def run_pass(a):
        """The whole pass, as one thread of the team."""
        _ = sources
        thread = enter(a)
        private = a[PRIVATE] + 4 * thread * a[PRIVATE_STRIDE]
        hidden = a[HIDDEN]
        copy(floats(private), floats(a[INPUT]), a[TOKENS] * hidden)
        x = private + 4 * a[PRIVATE_X]
        low, high, shares = 0, a[TOKENS], a[TOKENS] >= SHARED_FROM
        if shares:
            x = a[SHARED_X]
            low, high = a[TOKENS] * thread // a[THREADS], a[TOKENS] * (thread + 1) // a[THREADS]
        keeps = shares or thread == 0
        chunks = a[CHUNK_TABLE]
        shapes = a[WEIGHTS] + 8 * WIDTH * a[LAYERS]
        kept = integers(a[KEPT_TABLE])
        pairs = integers(a[PAIRS])
        wide = a[HEADS] * a[SIZE]
        for layer in range(a[LAYERS]):
            w = integers(a[WEIGHTS] + 8 * WIDTH * layer)
            if layer > 0:
                _take(a, private, a[SHARED_DOWN], kept[layer - 1], low, high, keeps)
            norm_rows(a, private, 0, chunks, w[INPUT_NORM], x, low, high)
            if shares:
                call0(a[BARRIER])
            multiply(
                a,
                shapes,
                w[QKV],
                w[QKV_BIAS],
                x,
                hidden,
                chunks,
                a[SHARED_QKV],
                a[QKV_STRIDE],
                private,
                thread,
            )
            call0(a[BARRIER])
            attend_all(a, w[HEAD_NORM], pairs[layer], private, thread)
            call0(a[BARRIER])
            multiply(
                a,
                shapes + 8 * SHAPE,
                w[ATTN_OUT],
                w[ATTN_OUT_BIAS],
                a[SHARED_ATTENDED],
                wide,
                chunks,
                a[SHARED_PROJECTED],
                a[OUT_STRIDE],
                private,
                thread,
            )
            call0(a[BARRIER])
            _take(a, private, a[SHARED_PROJECTED], -1, low, high, False)
            norm_rows(a, private, 0, chunks, w[MLP_NORM], x, low, high)
            if shares:
                call0(a[BARRIER])
            gated(
                a,
                shapes + 16 * SHAPE,
                w[GATE_UP],
                w[GATE_UP_BIAS],
                x,
                private,
                chunks,
                a[SHARED_ACTIVE],
                thread,
                0,
            )
            call0(a[BARRIER])
            multiply(
                a,
                shapes + 24 * SHAPE,
                w[DOWN],
                w[DOWN_BIAS],
                a[SHARED_ACTIVE],
                a[INNER],
                chunks,
                a[SHARED_DOWN],
                a[OUT_STRIDE],
                private,
                thread,
            )
            call0(a[BARRIER])
        _take(a, private, a[SHARED_DOWN], kept[a[LAYERS] - 1], low, high, keeps)
        if a[LOGITS] > 0:
            norm_rows(a, private, a[LOGIT_TOKENS], a[LOGIT_TABLE], a[FINAL_NORM], x, low, high)
            if shares:
                call0(a[BARRIER])
            multiply(
                a,
                shapes + 32 * SHAPE,
                a[HEAD_WEIGHTS],
                0,
                x,
                hidden,
                a[LOGIT_TABLE],
                a[OUT],
                a[VOCAB_STRIDE],
                private,
                thread,
            )

    return run_pass


run_pass = _compiled(source_hash(native_attend.__file__, native_entries.__file__))
