"""What the router keeps of each domain beside its prototype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import ValidationError

from drafts.errors import InvalidValueError
from router.config import DomainConfig

Origin = Literal["declared", "registered", "born"]
"""In the config; added while serving; born from traffic."""


@dataclass(frozen=True)
class Domain:
    """A registered domain.

    Attributes:
        name: Its name, which is also its identity; never given to another domain while it lives.
        description: What its requests ask for.
        examples: Typical prompts.
        origin: How it came to be.
        pinned: Whether it is exempt from automatic changes.
        created: Unix time, seconds; 0 for declared domains.
    """

    name: str
    description: str = ""
    examples: tuple[str, ...] = ()
    origin: Origin = "declared"
    pinned: bool = False
    created: float = 0.0

    def anchor_texts(self) -> list[str]:
        """What the prototype is made of: the examples, or else the description."""
        return list(self.examples) or ([self.description] if self.description.strip() else [])

    def as_dict(self) -> dict[str, Any]:
        """The domain as JSON."""
        return {**asdict(self), "examples": list(self.examples)}


def declared(config: DomainConfig) -> Domain:
    """The domain that a config declares."""
    return Domain(config.name, config.description, config.examples, "declared", config.pinned)


def registered(name: str, description: str, examples: Sequence[str], created: float) -> Domain:
    """A domain from the API, held to the same rules as one in the config.

    Raises:
        InvalidValueError: a bad name, or a blank example.
    """
    try:
        config = DomainConfig(name=name, description=description, examples=tuple(examples))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, InvalidValueError):
            raise InvalidValueError(cause.field, cause.value, cause.allowed) from None
        field = ".".join(str(part) for part in detail["loc"])
        raise InvalidValueError(field, detail["input"], detail["msg"]) from None
    return Domain(config.name, config.description, config.examples, "registered", False, created)
