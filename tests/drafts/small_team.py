"""A team that comes with fewer threads than were asked for, as under ``OMP_THREAD_LIMIT``."""

from drafts.native.team import Team, team


def lent() -> Team:
    found = team()
    assert found is not None
    return found


class SmallTeam:
    """One thread instead of many."""

    def __init__(self, whole: Team) -> None:
        self._whole = whole

    def run(self, function: int, argument: int, threads: int) -> None:
        assert threads > 1
        self._whole.run(function, argument, 1)
