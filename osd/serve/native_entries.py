"""Names of what the target's compiled pass reads through its table, behind :mod:`drafts.native.steps`' own.

Letters in shapes: N tokens of the pass, D size of a head, H heads, K key-value heads.
"""

from drafts.native.steps import COMMON

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
    ATTEND,  # kernel for blocks of tokens, 0 where there is none
    SCALING,  # bits of the float32 that scores are multiplied with
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
    PRIVATE_TURNED,  # a row's values, numbers by places
    PRIVATE_BLOCK,  # queries, results and scratch of a block
    ENTRIES,
) = range(COMMON, COMMON + 46)

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
"""Of the table of weights: ``WIDTH`` entries a layer."""
