"""A toy target for verification tests: 20 tokens, logits a function of the last two tokens."""

import functools

import torch

from drafts.proposal import Proposal
from osd.serve.noise import RequestNoise
from osd.serve.processor import LogitsProcessor, processes_logits
from osd.serve.verify import target_token, verify
from osd.types import SamplingParams

V = 20
TABLE = torch.randn(V + 1, V + 1, V, generator=torch.Generator().manual_seed(0)) * 1.5
DRAFT = TABLE + torch.randn(TABLE.shape, generator=torch.Generator().manual_seed(1)) * 0.7
GREEDY = SamplingParams(temperature=0.0)
A11 = SamplingParams(temperature=0.7, top_k=5, top_p=0.9)


def row_of(table, text):
    """Logits after ``text``; token V stands for "before the text"."""
    last = [V, V, *text][-2:]
    return table[last[0], last[1]]


def block_of(text, proposal):
    """The rows a target pass over the proposal returns."""
    return _block(tuple(text[-2:]), proposal)


@functools.cache
def _block(text, proposal):
    paths = [list(text)]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    last = torch.tensor([[V, V, *path][-2:] for path in paths])
    return TABLE[last[:, 0], last[:, 1]]


def tree(tokens, parents):
    n = len(tokens)
    return Proposal(tuple(tokens), tuple(parents), ("forced",) * n, (0.5,) * n)


def chain(tokens):
    return Proposal.chain(tokens, "forced", [0.5] * len(tokens))


def processor_of(params, prompt=(), ends=()):
    """A fresh processor where the parameters need one."""
    return LogitsProcessor(params, prompt, ends, V) if processes_logits(params) else None


def plain(params, seed, length, choice=0, prompt=(), ends=()):
    noise, processor = RequestNoise(seed, choice, V), processor_of(params, prompt, ends)
    text = []
    while len(text) < length:
        text.append(target_token(row_of(TABLE, text), params, noise, len(text), processor))
        if processor is not None:
            processor.advance(text[-1])
    return text


def speculate(params, seed, length, propose, prompt=(), ends=()):
    noise, processor = RequestNoise(seed, 0, V), processor_of(params, prompt, ends)
    text = []
    while len(text) < length:
        proposal = propose(text, noise)
        limit = length - len(text)
        verdict = verify(block_of(text, proposal), proposal, params, noise, len(text), limit, processor)
        text += verdict.emitted
    return text
