"""Admission: which requests may run, by slots and by the tokens that they may come to hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from drafts.errors import ContextLengthError, IntegrityError, InvalidValueError
from osd.types import GenerationRequest


class Admission:
    """The rule by which a waiting request enters; first come, first served.

    A request reserves its prompt and all the output it may ask for, so that no row ever has to be thrown out
    for want of room. Nobody overtakes: the oldest waiting request is admitted next or nobody is, and as every
    request that was let into the queue fits an empty engine, none starves.

    Args:
        slots: Rows that run at once.
        max_length: Most tokens of prompt and output of one row.
        max_tokens: Most tokens reserved by all running rows; ``None`` is what all slots can hold.

    Raises:
        InvalidValueError: ``max_tokens`` is below 2, which no request fits.
    """

    def __init__(self, slots: int, max_length: int, max_tokens: int | None = None) -> None:
        if max_tokens is not None and max_tokens < 2:
            raise InvalidValueError("engine.max_tokens_in_flight", max_tokens, "at least 2, or null")
        self.slots = slots
        self.max_length = max_length
        self.max_tokens = slots * max_length if max_tokens is None else max_tokens

    def reserved(self, request: GenerationRequest) -> int:
        """Tokens that ``request`` may come to hold: its prompt and its longest output, cut to a slot."""
        return min(len(request.prompt_ids) + request.sampling.max_tokens, self.max_length)

    def check(self, request: GenerationRequest) -> None:
        """Refuse what could never run, before it waits.

        Raises:
            InvalidValueError: An empty prompt, or a prompt and output beyond ``max_tokens_in_flight``.
            ContextLengthError: The prompt leaves no room for an answer in a slot.
        """
        length = len(request.prompt_ids)
        if not length:
            raise InvalidValueError("prompt", "", "at least one token")
        if length >= self.max_length:
            raise ContextLengthError(length, self.max_length)
        if self.reserved(request) > self.max_tokens:
            raise InvalidValueError(
                "max_tokens",
                request.sampling.max_tokens,
                f"with a prompt of {length} tokens at most {max(self.max_tokens - length, 0)}, as all "
                f"running requests share {self.max_tokens} tokens (engine.max_tokens_in_flight)",
            )

    def cut(self, request: GenerationRequest) -> GenerationRequest:
        """``request`` with ``max_tokens`` cut to what its slot can hold."""
        room = self.max_length - len(request.prompt_ids)
        params = request.sampling
        if params.max_tokens <= room:
            return request
        changes = {"max_tokens": room, "min_tokens": min(params.min_tokens, room)}
        return replace(request, sampling=params.model_copy(update=changes))

    def fits(self, request: GenerationRequest, running: Iterable[GenerationRequest]) -> bool:
        """Whether ``request`` may run beside ``running`` now."""
        others = list(running)
        held = sum(self.reserved(other) for other in others)
        return len(others) < self.slots and held + self.reserved(request) <= self.max_tokens

    def audit(self, running: Iterable[GenerationRequest]) -> None:
        """Raise :class:`IntegrityError` if the running requests reserve more than there is."""
        others = list(running)
        held = sum(self.reserved(other) for other in others)
        if len(others) > self.slots or held > self.max_tokens:
            raise IntegrityError(
                f"{len(others)} rows reserve {held} tokens, allowed are {self.slots} and {self.max_tokens}"
            )
