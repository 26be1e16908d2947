from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shared.policy.acceptance import Acceptance, expected_tokens
from shared.policy.gamma import GammaController
from shared.policy.step_costs import StepCosts

MAX = 8
RATES = [0.0, 0.1, 0.5, 0.8, 0.95, 1.0]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def flat(seconds: float) -> StepCosts:
    return StepCosts([(1, seconds), (1024, seconds)])


def linear(seconds: float) -> StepCosts:
    return StepCosts([(1, seconds), (1024, 1024 * seconds)])


def controller(
    target: StepCosts, draft: StepCosts, clock: Callable[[], float] | None = None, most: int = MAX
) -> GammaController:
    return GammaController(target, draft, most, clock or Clock())


def best_by_hand(rate: float, load: int, target: Callable[[int], float], draft: float) -> int:
    """The γ of most expected tokens a second, 0 unless 5 % better; written out as a sum, not in closed form."""

    def tokens_a_second(gamma: int) -> float:
        tokens = sum(rate**i for i in range(gamma + 1))
        return tokens / (target(load * (gamma + 1)) + gamma * draft)

    best = max(range(1, MAX + 1), key=tokens_a_second)
    return best if tokens_a_second(best) > 1.1 / target(load) else 0


# Costs


def test_costs_are_linear_between_what_was_measured() -> None:
    costs = StepCosts([(1, 0.010), (4, 0.013), (8, 0.021)])
    assert [costs.seconds(n) for n in (1, 2, 4, 6, 8)] == pytest.approx([0.010, 0.011, 0.013, 0.017, 0.021])
    assert costs.seconds(0) == pytest.approx(0.010)
    assert costs.seconds(2.5) == pytest.approx(0.0115)
    # Beyond, in proportion.
    assert costs.seconds(24) == pytest.approx(3 * 0.021)
    assert StepCosts([(4, 0.02)]).seconds(1) == pytest.approx(0.02)


@pytest.mark.parametrize("size", [1, 3, 4, 6, 8, 20])
def test_costs_learn_what_is_observed(size: int) -> None:
    costs = StepCosts([(1, 0.010), (4, 0.013), (8, 0.021)])
    true = 2.5 * costs.seconds(size)
    errors = []
    for _ in range(200):
        costs.observe(size, true)
        errors.append(abs(costs.seconds(size) - true))
    assert errors == sorted(errors, reverse=True)
    assert costs.seconds(size) == pytest.approx(true, rel=1e-3)


def test_costs_of_other_sizes_stay_as_measured() -> None:
    costs = StepCosts([(1, 0.010), (4, 0.013), (8, 0.021), (16, 0.05)])
    for _ in range(200):
        costs.observe(4, 0.026)
    assert [costs.seconds(n) for n in (1, 4, 8, 16)] == pytest.approx([0.010, 0.026, 0.021, 0.05])
    for _ in range(50):
        costs.observe(5, 0.040)
    assert costs.seconds(16) == pytest.approx(0.05)
    assert costs.seconds(4) / 0.026 > costs.seconds(8) / 0.021 > 1, "the nearer one learns more"


# Acceptance


def test_acceptance_finds_the_rate_of_a_bernoulli_process() -> None:
    rng = random.Random(1)
    acceptance = Acceptance()
    estimates = []
    for _ in range(4000):
        accepted = next((i for i in range(4) if rng.random() >= 0.62), 4)
        acceptance.observe(4, accepted)
        estimates.append(acceptance.rate)
    assert sum(estimates[1000:]) / 3000 == pytest.approx(0.62, abs=0.01)


def test_acceptance_counts_only_tokens_that_were_examined() -> None:
    one = Acceptance()
    one.observe(8, 0)
    other = Acceptance()
    other.observe(1, 0)
    assert one.rate == other.rate
    none = Acceptance()
    before = none.rate
    none.observe(0, 0)
    assert none.rate == before


def test_a_new_sequence_starts_from_everybodys_rate_and_departs_from_it() -> None:
    everybody = Acceptance()
    for _ in range(200):
        everybody.observe(4, 4)
    mine = Acceptance(everybody)
    assert mine.rate == pytest.approx(everybody.rate)
    for _ in range(20):
        mine.observe(4, 0)
    assert mine.rate < everybody.rate < 1
    assert Acceptance(everybody).rate == everybody.rate


def test_acceptance_forgets() -> None:
    acceptance = Acceptance()
    for _ in range(1000):
        acceptance.observe(4, 4)
    for _ in range(300):
        acceptance.observe(4, 0)
    assert acceptance.rate < 0.2


# E


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("gamma", [0, 1, 4, 16])
def test_expected_tokens_is_the_geometric_sum(rate: float, gamma: int) -> None:
    assert expected_tokens(rate, gamma) == pytest.approx(sum(rate**i for i in range(gamma + 1)))


def test_expected_tokens_is_the_mean_of_simulated_rounds() -> None:
    rng = random.Random(2)
    rounds = [1 + next((i for i in range(5) if rng.random() >= 0.7), 5) for _ in range(40_000)]
    # Standard error below 0.011.
    assert expected_tokens(0.7, 5) == pytest.approx(sum(rounds) / len(rounds), abs=0.04)


# γ


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("load", [1, 3, 32])
def test_nothing_is_drafted_when_verifying_costs_as_much_as_decoding(rate: float, load: int) -> None:
    assert controller(linear(0.01), flat(0.0)).choose(rate, load) == 0


def test_as_much_as_allowed_is_drafted_when_verifying_is_free_and_alpha_high() -> None:
    for most in (0, 1, 3, 8, 16):
        assert controller(flat(0.05), flat(0.0001), most=most).choose(0.98, 1) == most


@pytest.mark.parametrize("draft", [0.0, 0.001, 0.004, 0.009])
@pytest.mark.parametrize("load", [1, 4])
def test_gamma_is_the_best_by_hand_and_grows_with_alpha(draft: float, load: int) -> None:
    target = StepCosts([(1, 0.02), (8, 0.022), (64, 0.09)])
    chosen = []
    for rate in [i / 40 for i in range(41)]:
        c = controller(target, flat(draft))
        # The first choice of 0 is a probe.
        c.choose(0.0, load)
        chosen.append(c.choose(rate, load))
        assert chosen[-1] == best_by_hand(rate, load, target.seconds, draft)
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    assert chosen[-1] > 0


def test_gamma_falls_with_load_where_verifying_gets_dearer() -> None:
    target = StepCosts([(1, 0.02), (16, 0.02), (512, 0.64)])
    chosen = [controller(target, flat(0.001)).choose(0.8, load) for load in (1, 2, 4, 8, 16, 64)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] >= 4
    assert chosen[-1] == 0


def test_rounds_that_take_longer_than_thought_push_gamma_to_zero_and_probes_bring_it_back() -> None:
    clock = Clock()
    c = controller(flat(0.02), flat(0.001), clock)
    assert c.choose(0.8, 1) > 0
    for _ in range(100):
        c.observe_plain(1, 0.02)
        c.observe_round(1, 4, 10 * 0.024)
    assert c.choose(0.8, 1) == 0
    # Rounds among more sequences were not observed, and are held to be no better until they are.
    assert c.choose(0.8, 8) == 0
    for _ in range(8 * 100):
        c.observe_round(8, 4, 0.024)
    assert c.choose(0.8, 8) > 0
    assert c.choose(0.8, 1) == 0

    num_probes, seconds = 0, 0.0
    while (gamma := c.choose(0.8, 1)) <= 2 and seconds < 3600:
        # The trouble is over: rounds take what they should.
        took = 0.02 + gamma * 0.001
        clock.now += 16 * took
        seconds += 16 * took
        if gamma:
            num_probes += 1
            c.observe_round(1, gamma, took)
        else:
            c.observe_plain(1, took)
    assert 1 < num_probes < 60
    assert c.choose(0.8, 1) > 2


def test_steps_that_take_longer_than_thought_make_drafting_pay() -> None:
    c = controller(linear(0.01), flat(0.001))
    assert c.choose(0.8, 1) == 0
    for _ in range(100):
        c.observe_plain(1, 0.05)
    assert c.choose(0.8, 1) > 0


def test_whether_drafting_pays_is_said_without_spending_a_probe() -> None:
    clock = Clock()
    c = controller(flat(0.02), flat(0.001), clock)
    assert c.pays(0.8, 1)
    assert not c.pays(0.0, 1)
    clock.now += 3600
    assert not c.pays(0.0, 1)
    assert c.choose(0.0, 1) == 2  # the probe is still there
    assert c.choose(0.0, 1) == 0


def test_no_probe_when_no_drafter_could_pay() -> None:
    clock = Clock()
    c = controller(linear(0.01), flat(0.0), clock)
    for _ in range(1000):
        clock.now += 10
        assert c.choose(0.3, 4) == 0


@pytest.mark.parametrize("num_unseen_tokens", [0, 500])
@pytest.mark.parametrize("load", [1, 8])
def test_probes_take_less_than_a_hundredth_of_the_time(load: int, num_unseen_tokens: int) -> None:
    clock = Clock()
    draft = StepCosts([(1, 0.004), (1024, 1.0)])
    c = controller(flat(0.02), draft, clock)
    probing = plain = 0.0
    for _ in range(6000 // load):
        # All of the load ask once in 16 steps; nobody's drafts are ever kept.
        for gamma in [c.choose(0.0, load, num_unseen_tokens) for _ in range(load)]:
            if gamma:
                took = 0.02 + gamma * draft.seconds(load) + draft.seconds(num_unseen_tokens)
                probing += took
                clock.now += took
                c.observe_round(load, gamma, 0.02 + gamma * draft.seconds(load))
        c.observe_plain(load, 0.02)
        clock.now += 16 * 0.02
        plain += 16 * 0.02
    assert 0 < probing <= 0.01 * (probing + plain)
