"""Steps that the target's pass and the draft head's have in common, for numba.

They read what they need through a pass's table of int64, whose first entries are named here. All activations
are float32; where the model's type is bfloat16, they are rounded where the model rounds them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba
import numpy as np

from drafts.native.calls import call0_int, call2, call3, call4, call6, floats, integers
from drafts.native.split_tiles import GROUP_BYTES, INPUT_BYTES, LINE_BYTES, PARTS
from drafts.native.tiles import GROUP

(
    THREADS,  # threads of the team that runs the pass, see :func:`enter`
    TEAM,  # address: number of threads of the team
    BARRIER,  # address: wait for the team
    THREAD,  # address: number of this thread
    HIDDEN,
    INNER,  # width of the MLP
    SIZE,  # of a head
    ROUND,  # address of rounding to bfloat16; 0 in float32
    MATRIX,  # how inputs of products lie in a chunk, see below
    KERNEL_SHIFT,  # where the kernels for such inputs begin in a table of kernels
    NUMBERS,  # address of float32 eps and score scaling
    STORE,  # kernels
    SPLIT,
    GATE,
    DELTA,
    PRIVATE,  # address of the threads' own floats
    PRIVATE_STRIDE,  # floats of a thread
    PRIVATE_X,  # offsets in them
    PRIVATE_LINE,
    PRIVATE_GATE,
    PRIVATE_SCRATCH,
    PRIVATE_SECOND,
    COMMON,
) = range(23)
"""First entries of every pass's table; the pass's own begin at ``COMMON``."""

(
    PLAIN,  # float32 [inputs, padded rows]
    BFLOAT16,  # [padded rows, inputs]
    IN_PARTS,  # three bfloat16 and a sum a group, see drafts.native.split_tiles
) = range(3)
"""Inputs of products."""

(
    KERNELS,  # address of the kernels by row count
    TILES,
    TILE_BYTES,
    GROUPS,
    DECODED,  # address of the kernels for weights that are decoded, 0 where there is nothing to decode
    SHAPE,
) = range(6)
"""What is said of a product: six entries."""

(
    DELTA_B,  # address of float16 [tiles, rank, 32], or 0 where the row's expert changes nothing
    DELTA_T,  # address of float32 [rank], the row's inputs of it
    DELTA_RANK,
    DELTA_WIDTH,
) = range(4)
"""What is added to a row of a product: the row's low-rank delta."""

MOST_ROWS = 64
"""Rows of a chunk at most."""


def _keeps_code() -> bool:
    """Whether numba finds a folder for compiled code; without one it compiles at every start."""
    try:
        numba.njit(cache=True)(_keeps_code)
    except RuntimeError:
        return False
    return True


def source_hash(*more: str) -> str:
    """Of the files whose functions compiled passes call: numba itself looks at the pass's own file only.

    Args:
        more: Files of the pass besides those that all passes have in common.
    """
    folder = Path(__file__).parent
    names = ("calls.py", "matrix_attention.py", "split_tiles.py", "steps.py", "tiles.py")
    digest = hashlib.sha256()
    for path in (*(folder / name for name in names), *map(Path, more)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False, "cache": _keeps_code()}
_SUMS = {"reassoc", "contract", "nsz", "arcp"}

CFUNC = {name: OPTIONS[name] for name in ("error_model", "boundscheck", "cache")}

_STEP = {**OPTIONS, "cache": False}
"""Steps are kept as part of the passes that call them; alone, they would go stale when a callee changes."""

jit = numba.njit(**_STEP)
sums = numba.njit(fastmath=_SUMS, **_STEP)


@sums
def add(into, what, count):
    """``into += what``, numbers side by side."""
    for i in range(count):
        into[i] += what[i]


@sums
def copy(into, what, count):
    """``into = what``."""
    for i in range(count):
        into[i] = what[i]


@sums
def normed(line, h, count, eps):
    """Root mean square of ``h`` at one, without weights."""
    total = np.float32(0.0)
    for i in range(count):
        total += h[i] * h[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(count) + eps)
    for i in range(count):
        line[i] = h[i] * factor


@sums
def scaled(line, weight, count):
    """``line *= weight``."""
    for i in range(count):
        line[i] *= weight[i]


@jit
def chunk_of(table, number):
    """First token, rows, padded rows, and padded rows before, of a chunk."""
    at = 1 + 4 * number
    return table[at], table[at + 1], table[at + 2], table[at + 3]


@jit
def put(a, numbers, count, into, inputs, at, padded, before, row):
    """``count`` numbers of a row to the inputs ``at`` and following of a product."""
    if a[MATRIX] == IN_PARTS:
        groups, group = inputs // GROUP, at // GROUP
        base = into + INPUT_BYTES * before * inputs
        sums = base + 2 * PARTS * padded * inputs + 4 * (row * groups + group)
        place = base + (row // 16 * groups + group) * GROUP_BYTES + row % 16 * LINE_BYTES
        call4(a[SPLIT], numbers, place, count, sums)
    elif a[MATRIX] == BFLOAT16:
        call3(a[STORE], numbers, into + 2 * ((before + row) * inputs + at), count)
    else:
        source = floats(numbers)
        x = floats(into + 4 * (before * inputs + at * padded + row))
        for i in range(count):
            x[i * padded] = source[i]


@jit
def input_bytes(a):
    """Bytes of an input of a row."""
    if a[MATRIX] == IN_PARTS:
        return INPUT_BYTES
    if a[MATRIX] == BFLOAT16:
        return 2
    return 4


@jit
def norm_rows(a, private, tokens, chunks, weight, into, low, high):
    """The norm of the rows that ``tokens`` names, as far as they are from ``low`` to ``high``."""
    numbers = floats(a[NUMBERS])
    hidden = a[HIDDEN]
    table = integers(chunks)
    line = floats(private + 4 * a[PRIVATE_LINE])
    for number in range(table[0]):
        first, rows, padded, before = chunk_of(table, number)
        for row in range(rows):
            token = first + row
            if tokens != 0:
                token = integers(tokens)[token]
            if token < low or token >= high:
                continue
            normed(line, floats(private + 4 * token * hidden), hidden, numbers[0])
            if a[ROUND] != 0:
                call2(a[ROUND], private + 4 * a[PRIVATE_LINE], hidden)
            scaled(line, floats(weight), hidden)
            if a[ROUND] != 0:
                call2(a[ROUND], private + 4 * a[PRIVATE_LINE], hidden)
            put(a, private + 4 * a[PRIVATE_LINE], hidden, into, hidden, 0, padded, before, row)


@jit
def turn_of(a, turn, tiles, chunks):
    """The tile and the chunk of a turn: what is larger, the tile's weights or the chunk's inputs, stays."""
    if a[MATRIX] == IN_PARTS:
        return turn % tiles, turn // tiles
    return turn // chunks, turn % chunks


@jit
def enter(a):
    """This thread's number; the team's size is noted, as a limit may leave fewer threads than asked for."""
    a[THREADS] = call0_int(a[TEAM])
    return call0_int(a[THREAD])


@jit
def is_decoded(a, entry, number):
    """Whether a chunk's tile lies in scratch, decoded: the first chunk has left it there for the others."""
    return number > 0 and a[MATRIX] == BFLOAT16 and entry[DECODED] != 0


@jit
def kernel_of(a, entry, padded, ready):
    """The kernel for a chunk's rows; where weights are decoded, the one for those."""
    if ready:
        return integers(entry[DECODED])[padded]
    return integers(entry[KERNELS] + 8 * a[KERNEL_SHIFT])[padded]


@jit
def multiply(a, shape, weights, bias, x, inputs, chunks, out, stride, private, thread):
    """This thread's tiles of a product over all chunks."""
    entry = integers(shape)
    table = integers(chunks)
    tiles, size = entry[TILES], entry[TILE_BYTES]
    wide = input_bytes(a)
    scratch = private + 4 * a[PRIVATE_SCRATCH]
    begin = tiles * thread // a[THREADS]
    mine = tiles * (thread + 1) // a[THREADS] - begin
    for turn in range(mine * table[0]):
        tile, number = turn_of(a, turn, mine, table[0])
        tile += begin
        first, rows, padded, before = chunk_of(table, number)
        into = out + 4 * (first * stride + 32 * tile)
        inputs_at = x + wide * before * inputs
        ready = is_decoded(a, entry, number)
        at = scratch if ready else weights + tile * size
        call6(kernel_of(a, entry, padded, ready), at, inputs_at, into, 4 * stride, entry[GROUPS], scratch)
        if bias != 0 or a[ROUND] != 0:
            for row in range(rows):
                if bias != 0:
                    add(floats(into + 4 * row * stride), floats(bias + 128 * tile), 32)
                if a[ROUND] != 0:
                    call2(a[ROUND], into + 4 * row * stride, 32)


@jit
def change(a, deltas, row, tile, out):
    """Add the low-rank delta of a row's expert to 32 outputs."""
    delta = integers(deltas + 8 * DELTA_WIDTH * row)
    if delta[DELTA_B] != 0:
        rank = delta[DELTA_RANK]
        call4(a[DELTA], delta[DELTA_T], delta[DELTA_B] + 64 * rank * tile, rank, out)


@jit
def gated(a, shape, weights, bias, x, private, chunks, active, thread, deltas):
    """This thread's tiles of gate and up, which take turns, and of what they make."""
    entry = integers(shape)
    table = integers(chunks)
    pairs, size = entry[TILES] // 2, entry[TILE_BYTES]
    gate = private + 4 * a[PRIVATE_GATE]
    up = gate + 4 * 32 * MOST_ROWS
    wide = input_bytes(a)
    scratch = private + 4 * a[PRIVATE_SCRATCH]
    second = private + 4 * a[PRIVATE_SECOND]
    begin = pairs * thread // a[THREADS]
    mine = pairs * (thread + 1) // a[THREADS] - begin
    for turn in range(mine * table[0]):
        pair, number = turn_of(a, turn, mine, table[0])
        pair += begin
        at = weights + 2 * pair * size
        first, rows, padded, before = chunk_of(table, number)
        inputs = x + wide * before * a[HIDDEN]
        ready = is_decoded(a, entry, number)
        kernel = kernel_of(a, entry, padded, ready)
        gates = scratch if ready else at
        ups = second if ready else at + size
        call6(kernel, gates, inputs, gate, 128, entry[GROUPS], scratch)
        call6(kernel, ups, inputs, up, 128, entry[GROUPS], second)
        if bias != 0:
            for row in range(rows):
                add(floats(gate + 128 * row), floats(bias + 256 * pair), 32)
                add(floats(up + 128 * row), floats(bias + 256 * pair + 128), 32)
        if deltas != 0:
            for row in range(rows):
                change(a, deltas, first + row, 2 * pair, gate + 128 * row)
                change(a, deltas, first + row, 2 * pair + 1, up + 128 * row)
        call3(a[GATE], gate, up, 32 * rows)
        for row in range(rows):
            put(a, gate + 128 * row, 32, active, a[INNER], 32 * pair, padded, before, row)


@sums
def turn(out, x, cos, sin, size):
    """Rotary positions; ``sin`` is signed so that the halves swap without a sign."""
    half = size // 2
    for i in range(half):
        out[i] = x[i] * cos[i] + x[i + half] * sin[i]
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half]
