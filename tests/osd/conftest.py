"""Fixtures of the engine's tests."""

import pytest

from drafts.native.team import Team
from tests.osd.native_rig import Calls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found, whole = Calls(), Team.run

    def counted(self: Team, function: int, argument: int, threads: int) -> None:
        found.count += 1
        found.threads.add(threads)
        whole(self, function, argument, threads)

    monkeypatch.setattr(Team, "run", counted)
    return found
