"""Typed errors shared by every layer: each names the field, the value received and what is allowed."""

from __future__ import annotations


class PolydraftError(Exception):
    """Root of all errors raised on purpose.

    ``status`` is the HTTP status the service answers with and ``code`` a stable machine-readable
    name, so that exceptions become responses in exactly one handler.
    """

    status: int = 500
    code: str = "internal_error"


def as_typed(error: Exception, what: str) -> PolydraftError:
    """``error`` itself if it is one of ours, else one that says what failed and how, ``error`` its cause."""
    if isinstance(error, PolydraftError):
        return error
    typed = PolydraftError(f"{what}: {error!r}")
    typed.__cause__ = error
    return typed


class InvalidValueError(PolydraftError, ValueError):
    """A value from a user (config, request, command line) that cannot be used.

    Args:
        field: Dotted path of the offending field, for example ``domains[2].name``.
        value: What was received.
        allowed: What would have been accepted, as a sentence.
    """

    status = 400
    code = "invalid_value"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        shown = repr(value)
        if len(shown) > 200:
            shown = f"{shown[:200]}… ({len(shown)} characters)"
        super().__init__(f"{field}: got {shown}; {allowed}")


class UnknownNameError(InvalidValueError):
    """A name that is not registered; the message lists the known ones.

    Args:
        field: What kind of thing was named, for example ``domain`` or ``drafts.sources[0]``.
        value: The unknown name.
        known: The registered names.
    """

    status = 404
    code = "unknown_name"

    def __init__(self, field: str, value: object, known: list[str]) -> None:
        self.known = sorted(known)
        super().__init__(field, value, f"known: {', '.join(self.known) or 'none'}")


class BusyError(PolydraftError):
    """The bounded queue is full; the caller should retry later."""

    status = 503
    code = "busy"


class CheckpointError(PolydraftError):
    """A file of weights or state that cannot be used; names the file and the reason."""

    code = "checkpoint"


class ExportError(PolydraftError):
    """A draft that a format of another engine cannot hold; names the domain, the format and the reason.

    Args:
        domain: Whose draft was to be written.
        form: The format.
        reason: What stands in the way, and what would remove it.
    """

    status = 409
    code = "export"

    def __init__(self, domain: str, form: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"export of {domain} as {form}: {reason}")


class UnflushedError(CheckpointError):
    """A file is in place, but flushing its folder failed: a power cut may bring the old one back."""

    code = "unflushed"


class VersionsFileError(CheckpointError):
    """An exported file of versions that cannot be imported; names the file and the reason."""

    status = 400
    code = "versions_file"


class IntegrityError(PolydraftError):
    """Internal books that do not balance; the message shows both sides of the broken equation."""

    code = "integrity"


class DraftDistributionError(PolydraftError):
    """A proposal that rejection sampling cannot verify, since it does not say what it was drawn from.

    Args:
        source: The source that proposed.
        found: What it reported.
    """

    code = "draft_distribution"

    def __init__(self, source: str, found: str) -> None:
        self.source = source
        super().__init__(
            f"proposal of source {source or 'none'}: {found}; under verification: rejection every node needs "
            "the distribution it was drawn from, POINT_MASS where none was"
        )


class ContextLengthError(InvalidValueError):
    """A prompt that leaves no room for an answer; names both lengths.

    Args:
        tokens: Length of the prompt.
        limit: Most tokens of prompt and answer together.
    """

    code = "context_length_exceeded"

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            "prompt", f"{tokens} tokens", f"at most {limit - 1}: prompt and answer share {limit} tokens"
        )
