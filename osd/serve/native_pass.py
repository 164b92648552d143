"""The target's pass in one piece of compiled code, run by every thread of the team at once.

A pass over a few tokens is a hundred and fifty matrix products of some ten microseconds each: calling them
one by one costs as much as computing them. Here the threads enter once, share out the tiles of each product,
and wait for each other where one needs what another computed. What is cheap (norms, residual sums) every
thread computes for itself instead of waiting, as long as there are few tokens.

The code is numba's; it reads everything through one table of int64: the entries of
:mod:`drafts.native.steps`, then those named below.

Letters in shapes: N tokens of the pass, D size of a head, H heads, K key-value heads.

One file, though a long one: the names of the table and the code that reads it are compiled as a whole.
"""

from __future__ import annotations

import numba
from numba import types

from drafts.native.calls import call0, call2, call3, call4, call5, flags, floats, integers
from drafts.native.steps import (
    BARRIER,
    CFUNC,
    COMMON,
    HIDDEN,
    INNER,
    NUMBERS,
    PRIVATE,
    PRIVATE_STRIDE,
    PRIVATE_X,
    ROUND,
    SHAPE,
    SIZE,
    STORE,
    THREADS,
    add,
    chunk_of,
    copy,
    enter,
    gated,
    jit,
    multiply,
    norm_rows,
    normed,
    put,
    scaled,
    source_hash,
    sums,
    turn,
)

(
    TOKENS,  # N
    LAYERS,
    HEADS,
    KV_HEADS,
    QKV_STRIDE,  # floats of a row of queries, keys and values
    OUT_STRIDE,  # floats of a row of what attention and MLP put out
    WEIGHTS,  # address of the layers' table, WIDTH entries a layer
    PAIRS,  # address of the layers' caches [2, slots, K, places, D]
    SLOT_BYTES,  # of a cache: from slot to slot
    HEAD_BYTES,  # from head to head
    SIDE_BYTES,  # from keys to values
    ENTRY_BYTES,  # bytes of a number of the cache
    INPUT,  # float32 [N, hidden]
    COS,  # float32 [N, D]
    SIN,
    CHUNK_TABLE,  # number of chunks, then (first token, rows, padded rows, padded rows before) each
    ROWS,  # number of cache rows
    ROW_TABLE,  # (slot, start, tokens, first token, address of bool [T, T] or 0)
    LOGITS,  # number of logit rows
    LOGIT_TOKENS,  # address of int64 [logits]
    LOGIT_TABLE,
    OUT,  # float32 [logits, VOCAB_STRIDE]
    VOCAB_STRIDE,
    HEAD_WEIGHTS,
    FINAL_NORM,
    KEPT,  # address of float32 [kept layers, N, hidden]
    KEPT_TABLE,  # address of one flag a layer: its place in KEPT, or -1
    SCORES,  # kernels
    VALUES,
    VALUES_MORE,
    SOFTMAX,
    TOGETHER,  # queries that VALUES takes at once
    SHARED_X,  # inputs of products, where threads share the rows' norms
    SHARED_QKV,
    SHARED_ATTENDED,
    SHARED_PROJECTED,
    SHARED_ACTIVE,
    SHARED_DOWN,
    PRIVATE_HEADS,
    PRIVATE_SCORES,
    SCORES_STRIDE,
    ENTRIES,
) = range(COMMON, COMMON + 42)

SHARED_FROM = 8
"""Tokens from which threads share out the norms: waiting once more costs less than computing all of them."""

(
    INPUT_NORM,
    MLP_NORM,
    HEAD_NORM,
    QKV,
    QKV_BIAS,
    ATTN_OUT,
    ATTN_OUT_BIAS,
    GATE_UP,
    GATE_UP_BIAS,
    DOWN,
    DOWN_BIAS,
    WIDTH,
) = range(12)


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


@sums
def _turn_in_steps(out, x, cos, sin, size, second):
    half = size // 2
    if second:
        for i in range(half):
            out[i] += x[i + half] * sin[i]
            out[i + half] += x[i] * sin[i + half]
    else:
        for i in range(size):
            out[i] = x[i] * cos[i]


@jit
def _place(a, source, norm, token, out, spare):
    """A query or key of ``token`` at ``source``, normed if the model does that, turned to its position."""
    size = a[SIZE]
    x = source
    if norm != 0:
        line = floats(spare)
        normed(line, floats(source), size, floats(a[NUMBERS])[0])
        if a[ROUND] != 0:
            call2(a[ROUND], spare, size)
        scaled(line, floats(norm), size)
        if a[ROUND] != 0:
            call2(a[ROUND], spare, size)
        x = spare
    cos, sin = floats(a[COS] + 4 * token * size), floats(a[SIN] + 4 * token * size)
    if a[ROUND] != 0:
        _turn_in_steps(floats(out), floats(x), cos, sin, size, False)
        call2(a[ROUND], out, size)
        _turn_in_steps(floats(out), floats(x), cos, sin, size, True)
        call2(a[ROUND], out, size)
    else:
        turn(floats(out), floats(x), cos, sin, size)


@jit
def _keep(a, norm, pair, row, head, private):
    """Write the keys and values of all tokens of a row, for one key-value head."""
    table = integers(a[ROW_TABLE] + 40 * row)
    slot, start, count, first = table[0], table[1], table[2], table[3]
    size, entry = a[SIZE], a[ENTRY_BYTES]
    scratch = private + 4 * a[PRIVATE_HEADS]
    cache = pair + slot * a[SLOT_BYTES] + head * a[HEAD_BYTES]
    if norm != 0:
        norm += 4 * size * a[HEADS] + 4 * size * head
    for index in range(count):
        token = first + index
        key = a[SHARED_QKV] + 4 * (token * a[QKV_STRIDE] + (a[HEADS] + head) * size)
        value = key + 4 * a[KV_HEADS] * size
        _place(a, key, norm, token, scratch, scratch + 4 * size)
        at = cache + (start + index) * size * entry
        call3(a[STORE], scratch, at, size)
        call3(a[STORE], value, at + a[SIDE_BYTES], size)


@jit
def _attend(a, norm, pair, row, head, index, private):
    """Attention of one token's queries that share a key-value head.

    A tree's token reads the entries of its path in order, so that it computes what it would on a chain.
    """
    table = integers(a[ROW_TABLE] + 40 * row)
    slot, start, count, first, seen = table[0], table[1], table[2], table[3], table[4]
    size = a[SIZE]
    share = a[HEADS] // a[KV_HEADS]
    token = first + index
    line = size * a[ENTRY_BYTES]
    keys = pair + slot * a[SLOT_BYTES] + head * a[HEAD_BYTES]
    values = keys + a[SIDE_BYTES]
    queries = private + 4 * a[PRIVATE_HEADS]
    spare = queries + 4 * share * size
    scaling = floats(a[NUMBERS])[1]
    scores = private + 4 * a[PRIVATE_SCORES]
    stride = 4 * a[SCORES_STRIDE]
    mask = flags(seen + index * count)
    whole = start if seen != 0 else start + index + 1
    length = whole
    for q in range(share):
        source = a[SHARED_QKV] + 4 * (token * a[QKV_STRIDE] + (head * share + q) * size)
        own = 0
        if norm != 0:
            own = norm + 4 * size * (head * share + q)
        query = queries + 4 * q * size
        _place(a, source, own, token, query, spare)
        numbers = floats(query)
        for i in range(size):
            numbers[i] *= scaling
        call4(a[SCORES], query, keys, whole, scores + q * stride)
        length = whole
        if seen != 0:
            for other in range(count):
                if mask[other] != 0:
                    at = scores + q * stride + 4 * length
                    call4(a[SCORES], query, keys + (start + other) * line, 1, at)
                    length += 1
        call2(a[SOFTMAX], scores + q * stride, length)
    for q in range(0, share, a[TOGETHER]):
        weights, out = scores + q * stride, queries + 4 * q * size
        call5(a[VALUES], weights, stride, values, whole, out)
        if seen != 0:
            done = whole
            for other in range(count):
                if mask[other] != 0:
                    at = values + (start + other) * line
                    call5(a[VALUES_MORE], weights + 4 * done, stride, at, 1, out)
                    done += 1
    if a[ROUND] != 0:
        call2(a[ROUND], queries, share * size)


@jit
def _hand_on(a, head, token, private):
    """Put one token's attended heads where the next product reads them."""
    table = integers(a[CHUNK_TABLE])
    chunk = 0
    while token >= table[1 + 4 * chunk] + table[2 + 4 * chunk]:
        chunk += 1
    first, _, padded, before = chunk_of(table, chunk)
    size = a[SIZE]
    share = a[HEADS] // a[KV_HEADS]
    queries = private + 4 * a[PRIVATE_HEADS]
    wide, at = a[HEADS] * size, head * share * size
    put(a, queries, share * size, a[SHARED_ATTENDED], wide, at, padded, before, token - first)


@jit
def _attend_all(a, norm, pair, private, thread):
    """This thread's share of the attention of all rows, by the entries that are read."""
    rows = a[ROWS]
    total = 0
    for row in range(rows):
        table = integers(a[ROW_TABLE] + 40 * row)
        total += a[KV_HEADS] * table[2] * (table[1] + table[2] + 32)
    low, high = total * thread // a[THREADS], total * (thread + 1) // a[THREADS]
    done = 0
    for row in range(rows):
        table = integers(a[ROW_TABLE] + 40 * row)
        count, first = table[2], table[3]
        cost = table[1] + count + 32
        for head in range(a[KV_HEADS]):
            kept = False
            for index in range(count):
                if low <= done < high:
                    if not kept:
                        # Two threads that share a row's head both write its keys: the same bits.
                        _keep(a, norm, pair, row, head, private)
                        kept = True
                    _attend(a, norm, pair, row, head, index, private)
                    _hand_on(a, head, first + index, private)
                done += cost


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
            _attend_all(a, w[HEAD_NORM], pairs[layer], private, thread)
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


run_pass = _compiled(source_hash())
