"""Neural sources are asked where they earn their time, and can come back."""

import pytest

from drafts.neural_pricing import REFRESH_STEPS, NeuralPricing


def choose(pricing: NeuralPricing, sure=(0.0,), goodput: float = 0.05) -> list[bool]:
    return pricing.choose(["d"] * len(sure), list(sure), goodput, node_ms=0.5)


def test_a_source_that_adds_nothing_is_asked_once_in_a_while():
    pricing = NeuralPricing()
    for _ in range(300):
        pricing.note_gain("d", 0.0, 0.0, 2.0)
    asked = sum(choose(pricing)[0] for _ in range(10 * REFRESH_STEPS))
    assert asked == 10


def test_a_source_that_adds_much_is_asked_always():
    pricing = NeuralPricing()
    for _ in range(100):
        pricing.note_gain("d", 0.0, 1.5, 2.0)
    assert all(choose(pricing)[0] for _ in range(100))


def test_rows_whose_memories_are_sure_are_left_out():
    pricing = NeuralPricing()
    for _ in range(200):
        pricing.note_gain("d", 0.1, 1.0, 2.0)
        pricing.note_gain("d", 0.95, 0.0, 2.0)
    assert choose(pricing, (0.1, 0.95, 0.1)) == [True, False, True]


def test_a_dear_call_is_not_made():
    pricing = NeuralPricing()
    for _ in range(100):
        pricing.note_call(1, 400.0)
    assert not choose(pricing, goodput=0.1)[0]


def test_one_slow_call_counts_little():
    pricing = NeuralPricing()
    before = pricing.call_ms(1)
    pricing.note_call(1, 1000.0)
    assert pricing.call_ms(1) < 1.5 * before


def learned(good: str = "good", poor: str = "d") -> NeuralPricing:
    pricing = NeuralPricing()
    for _ in range(300):
        pricing.note_gain(good, 0.0, 1.0, 2.0)
        pricing.note_gain(poor, 0.0, 0.0, 2.0)
    return pricing


def test_forgetting_a_domain_starts_it_anew():
    pricing = learned()
    assert choose(pricing, goodput=0.1) == [False]
    pricing.forget("d")
    assert choose(pricing, goodput=0.1) == [True]


def test_a_new_domain_expects_what_all_domains_gain():
    pricing = learned(poor="e")
    assert pricing.expected("new", 0.0) == pytest.approx((0.5, 2.0), abs=0.05)


def test_a_few_unlucky_rows_do_not_give_up_what_helps_everywhere_else():
    pricing = NeuralPricing()
    for _ in range(300):
        pricing.note_gain("good", 0.0, 1.0, 2.0)
    for _ in range(8):
        pricing.note_gain("d", 0.0, 0.0, 2.0)
    assert choose(pricing, goodput=0.1) == [True]


def test_old_evidence_of_a_domain_gives_way_to_what_all_domains_gain():
    pricing = learned()
    for _ in range(300):
        pricing.note_gain("good", 0.0, 1.0, 2.0)
    before = pricing.expected("d", 0.0)[0]
    for _ in range(10 * REFRESH_STEPS):
        choose(pricing, goodput=0.1)
    assert pricing.expected("d", 0.0)[0] > before + 0.1


def test_reading_a_prompt_is_no_part_of_what_a_call_costs():
    pricing = NeuralPricing()
    for _ in range(20):
        pricing.note_call(1, 41.0, unread=[800])
        for _ in range(5):
            pricing.note_call(1, 1.0, unread=[2])
    assert pricing.call_ms(1) == pytest.approx(1.0, abs=0.1)
    assert pricing.read_ms(800) == pytest.approx(40.0, rel=0.1)


def test_the_last_tokens_of_many_rows_are_no_reading():
    pricing = NeuralPricing()
    for _ in range(60):
        pricing.note_call(16, 8.0, unread=[2] * 16)
    assert pricing.call_ms(16) == pytest.approx(8.0, abs=0.1)
    assert pricing.read_ms(100) == NeuralPricing().read_ms(100)


def test_a_long_unread_prompt_is_read_only_where_that_pays_over_several_steps():
    pricing = NeuralPricing()
    for _ in range(50):
        pricing.note_call(1, 41.0, unread=[800])
        pricing.note_call(1, 1.0, unread=[2])
        pricing.note_gain("d", 0.0, 0.5, 1.0)
    assert pricing.choose(["d"], [0.0], 0.2, 0.5, unread=[400]) == [True]
    assert pricing.choose(["d"], [0.0], 0.2, 0.5, unread=[4000]) == [False]


def test_a_kind_of_row_that_does_not_pay_is_asked_again_although_another_pays():
    pricing = NeuralPricing()
    for _ in range(300):
        pricing.note_gain("pays", 0.0, 1.5, 2.0)
        pricing.note_gain("idle", 0.0, 0.0, 2.0)
    asked = [pricing.choose(["pays", "idle"], [0.0, 0.0], 0.2, node_ms=0.5) for _ in range(96)]
    assert all(first for first, _ in asked)
    assert sum(second for _, second in asked) == 2


def test_a_cheap_source_is_known_as_cheap_after_a_few_calls_though_the_first_read_a_prompt():
    pricing = NeuralPricing()
    pricing.note_call(1, 1000.0)
    for _ in range(6):
        pricing.note_call(1, 0.5)
    assert pricing.call_ms(1) < 0.7
    for _ in range(40):
        pricing.note_call(1, 2.0)
    assert pricing.call_ms(1) > 1.9


def test_a_price_once_too_high_is_mended_although_every_call_reads():
    pricing = NeuralPricing()
    for _ in range(40):
        pricing.note_call(1, 60.0)
    for _ in range(40):
        pricing.note_call(1, 2.0, unread=[REFRESH_STEPS])
    assert pricing.call_ms(1) < 3.0


def test_fewer_rows_than_any_known_cost_no_less_than_the_fewest_known():
    pricing = NeuralPricing()
    for _ in range(60):
        pricing.note_call(16, 6.9)
    assert pricing.call_ms(8) == pytest.approx(6.9, abs=0.1)


def test_what_a_refusal_put_off_is_asked_at_the_next_step_and_nothing_is_doubted():
    pricing = learned()
    before = pricing.expected("d", 0.0)
    for _ in range(2 * REFRESH_STEPS):
        assert pricing.choose(["d"], [0.0], 0.1, 0.5, afford=lambda milliseconds: False) == [False]
    assert pricing.expected("d", 0.0) == before
    assert choose(pricing, goodput=0.1) == [True]
    assert choose(pricing, goodput=0.1) == [False]
