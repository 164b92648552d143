"""One depth of the draft head in one piece of compiled code, run by every thread of the team at once.

The head is small: called product by product, a depth costs more in calls than in arithmetic. See
:mod:`drafts.native.steps` for how threads share the work, and :mod:`drafts.trunk` for what is computed.

Letters in shapes: N pairs that are read, R rows that predict, H hidden size, F width of the features, D size
of a head, V outputs in whole tiles.

One file, though a long one: the names of the table and the code that reads it are compiled as a whole.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from drafts.native.calls import call0, call2, call4, call5, floats, integers
from drafts.native.steps import (
    BARRIER,
    CFUNC,
    COMMON,
    DELTA_B,
    DELTA_T,
    DELTA_WIDTH,
    HIDDEN,
    INNER,
    NUMBERS,
    PRIVATE,
    PRIVATE_LINE,
    PRIVATE_STRIDE,
    PRIVATE_X,
    SHAPE,
    SIZE,
    THREADS,
    add,
    change,
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
    HEADS,
    KV_HEADS,
    LAYERS,  # target layers that the features come from
    FEATURES,  # address of float32 [N, F], or 0: the hidden states are given
    EMBEDS,  # float32 [N, H]
    COS,  # float32 [N, D]
    SIN,
    CHUNK_TABLE,  # of the N pairs
    ROWS,  # R
    ROW_TABLE,  # (keys, values, bytes from head to head, entries before, first entry seen, pairs, first pair)
    ROW_CHUNKS,  # of the R rows
    SHAPES,  # address of what is said of the six products
    WEIGHTS,  # address of the weights' addresses, see below
    SHARED_HIDDEN,  # float32 [N, HIDDEN_STRIDE]; given where there are no features
    HIDDEN_STRIDE,
    SHARED_QKV,
    QKV_STRIDE,
    SHARED_ATTENDED,
    SHARED_PROJECTED,
    SHARED_ACTIVE,
    SHARED_DOWN,
    HIDDEN_OUT,  # float32 [R, H], the layer's output
    OUT,  # float32 [R, V]
    CHANCES,  # float32 [R, V + 16]
    VOCAB_STRIDE,
    VOCAB,
    WIDTH,  # candidates
    TOP_IDS,  # int64 [R, WIDTH]
    TOP_CHANCES,  # float32 [R, WIDTH]
    SCORES,
    VALUES,
    SOFTMAX,
    PROJECT,
    TOGETHER,
    DELTAS,  # address of the tables of deltas: gate and up, down, output, R rows each; 0 without any
    DELTA_A,  # address of the A matrices in the same order, int64 [3, R]
    PRIVATE_HEADS,
    PRIVATE_SCORES,
    SCORES_STRIDE,
    ENTRIES,
) = range(COMMON, COMMON + 40)

(
    FEATURE_NORM,
    EMBED_NORM,
    HIDDEN_NORM,
    MLP_NORM,
    FINAL_NORM,
    FUSE,
    QKV,
    ATTN_OUT,
    GATE_UP,
    DOWN,
    OUTPUT,
    OUTPUT_BIAS,
    WEIGHT_COUNT,
) = range(13)

(
    ROW_KEYS,
    ROW_VALUES,
    ROW_STRIDE,
    ROW_BEFORE,
    ROW_SEEN,
    ROW_PAIRS,
    ROW_FIRST,
    ROW_WIDTH,
) = range(8)


@jit
def _put_normed(a, source, weight, inputs, at, into, padded, before, row, private):
    """The norm of one row of H numbers, as inputs of a product."""
    hidden = a[HIDDEN]
    line = private + 4 * a[PRIVATE_LINE]
    normed(floats(line), floats(source), hidden, floats(a[NUMBERS])[0])
    scaled(floats(line), floats(weight), hidden)
    put(a, line, hidden, into, inputs, at, padded, before, row)


@jit
def _fuse_inputs(a, weights, into, private):
    """Each layer's features, normed, side by side."""
    hidden, layers = a[HIDDEN], a[LAYERS]
    table = integers(a[CHUNK_TABLE])
    for number in range(table[0]):
        first, rows, padded, before = chunk_of(table, number)
        for row in range(rows):
            for layer in range(layers):
                at = layer * hidden
                source = a[FEATURES] + 4 * ((first + row) * layers * hidden + at)
                norm = weights[FEATURE_NORM] + 4 * at
                _put_normed(a, source, norm, layers * hidden, at, into, padded, before, row, private)


@jit
def _layer_inputs(a, weights, into, private):
    """Embeddings and hidden states, normed, side by side."""
    hidden = a[HIDDEN]
    table = integers(a[CHUNK_TABLE])
    for number in range(table[0]):
        first, rows, padded, before = chunk_of(table, number)
        for row in range(rows):
            embed = a[EMBEDS] + 4 * (first + row) * hidden
            _put_normed(a, embed, weights[EMBED_NORM], 2 * hidden, 0, into, padded, before, row, private)
            state = a[SHARED_HIDDEN] + 4 * (first + row) * a[HIDDEN_STRIDE]
            norm = weights[HIDDEN_NORM]
            _put_normed(a, state, norm, 2 * hidden, hidden, into, padded, before, row, private)


@jit
def _turned(a, source, pair, out):
    """A query or key at ``source``, turned to the position of ``pair``."""
    size = a[SIZE]
    cos, sin = floats(a[COS] + 4 * pair * size), floats(a[SIN] + 4 * pair * size)
    turn(floats(out), floats(source), cos, sin, size)


@jit
def _attend(a, row, head, private):
    """One key-value head of a row: its pairs' entries, and attention from the last of them."""
    line = integers(a[ROW_TABLE] + 8 * ROW_WIDTH * row)
    size = a[SIZE]
    share = a[HEADS] // a[KV_HEADS]
    keys = line[ROW_KEYS] + head * line[ROW_STRIDE]
    values = line[ROW_VALUES] + head * line[ROW_STRIDE]
    entry = 4 * size
    pairs, first = line[ROW_PAIRS], line[ROW_FIRST]
    for index in range(pairs):
        source = a[SHARED_QKV] + 4 * ((first + index) * a[QKV_STRIDE] + (a[HEADS] + head) * size)
        at = (line[ROW_BEFORE] + index) * entry
        _turned(a, source, first + index, keys + at)
        copy(floats(values + at), floats(source + a[KV_HEADS] * entry), size)
    last = first + pairs - 1
    seen = line[ROW_SEEN]
    count = line[ROW_BEFORE] + pairs - seen
    queries = private + 4 * a[PRIVATE_HEADS]
    scores = private + 4 * a[PRIVATE_SCORES]
    stride = 4 * a[SCORES_STRIDE]
    scaling = floats(a[NUMBERS])[1]
    for q in range(share):
        query = queries + q * entry
        _turned(a, a[SHARED_QKV] + 4 * (last * a[QKV_STRIDE] + (head * share + q) * size), last, query)
        numbers = floats(query)
        for i in range(size):
            numbers[i] *= scaling
        call4(a[SCORES], query, keys + seen * entry, count, scores + q * stride)
        call2(a[SOFTMAX], scores + q * stride, count)
    for q in range(0, share, a[TOGETHER]):
        call5(a[VALUES], scores + q * stride, stride, values + seen * entry, count, queries + q * entry)
    table = integers(a[ROW_CHUNKS])
    number = 0
    while row >= table[1 + 4 * number] + table[2 + 4 * number]:
        number += 1
    begin, _, padded, before = chunk_of(table, number)
    wide = a[HEADS] * size
    put(a, queries, share * size, a[SHARED_ATTENDED], wide, head * share * size, padded, before, row - begin)


@jit
def _attend_all(a, private, thread):
    units = a[ROWS] * a[KV_HEADS]
    for unit in range(units * thread // a[THREADS], units * (thread + 1) // a[THREADS]):
        _attend(a, unit // a[KV_HEADS], unit % a[KV_HEADS], private)


@jit
def _project(a, part, x, inputs):
    """Down to the rank, for every row whose expert changes this part; each thread computes all rows."""
    table = integers(a[ROW_CHUNKS])
    matrices = integers(a[DELTA_A] + 8 * part * a[ROWS])
    for number in range(table[0]):
        first, rows, padded, before = chunk_of(table, number)
        for row in range(rows):
            delta = integers(a[DELTAS] + 8 * DELTA_WIDTH * (part * a[ROWS] + first + row))
            if delta[DELTA_B] != 0:
                at = x + 4 * (before * inputs + row)
                call5(a[PROJECT], at, 4 * padded, matrices[first + row], inputs, delta[DELTA_T])


@jit
def _change_all(a, part, shape, out, stride, thread):
    """Add the experts' deltas to this thread's tiles."""
    deltas = a[DELTAS] + 8 * DELTA_WIDTH * part * a[ROWS]
    tiles = integers(shape)[1]
    for row in range(a[ROWS]):
        for tile in range(tiles * thread // a[THREADS], tiles * (thread + 1) // a[THREADS]):
            change(a, deltas, row, tile, out + 4 * (row * stride + 32 * tile))


@sums
def _best(chances, count, width, ids, values):
    """The ``width`` largest of ``count`` numbers, in order; the lower id first among equals."""
    for place in range(width):
        ids[place] = 0
        values[place] = np.float32(-1.0)
    least = np.float32(-1.0)
    for index in range(count):
        value = chances[index]
        if value > least:
            place = width - 1
            while place > 0 and values[place - 1] < value:
                values[place] = values[place - 1]
                ids[place] = ids[place - 1]
                place -= 1
            values[place] = value
            ids[place] = index
            least = values[width - 1]


@jit
def _rank_all(a, thread):
    """Probabilities and candidates of this thread's rows."""
    for row in range(thread, a[ROWS], a[THREADS]):
        chances = a[CHANCES] + 4 * row * (a[VOCAB_STRIDE] + 16)
        copy(floats(chances), floats(a[OUT] + 4 * row * a[VOCAB_STRIDE]), a[VOCAB])
        call2(a[SOFTMAX], chances, a[VOCAB])
        ids = integers(a[TOP_IDS] + 8 * row * a[WIDTH])
        _best(floats(chances), a[VOCAB], a[WIDTH], ids, floats(a[TOP_CHANCES] + 4 * row * a[WIDTH]))


def _compiled(sources):
    """The pass; numba keeps compiled code by this file and by what the function closes over."""

    @numba.cfunc(types.void(types.CPointer(types.int64)), **CFUNC)
    def run_head(a):
        """One depth, as one thread of the team."""
        _ = sources
        thread = enter(a)
        private = a[PRIVATE] + 4 * thread * a[PRIVATE_STRIDE]
        hidden, rows = a[HIDDEN], a[ROWS]
        weights = integers(a[WEIGHTS])
        shapes = a[SHAPES]
        x = private + 4 * a[PRIVATE_X]
        pairs, chunks = a[CHUNK_TABLE], a[ROW_CHUNKS]
        state, wide = a[SHARED_HIDDEN], a[HIDDEN_STRIDE]
        if a[FEATURES] != 0:
            _fuse_inputs(a, weights, x, private)
            multiply(a, shapes, weights[FUSE], 0, x, a[LAYERS] * hidden, pairs, state, wide, private, thread)
            call0(a[BARRIER])
        _layer_inputs(a, weights, x, private)
        qkv = shapes + 8 * SHAPE
        multiply(a, qkv, weights[QKV], 0, x, 2 * hidden, pairs, a[SHARED_QKV], a[QKV_STRIDE], private, thread)
        call0(a[BARRIER])
        _attend_all(a, private, thread)
        call0(a[BARRIER])
        projected, attended = a[SHARED_PROJECTED], a[SHARED_ATTENDED]
        inputs = a[HEADS] * a[SIZE]
        shape = shapes + 16 * SHAPE
        multiply(a, shape, weights[ATTN_OUT], 0, attended, inputs, chunks, projected, wide, private, thread)
        call0(a[BARRIER])
        for row in range(rows):
            line = integers(a[ROW_TABLE] + 8 * ROW_WIDTH * row)
            last = line[ROW_FIRST] + line[ROW_PAIRS] - 1
            h = private + 4 * row * hidden
            copy(floats(h), floats(state + 4 * last * wide), hidden)
            add(floats(h), floats(projected + 4 * row * wide), hidden)
        norm_rows(a, private, 0, chunks, weights[MLP_NORM], x, 0, rows)
        deltas = a[DELTAS]
        if deltas != 0:
            _project(a, 0, x, hidden)
        active, down = a[SHARED_ACTIVE], a[SHARED_DOWN]
        gated(a, shapes + 24 * SHAPE, weights[GATE_UP], 0, x, private, chunks, active, thread, deltas)
        call0(a[BARRIER])
        shape = shapes + 32 * SHAPE
        multiply(a, shape, weights[DOWN], 0, active, a[INNER], chunks, down, wide, private, thread)
        if deltas != 0:
            _project(a, 1, active, a[INNER])
            _change_all(a, 1, shape, down, wide, thread)
        call0(a[BARRIER])
        for row in range(rows):
            h = private + 4 * row * hidden
            add(floats(h), floats(down + 4 * row * wide), hidden)
            if thread == 0:
                copy(floats(a[HIDDEN_OUT] + 4 * row * hidden), floats(h), hidden)
        norm_rows(a, private, 0, chunks, weights[FINAL_NORM], x, 0, rows)
        shape = shapes + 40 * SHAPE
        out, stride = a[OUT], a[VOCAB_STRIDE]
        bias = weights[OUTPUT_BIAS]
        multiply(a, shape, weights[OUTPUT], bias, x, hidden, chunks, out, stride, private, thread)
        if deltas != 0:
            _project(a, 2, x, hidden)
            _change_all(a, 2, shape, out, stride, thread)
        call0(a[BARRIER])
        _rank_all(a, thread)

    return run_head


run_head = _compiled(source_hash())
