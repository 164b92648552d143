"""Attention of the target's compiled pass: token by token, and by blocks of tokens in matrix registers."""

from __future__ import annotations

from drafts.native.calls import call2, call3, call4, call5, call8, flags, floats, halves, integers
from drafts.native.matrix_attention import KEYS as BLOCK_KEYS
from drafts.native.matrix_attention import TOKENS as BLOCK_TOKENS
from drafts.native.steps import (
    NUMBERS,
    ROUND,
    SIZE,
    STORE,
    THREADS,
    chunk_of,
    jit,
    normed,
    put,
    scaled,
    sums,
    turn,
)
from osd.serve.native_entries import (
    ATTEND,
    CHUNK_TABLE,
    COS,
    ENTRY_BYTES,
    HEAD_BYTES,
    HEADS,
    KV_HEADS,
    PRIVATE_BLOCK,
    PRIVATE_HEADS,
    PRIVATE_SCORES,
    PRIVATE_TURNED,
    QKV_STRIDE,
    ROW_TABLE,
    ROWS,
    SCALING,
    SCORES,
    SCORES_STRIDE,
    SHARED_ATTENDED,
    SHARED_QKV,
    SIDE_BYTES,
    SIN,
    SLOT_BYTES,
    SOFTMAX,
    TOGETHER,
    VALUES,
    VALUES_MORE,
)


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
def _hand_on(a, at, count, token, numbers):
    """Put ``count`` attended numbers of a token, from ``at`` on, where the next product reads them."""
    table = integers(a[CHUNK_TABLE])
    chunk = 0
    while token >= table[1 + 4 * chunk] + table[2 + 4 * chunk]:
        chunk += 1
    first, _, padded, before = chunk_of(table, chunk)
    wide = a[HEADS] * a[SIZE]
    put(a, numbers, count, a[SHARED_ATTENDED], wide, at, padded, before, token - first)


@jit
def _turn_values(a, pair, row, head, private):
    """A row's values of a key-value head, numbers by places, zeros behind them; how far numbers lie apart."""
    table = integers(a[ROW_TABLE] + 40 * row)
    size, end = a[SIZE], table[1] + table[2]
    stride = -(-end // BLOCK_KEYS) * BLOCK_KEYS
    values = halves(pair + table[0] * a[SLOT_BYTES] + head * a[HEAD_BYTES] + a[SIDE_BYTES])
    turned = halves(private + 4 * a[PRIVATE_TURNED])
    for place in range(end):
        for number in range(size):
            turned[number * stride + place] = values[place * size + number]
    for number in range(size):
        for place in range(end, stride):
            turned[number * stride + place] = 0
    return stride


@jit
def _attend_block(a, norm, pair, row, head, index, stride, private):
    """Attention of sixteen neighbouring tokens of a chain, for the queries that share a key-value head."""
    table = integers(a[ROW_TABLE] + 40 * row)
    slot, start, first = table[0], table[1], table[3]
    size = a[SIZE]
    share = a[HEADS] // a[KV_HEADS]
    keys = pair + slot * a[SLOT_BYTES] + head * a[HEAD_BYTES]
    spare = private + 4 * a[PRIVATE_HEADS]
    block = private + 4 * a[PRIVATE_BLOCK]
    out = block + 2 * BLOCK_TOKENS * size
    scratch = out + 4 * BLOCK_TOKENS * size
    turned = private + 4 * a[PRIVATE_TURNED]
    seen = start + index + BLOCK_TOKENS
    for q in range(share):
        at = (head * share + q) * size
        own = 0
        if norm != 0:
            own = norm + 4 * at
        for place in range(BLOCK_TOKENS):
            token = first + index + place
            source = a[SHARED_QKV] + 4 * (token * a[QKV_STRIDE] + at)
            _place(a, source, own, token, spare, spare + 4 * size)
            call3(a[STORE], spare, block + 2 * place * size, size)
        call8(a[ATTEND], block, keys, turned, seen, scratch, out, a[SCALING], stride)
        call2(a[ROUND], out, BLOCK_TOKENS * size)
        for place in range(BLOCK_TOKENS):
            _hand_on(a, at, size, first + index + place, out + 4 * place * size)


@jit
def attend_all(a, norm, pair, private, thread):
    """This thread's share of the attention of all rows, by the entries that are read."""
    rows = a[ROWS]
    total = 0
    for row in range(rows):
        table = integers(a[ROW_TABLE] + 40 * row)
        total += a[KV_HEADS] * table[2] * (table[1] + table[2] + 32)
    low, high = total * thread // a[THREADS], total * (thread + 1) // a[THREADS]
    share = a[HEADS] // a[KV_HEADS] * a[SIZE]
    done = 0
    for row in range(rows):
        table = integers(a[ROW_TABLE] + 40 * row)
        count, first = table[2], table[3]
        cost = table[1] + count + 32
        blocks = a[ATTEND] != 0 and table[4] == 0
        for head in range(a[KV_HEADS]):
            kept, stride, index = False, 0, 0
            while index < count:
                block = blocks and count - index >= BLOCK_TOKENS
                if low <= done < high:
                    if not kept:
                        # Two threads that share a row's head both write its keys: the same bits.
                        _keep(a, norm, pair, row, head, private)
                        kept = True
                    if block:
                        if stride == 0:
                            stride = _turn_values(a, pair, row, head, private)
                        _attend_block(a, norm, pair, row, head, index, stride, private)
                    else:
                        _attend(a, norm, pair, row, head, index, private)
                        _hand_on(a, head * share, share, first + index, private + 4 * a[PRIVATE_HEADS])
                step = BLOCK_TOKENS if block else 1
                done += cost * step
                index += step
