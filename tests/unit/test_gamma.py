"""The γ controller, driven by a simulation of the service it chooses for."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import pytest

from shared.policy.acceptance import Acceptance, expected_tokens
from shared.policy.drafting import Drafting, Situation
from shared.policy.gamma import GammaController
from shared.policy.shape import PLAIN, Shape
from shared.policy.step_costs import StepCosts
from tests.benchmarks.gamma_grid import Cell, run_cell
from tests.support.speculation_simulator import Machine, Simulation, Workload

MAX = 8


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def flat(seconds: float) -> StepCosts:
    return StepCosts([(1, seconds), (1024, seconds)])


def situation(load: int = 1, num_unseen: int = 1, num_waiting: int = 0, num_prefill_tokens: int = 0) -> Situation:
    return Situation(load, num_waiting, num_prefill_tokens, num_unseen, 64, 1000)


def controller(target: StepCosts, draft: StepCosts, clock: Clock, most: int = MAX) -> GammaController:
    """One that has just measured plain steps of a single sequence, and found them as they should be."""
    found = GammaController(target, draft, most, clock)
    for i in range(8):
        found.observe_plain(1, target.seconds(1), clock.now - 8 + i)
    return found


def pass_one(found: GammaController, clock: Clock, gamma: int, took: float) -> None:
    """A single sequence has a round of γ draft tokens, or with none a plain step, that takes so long."""
    clock.now += took
    if gamma:
        found.observe_round(1, Shape(gamma), 1, took)
    else:
        found.observe_plain(1, took, clock.now)


def at(rate: float) -> Acceptance:
    """An acceptance rate of which much has been seen."""
    found = Acceptance()
    for _ in range(100):
        found.observe(1000, round(1000 * rate))
        found._num_examined, found._num_accepted = 256.0, 256.0 * rate
    return found


def drafting(rate: float) -> Drafting:
    found = Drafting()
    found.acceptance = at(rate)
    return found


def run(
    workload: Workload, draft_ratio: float, slow: tuple[float, float, float] = (0.0, 0.0, 1.0), seed: int = 0
) -> Simulation:
    simulation = Simulation(Machine(draft_ratio), workload, seed, slow=slow)
    simulation.run()
    return simulation


def share_drafted(simulation: Simulation, since: float, until: float) -> float:
    """Share of the results between two moments that came of rounds."""
    gammas = [gamma for when, gamma in simulation.trace if since <= when < until]
    return sum(gamma > 0 for gamma in gammas) / len(gammas)


# In simulation


@pytest.mark.parametrize(
    "cell",
    [
        Cell(1, 0.7, 0.1, 20, shared=True),
        Cell(1, 0.9, 0.02, 500, shared=False),
        Cell(1, 0.2, 0.3, 500, shared=True),
        Cell(8, 0.7, 0.1, 20, shared=True),
        Cell(8, 0.9, 0.02, 500, shared=False),
        Cell(8, 0.2, 0.3, 20, shared=False),
        Cell(1, 0.9, 0.1, 4000, shared=False),
        Cell(32, 0.2, 0.3, 500, shared=True),
        Cell(32, 0.9, 0.02, 20, shared=True),
    ],
    ids=str,
)
def test_the_policy_comes_close_to_the_best_fixed_gamma(cell: Cell) -> None:
    outcome = run_cell(cell, 2, (0, 1, 2, 4, 8))
    assert outcome.mean >= 0.95
    assert outcome.worst >= 0.90


def test_beside_long_prompts_nobody_waits_for_those_that_decode_plainly() -> None:
    cell = Cell(8, 0.2, 0.02, 4000, shared=False)
    assert cell.tokens_per_second(5, None) >= 0.95 * cell.tokens_per_second(5, 0)


@pytest.mark.parametrize("streams", [1, 8])
def test_a_tenfold_slow_round_does_not_end_drafting(streams: int) -> None:
    workload = Workload(lambda _: streams, lambda _: 0.8, 20, seconds=16)
    simulation = run(workload, 0.1, slow=(10.0, 10.04, 10.0))
    assert share_drafted(simulation, 8, 10) > 0.9
    assert share_drafted(simulation, 12, 14) > 0.9


def test_gamma_follows_the_load() -> None:
    """Alone it pays to draft; with 64 streams a round takes far longer than it brings, and it is over at once."""
    workload = Workload(lambda now: 64 if 10 <= now < 20 else 1, lambda _: 0.6, 20, seconds=60)
    simulation = run(workload, 0.2)
    assert share_drafted(simulation, 5, 10) > 0.8
    assert share_drafted(simulation, 13, 20) < 0.1
    assert share_drafted(simulation, 45, 60) > 0.8


def test_gamma_follows_acceptance() -> None:
    workload = Workload(lambda _: 1, lambda now: 0.1 if 15 <= now < 40 else 0.9, 20, seconds=90)
    simulations = [run(workload, 0.2, seed=seed) for seed in range(5)]

    def share(since: float, until: float) -> float:
        return median(share_drafted(each, since, until) for each in simulations)

    assert share(5, 15) > 0.9
    assert share(25, 40) < 0.2
    assert share(75, 90) > 0.9, "scouts found that it pays again"


@pytest.mark.parametrize(("ratio", "rate"), [(0.3, 0.0), (0.9, 0.3)])
def test_what_never_pays_takes_little(ratio: float, rate: float) -> None:
    workload = Workload(lambda _: 4, lambda _: rate, 100)
    simulation, off = run(workload, ratio), Simulation(Machine(ratio), workload, 0, PLAIN)
    assert simulation.tokens >= 0.95 * (off.run() * workload.seconds)
    assert share_drafted(simulation, 20, 60) < 0.03


# Choices by hand


def test_nothing_is_drafted_when_verifying_costs_as_much_as_decoding() -> None:
    costs = StepCosts([(1, 0.01), (1024, 10.24)])
    for rate in (0.0, 0.5, 0.9):
        found = controller(costs, flat(0.0001), Clock())
        assert found.choose(drafting(rate), situation()) == 0


def test_as_much_as_allowed_is_drafted_when_verifying_is_free_and_acceptance_high() -> None:
    for most in (0, 1, 3, 8, 16):
        found = controller(flat(0.05), flat(0.0001), Clock(), most)
        assert found.choose(drafting(0.98), situation()) == most


@pytest.mark.parametrize("draft", [0.0005, 0.002, 0.004])
def test_gamma_is_the_best_by_hand(draft: float) -> None:
    """Where another γ promises within a few percent of the best, either may be chosen."""
    target = StepCosts([(1, 0.02), (8, 0.022), (64, 0.09)])
    for rate in (0.5, 0.6, 0.7, 0.8, 0.9):

        def tokens_a_second(gamma: int, rate: float = rate) -> float:
            return sum(rate**i for i in range(gamma + 1)) / (target.seconds(gamma + 1) + gamma * draft)

        chosen = controller(target, flat(draft), Clock()).choose(drafting(rate), situation())
        best = max(range(MAX + 1), key=tokens_a_second)
        assert tokens_a_second(chosen) >= 0.94 * tokens_a_second(best)
        assert (chosen > 0) == (best > 0)


@pytest.mark.parametrize(
    ("row_seconds", "load", "least"), [(0.0, 1, 0.0), (0.002, 1, 0.2), (0.002, 4, 0.5), (1.0, 1, 1.0)]
)
def test_a_draft_token_must_be_as_likely_as_its_row_is_dear(row_seconds: float, load: int, least: float) -> None:
    """A row holds up every sequence, and what it brings one of them is at most a plain step."""
    target = StepCosts([(1, 0.01), (1025, 0.01 + 1024 * row_seconds)])
    for gamma in (1, 8):
        assert controller(target, flat(0.001), Clock()).least_likelihood(load, gamma) == pytest.approx(least)


def test_rounds_compete_with_what_the_target_drafts_itself() -> None:
    """Plain steps that bring S tokens: rounds of 2.5 times their length pay while they bring more than 2.5 S."""
    clock, target, draft = Clock(), flat(0.01), flat(0.005)

    def gamma_beside(num_tokens: int) -> int:
        found = controller(target, draft, clock, 3)
        for _ in range(300):
            found.observe_plain(1, 0.01, clock.now, num_tokens)
        return found.choose(drafting(0.95), situation())

    assert gamma_beside(1) == 3
    assert gamma_beside(2) == 0
    found = controller(StepCosts([(1, 0.01), (11, 0.02)]), draft, clock, 3)
    assert found.least_likelihood(1, 2) == pytest.approx(0.1)  # a millisecond a row
    for _ in range(300):
        found.observe_plain(1, 0.01, clock.now, 3)
    assert found.least_likelihood(1, 2) == pytest.approx(0.3, rel=0.02)


def test_all_sequences_of_a_worker_draft_alike_until_the_next_choice() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.002), clock)
    sequences = [drafting(rate) for rate in (0.9, 0.5, 0.7)]
    assert len({found.choose(each, situation(3)) for each in sequences}) == 1


def test_catching_up_must_be_worth_it() -> None:
    """A prompt of 8,000 tokens takes the drafter 10 s; 1,000 tokens of output save more, 10 do not."""
    draft = StepCosts([(1, 0.002), (1024, 1.28)])

    def choose(num_remaining: int) -> int:
        found = controller(flat(0.05), draft, Clock())
        return found.choose(drafting(0.9), Situation(1, 0, 0, 8000, 1000, num_remaining))

    assert choose(10) == 0
    assert choose(1000) > 0


@pytest.mark.parametrize(("rate", "gamma"), [(0.98, MAX), (0.9, 5), (0.75, 2), (0.6, 1)])
def test_beside_prompts_that_fill_the_steps_no_more_is_drafted_than_is_likely_kept(rate: float, gamma: int) -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.0001), clock)
    found.acceptance = at(rate)
    sequence, later = drafting(rate), drafting(rate)
    assert found.choose(sequence, situation(4)) > gamma or gamma == MAX
    clock.now += 30
    beside = situation(4, 1, 8, 8 * 4000)
    assert found.choose(sequence, beside) == gamma
    likely = found.acceptance.rate  # a little nearer to where it started from
    assert likely**gamma >= 0.5
    assert gamma == MAX or likely ** (gamma + 1) < 0.5
    assert found.choose(later, beside) == gamma, "who joins drafts like the others"
    assert found.choose(sequence, situation(4)) == found.choose(later, situation(4)) == found.gamma > 0


@pytest.mark.parametrize(("num_came", "joins"), [(1, True), (60, False)])
def test_what_was_chosen_for_a_few_that_are_left_is_nothing_for_the_many_that_come(num_came: int, joins: bool) -> None:
    clock = Clock()
    found = controller(flat(0.05), StepCosts([(1, 0.002), (1024, 1.0)]), clock)
    found.acceptance = at(0.9)
    left = [drafting(0.9) for _ in range(4)]
    for _ in range(3):
        clock.now += 0.05
        assert all(found.choose(each, situation(4)) > 0 for each in left)
    clock.now += 0.05
    come = situation(4, num_waiting=num_came, num_prefill_tokens=60 * 600)
    assert (found.choose(drafting(0.9), come._replace(num_unseen=500)) > 0) == joins


def test_after_a_pause_nothing_that_was_chosen_before_stands() -> None:
    clock = Clock()
    found = controller(StepCosts([(1, 0.01), (2, 0.0105), (8, 0.013), (64, 0.2)]), flat(0.002), clock)
    sequence = drafting(0.9)
    assert found.choose(sequence, situation(1)) > 0
    assert found._costs._trials_at(1).running
    found._costs.plain.measure_if_older(1, -1.0, 0.0, 0.0)
    assert found.measuring
    found.leave(sequence, 100)
    clock.now += 1.0
    found.choose(drafting(0.9), situation(1, num_waiting=31, num_prefill_tokens=31 * 600))
    assert found.gamma == 0
    assert not found.measuring
    assert not found._costs._trials_at(1).running
    assert found._costs._trials_at(1).num_failed == 0


def test_while_somebody_is_there_a_pause_is_no_new_beginning() -> None:
    clock = Clock()
    found = controller(flat(0.01), flat(0.001), clock)
    sequence, other = drafting(0.9), drafting(0.9)
    assert found.choose(sequence, situation(1)) > 0
    clock.now += 5.0  # its client did not read, or its step was a long prompt's
    found.choose(other, situation(2, num_waiting=1, num_prefill_tokens=600))
    assert found.gamma > 0
    assert found._costs._trials_at(1).running


@pytest.mark.parametrize("seed", range(4))
def test_one_user_with_pauses_has_drafts_whatever_happens_now_and_then(seed: int) -> None:
    """Replies of a second; each hundredth round or step takes ten times as long, and some replies are slow at first."""
    clock, dice = Clock(), random.Random(seed)
    found = controller(flat(0.01), flat(0.001), clock)
    shares = []
    for _ in range(80):
        sequence, num_output, drafted = Drafting(found.acceptance), 0, 0
        slow = dice.random() < 0.1
        while num_output < 120:
            gamma = found.choose(sequence, Situation(1, 0, 0, 1, num_output, 300))
            took = (0.01 + 0.001 * gamma) * (10 if dice.random() < 0.01 else 1) * (3 if slow and num_output < 30 else 1)
            clock.now += took
            if gamma:
                accepted = next((i for i in range(gamma) if dice.random() > 0.7), gamma)
                sequence.acceptance.observe(gamma, accepted)
                found.observe_round(1, Shape(gamma), 1, took)
                num_output, drafted = num_output + accepted + 1, drafted + accepted + 1
            else:
                found.observe_plain(1, took, clock.now)
                num_output += 1
        found.leave(sequence, num_output)
        clock.now += 3.0
        shares.append(drafted / num_output)
    assert sum(shares) / len(shares) > 0.9
    assert min(sum(shares[i : i + 10]) for i in range(10, 80, 10)) > 7


@pytest.mark.parametrize(("num_remaining", "begins"), [(4, False), (24, False), (400, True)])
def test_rounds_are_not_tried_where_they_end_before_they_tell(num_remaining: int, begins: bool) -> None:
    """They promise little, and were never tried."""
    found = controller(flat(0.01), flat(0.0092), Clock())
    where = Situation(1, 0, 0, 1, 64, num_remaining)
    assert 1.0 < found._costs.gain(1, Shape(1), 1.95, 100.0, 0.0, 0.0) < 1.03
    found.choose(drafting(0.95), where)
    assert (found.gamma > 0) == begins


@pytest.mark.parametrize(("num_waiting", "begins"), [(0, True), (12, False)])
def test_what_failed_for_many_is_not_tried_while_they_arrive(num_waiting: int, begins: bool) -> None:
    """It was never tried for those that are there by now."""
    found = controller(flat(0.05), flat(0.024), Clock())
    trials = found._costs.trials(32)
    for _ in range(3):
        trials.go_on(0.0, 0.9)
        trials.observe_round(0.0, (5, 4), 0.05, 0.1, 1.0)
        trials.end(0.0, 0.0)
    found.choose(drafting(0.75), situation(20, num_waiting=num_waiting))
    assert (found.gamma > 0) == begins


@pytest.mark.parametrize(
    ("rate", "seconds_beside", "catch_up", "joins"),
    [
        (0.9, 60, 0.05, True),
        (0.9, 60, 20.0, False),  # more than its tokens can make up for
        (0.9, 0, 0.05, False),  # hardly any of its tokens come in such steps
        (0.3, 60, 0.05, False),  # no draft token is likely enough to be kept
    ],
)
def test_who_joins_where_prompts_fill_the_steps_and_nobody_drafts_in_others(
    rate: float, seconds_beside: int, catch_up: float, joins: bool
) -> None:
    clock = Clock()
    draft = StepCosts([(1, 0.05), (1024, 0.05 + catch_up)])
    found = controller(flat(0.05), draft, clock)
    found.acceptance = at(rate)
    beside, plain = situation(4, 1, 8, 8 * 4000), situation(4, 1024)
    sequence = drafting(rate)
    assert found.choose(sequence, plain) == 0, "a draft token takes as long as a plain step"
    for _ in range(seconds_beside):
        clock.now += 1
        found.choose(sequence, beside._replace(num_unseen=100_000))  # it never joins
    clock.now += 0.01
    assert not found.measuring
    assert (found.choose(drafting(rate), beside._replace(num_unseen=1024)) > 0) == joins


@pytest.mark.parametrize(("seconds", "joins"), [(0.05, True), (0.1, False)])
def test_who_joins_beside_prompts_depends_on_whether_the_drafter_slows_plain_steps_down(
    seconds: float, joins: bool
) -> None:
    """A scout has the drafter catch up, and the plain steps meanwhile tell whether it has cores of its own."""
    clock = Clock()
    found = controller(flat(0.05), StepCosts([(1, 0.02), (1024, 0.42)]), clock)
    found.acceptance = at(0.2)
    num_scouts = 0
    for _ in range(4000):
        scout = Drafting(found.acceptance, coupled=True)
        assert found.choose(scout, situation(1, 1024)) == 0
        num_scouts += scout.num_scouting_rounds > 0
        for _ in range(16):
            took = seconds if scout.num_scouting_rounds else 0.05
            clock.now += took
            found.observe_plain(1, took, clock.now)
        while scout.num_scouting_rounds:
            scout.observe_in_shadow(scout.num_scouting_tokens, 0)
        found.leave(scout, None)
    assert num_scouts >= 4
    plain = found.plain_seconds(1)
    found.acceptance, scout = at(0.9), drafting(0.9)
    beside = situation(4, 1, 8, 8 * 4000)
    for _ in range(30):
        clock.now += 1
        found.choose(scout, beside._replace(num_unseen=100_000))  # it never joins
    clock.now += 0.01
    assert found.plain_seconds(1) == plain == pytest.approx(0.05), "what they take beside it is not what they take"
    assert (found.choose(drafting(0.9), beside._replace(num_unseen=1024)) > 0) == joins


def test_a_sequence_decodes_on_while_the_drafter_catches_up_if_that_holds_up_no_others() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.01), clock)
    assert [found.steps_meanwhile(seconds, 1) for seconds in (0.02, 0.03, 0.16)] == [0, 1, 3]
    for _ in range(2):
        assert found.choose(drafting(0.95), situation(2)) > 0
    seconds = 0.05 + 0.01 * found.gamma
    assert [found.steps_meanwhile(times * seconds, 2) for times in (0.9, 1.1, 3.9)] == [0, 1, 3], "within their rounds"


def test_plain_steps_are_measured_before_rounds_begin_where_it_is_close() -> None:
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    sequence = drafting(0.6)
    assert found.choose(sequence, situation()) == 0
    assert found.measuring
    for _ in range(8):
        clock.now += 0.05
        found.observe_plain(1, 0.05, clock.now)
    assert not found.measuring
    assert found.choose(sequence, situation()) > 0


def test_a_sequence_that_stood_still_does_not_silence_the_others() -> None:
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    assert found.choose(drafting(0.6), situation(8)) == 0
    assert found.measuring
    clock.now += 30
    found.observe_plain(8, 30.0, clock.now)  # preempted before all of this began
    for _ in range(7):
        clock.now += 0.05
        for _ in range(8):
            found.observe_plain(8, 0.05, clock.now)
    assert not found.measuring
    assert found.plain_seconds(8) == pytest.approx(0.05, rel=0.01)


def test_a_plain_step_takes_what_it_took_those_that_were_in_the_one_before_too() -> None:
    """Where sequences take turns, those that sat one out say that theirs took twice as long."""
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    assert found.choose(drafting(0.6), situation(8)) == 0
    assert found.measuring
    for _ in range(8):
        clock.now += 0.05
        for seconds in (0.1, 0.05, 0.1):
            found.observe_plain(8, seconds, clock.now)
    assert not found.measuring
    assert found.plain_seconds(8) == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize(("rate", "pays"), [(0.3, False), (0.95, True)])
def test_plain_steps_that_seem_to_take_longer_than_the_rounds_they_are_part_of_are_measured_again(
    rate: float, pays: bool
) -> None:
    """However much drafting promises: it is against them that it does. With a high α the rounds that are made take
    longer than the plain steps do, as it seems, and yet one of a single draft token would not."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.02), clock)
    sequence = drafting(rate)
    for _ in range(8):
        clock.now += 0.15
        found.observe_plain(1, 0.15, clock.now)
    assert found.plain_seconds(1) > 0.1
    gammas = []
    for _ in range(100):
        gamma = found.choose(sequence, situation())
        took = 0.05 + gamma * 0.02
        clock.now += took
        if gamma:
            found.observe_round(1, Shape(gamma), 1, took)
        else:
            found.observe_plain(1, took, clock.now)
        gammas.append(gamma)
    assert gammas[0] > 0
    assert found.plain_seconds(1) == pytest.approx(0.05, rel=0.1)
    assert (gammas[-1] > 0) == pays


def test_plain_steps_that_do_take_longer_than_rounds_are_measured_ever_less_often() -> None:
    """Kernels for one row may be slower than those for a few."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.001), clock)
    sequence = drafting(0.8)
    measured_at: list[float] = []
    while clock.now < 1120:
        gamma = found.choose(sequence, situation())
        if found.measuring and (not measured_at or clock.now - measured_at[-1] > 0.5):
            measured_at.append(clock.now)
        took = 0.04 if gamma else 0.05
        clock.now += took
        if gamma:
            found.observe_round(1, Shape(gamma), 1, took)
        else:
            found.observe_plain(1, took, clock.now)
    assert 3 <= len(measured_at) <= 9
    pauses = [later - earlier for earlier, later in pairwise(measured_at)]
    assert all(later > 1.5 * earlier for earlier, later in pairwise(pauses))


def test_however_sure_drafting_seems_plain_steps_are_measured_once_a_minute() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.001), clock)
    sequence = drafting(0.9)
    measured_at: list[float] = []
    while clock.now < 1200:
        gamma = found.choose(sequence, situation())
        if found.measuring and (not measured_at or clock.now - measured_at[-1] > 10):
            measured_at.append(clock.now)
        took = 0.05 + gamma * 0.001
        clock.now += took
        if gamma:
            found.observe_round(1, Shape(gamma), 1, took)
        else:
            found.observe_plain(1, took, clock.now)
    assert len(measured_at) == 3
    assert all(55 < later - earlier < 65 for earlier, later in pairwise(measured_at))


def test_a_plain_step_is_looked_at_by_a_few_of_its_sequences_and_the_next_ones_by_nobody() -> None:
    """Each costs the router time. Of those few, whoever was not in the step before says what it waited as well."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.01), clock)
    num_looked = []
    for _ in range(90):
        clock.now += 0.004
        looked = 0
        for place in range(32):
            if found.looks_at(clock.now):
                looked += 1
                found.observe_plain(32, 0.03 if place == 0 else 0.004, clock.now)
        num_looked.append(looked)
    assert num_looked == [4, 0, 0] * 30
    assert found.plain_seconds(32) == pytest.approx(0.004, rel=0.1)


def test_plain_steps_of_a_crowds_end_do_not_make_one_sequence_draft_for_long() -> None:
    """They took more than twice as long as one alone does, beside all that ended then. Rounds, whose messages take
    longer than a step, seem to bring twice what plain decoding does, and nothing about them contradicts that."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.01), clock)
    sequence = drafting(0.75)
    for _ in range(20):
        for load in (8, 8, 8, 3, 1, 1):
            clock.now += 0.12
            found.observe_plain(load, 0.12, clock.now)
    assert found.plain_seconds(1) > 0.1
    drafted = []
    for _ in range(100):
        gamma = found.choose(sequence, situation())
        pass_one(found, clock, gamma, 0.15 + gamma * 0.01 if gamma else 0.05)
        drafted.append(gamma > 0)
    assert drafted[0]
    assert sum(drafted) <= 30
    assert found.plain_seconds(1) == pytest.approx(0.05, rel=0.05)


def test_a_step_of_the_crowd_before_does_not_end_the_measurement_of_one_sequence() -> None:
    """The last plain step that was looked at is heard of when the next one is: long after, if there were rounds."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.01), clock)
    for _ in range(20):
        for load in (1, 1, 8, 8, 8):
            clock.now += 0.12
            found.observe_plain(load, 0.12, clock.now)
    sequence = drafting(0.75)
    for _ in range(120):
        gamma = found.choose(sequence, situation())
        pass_one(found, clock, gamma, 0.15 + gamma * 0.01 if gamma else 0.05)
    assert found.plain_seconds(1) == pytest.approx(0.05, rel=0.05)


def test_where_the_load_changes_to_and_fro_what_was_measured_stays_known() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.001), clock)
    sequences = [drafting(0.9) for _ in range(6)]
    num_plain = num_all = 0
    while clock.now < 1100:
        load = 5 + int(clock.now) % 2
        gammas = [found.choose(each, situation(load)) for each in sequences[:load]]
        gamma = max(gammas)
        took = 0.05 + gamma * 0.001
        clock.now += took
        for each in gammas:
            if each:
                found.observe_round(load, Shape(each), 1, took)
            else:
                found.observe_plain(load, took, clock.now)
        num_all += 1
        num_plain += gamma == 0
    assert num_plain < 0.05 * num_all


def test_who_has_short_replies_is_tried_with_too_after_some_of_them() -> None:
    """Drafting would bring an eighth more, and each reply is over before that were known."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.025), clock)
    shares = []
    for _ in range(80):
        sequence = Drafting(found.acceptance, coupled=True)
        sequence.acceptance = at(0.7)
        num_output, drafted = 1.0, 0.0
        while num_output < 24:
            where = Situation(1, 0, 0, 1, int(num_output), 24 - int(num_output))
            gamma = found.choose(sequence, where)
            took, tokens = 0.05 + gamma * 0.025, expected_tokens(0.7, gamma)
            clock.now += took
            if gamma:
                found.observe_round(1, Shape(gamma), 1, took)
            else:
                found.observe_plain(1, took, clock.now)
            num_output += tokens
            drafted += tokens if gamma else 0.0
        found.leave(sequence, 24)
        shares.append(drafted / 24)
    assert shares[0] == 0.0
    assert sum(shares[-20:]) > 15


def test_a_measurement_in_a_bad_moment_is_made_again_soon_and_then_ever_more_rarely() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.01), clock)
    sequence = drafting(0.9)
    measured_at: list[float] = []
    bad_until = 0.0
    while clock.now < 1200:
        gamma = found.choose(sequence, situation())
        if found.measuring and (not measured_at or clock.now - measured_at[-1] > 4):
            measured_at.append(clock.now)
            if len(measured_at) == 2:
                bad_until = clock.now + 3
        took = 0.15 + gamma * 0.01 if gamma else 0.125 if clock.now < bad_until else 0.05
        pass_one(found, clock, gamma, took)
    pauses = [later - earlier for earlier, later in pairwise(measured_at)]
    assert pauses[0] > 55
    assert pauses[1] < 20, "soon"
    assert found.plain_seconds(1) == pytest.approx(0.05, rel=0.1)
    assert len(measured_at) <= 12


def test_plain_steps_follow_the_machine_while_rounds_go_on_as_far_as_it_may_be_the_machine() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock, 1)
    sequence = drafting(0.9)

    def rounds(times: float) -> tuple[float, float]:
        """What is believed of a plain step and of a round when they take so many times as long for a while."""
        for _ in range(60):
            gamma = 0
            while gamma == 0:
                gamma = found.choose(sequence, situation())
                clock.now += 0.05
                if gamma == 0:
                    found.observe_plain(1, 0.05, clock.now)
            clock.now += times * (0.05 + gamma * 0.005) - 0.05
            found.observe_round(1, Shape(gamma), 1, times * (0.05 + gamma * 0.005))
        return found.plain_seconds(1), found._round_seconds(1, Shape(gamma)) / (0.05 + gamma * 0.005)

    assert rounds(1.0) == pytest.approx((0.05, 1.0), rel=0.02)
    assert rounds(1.1) == pytest.approx((0.055, 1.1), rel=0.03)
    plain, slower = rounds(3.0)
    assert slower > 1.5
    assert plain < 0.065, "it may be the drafter's alone"


def test_rounds_become_slower_with_plain_steps_where_nobody_drafts_and_while_they_go_on_as_seen() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.02), clock)
    sequence = drafting(0.9)
    measured = False
    while not measured or found.measuring:
        gamma = found.choose(sequence, situation())
        measured = measured or (found.measuring and clock.now > 1030)
        took = 0.05 + gamma * 0.02 if gamma else 0.06
        clock.now += took
        if gamma:
            found.observe_round(1, Shape(gamma), 1, took)
        else:
            found.observe_plain(1, took, clock.now)
    assert found.plain_seconds(1) > 0.054
    seconds = 0.05 + 4 * 0.02
    assert found._round_seconds(1, Shape(4)) == pytest.approx(seconds, rel=0.01), "amid rounds, as slow as ever"

    found.leave(sequence, None)
    hopeless = drafting(0.0)
    for _ in range(100):
        clock.now += 0.12
        assert found.choose(hopeless, situation()) == 0
        found.observe_plain(1, 0.12, clock.now)
    assert found.plain_seconds(1) == pytest.approx(0.12, rel=0.05)
    assert found._round_seconds(1, Shape(4)) == pytest.approx(seconds * (0.12 + 0.08) / (0.055 + 0.08), rel=0.1)


def test_before_drafting_ends_a_smaller_gamma_that_was_never_tried_gets_its_chance() -> None:
    """Verifying more than a few tokens takes far longer than was measured at warm-up; verifying two does not."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.002), clock)
    sequence = drafting(0.7)
    gammas = []
    for _ in range(300):
        gamma = found.choose(sequence, situation())
        took = (0.05, 0.052, 0.25)[min(gamma, 2)]
        clock.now += took
        if gamma:
            found.observe_round(1, Shape(gamma), 1, took)
        else:
            found.observe_plain(1, took, clock.now)
        gammas.append(gamma)
    assert gammas[0] > 1
    assert gammas[-50:] == [1] * 50


@pytest.mark.parametrize("bad", [0.06, 0.065, 0.07])
def test_the_next_smaller_gamma_is_tried_again_after_long(bad: float) -> None:
    """Both seem to bring much the same, or the larger up to 20 percent more, but the smaller had met a bad moment."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.002), clock)
    sequence = drafting(0.8)
    gammas: list[int] = []
    for _ in range(1500):
        gamma = found.choose(sequence, situation())
        took = (0.05, bad if gammas.count(1) < 5 else 0.05, 0.0775, 0.25)[min(gamma, 3)]
        clock.now += took
        if gamma:
            found.observe_round(1, Shape(gamma), 1, took)
        else:
            found.observe_plain(1, took, clock.now)
        gammas.append(gamma)
    assert 2 in gammas[:200]
    assert gammas[-1] == 1


def test_before_drafting_ends_it_is_seen_whether_plain_steps_got_slower_too() -> None:
    """The machine is three times as slow all at once: rounds seem not to pay, but plain steps are no better."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock)
    sequence = drafting(0.7)
    gammas = []
    for i in range(600):
        slow = 3 if i > 200 else 1
        gamma = found.choose(sequence, situation())
        gammas.append(gamma)
        took = slow * (0.05 + gamma * 0.005)
        clock.now += took
        if gamma:
            found.observe_round(1, Shape(gamma), 1, took)
        else:
            found.observe_plain(1, took, clock.now)
    assert sum(gamma > 0 for gamma in gammas[210:]) > 0.85 * len(gammas[210:])
    assert gammas[-1] > 0


@pytest.mark.parametrize(
    ("times", "transport"), [(1.5, 0.0), (2.0, 0.0), (1.0, 0.0007), (1.0, 0.001), (1.0, 0.004), (1.2, 0.0005)]
)
def test_a_trial_that_is_in_vain_takes_few_rounds(times: float, transport: float) -> None:
    """Rounds of every γ take so many times what steps at warm-up say, and so much more."""
    clock = Clock()
    found = controller(flat(0.001), flat(0.0002), clock)
    sequences = [drafting(0.6) for _ in range(8)]
    num_rounds = 0
    for _ in range(2000):
        gammas = [found.choose(each, situation(8)) for each in sequences]
        took = times * (0.001 + max(gammas) * 0.0002) + transport if any(gammas) else 0.001
        clock.now += took
        for gamma in gammas:
            if gamma:
                found.observe_round(8, Shape(gamma), 1, took)
            else:
                found.observe_plain(8, took, clock.now)
        num_rounds += any(gammas)
    assert 0 < num_rounds <= 14, "those that tell, and a few of the smallest γ"


def test_drafting_that_was_in_vain_begins_again_only_for_more() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock)
    untried = found._begin_at(1)
    found._costs._overhead.observe(1, (1, False), 0.055, 0.055, 1.0)
    before = found._begin_at(1)
    assert before > untried == 1.0, "what rounds take is not known before there were any"
    trials = found._costs._trials_at(1)
    for _ in range(3):
        trials.go_on(found._busy_seconds, 0.9)
        trials.observe_round(found._busy_seconds, (0, 4), 0.05, 0.1, 1.0)
        trials.end(found._busy_seconds, 0.0)
    assert found._begin_at(1) == pytest.approx(before + 0.15)
    found._busy_seconds += 5000
    assert found._begin_at(1) == pytest.approx(before, abs=0.01), "not for ever"


def test_drafting_that_ends_for_a_load_never_drafted_at_was_not_in_vain_at_the_load_before() -> None:
    clock = Clock()
    costs = StepCosts([(1, 0.05), (2, 0.05), (4, 0.05), (64, 0.05), (128, 0.1), (512, 0.4)])
    found = controller(costs, flat(0.005), clock)
    sequence = drafting(0.7)
    while clock.now < 1005:
        gamma = found.choose(sequence, situation())
        took = 0.05 + gamma * 0.005
        clock.now += took
        if gamma:
            found.observe_round(1, Shape(gamma), 1, took)
        else:
            found.observe_plain(1, took, clock.now)
    assert found.gamma > 0
    others = [drafting(0.7) for _ in range(63)]
    while found.gamma > 0:
        clock.now += 0.05
        for each in (sequence, *others):
            found.choose(each, situation(64))
            found.observe_plain(64, 0.05, clock.now)
    assert found._costs._trials_at(1).num_failed == 0
    assert not found._costs._trials_at(1).running


def test_nothing_is_learnt_while_the_drafter_catches_up() -> None:
    clock = Clock()
    draft = StepCosts([(1, 0.002), (1024, 1.0)])
    found = controller(flat(0.05), draft, clock)
    one, other = drafting(0.9), drafting(0.9)
    assert found.choose(one, situation(2)) > 0
    clock.now += 1
    found.choose(other, situation(2, num_unseen=500))
    clock.now += 0.4
    found.observe_round(2, Shape(4), 1, 0.4)
    assert found._costs._overhead.count(2, (4, False)) == 0.0
    clock.now += 2
    found.observe_round(2, Shape(4), 1, 0.06)
    assert found._costs._overhead.count(2, (4, False)) > 0.0


@pytest.mark.parametrize(("step", "least", "most"), [(0.001, 8, 10), (0.004, 32, 34), (0.012, 98, 100)])
def test_of_many_short_plain_steps_a_few_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, step: float, least: int, most: int
) -> None:
    clock = Clock()
    seen: list[float] = []
    chooser = controller(flat(step), flat(step), clock)
    observe = chooser._costs.plain.observe

    def note(load: int, seconds: float, now: float, busy: float) -> bool:
        seen.append(seconds)
        return observe(load, seconds, now, busy)

    monkeypatch.setattr(chooser._costs.plain, "observe", note)
    for _ in range(100):
        clock.now += step
        # Two that were in it tell of it, one of them late.
        for seconds in (2 * step, 1.5 * step):
            chooser.observe_plain(2, seconds, clock.now)
    assert least <= len(seen) <= most
    assert chooser.plain_seconds(2) > 1.1 * step, "and learnt from"
    assert seen[1:] == [pytest.approx(1.5 * step)] * (len(seen) - 1)


def test_where_nobody_is_to_draft_a_request_may_know_it_beforehand() -> None:
    clock = Clock()
    chooser = controller(flat(0.01), flat(0.02), clock)
    assert not chooser.declines, "nothing was decided yet"
    each = drafting(0.2)
    assert chooser.choose(each, situation()) == 0
    assert chooser.declines
    better = controller(flat(0.01), flat(0.0001), clock)
    assert better.choose(drafting(0.9), situation()) > 0 or better.measuring
    assert not better.declines


def test_nothing_is_learnt_of_plain_steps_while_one_scouts_in_their_shadow() -> None:
    """Where the drafter is on the same cores, each of its rounds takes from the plain steps beside it."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.04), clock)
    scout = Drafting(found.acceptance, coupled=True)
    assert found.choose(scout, situation(2)) == 0

    def plain_steps(seconds: float) -> None:
        for _ in range(40):
            clock.now += seconds
            found.observe_plain(1, seconds, clock.now)

    plain_steps(0.05)
    before = found.plain_seconds(1)
    assert scout.num_scouting_rounds > 0
    plain_steps(0.09)
    assert found.plain_seconds(1) == before
    while scout.num_scouting_rounds:
        scout.observe_in_shadow(scout.num_scouting_tokens, 0)
    plain_steps(0.09)
    assert found.plain_seconds(1) == pytest.approx(0.09, rel=0.1)


def test_a_scout_that_leaves_before_its_rounds_are_made_silences_nobody() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.04), clock)
    scout = Drafting(found.acceptance, coupled=True)
    assert found.choose(scout, situation(2)) == 0
    assert scout.num_scouting_rounds > 0
    found.leave(scout, None)
    for _ in range(40):
        clock.now += 0.09
        found.observe_plain(1, 0.09, clock.now)
    assert found.plain_seconds(1) == pytest.approx(0.09, rel=0.1)


def test_nothing_is_learnt_of_plain_steps_beside_what_others_draft_beside_prompts() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.0001), clock)
    found.acceptance = at(0.9)
    for _ in range(60):
        clock.now += 1
        gamma = found.choose(drafting(0.9), situation(4, 1, 8, 8 * 4000))
    assert gamma > 0
    assert found.gamma == 0
    for _ in range(40):
        clock.now += 0.2
        found.observe_plain(4, 0.2, clock.now)
    assert found.plain_seconds(4) == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("gamma", [0, 2])
def test_steps_that_are_mostly_prompts_teach_only_where_there_are_few_others(gamma: int, always: bool) -> None:
    """What the prompts took is only reckoned."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.005 if gamma else 0.05), clock)
    sequence = drafting(0.9 if gamma else 0.1)
    before = found._round_seconds(1, Shape(2)), found.plain_seconds(1)
    for i in range(100):
        clock.now += 0.5
        chosen = found.choose(sequence, situation(num_waiting=1 if always or i % 2 else 0))
        if found.measuring:
            found._costs.plain.give_up_measuring()
        elif gamma and chosen:
            found.observe_round(1, Shape(2), 1, 0.09, mostly_prompts=True)
        elif not gamma:
            assert chosen == 0
            found.observe_plain(1, 0.09, clock.now, mostly_prompts=True)
    after = found._round_seconds(1, Shape(2)), found.plain_seconds(1)
    assert (after != before) == always


def test_what_a_measurement_waits_for_may_be_mostly_prompts() -> None:
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    assert found.choose(drafting(0.6), situation(4)) == 0
    assert found.measuring
    for _ in range(20):
        clock.now += 0.05
        found.observe_plain(4, 0.05, clock.now, mostly_prompts=True)
    assert not found.measuring


def test_nobody_joins_beside_prompts_while_plain_steps_are_measured() -> None:
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    assert found.choose(drafting(0.6), situation(4)) == 0
    assert found.measuring
    clock.now += 0.01
    assert found.choose(drafting(0.99), situation(4, 1, 8, 8 * 4000)) == 0


def test_measuring_plain_steps_ends_though_a_sequence_was_scouting() -> None:
    """Its drafter may be away, so that it asks for nothing any more."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.02), clock)
    scout, other = drafting(0.6), drafting(0.6)
    scout.num_scouting_rounds = 5
    clock.now += 60
    assert found.choose(other, situation(2)) == found.choose(scout, situation(2)) == 0
    assert found.measuring
    scout.num_scouting_rounds = 5
    for _ in range(20):
        clock.now += 0.05
        found.observe_plain(2, 0.05, clock.now)
    assert not found.measuring


def test_nothing_is_unlearnt_while_there_is_nothing_to_choose() -> None:
    """Drafting took three times what it should; ten minutes later it is not tried again for that alone."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock)
    sequence = drafting(0.7)
    gammas = []
    for _ in range(200):
        gamma = found.choose(sequence, situation())
        took = 3 * (0.05 + gamma * 0.005) if gamma else 0.05
        if gamma:
            found.observe_round(1, Shape(gamma), 1, took)
        clock.now += took
        gammas.append(gamma)
    assert gammas[0] > 0
    assert gammas[-1] == 0
    found.leave(sequence, 200)
    clock.now += 600
    other = drafting(0.7)
    assert found.choose(other, situation()) == 0


@pytest.mark.parametrize(("catch_up", "load", "goes_on"), [(0.0, 2, True), (3.0, 2, False), (3.0, 1, True)])
def test_what_each_of_several_had_to_catch_up_with_counts_while_it_drafts(
    catch_up: float, load: int, goes_on: bool
) -> None:
    """It is past, but who takes its place beside the others will have to do the same; who comes after one that is
    alone decides for itself."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock)
    sequences = [drafting(0.5) for _ in range(load)]
    for sequence in sequences:
        assert found.choose(sequence, situation(load)) > 0
        assert sequence.active
        sequence.catch_up = catch_up
    gammas = set()
    for _ in range(40):
        clock.now += 0.1
        for sequence in sequences:
            found.choose(sequence, situation(load))
        gammas.add(found.gamma)
    assert (0 not in gammas) == goes_on


def test_what_a_sequence_had_to_catch_up_with_counts_when_it_begins_again() -> None:
    """Else drafting seems to cost nothing, once it has been tried, until the last of these sequences has ended."""
    clock = Clock()
    found = controller(flat(0.05), StepCosts([(1, 0.005), (1024, 0.505)]), clock)
    sequence = drafting(0.7)
    assert found.choose(sequence, situation(num_unseen=1024)) > 0
    found.leave(sequence, None)
    assert found._catching_up.cost_of_rest(sequence, situation(), 2) == pytest.approx(0.25)
    assert found.choose(sequence, situation()) > 0
    assert found._catching_up.cost_of_rest(sequence, situation(), 2) == pytest.approx(0.25)


def test_scouts_take_a_hundredth_of_the_time() -> None:
    clock = Clock()
    found = controller(flat(0.02), flat(0.004), clock)
    sequence = Drafting(found.acceptance)
    scouting = 0.0
    began = clock.now
    while clock.now - began < 600:
        gamma = found.choose(sequence, situation(num_unseen=8))
        if gamma:
            took = 0.02 + gamma * 0.004
            sequence.acceptance.observe(gamma, 0)
            found.observe_round(1, Shape(gamma), 8, took)
            if clock.now - began > 60:
                scouting += took
        else:
            took = 16 * 0.02
            found.observe_plain(1, 0.02, clock.now)
        clock.now += took
    assert 0 < scouting <= 0.02 * (clock.now - began)


def test_scouts_that_find_nothing_new_go_less_often() -> None:
    clock = Clock()
    found = controller(flat(0.02), flat(0.004), clock)
    sequence = drafting(0.1)
    began_at: list[float] = []
    while len(began_at) < 6:
        gamma = found.choose(sequence, situation(num_unseen=8))
        if gamma and (not began_at or clock.now - began_at[-1] > 1.0):
            began_at.append(clock.now)
        if gamma:
            sequence.acceptance.observe(gamma, 0)
            found.observe_round(1, Shape(gamma), 8, 0.02 + gamma * 0.004)
        clock.now += 0.05
    pauses = [after - before for before, after in pairwise(began_at)]
    assert pauses[1] == pytest.approx(2 * pauses[0], rel=0.1)
    assert pauses[2] == pytest.approx(4 * pauses[0], rel=0.1)
    assert pauses[3] == pytest.approx(pauses[2], rel=0.1)


def test_pauses_between_short_loads_earn_a_scout_no_time() -> None:
    """A tenth of a second of 1 ms steps every second: what scouts take is a share of the tenth."""
    clock = Clock()
    found = controller(flat(0.001), flat(0.0002), clock)
    num_scouts = 0
    for _ in range(300):
        sequence = Drafting(at(0.1), coupled=True)
        for _ in range(25):
            assert found.choose(sequence, situation(num_unseen=8)) == 0
            if sequence.num_scouting_rounds:
                num_scouts += 1
                sequence.num_scouting_rounds = 0
            clock.now += 0.004
        found.leave(sequence, 100)
        clock.now += 0.9
    # Ten rounds of 2 ms and two draft steps each, a quarter of a hundredth of the time once they were in vain.
    assert 0 < num_scouts * 0.024 <= 0.006 * 300 * 0.1


def test_the_share_of_steps_that_prompts_fill_is_less_than_that_of_the_time() -> None:
    found = controller(StepCosts([(1, 0.05), (512, 0.5)]), flat(0.01), Clock())
    found._catching_up.prefill_bound.share = 0.5
    assert found._catching_up.prefill_bound_steps(1) == pytest.approx(1 / 11)


def test_who_leaves_is_forgotten() -> None:
    found = controller(flat(0.05), flat(0.002), Clock())
    sequence = drafting(0.9)
    found.leave(sequence, 10)  # never here
    found.choose(sequence, situation())
    found.leave(sequence, 10)
    found.leave(sequence, 10)
    assert not found._members


def test_a_slow_round_teaches_no_more_than_a_somewhat_slow_one() -> None:
    def gamma_after(change: Callable[[GammaController], None]) -> int:
        clock = Clock()
        found = controller(flat(0.05), flat(0.002), clock)
        sequence = drafting(0.8)
        for _ in range(20):
            gamma = found.choose(sequence, situation())
            found.observe_round(1, Shape(gamma), 1, 0.05 + gamma * 0.002)
            clock.now += 0.06
        change(found)
        clock.now += 1
        return found.choose(sequence, situation())

    assert gamma_after(lambda _: None) > 0
    assert gamma_after(lambda found: found.observe_round(1, Shape(4), 1, 100.0)) > 0
