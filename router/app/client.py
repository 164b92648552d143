"""Talks to a running server for the commands that inspect and change it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx

from drafts.errors import InvalidValueError, PolydraftError
from router.app.client_url import DEFAULT_URL


class ServerUnreachableError(PolydraftError):
    """No server answers at the URL; the message says how to start one."""

    code = "server_unreachable"

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"no server answers at {url} ({reason}). Start one with: polydraft serve configs/demo.yaml "
            "(or name another with --url)"
        )


class ServerError(PolydraftError):
    """The server answered with an error; the message is the server's own."""

    code = "server_error"


class Client:
    """A running server.

    Args:
        url: Its base URL, for example ``http://127.0.0.1:8321``.
        timeout: Seconds to wait for an answer.
        transport: Another way to reach it, for tests.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, timeout: float = 30.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidValueError("--url", url, f"an address such as {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, timeout=timeout, transport=transport)

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        return self._send(method, path, **options).json()

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServerUnreachableError(self.url, str(error) or type(error).__name__) from None
        if response.is_success:
            return response
        try:
            content = response.json()
        except ValueError:
            content = {}
        problem = content.get("error") if isinstance(content, dict) else None
        message = problem.get("message") if isinstance(problem, dict) else response.reason_phrase
        raise ServerError(f"{self.url}{path} answered {response.status_code}: {message}")

    def stats(self) -> dict[str, Any]:
        """All statistics."""
        return dict(self._ask("GET", "/v1/stats"))

    def domains(self) -> list[dict[str, Any]]:
        """Registered domains with their statistics."""
        return list(self._ask("GET", "/v1/domains")["data"])

    def add_domain(
        self, name: str, description: str, examples: list[str], draft: str | None = None
    ) -> dict[str, Any]:
        """Register a domain, with a draft model of its own where ``draft`` names one."""
        body: dict[str, Any] = {"name": name, "description": description, "examples": examples}
        if draft is not None:
            body["draft"] = {"kind": "model", "path": draft}
        return dict(self._ask("POST", "/v1/domains", json=body))

    def remove_domain(self, name: str) -> None:
        """Forget a domain."""
        self._ask("DELETE", f"/v1/domains/{quote(name, safe='')}")

    def versions(self, name: str, kind: str | None = None) -> list[dict[str, Any]]:
        """Kept versions of a domain's expert, oldest first; of its first kind that has any by default."""
        return list(self._ask("GET", _of(name, "versions"), params=_only(kind=kind))["data"])

    def rollback(self, name: str, to: int | None, kind: str | None = None) -> dict[str, Any]:
        """Serve an earlier version again."""
        return dict(self._ask("POST", _of(name, "rollback"), json={"to": to}, params=_only(kind=kind)))

    def export_versions(self, name: str, kind: str | None = None) -> bytes:
        """The file of a domain's versions."""
        return self._send("GET", _of(name, "export"), params=_only(kind=kind)).content

    def import_versions(
        self, name: str, content: bytes, file: str, kind: str | None = None
    ) -> dict[str, Any]:
        """Serve the versions of an exported file."""
        params = _only(file=file, kind=kind)
        return dict(self._ask("POST", _of(name, "import"), content=content, params=params))

    def buffer(self, name: str) -> dict[str, Any]:
        """What is kept of a domain's answers."""
        return dict(self._ask("GET", _of(name, "buffer")))

    def export_buffer(self, name: str, kind: str | None = None) -> bytes:
        """The file of a domain's buffer."""
        return self._send("GET", _of(name, "buffer/export"), params=_only(kind=kind)).content

    def purge_buffer(self, name: str) -> dict[str, Any]:
        """Forget what is kept of a domain's answers; what was there."""
        return dict(self._ask("DELETE", _of(name, "buffer")))


def _of(domain: str, what: str) -> str:
    return f"/v1/domains/{quote(domain, safe='')}/{what}"


def _only(**params: str | None) -> dict[str, str]:
    return {name: value for name, value in params.items() if value is not None}
