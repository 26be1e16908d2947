"""The policy of targets that draft themselves, against closed forms and a worker of arithmetic."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shared.policy.self_drafting import PLAIN_STEPS_APART, PlainStep, SelfDraftingPolicy
from shared.policy.step_costs import StepCosts
from shared.policy.ways import Way
from tests.support.step_costs import flat


def best_count(costs: StepCosts, load: int, likelihoods: list[float], spent: float) -> int:
    """By trying all."""
    rates = [
        (load + sum(likelihoods[:count])) / (costs.seconds(load + count) + spent)
        for count in range(len(likelihoods) + 1)
    ]
    return max(range(len(rates)), key=lambda count: (rates[count], -count))


@pytest.mark.parametrize("load", [1, 4, 20])
@pytest.mark.parametrize("seed", range(5))
def test_as_many_rows_are_verified_as_bring_most_tokens_a_second(load: int, seed: int) -> None:
    rng = random.Random(seed)
    likelihoods = sorted((rng.random() ** 2 for _ in range(40)), reverse=True)
    costs, spent = flat(), rng.random() * 0.01
    assert SelfDraftingPolicy(costs).num_rows(load, likelihoods, spent) == best_count(costs, load, likelihoods, spent)


def test_rows_that_cost_nothing_are_all_verified_and_such_as_cost_a_step_none() -> None:
    policy = SelfDraftingPolicy(flat())
    assert policy.num_rows(1, [0.01] * 7, 0.0) == 7
    steep = SelfDraftingPolicy(StepCosts([(1, 0.01), (100, 1.0)]))
    assert steep.num_rows(1, [0.9] * 7, 0.0) == 0


def serve(
    policy: SelfDraftingPolicy, load: int, gain: float, seconds: float, num_steps: int, waited: float = 0.0
) -> tuple[float, float]:
    """Steps of a worker whose plain ones take 10 ms and bring a token each, and whose others take `seconds`, drafting
    included, and bring `gain`; before each they `waited`: tokens a second over those of the better way, and the share
    of steps with drafts."""
    rng = random.Random(1)
    seconds_in_all, num_tokens, num_drafted = 0.0, 0, 0
    for _ in range(num_steps):
        way = policy.way(load)
        drafts = way.drafts
        took = (seconds if drafts else 0.01) * rng.lognormvariate(0, 0.1)
        seconds_in_all += took + waited
        brought = sum(int(gain) + (rng.random() < gain % 1) for _ in range(load)) if drafts else load
        policy.observe(load, way, brought, took, waited)
        num_tokens += brought
        num_drafted += drafts
    best = load * max(gain / (seconds + waited), 1 / (0.01 + waited))
    return num_tokens / seconds_in_all / best, num_drafted / num_steps


@pytest.mark.parametrize("load", [1, 8])
@pytest.mark.parametrize(
    ("gain", "seconds"), [(2.5, 0.015), (1.3, 0.012), (3.9, 0.03), (1.0, 0.012), (1.4, 0.02), (1.1, 0.05)]
)
def test_the_better_way_is_gone_but_for_a_hundredth_of_the_time(load: int, gain: float, seconds: float) -> None:
    policy = SelfDraftingPolicy(flat())
    serve(policy, load, gain, seconds, 500)
    rate, _ = serve(policy, load, gain, seconds, 4000)
    assert rate > 0.97


def test_it_comes_back_when_it_begins_to_pay() -> None:
    policy = SelfDraftingPolicy(flat())
    serve(policy, 1, 1.0, 0.015, 1000)
    assert serve(policy, 1, 1.0, 0.015, 1000)[1] < 0.1
    serve(policy, 1, 3.0, 0.015, 3000)
    assert serve(policy, 1, 3.0, 0.015, 1000)[1] > 0.9


@pytest.mark.parametrize(("waited", "drafts"), [(0.0, False), (0.03, True)])
def test_steps_that_bring_fewer_tokens_pay_where_these_are_long_on_their_way(waited: float, drafts: bool) -> None:
    policy = SelfDraftingPolicy(flat())
    serve(policy, 1, 3.0, 0.04, 1000, waited)
    rate, share = serve(policy, 1, 3.0, 0.04, 2000, waited)
    assert rate > 0.97
    assert (share > 0.9) == drafts


def test_rows_are_worth_more_where_each_step_is_waited_for() -> None:
    policy = SelfDraftingPolicy(StepCosts([(1, 0.01), (100, 1.0)]))
    assert policy.num_rows(1, [0.6] * 7, 0.0) == 0
    for _ in range(100):
        policy.observe(1, Way.PLAIN, 1, 0.01, 0.02)
    assert policy.num_rows(1, [0.6] * 7, policy.waited(1, Way.PLAIN)) == 7


def alternate(policy: SelfDraftingPolicy, num_steps: int, waits: Sequence[float] = (0.0,)) -> float:
    """Steps of 5 ms, or of 25 with drafts that bring three tokens, behind these waits in turns: tokens a second."""
    rng, seconds, num_tokens = random.Random(1), 0.0, 0
    for i in range(num_steps):
        way, waited = policy.way(1), waits[i % len(waits)]
        brought, took = (3, 0.025) if way.drafts else (1, 0.005)
        took *= rng.lognormvariate(0, 0.1)
        policy.observe(1, way, brought, took, waited)
        seconds, num_tokens = seconds + took + waited, num_tokens + brought
    return num_tokens / seconds


@pytest.mark.parametrize("waited", [5.0, 0.3])
def test_who_reads_slowly_does_not_decide_for_who_comes_next(waited: float) -> None:
    policy = SelfDraftingPolicy(flat(0.005))
    alternate(policy, 2000)
    alternate(policy, 300, [waited])
    alternate(policy, 4000)  # some half a minute, in which it is seen
    assert alternate(policy, 1000) > 0.95 * 200


@pytest.mark.parametrize("waited", [0.02, 0.04, 0.08])
def test_nor_does_who_read_slowly_for_a_minute(waited: float) -> None:
    """What was waited behind plain steps, which are hardly made any more, is no more either."""
    policy = SelfDraftingPolicy(flat())
    serve(policy, 1, 3.0, 0.043, 1500, waited)
    assert serve(policy, 1, 3.0, 0.043, 500, waited)[1] > 0.9
    serve(policy, 1, 3.0, 0.043, 2000)
    rate, share = serve(policy, 1, 3.0, 0.043, 2000)
    assert share < 0.05
    assert rate > 0.95


@pytest.mark.parametrize(("every", "waited"), [(1, 0.02), (4, 0.05), (8, 0.1), (16, 0.2)])
def test_waits_that_come_at_once_count_as_those_that_come_one_by_one(every: int, waited: float) -> None:
    policy = SelfDraftingPolicy(flat(0.005))
    waits = [0.0] * (every - 1) + [waited]
    alternate(policy, 4000, waits)
    assert alternate(policy, 2000, waits) > 0.95 * 3 / (0.025 + waited / every)


def write_texts(policy: SelfDraftingPolicy, gain: float, num_texts: int) -> float:
    """One after another, of 100 steps each: the share of them that are followed from their beginning, and only so may
    have drafts."""
    num_followed = 0
    for _ in range(num_texts):
        follows = policy.follows(1)
        num_followed += follows
        for _ in range(100):
            way = policy.way(1) if follows else Way.PLAIN
            policy.observe(1, way, round(gain) if way.drafts else 1, 0.015 if way.drafts else 0.01)
    return num_followed / num_texts


def test_few_are_followed_while_drafts_do_not_pay_and_all_when_they_do() -> None:
    policy = SelfDraftingPolicy(flat())
    assert policy.follows(1)  # nobody knows yet
    write_texts(policy, 1.0, 5)
    assert 0 < write_texts(policy, 1.0, 100) < 0.3
    write_texts(policy, 3.0, 50)
    assert write_texts(policy, 3.0, 100) == 1.0


def test_what_did_not_pay_is_tried_again_with_enough_sequences_only() -> None:
    policy = SelfDraftingPolicy(flat())
    serve(policy, 8, 1.0, 0.015, 200)
    follows = []
    for _ in range(4000):
        assert not policy.way(8, may_try=False).drafts
        policy.observe(8, Way.PLAIN, 8, 0.01)
        follows.append(policy.follows(8))
    # Nor does it wait for them all the time: who is followed pays for it.
    assert 0.1 < sum(follows) / len(follows) < 0.6
    while not policy.follows(8):
        policy.observe(8, Way.PLAIN, 8, 0.01)
    assert policy.way(8).drafts


def test_steps_that_bring_nothing_end_nobody() -> None:
    policy = SelfDraftingPolicy(flat())
    for _ in range(100):
        policy.observe(1, policy.way(1), 0, 0.001)


def test_a_further_step_of_the_drafter_must_bring_what_its_time_is_worth() -> None:
    policy = SelfDraftingPolicy(flat())
    for took in (60.0, 0.002, 0.05):
        assert policy.goes_on(1, 1, 0.0)  # nobody knows yet what it takes
        policy.observe_drafting(1, took)
    for _ in range(20):
        policy.observe(1, Way.PLAIN, 1, 0.01)  # a token in 10 ms
    assert policy.goes_on(1, 1, 0.21)
    assert not policy.goes_on(1, 1, 0.19)
    # The time is that of all in the step, who would have more tokens by then.
    for _ in range(20):
        policy.observe(8, Way.PLAIN, 8, 0.01)
    assert policy.goes_on(1, 8, 1.61)
    assert not policy.goes_on(1, 8, 1.59)


def serve_some(policy: SelfDraftingPolicy, gain: float, taking_in: float, num_tokens: int) -> tuple[float, float]:
    """Of 60 s of steps of 10 ms the share with drafts, which bring two tokens instead of one, `gain` times as many a
    second, and of which taking a sequence in, all `num_tokens` of its tokens, takes so long; and the share of time that
    went into that."""
    seconds = spent = drafted = steps = 0.0
    left, taken_in = 0.0, False
    while seconds < 60:
        if left <= 0:
            left, taken_in = float(num_tokens), False
        if policy.follows(1) and not taken_in and policy.follows_up(1, 1000, int(left)):
            policy.observe_following(1, 1000, [num_tokens], taking_in)
            seconds, spent, taken_in = seconds + taking_in, spent + taking_in, True
        way = policy.way(1) if taken_in else Way.PLAIN
        brought, took = (2, 0.02 / gain) if way.drafts else (1, 0.01)
        policy.observe(1, way, brought, took)
        seconds, steps, left, drafted = seconds + took, steps + 1, left - brought, drafted + way.drafts
    return drafted / steps, spent / seconds


def test_what_a_drafter_takes_in_has_its_price() -> None:
    # 100 tokens take a second, or half of it with drafts, or two thirds.
    for gain, taking_in in ((2.0, 0.1), (2.0, 0.35), (1.5, 0.2)):
        share, _ = serve_some(SelfDraftingPolicy(flat()), gain, taking_in, 100)
        assert share > 0.9
    for gain, taking_in in ((2.0, 0.6), (2.0, 0.9), (1.5, 0.45), (1.2, 0.3)):
        policy = SelfDraftingPolicy(flat())
        for _ in range(5):
            share, spent = serve_some(policy, gain, taking_in, 100)
            assert share < 0.05
            assert spent < 0.05


@pytest.mark.parametrize(("gain", "taking_in"), [(2.0, 0.4), (1.5, 0.2), (3.0, 0.4)])
def test_what_it_takes_in_of_a_burst_is_paid_by_all_that_its_sequences_write(gain: float, taking_in: float) -> None:
    """Eight sequences of 500 tokens, which take 5 s of plain steps: what half a second of it spares is more."""
    policy, drafted, num_steps = SelfDraftingPolicy(flat()), 0, 20_000
    left, owing = 0.0, 0
    for _ in range(num_steps):
        if left <= 0:
            left, owing = 500.0, 8
        if owing and policy.follows(8) and policy.follows_up(8, 1000, int(left)):
            policy.observe_following(8, 1000, [int(left)], taking_in / 8)
            owing -= 1
        way = Way.PLAIN if owing else policy.way(8)
        brought = gain if way.drafts else 1.0
        policy.observe(8, way, round(8 * brought), 0.01)
        left, drafted = left - brought, drafted + way.drafts
    assert drafted > 0.9 * num_steps


def test_of_what_a_further_step_promises_as_much_counts_as_was_found_by_others() -> None:
    policy = SelfDraftingPolicy(flat())
    for _ in range(3):
        policy.observe_drafting(1, 0.002)
    for _ in range(20):
        policy.observe(1, Way.PLAIN, 1, 0.01)
    for _ in range(100):
        policy.observe_found(0.8, 0.4)
    assert policy.goes_on(1, 1, 0.41)
    assert not policy.goes_on(1, 1, 0.39)


def test_what_others_did_not_find_is_looked_for_again() -> None:
    policy = SelfDraftingPolicy(flat())
    for _ in range(3):
        policy.observe_drafting(1, 0.002)
    for _ in range(20):
        policy.observe(1, Way.PLAIN, 1, 0.01)

    def num_looks(found: float, num_rounds: int) -> int:
        looks = 0
        for _ in range(num_rounds):
            if policy.goes_on(1, 1, 0.4):
                looks += 1
                policy.observe_found(0.4, found)
        return looks

    assert num_looks(0.02, 1000) < 100
    assert num_looks(0.4, 1000) > 800


def test_a_machine_that_stands_still_while_the_drafter_takes_in_decides_nothing() -> None:
    policy = SelfDraftingPolicy(flat())
    policy.observe_following(1, 200, [200], 3600.0)
    chosen = []
    for _ in range(10_000):
        chosen.append(policy.way(1))
        policy.observe(1, chosen[-1], 2 if chosen[-1].drafts else 1, 0.01)
    assert sum(way.drafts for way in chosen[-2000:]) > 1900


def test_what_one_has_left_must_be_worth_what_the_drafter_takes_in_of_it() -> None:
    policy = SelfDraftingPolicy(flat())
    assert policy.follows_up(4, 200, 3), "as long as it is not known what that takes"
    policy.observe_following(4, 200, [200], 0.02)
    # Plain steps of four take 10 ms, of which each has a quarter, and half of it may be spared.
    assert not policy.follows_up(4, 200, 15)
    assert policy.follows_up(4, 200, 17)
    assert policy.follows_up(4, 30, 3)


@pytest.mark.parametrize("num_tokens", [17, 100, 500])
def test_a_stall_of_the_drafter_does_not_keep_it_from_taking_in(num_tokens: int) -> None:
    policy = SelfDraftingPolicy(flat())
    policy.observe_following(1, num_tokens, [100], 3600.0)
    refusals = 0
    while not policy.follows_up(1, 100, 100):
        refusals += 1
    assert refusals < 500


def decide(
    policy: SelfDraftingPolicy, extra: float, likelihood: float, num_steps: int, seed: int = 1
) -> tuple[float, float]:
    """Steps of a sequence that may always verify one more token, of that likelihood, which takes `extra` beyond its
    row, and half as long again as its size says: tokens a second over those of the better way, and how often it did."""
    rng = random.Random(seed)
    seconds, tokens, num_verified = 0.0, 0, 0
    for i in range(num_steps):
        count = policy.num_rows(1, [likelihood], 0.0)
        took = (0.015 + extra * count) * rng.lognormvariate(0, 0.05) * (10 if i % 100 == 50 else 1)
        policy.observe_step(1, count, took)
        seconds += took
        tokens += 1 + (count > 0 and rng.random() < likelihood)
        num_verified += count
    stalls = 1 + 0.01 * 9
    best = max(1 / 0.015, (1 + likelihood) / (0.015 + extra)) / stalls
    return tokens / seconds / best, num_verified / num_steps


@pytest.mark.parametrize(
    ("extra", "likelihood", "pays"),
    [(0.0, 0.1, True), (0.003, 0.1, False), (0.003, 0.4, True), (0.01, 0.5, False), (0.03, 0.9, False)],
)
def test_what_verifying_takes_beyond_its_rows_is_found_out(extra: float, likelihood: float, pays: bool) -> None:
    policy = SelfDraftingPolicy(flat())
    decide(policy, extra, likelihood, 100)
    rate, share = decide(policy, extra, likelihood, 3000, seed=2)
    assert rate > 0.97
    assert share > 0.7 if pays else share < 0.05


def test_verifying_is_tried_again_when_it_takes_less() -> None:
    policy = SelfDraftingPolicy(flat())
    assert decide(policy, 0.02, 0.5, 1000)[1] < 0.1
    decide(policy, 0.0, 0.5, 1500)
    assert decide(policy, 0.0, 0.5, 500)[1] > 0.95


@pytest.mark.parametrize("longer", [0.01, 0.3, 3600.0])
def test_a_first_step_of_the_drafter_that_takes_long_decides_nothing(longer: float) -> None:
    """Something is compiled in it: chains of up to five, of which each further token is accepted 0.7 of the time."""
    policy, rng, began, depths = SelfDraftingPolicy(flat()), random.Random(1), False, []
    for _ in range(1000):
        way, spent, depth = policy.way(1), 0.0, 0
        if way.drafts:
            spent, depth = 0.0005, 1
            while depth < 5 and policy.goes_on(1, 1, 0.7**depth):
                took = 0.001 if began else 0.001 + longer
                policy.observe_drafting(1, took)
                policy.observe_found(0.7**depth, 0.7 ** (depth + 1))
                spent, depth, began = spent + took, depth + 1, True
        count = policy.num_rows(1, [0.7**i for i in range(1, depth + 1)], spent)
        num_accepted = next((i for i in range(count) if rng.random() > 0.7), count)
        took = (0.01 + 0.0002 * count) * rng.lognormvariate(0, 0.05)
        policy.observe_step(1, count, took)
        policy.observe(1, way, 1 + num_accepted, took + spent)
        depths.append(depth)
    assert sum(depth >= 3 for depth in depths) > 800


@pytest.mark.parametrize(("gain", "taking_in"), [(1.2, 0.3), (1.5, 0.5), (2.0, 0.6), (2.0, 0.9)])
@pytest.mark.parametrize("most", [100, 1024, 100_000])
def test_what_a_drafter_takes_in_is_worth_what_is_written_not_what_might_be(
    gain: float, taking_in: float, most: int
) -> None:
    """Answers of a hundred tokens, which take a second, of clients that would take more: tokens a second over those of
    plain steps."""
    policy, seconds, num_tokens = SelfDraftingPolicy(flat()), 0.0, 0
    while seconds < 300:
        written, taken_in = 0, False
        while written < 100:
            if policy.follows(1) and not taken_in and policy.follows_up(1, 1000, most - written):
                policy.observe_following(1, 1000, [most - written], taking_in)
                seconds, taken_in = seconds + taking_in, True
            way = policy.way(1) if taken_in else Way.PLAIN
            brought, took = (2, 0.02 / gain) if way.drafts else (1, 0.01)
            policy.observe(1, way, brought, took)
            seconds, written = seconds + took, written + brought
        policy.observe_ended(written)
        num_tokens += written
    assert num_tokens / seconds > 94


def test_greedy_and_sampled_sequences_are_decided_for_apart() -> None:
    """In turns of 100 steps: greedy ones have twice as much of drafts, sampled ones half."""
    policy, shares = SelfDraftingPolicy(flat()), []
    for turn in range(40):
        policy.sampled = turn % 2 == 1
        _, drafted = serve(policy, 1, 2.0 if not policy.sampled else 1.0, 0.01 if not policy.sampled else 0.02, 100)
        shares.append(drafted)
    assert min(shares[20::2]) > 0.75
    assert max(shares[21::2]) < 0.25
    assert sum(shares[20::2]) / 10 > 0.9
    assert sum(shares[21::2]) / 10 < 0.1


@pytest.mark.parametrize(("load", "together"), [(1, 32), (1, 5), (4, 16)])
def test_plain_steps_that_are_told_of_together_say_the_same(load: int, together: int) -> None:
    policies = [SelfDraftingPolicy(flat()) for _ in range(2)]
    for policy in policies:
        for _ in range(200):
            policy.observe(load, Way.TREE, 2 * load, 0.03, 0.001)
            policy.observe_step(load, 2 * load, 0.03)
    one_by_one, at_once = policies
    for _ in range(20):
        at_once.observe_rest(load, load, [PlainStep(load, 0.0145, 0.0005, 0.002)] * together)
        for i in range(together):
            one_by_one.observe(load, Way.PLAIN, load, 0.015, 0.002)
            if i % PLAIN_STEPS_APART == 0:
                one_by_one.observe_step(load, 0, 0.0145)

    def says(policy: SelfDraftingPolicy) -> list[float]:
        ways = policy._at(load)
        costs = [policy.step_seconds(load, count) for count in (0, 3 * load)]
        return [*costs, policy.least_likelihood(load), ways.waited(Way.PLAIN), ways.best_rate(), ways._seconds]

    assert says(at_once) == pytest.approx(says(one_by_one), rel=0.02)


def test_of_plain_steps_that_are_told_of_together_one_that_stood_still_says_nothing() -> None:
    policy = SelfDraftingPolicy(flat())
    for _ in range(50):
        policy.observe_rest(1, 1, [PlainStep(1, 0.01, 0.0, 0.0)] * 31 + [PlainStep(1, 10.0, 10.0, 0.0)])
    assert policy.step_seconds(1, 0) < 0.0115
    assert policy._at(1).best_rate() > 0.85 * 100


def test_plain_steps_of_whom_nothing_is_to_be_decided_say_what_such_steps_take() -> None:
    policy = SelfDraftingPolicy(flat())
    for _ in range(50):
        policy.observe_rest(2, 0, [PlainStep(2, 0.02, 0.0, 0.0)] * 32)
    assert policy.step_seconds(2, 0) == pytest.approx(0.02, rel=0.02)
    assert not policy._at(2).is_known(Way.PLAIN)
