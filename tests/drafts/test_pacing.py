"""Pacing and recent acceptance: what a millisecond is worth, whom to ask, how far to believe."""

import pytest

from drafts.depths import DepthAcceptance
from drafts.pacing import ALLOWANCE, CALL_ALLOWANCE, Pacing
from drafts.proposal import EMPTY, Price, Proposal

CHAIN = Proposal.chain([5, 6], "a", [0.8, 0.5])


def price(rows: int = 1) -> Price:
    return Price(rows, lambda n: 100.0)


def resting(ask_ms: float, rows: int = 4) -> Pacing:
    pacing = Pacing()
    for _ in range(100):
        pacing.note_asked(rows, rows, ask_ms * rows)
        pacing.note_worth("d", rows, 0.0, 0.1, 0.0)
    return pacing


def test_a_millisecond_is_never_worth_less_than_plain_decoding_makes_of_it():
    pacing = Pacing()
    assert pacing.goodput(price(2)) == pytest.approx(0.02)
    pacing.note_step(2, 1, 100.0)
    assert pacing.goodput(price(2)) == pytest.approx(0.02)
    for _ in range(100):
        pacing.note_step(2, 6, 100.0)
    assert pacing.goodput(price(2)) == pytest.approx(0.06, rel=0.02)
    assert pacing.goodput(price(1)) == pytest.approx(0.01)


def test_everybody_who_may_propose_is_asked_until_it_is_known_not_to_pay():
    assert Pacing().whom(["d", "d"], [True, False], price(2)) == [True, False]


def test_rows_of_a_resting_domain_are_asked_in_turn_as_the_allowance_allows():
    pacing = resting(ask_ms=1.0)
    asked = [pacing.whom(["d"] * 4, [True] * 4, price(4)) for _ in range(80)]
    assert sum(map(sum, asked)) == pytest.approx(80 * 100.0 * ALLOWANCE / 1.0, abs=1)
    each = [sum(step[row] for step in asked) for row in range(4)]
    assert max(each) - min(each) <= len(asked) / 4


def test_one_find_wakes_a_domain_and_other_domains_never_slept():
    pacing = resting(ask_ms=1000.0)
    assert pacing.whom(["d", "other", "d", "d"], [True] * 4, price(4)) == [False, True, False, False]
    pacing.note_worth("d", 4, 2.0, 0.1, 0.0)
    assert all(pacing.whom(["d"] * 4, [True] * 4, price(4)))


def test_resting_at_one_load_says_nothing_about_another():
    pacing = resting(ask_ms=1000.0, rows=4)
    assert not any(pacing.whom(["d"] * 4, [True] * 4, price(4)))
    assert pacing.whom(["d"], [True], price(1)) == [True]


def test_the_allowance_is_saved_up_for_a_while_only():
    pacing = Pacing()
    for _ in range(10_000):
        pacing.whom([], [], price(4))
    assert pacing.allowance.afford(50 * 100.0 * ALLOWANCE)
    assert not pacing.allowance.afford(0.1)


def test_what_costs_more_than_can_be_saved_up_is_granted_once_and_paid_off():
    pacing = Pacing()
    most = 50 * 100.0 * ALLOWANCE
    granted = 0
    for _ in range(1000):
        pacing.whom([], [], price(4))
        pacing.note_asked(4, 4, 0.4)
        granted += pacing.allowance.afford(3 * most)
    assert granted == 1 + 950 // 150


def test_memories_that_use_up_their_allowance_leave_that_of_calls_alone():
    pacing = resting(ask_ms=0.4)
    for _ in range(100):
        pacing.whom(["d"] * 4, [True] * 4, price(4))
    assert not pacing.allowance.afford(0.4)
    assert pacing.call_allowance.afford(50 * 100.0 * CALL_ALLOWANCE)


def test_calls_that_lose_do_not_stop_memories_that_gain():
    pacing = Pacing()
    for _ in range(100):
        assert pacing.pays_with_calls("d", 1)
        pacing.note_worth("d", 1, 0.5, 0.1, 1.0)
    assert pacing.pays("d", 1)
    assert not pacing.pays_with_calls("d", 1)


def test_one_slow_moment_hardly_changes_what_asking_costs():
    pacing = Pacing()
    for _ in range(150):
        pacing.note_asked(1, 1, 1.0)
    pacing.note_asked(1, 1, 100.0)
    assert pacing.ask_ms(1) == pytest.approx(1.05, rel=0.01)


def test_reading_prompts_once_is_not_taken_for_the_price_of_asking():
    pacing = Pacing()
    pacing.note_asked(16, 16, 16 * 5.0)
    assert pacing.ask_ms(16) < 0.15


def test_an_attempt_that_took_longer_than_thought_delays_the_next():
    quick, slow = resting(ask_ms=0.4), resting(ask_ms=0.4)
    tried = []
    for pacing, took in ((quick, 0.4), (slow, 4.0)):
        count = 0
        for _ in range(40):
            asked = sum(pacing.whom(["d"] * 4, [True] * 4, price(4)))
            pacing.note_asked(4, asked, took * asked)
            count += asked
        tried.append(count)
    assert tried[1] < tried[0] / 3
    assert tried[1] >= 1


def see(depths: DepthAcceptance, times: int, accepted: int, proposal: Proposal = CHAIN) -> None:
    for _ in range(times):
        depths.see("d", proposal, list(range(accepted)), accepted + 1)


def test_confidence_is_believed_until_outcomes_contradict_it():
    depths = DepthAcceptance()
    assert depths.reach("d", CHAIN) == pytest.approx([0.8, 0.4])
    see(depths, 1, 0)
    assert depths.reach("d", CHAIN) == pytest.approx([0.8, 0.4])
    see(depths, 20, 0)
    assert depths.reach("d", CHAIN)[0] < 0.3


def test_only_the_depth_that_fails_is_believed_less():
    depths = DepthAcceptance()
    see(depths, 30, 1, Proposal.chain([5, 6], "a", [0.95, 0.95]))
    first, second = depths.reach("d", CHAIN)
    assert first >= 0.8
    assert second < 0.25 * first


def test_drafts_that_turn_good_are_believed_more_and_never_wholly():
    depths = DepthAcceptance()
    see(depths, 60, 2, Proposal.chain([5, 6], "a", [0.3, 0.3]))
    first, second = depths.reach("d", Proposal.chain([5, 6], "a", [0.6, 0.6]))
    assert 0.6 < first <= 0.98
    assert second > 0.36
    assert depths.recent("d") == pytest.approx([1.0, 1.0])


def test_siblings_are_one_promise_and_reach_never_rises_along_a_proposal():
    depths = DepthAcceptance()
    tree = Proposal((5, 6, 7), (-1, -1, 0), ("a",) * 3, (0.5, 0.4, 0.3))
    for _ in range(30):
        depths.see("d", tree, [1], 1)
    assert depths.reach("d", tree)[:2] == pytest.approx([0.5, 0.4], rel=0.15)
    see(depths, 40, 2, Proposal.chain([5, 6], "a", [0.9, 0.1]))
    reach = depths.reach("d", tree)
    assert reach == sorted(reach, reverse=True)


def test_what_was_not_proposed_or_not_emitted_is_no_test():
    depths = DepthAcceptance()
    depths.see("d", EMPTY, [], 3)
    depths.see("d", CHAIN, [0], 1)
    assert depths.recent("d") == [1.0]
    depths.forget("d")
    assert depths.recent("d") == []
