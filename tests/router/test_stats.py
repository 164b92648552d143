"""Statistics: sums agree, rates are derived, windows close after ten, state round-trips."""

from __future__ import annotations

import json
import threading

from osd.types import Assignment, Event, FinishReason, Round
from router.mind.stats import Stats
from router.mind.timeline import KEPT, Timeline
from tests.router.fakes import record

HIT = Round(proposed=4, accepted=3, tested=4, emitted=4, source="ngram", version=2)
ALL = Round(proposed=2, accepted=2, tested=2, emitted=3, source="lookup", version=3)
PLAIN = Round(proposed=0, accepted=0, tested=0, emitted=1, source="", version=3)


def known(domain: str) -> Assignment:
    return Assignment(domain, 0.9, None, True, 0.01)


def filled() -> Stats:
    stats = Stats()
    for number in range(25):
        domain = "alpha" if number % 5 else "base"
        assignment = known(domain) if domain == "alpha" else Assignment(seconds=0.01)
        stats.take(
            record("x", assignment, rounds=(PLAIN, HIT, ALL), versions=(2, 3), seconds=0.5),
            label=f"l{number % 2}",
        )
    stats.add_event(Event("birth", "alpha", "Because.", {"size": 8}, time=5.0))
    return stats


def test_domains_and_labels_sum_to_the_whole():
    figures = filled().snapshot()
    for key in ("requests", "tokens", "proposed_tokens", "accepted_tokens", "target_passes", "seconds"):
        whole = figures["overall"][key]
        assert sum(d[key] for d in figures["domains"].values()) == whole
        assert sum(d[key] for d in figures["labels"].values()) == whole
    assert sum(sum(row.values()) for row in figures["routing"]["confusion"].values()) == 25
    assert figures["routing"]["unknown"] == 5
    assert figures["finish"] == {"stop": 25}


def test_rates_follow_their_definitions():
    alpha = filled().snapshot()["domains"]["alpha"]
    assert alpha["acceptance_rate"] == 5 / 6
    assert alpha["alpha"] == 5 / 6
    assert alpha["mean_accepted_length"] == 8 / 3
    assert alpha["tokens_per_second"] == 16.0
    assert alpha["share_of_requests"] == 0.8
    assert alpha["acceptance_by_depth"] == [1.0, 1.0, 1.0, 0.0]
    assert set(alpha["versions"]) == {"2", "3"}
    assert alpha["by_source"]["lookup"]["acceptance_rate"] == 1.0
    assert "" not in alpha["by_source"]


def test_timeline_has_windows_of_ten_and_the_one_that_fills():
    windows = filled().snapshot()["timeline"]["alpha"]
    assert [window["requests"] for window in windows] == [10, 10]
    assert [window["at"] for window in windows] == [13, 25]
    assert windows[0]["version"] == 3
    assert filled().snapshot()["timeline"]["base"][0]["requests"] == 5


def test_an_idle_domain_and_an_empty_process_have_figures_without_dividing_by_zero():
    figures = Stats().snapshot(domains=["quiet"])
    assert figures["domains"]["quiet"]["acceptance_rate"] == 0.0
    assert figures["timeline"]["quiet"] == []
    assert figures["routing"]["share_of_latency"] == 0.0


def test_extras_are_merged_into_their_domain():
    figures = filled().snapshot({"alpha": {"version": 3, "buffer": {"records": 7}}, "new": {"version": 0}})
    assert figures["domains"]["alpha"]["buffer"] == {"records": 7}
    assert figures["domains"]["alpha"]["requests"] == 20
    assert figures["domains"]["new"]["requests"] == 0


def test_state_round_trips_through_json_and_goes_on():
    stats = filled()
    again = Stats()
    again.load_state(json.loads(json.dumps(stats.state())))
    assert again.snapshot() == stats.snapshot()
    for one in (stats, again):
        one.take(record("x", known("alpha"), rounds=(HIT,), finish=FinishReason.LENGTH))
    assert again.snapshot() == stats.snapshot()


def test_snapshots_are_json_and_do_not_change_afterwards():
    stats = filled()
    figures = stats.snapshot()
    text = json.dumps(figures)
    stats.take(record("x", known("alpha"), rounds=(HIT,)), label="l0")
    assert json.dumps(figures) == text


def test_counts_add_up_under_parallel_use():
    stats = Stats()

    def work() -> None:
        for _ in range(200):
            stats.take(record("x", known("alpha"), rounds=(HIT,)))
            stats.snapshot()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.snapshot()["overall"]["accepted_tokens"] == 4 * 200 * 3


def test_timelines_are_bounded():
    line = Timeline()
    stats = Stats()
    stats.take(record("x", known("alpha"), rounds=(HIT,)))
    tally = stats._domains["alpha"]
    for at in range((KEPT + 5) * 10):
        line.add(record("x"), tally, at)
    assert len(line.windows()) == KEPT
