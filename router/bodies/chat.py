"""Chat messages as clients send them, made uniform before router and chat template see them.

Content may be a string or a list of text parts, and an assistant turn that only calls tools has none.
Both the router's text and the target's prompt are built from what leaves this module, so they never
differ (a router that reads another text than the model is a known fault of such servers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafts.errors import InvalidValueError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
KEPT = ("name", "tool_calls", "tool_call_id", "function_call")


def normalise_messages(messages: object, field: str = "messages") -> list[dict[str, Any]]:
    """The messages with known roles and plain string contents; tool fields are kept.

    Args:
        messages: What the client sent.
        field: How errors name it, for example ``messages`` or ``line 7: messages``.

    Raises:
        InvalidValueError: not a list, empty, an unknown role, or content that is not text.
    """
    if not isinstance(messages, list):
        raise InvalidValueError(field, messages, "a list of messages with role and content")
    if not messages:
        raise InvalidValueError(field, messages, "at least one message")
    return [_message(item, f"{field}[{index}]") for index, item in enumerate(messages)]


def _message(item: object, field: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise InvalidValueError(field, item, "an object with role and content")
    role = item.get("role")
    if role not in ROLES:
        raise InvalidValueError(f"{field}.role", role, f"one of {', '.join(ROLES)}")
    message = {"role": "system" if role == "developer" else role}
    message["content"] = _content(item, role, f"{field}.content")
    message.update({key: item[key] for key in KEPT if item.get(key) is not None})
    return message


def _content(item: Mapping[str, Any], role: str, field: str) -> str:
    content = item.get("content")
    if content is None and role == "assistant" and (item.get("tool_calls") or item.get("function_call")):
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        if not content:
            raise InvalidValueError(field, content, "at least one text part")
        return "".join(_part(part, f"{field}[{index}]") for index, part in enumerate(content))
    raise InvalidValueError(
        field, content, "a string or a list of text parts (null only on an assistant turn with tool_calls)"
    )


def _part(part: object, field: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        shown = kind if isinstance(kind, str) else part
        raise InvalidValueError(f"{field}.type", shown, "only text parts: the target model reads text")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidValueError(f"{field}.text", text, "a string")
    return text
