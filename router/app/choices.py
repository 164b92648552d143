"""One API request as several requests of the engine: ``n`` choices of every prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osd.serve.noise import fresh_seed
from router.bodies.api import Completion, Handle, ServingEngine


@dataclass(frozen=True)
class Choices:
    """The running choices of one API request, by index: prompt times ``per_prompt`` plus choice.

    Attributes:
        handles: The request of every choice.
        per_prompt: Choices of one prompt (``n``).
    """

    handles: tuple[Handle, ...]
    per_prompt: int = 1

    @classmethod
    def submit(
        cls,
        engine: ServingEngine,
        prompts: Sequence[Mapping[str, Any]],
        per_prompt: int,
        request_id: str,
        **options: Any,
    ) -> Choices:
        """Submit ``per_prompt`` choices of each prompt; if one is refused, none of them runs.

        The choices of a prompt share one seed, the client's or a fresh one, and differ by ``choice``, so
        that they are different samples and reproducible together.

        Args:
            engine: Serves them.
            prompts: Arguments of ``engine.submit`` that tell the prompt.
            per_prompt: Choices of each.
            request_id: Id of the API request; those of several choices get their index behind it.
            options: All other arguments of ``engine.submit``, alike for every choice.
        """
        handles: list[Handle] = []
        try:
            for prompt in prompts:
                seed = options.get("seed")
                if per_prompt > 1 and seed is None:
                    seed = fresh_seed()
                for choice in range(per_prompt):
                    own: dict[str, Any] = {"seed": seed, "choice": choice} if per_prompt > 1 else {}
                    several = len(prompts) * per_prompt > 1
                    name = f"{request_id}-{len(handles)}" if several else request_id
                    handles.append(engine.submit(request_id=name, **prompt, **{**options, **own}))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return cls(tuple(handles), per_prompt)

    def cancel(self) -> None:
        """Stop what still runs."""
        for handle in self.handles:
            handle.cancel()


@dataclass(frozen=True)
class Answers:
    """The finished choices of one API request, by index.

    Attributes:
        completions: One a choice.
        per_prompt: Choices of one prompt (``n``).
    """

    completions: tuple[Completion, ...]
    per_prompt: int = 1

    @property
    def by_prompt(self) -> list[tuple[Completion, ...]]:
        """The choices of each prompt."""
        starts = range(0, len(self.completions), self.per_prompt)
        return [self.completions[start : start + self.per_prompt] for start in starts]
