"""A deterministic engine without a model: bytes are tokens, and every prompt has one known answer."""

from __future__ import annotations

import codecs
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from drafts.config import ModelConfig
from drafts.errors import BusyError, ContextLengthError, InvalidValueError, UnknownNameError
from drafts.registry import Registry
from osd.types import BASE_DOMAIN, Assignment, FinishReason, Round, SamplingParams, TokenLogprob
from router.bodies.api import Completion, Delta
from router.bodies.buffers import DomainBuffers
from router.bodies.sampling import sampling_params
from router.bodies.versions import DomainVersions

EOS, END_OF_PROMPT, FIRST_BYTE = 0, 1, 2
VOCABULARY = FIRST_BYTE + 256


def encode(text: str) -> list[int]:
    return [byte + FIRST_BYTE for byte in text.encode()]


def default_answer(prompt: str) -> str:
    return f"The answer to {prompt!r} is ünïcödé 🙂 漢字."


def logprob_of(token: int, count: int) -> TokenLogprob:
    """Log-probabilities that depend on the token alone: it is the most probable, its neighbours follow."""
    top = tuple(((token + at) % VOCABULARY, -0.25 * (1 + at)) for at in range(count))
    return TokenLogprob(token, -0.25, top)


class FakeModel:
    """Stands for the Hugging Face model: puts all its score on the known answer."""

    device = torch.device("cpu")

    def __init__(self, answer_ids: Callable[[Sequence[int]], list[int]]) -> None:
        self.answer_ids = answer_ids
        self.generated = 0
        self.gap = 1.0

    def _parts(self, ids: torch.Tensor) -> tuple[int, list[int]]:
        tokens = ids[0].tolist()
        end = len(tokens) - tokens[::-1].index(END_OF_PROMPT)
        return end, [*self.answer_ids(tokens[:end]), EOS]

    def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> Any:
        end, answer = self._parts(input_ids)
        logits = torch.zeros(1, input_ids.shape[1], VOCABULARY)
        for at, token in enumerate(answer):
            if end - 1 + at < input_ids.shape[1]:
                logits[0, end - 1 + at, token] = self.gap
        return SimpleNamespace(logits=logits)

    __call__ = forward

    def generate(self, ids: torch.Tensor, *, max_new_tokens: int, **_: Any) -> torch.Tensor:
        self.generated += 1
        _, answer = self._parts(ids)
        return torch.cat([ids, torch.tensor([answer[:max_new_tokens]])], dim=1)


class FakeHandle:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.pieces: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
        self.done = threading.Event()
        self.cancelled = threading.Event()
        self.completion: Completion | None = None
        self.error: Exception | None = None

    def result(self, timeout: float | None = None) -> Completion:
        if not self.done.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        assert self.completion is not None
        return self.completion

    def stream(self) -> Iterator[Delta]:
        while True:
            piece = self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece
            if piece.completion is not None:
                return

    def cancel(self) -> None:
        self.cancelled.set()


class FakeEngine:
    """Implements ``ServingEngine`` and what a replay needs.

    Args:
        answer: The answer to a prompt.
        delay: Seconds between two rounds.
        slots: Requests that run at once.
        context: Longest prompt plus one, in tokens.
        wrong: Output positions at which the engine emits another token than the model would.
        cached: Prompt tokens that every answer reports as reused.
        capacity: Most requests that may run or wait; one more is refused as busy.
    """

    model_name = "fake-model"
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({EOS, END_OF_PROMPT})

    def __init__(
        self,
        answer: Callable[[str], str] = default_answer,
        *,
        delay: float = 0.0,
        slots: int = 8,
        context: int = 4096,
        wrong: Sequence[int] = (),
        fail: Callable[[str], Exception | None] = lambda prompt: None,
        cached: int = 0,
        capacity: int = 10_000,
    ) -> None:
        self.cached, self.capacity, self.open = cached, capacity, 0
        self.handles: list[FakeHandle] = []
        self.answer, self.delay, self.context, self.wrong, self.fail = (
            answer,
            delay,
            context,
            set(wrong),
            fail,
        )
        self.registered: dict[str, dict[str, Any]] = {BASE_DOMAIN: {}, "math": {}, "code": {}}
        self.slots = threading.Semaphore(slots)
        self.running = self.peak = 0
        self.ready = True
        self.lock = threading.Lock()
        self.submitted: list[dict[str, Any]] = []
        self.modes: list[dict[str, Any]] = []
        self.mode: dict[str, Any] = {"sources": None, "learn": True, "k": None}
        self.events: list[dict[str, Any]] = []
        self.matrix: dict[str, Any] = {}
        self.versions = DomainVersions(Registry())
        self.buffers = DomainBuffers(lambda: list(self.registered))
        self.sources: dict[str, Any] = {}
        self.closed = 0
        self.model = FakeModel(lambda ids: encode(self.answer(self.decode_prompt(ids))))
        self.ids = itertools.count()
        self.max_length = context

    @staticmethod
    def decode_prompt(ids: Sequence[int]) -> str:
        return bytes(i - FIRST_BYTE for i in ids if i >= FIRST_BYTE).decode()

    @staticmethod
    def token_bytes(token_id: int) -> bytes:
        return bytes([token_id - FIRST_BYTE]) if token_id >= FIRST_BYTE else (b"<eos>", b"<end>")[token_id]

    def prompt_ids(
        self, prompt: str | Sequence[int] | None = None, *, messages: Any = None, template: bool = True
    ) -> tuple[int, ...]:
        if prompt is not None and not isinstance(prompt, str):
            prompt = self.decode_prompt(prompt)
        text = prompt if prompt is not None else "\n".join(m["content"] for m in messages)
        ids = (*encode(text), END_OF_PROMPT)
        if len(ids) >= self.context:
            raise ContextLengthError(len(ids), self.context)
        return ids

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Any = None,
        domain: str | None = None,
        store: bool = True,
        request_id: str | None = None,
        template: bool = True,
        **sampling: Any,
    ) -> FakeHandle:
        params = sampling_params(sampling)
        if domain is not None and domain not in self.registered:
            raise UnknownNameError("domain", domain, list(self.registered))
        ids = self.prompt_ids(prompt, messages=messages, template=template)
        text = self.decode_prompt(ids)
        self.submitted.append(
            {
                "text": text,
                "messages": messages,
                "domain": domain,
                "store": store,
                "template": template,
                **sampling,
            }
        )
        handle = FakeHandle(request_id or f"fake-{next(self.ids)}")
        with self.lock:
            if self.open >= self.capacity:
                raise BusyError(f"the queue is full ({self.capacity})")
            self.open += 1
        assert all(other.done.is_set() or other.request_id != handle.request_id for other in self.handles)
        self.handles.append(handle)
        chosen = domain or next((name for name in self.registered if name in text), BASE_DOMAIN)
        threading.Thread(target=self._run, args=(handle, text, len(ids), chosen, params), daemon=True).start()
        return handle

    def _run(self, handle: FakeHandle, text: str, prompt: int, domain: str, params: SamplingParams) -> None:
        with self.slots:
            with self.lock:
                self.running += 1
                self.peak = max(self.peak, self.running)
            begin = time.monotonic()
            error = self.fail(text)
            try:
                completion = None if error else self._decode(handle, text, prompt, domain, params, begin)
            finally:
                with self.lock:
                    self.running -= 1
                    self.open -= 1
        handle.error, handle.completion = error, completion
        handle.done.set()
        handle.pieces.put(error or Delta("", (), completion))

    def _decode(
        self, handle: FakeHandle, text: str, prompt: int, domain: str, params: SamplingParams, begin: float
    ) -> Completion:
        plain = self.mode["sources"] == () or params.k == 0
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        answer = '{"answer": 42}' if params.response_format is not None else self.answer(text)
        if params.choice and params.temperature > 0:
            answer = f"{params.choice}: {answer}"
        wanted = encode(answer)
        entries: list[TokenLogprob] = []
        source = itertools.cycle(wanted) if params.ignore_eos else iter([*wanted, EOS])
        tokens: list[int] = []
        rounds: list[Round] = []
        sent = held = ""
        reason = FinishReason.CANCELLED
        finished = False
        while not finished and not handle.cancelled.is_set():
            block = list(itertools.islice(source, 1 if plain or not rounds else 3))
            kept = 0
            for token in block:
                if len(tokens) in self.wrong:
                    token = FIRST_BYTE + ord("?")
                tokens.append(token)
                if params.logprobs is not None:
                    entries.append(logprob_of(token, params.logprobs))
                kept += 1
                held += decoder.decode(bytes([token - FIRST_BYTE])) if token >= FIRST_BYTE else ""
                cut = min((at for at in map((sent + held).find, params.stop) if at >= 0), default=-1)
                if token == EOS or token in params.stop_token_ids or cut >= 0:
                    held = held if cut < 0 else (sent + held)[len(sent) : cut]
                    reason, finished = FinishReason.STOP, True
                elif len(tokens) == params.max_tokens:
                    reason, finished = FinishReason.LENGTH, True
                elif params.timeout is not None and time.monotonic() - begin > params.timeout:
                    reason, finished = FinishReason.TIMEOUT, True
                if finished:
                    break
            guessed = 0 if len(block) < 2 else len(block)
            accepted = max(kept - 1, 0)
            name = "ngram" if guessed else ("none" if rounds else "prefill")
            rounds.append(Round(guessed, accepted, min(accepted + 1, guessed), kept, name, 0))
            keep = 0 if finished else self._tail(held, params.stop)
            piece, held = held[: len(held) - keep], held[len(held) - keep :]
            sent += piece
            handle.pieces.put(Delta(piece, tuple(tokens[-kept:]), logprobs=tuple(entries[-kept:])))
            if self.delay:
                time.sleep(self.delay)
        if held:
            sent += held
            handle.pieces.put(Delta(held))
        elapsed = time.monotonic() - begin
        return Completion(
            handle.request_id,
            sent,
            tuple(tokens),
            prompt,
            reason,
            domain,
            Assignment(domain, 0.9, None, domain != BASE_DOMAIN, 0.001),
            tuple(rounds),
            (0,),
            seconds=len(rounds) * 0.01,
            total_seconds=max(elapsed, 0.01),
            first_token_seconds=0.001,
            logprobs=tuple(entries) if params.logprobs is not None else None,
            cached_tokens=self.cached,
        )

    @staticmethod
    def _tail(text: str, stops: Sequence[str]) -> int:
        return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)

    def compute(self, work):
        return work()

    def set_mode(self, *, sources: Any, learn: bool, k: int | None) -> None:
        assert self.running == 0, "the mode may change only while nothing runs"
        self.mode = {"sources": sources, "learn": learn, "k": k}
        self.modes.append(self.mode)

    def reference(self) -> FakeModel:
        return self.model

    def stats(self) -> dict[str, Any]:
        return {
            "overall": {},
            "domains": {name: {"requests": 0, "sources": self.sources} for name in self.registered},
            "matrix": self.matrix,
            "routing": {},
            "running": self.running,
            "waiting": 0,
            "learning": {"share_of_busy_time": 0.01, "updates": 3, "published": 2, "rolled_back": 1},
            "events": list(self.events),
            "timeline": {},
        }

    def domains(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "description": row.get("description", ""), "version": 0, "buffer": {"tokens": 12}}
            for name, row in self.registered.items()
        ]

    def add_domain(
        self,
        name: str,
        *,
        description: str = "",
        examples: Sequence[str] = (),
        draft: ModelConfig | None = None,
    ) -> None:
        if name in self.registered:
            raise InvalidValueError("name", name, "a name that is not registered yet")
        self.registered[name] = {"description": description, "examples": list(examples)}

    def remove_domain(self, name: str) -> None:
        if name not in self.registered:
            raise UnknownNameError("domain", name, list(self.registered))
        del self.registered[name]

    def close(self) -> None:
        self.closed += 1
