"""Neural sources are asked where they earn their time, and can come back."""

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


def test_forgetting_a_domain_starts_it_anew():
    pricing = NeuralPricing()
    fresh = choose(NeuralPricing())
    for _ in range(300):
        pricing.note_gain("d", 0.0, 0.0, 2.0)
    pricing.forget("d")
    assert choose(pricing) == fresh


def test_a_kind_of_row_that_does_not_pay_is_asked_again_although_another_pays():
    pricing = NeuralPricing()
    for _ in range(300):
        pricing.note_gain("pays", 0.0, 1.5, 2.0)
        pricing.note_gain("idle", 0.0, 0.0, 2.0)
    asked = [pricing.choose(["pays", "idle"], [0.0, 0.0], 0.05, node_ms=0.5) for _ in range(96)]
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
