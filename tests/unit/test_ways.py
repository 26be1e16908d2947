"""Plain steps, chains or trees: what brings most is gone, and the others are tried for a small share of the time."""

from __future__ import annotations

import itertools
import random
from statistics import mean

import pytest

from shared.policy.ways import Way, Ways

Worker = dict[Way, tuple[float, float]]
"""Tokens that a step of each way brings on average, and the seconds that it takes."""


def serve(ways: Ways, worker: Worker, num_steps: int, seed: int = 1) -> tuple[float, dict[Way, float]]:
    """Such steps of one sequence, whose tokens are a matter of luck: tokens a second over those of the best way, and
    the share of the steps that went each."""
    rng, seconds, num_tokens = random.Random(seed), 0.0, 0
    gone = dict.fromkeys(Way, 0.0)
    for _ in range(num_steps):
        way = ways.choose(may_try=True)
        expected, took = worker[way]
        brought = 1 + sum(rng.random() < (expected - 1) / 6 for _ in range(6))
        took *= rng.lognormvariate(0, 0.05)
        ways.observe(way, brought, took, 0.0)
        seconds, num_tokens = seconds + took, num_tokens + brought
        gone[way] += 1 / num_steps
    return num_tokens / seconds / max(tokens / took for tokens, took in worker.values()), gone


def worker(plain: tuple[float, float], chain: tuple[float, float], tree: tuple[float, float]) -> Worker:
    return {Way.PLAIN: plain, Way.CHAIN: chain, Way.TREE: tree}


@pytest.mark.parametrize("best", Way)
@pytest.mark.parametrize(("second", "third"), [(0.8, 0.6), (0.5, 0.5), (0.9, 0.3)])
def test_the_best_of_three_is_gone(best: Way, second: float, third: float) -> None:
    """Whichever it is, and in whatever order the others come: on average, as a second best of nine tenths may be gone
    for a while by chance."""
    reached, shares = [], []
    tokens = {Way.PLAIN: 1.0, Way.CHAIN: 2.5, Way.TREE: 3.5}
    for others in itertools.permutations(way for way in Way if way is not best):
        rates = {best: 1.0, others[0]: second, others[1]: third}
        at_work = {way: (tokens[way], 0.02 * tokens[way] / rate) for way, rate in rates.items()}
        for seed in range(1, 9):
            ways = Ways()
            serve(ways, at_work, 2000, seed)
            rate, gone = serve(ways, at_work, 6000, seed=-seed)
            reached.append(rate)
            shares.append(gone[best])
    assert mean(shares) > 0.88
    assert mean(reached) > 0.98
    assert min(reached) > 0.95


def steps_until(ways: Ways, at_work: Worker, wanted: Way) -> int:
    """How many it takes until that way is gone, some hundreds more or less."""
    num_steps = 0
    while ways.way is not wanted and num_steps < 100_000:
        serve(ways, at_work, 500, seed=num_steps)
        num_steps += 500
    return num_steps


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_what_begins_to_pay_is_found_from_any_other(kind: str) -> None:
    ways, best = Ways(), Way(kind)
    for before in [way for way in Way if way is not best] * 2:
        at_work = worker((1.0, 0.02), (2.0, 0.06), (3.0, 0.09))
        at_work[before] = (at_work[before][0], at_work[before][1] / 2.5)
        assert steps_until(ways, at_work, before) < 20_000
        serve(ways, at_work, 2000)
        at_work[best] = (at_work[best][0], 0.01)
        assert steps_until(ways, at_work, best) < 40_000, "what seems to bring a third is tried for 1/400 of the time"


def test_of_two_that_bring_the_same_none_costs_much() -> None:
    at_work = worker((1.0, 0.02), (2.5, 0.03), (3.5, 0.042))
    ways = Ways()
    serve(ways, at_work, 1000)
    rate, gone = serve(ways, at_work, 10_000, seed=2)
    assert rate > 0.98
    assert gone[Way.PLAIN] < 0.02


WORSE = worker((1.0, 0.02), (2.5, 0.1), (3.5, 0.14))
"""Where drafting brings half of plain, or less."""


@pytest.mark.parametrize("share", [0.8, 0.95, 0.98])
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.05])
def test_where_most_steps_carry_prompts_what_is_worse_is_left_all_the_same(share: float, scale: float) -> None:
    """These are never told of. Steps of 20 ms, and of 2 and 1."""
    ways, rng = Ways(), random.Random(1)
    for _ in range(2):
        gone = dict.fromkeys(Way, 0)
        for _ in range(3000):
            way = ways.choose(may_try=True)
            gone[way] += 1
            while rng.random() < share:
                gone[ways.choose(may_try=True)] += 1
            ways.observe(way, round(WORSE[way][0]), scale * WORSE[way][1], 0.0)
    assert gone[Way.PLAIN] > 0.9 * sum(gone.values())


@pytest.mark.parametrize("num_forced", [1, 2, 3])
def test_steps_that_nobody_chose_keep_nothing_from_being_compared(num_forced: int) -> None:
    """Such as are plain because no drafter is ready."""
    ways = Ways()
    for _ in range(2000):
        for _ in range(num_forced):
            ways.observe(Way.PLAIN, 1, 0.02, 0.0)
        way = ways.choose(may_try=True)
        ways.observe(way, round(WORSE[way][0]), WORSE[way][1], 0.0)
    assert ways.way is Way.PLAIN


def test_what_is_tried_is_not_judged_by_steps_in_which_hardly_anybody_may_have_it() -> None:
    ways = Ways()
    serve(ways, WORSE, 2000)
    assert ways.way is Way.PLAIN
    num_tried = 0
    for step in range(40_000):  # by now it pays, but in 19 of 20 steps a tree is a plain step that takes longer
        many = step % 40 < 2
        way = ways.choose(may_try=many)
        num_tried += way.drafts
        pays = way.drafts and many
        ways.observe(way, 3 if pays else 1, 0.03 if pays else 0.025 if way.drafts else 0.02, 0.0)
        if ways.way.drafts:
            return
    pytest.fail(f"{num_tried} steps had drafts")


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.1])
def test_what_was_spent_so_that_sequences_have_drafts_counts_once(scale: float) -> None:
    """0.35 s for 100 tokens, of which a tree brings two in 0.01 s, and a plain step one: that, and less of all."""
    ways, left = Ways(), 0
    for _ in range(3000):
        if left <= 0:
            ways.charge(scale * 0.35, 100)
            left = 100
        way = ways.choose(may_try=True)
        brought = 2 if way.drafts else 1
        ways.observe(way, brought, scale * 0.01, 0.0)
        left -= brought
    assert ways.times(Way.PLAIN) == pytest.approx(1.04 * 1.01 * 100 / (2 / 0.017), abs=0.03)


@pytest.mark.parametrize("seconds", [0.0006, 0.001, 0.004, 0.02])
@pytest.mark.parametrize(("num_ready", "num_not"), [(2, 2), (3, 1), (2, 5), (8, 8)])
def test_what_begins_to_pay_is_found_though_not_every_step_may_have_it(
    seconds: float, num_ready: int, num_not: int
) -> None:
    """Steps with somebody to try it with and such without, in turns shorter than what it takes to settle."""
    ways = Ways()
    serve(ways, worker((1.0, seconds), (1.0, 3 * seconds), (1.0, 3 * seconds)), 600)
    assert ways.way is Way.PLAIN
    for step in range(10_000):
        way = ways.choose(may_try=step % (num_ready + num_not) < num_ready)
        ways.observe(way, 4 if way.drafts else 1, 1.2 * seconds if way.drafts else seconds, 0.0)
    assert ways.way.drafts


def test_chains_and_trees_are_not_tried_without_whom_to_try_them_with() -> None:
    ways = Ways()
    serve(ways, worker((1.0, 0.01), (2.0, 0.05), (3.0, 0.08)), 2000)
    assert ways.way is Way.PLAIN
    num_ready = 0
    for _ in range(5000):
        assert ways.choose(may_try=False) is Way.PLAIN
        ways.observe(Way.PLAIN, 1, 0.01, 0.0)
        num_ready += ways.may_draft()
    assert 0 < num_ready < 3000
    while not ways.may_draft():
        assert ways.choose(may_try=True) is Way.PLAIN
        ways.observe(Way.PLAIN, 1, 0.01, 0.0)
    assert ways.choose(may_try=True).drafts


def test_a_step_that_nobody_chose_is_none_of_a_trial() -> None:
    """As where the one that was chosen had prompts beside it, and the next nobody to draft for."""
    ways = Ways()
    while ways.choose(True) is not Way.TREE or ways._tried is not None:  # until a tree is gone
        ways.observe(ways._chosen or Way.TREE, 9 if ways._chosen is Way.TREE else 1, 0.02, 0.0)
    while ways.choose(True) is not Way.CHAIN:
        ways.observe(ways.way, 9, 0.02, 0.0)
    compared = ways._known[Way.CHAIN].compared
    before = ways._turn_steps, ways.step_seconds(Way.CHAIN), compared.gone.num_steps, compared.tried.num_steps
    ways._known[Way.PLAIN].goodput = type(ways._known[Way.PLAIN].goodput)()
    ways.observe(Way.PLAIN, 1, 0.004, 0.0)
    ways.observe(Way.TREE, 1, 0.004, 0.0)
    assert ways.step_seconds(Way.PLAIN) == pytest.approx(0.004)
    after = ways._turn_steps, ways.step_seconds(Way.CHAIN), compared.gone.num_steps, compared.tried.num_steps
    assert after == before


def test_a_step_that_has_nobody_to_be_tried_with_is_none_of_a_trial_nor_counts_what_comes_behind_it() -> None:
    ways = Ways()
    serve(ways, WORSE, 2000)
    while not (way := ways.choose(may_try=True)).drafts:
        ways.observe(way, 1, 0.02, 0.0)
    compared = ways._known[way].compared
    for _ in range(10):
        ways.observe(way, 2, 0.1, 0.0)
        assert ways.choose(may_try=False) is Way.PLAIN
        ways.observe(Way.PLAIN, 1, 0.03, 0.0)
        assert ways.choose(may_try=True) is way, "until some count"
    assert compared.gone.num_steps == compared.tried.num_steps == 0
    for num_counted in (0, 1):  # behind a plain step it takes in what that brought
        ways.observe(way, 2, 0.1, 0.0)
        assert compared.tried.num_measured == num_counted
        ways.choose(may_try=True)


def test_a_trial_without_anybody_to_try_it_with_comes_to_nothing() -> None:
    ways = Ways()
    serve(ways, WORSE, 2000)
    while not ways.choose(may_try=True).drafts:
        ways.observe(Way.PLAIN, 1, 0.02, 0.0)
    num_ready = 0
    for _ in range(5000):
        assert ways.choose(may_try=False) is Way.PLAIN
        ways.observe(Way.PLAIN, 1, 0.02, 0.0)
        num_ready += ways.may_draft()
    assert num_ready < 3000


def test_a_trial_that_came_to_nothing_stays_away_for_what_it_took_and_not_for_what_lay_in_it() -> None:
    """A minute in which nobody was ready, or asked, between its steps."""
    ways = Ways()
    serve(ways, WORSE, 2000)
    tried = ways.choose(may_try=True)
    while not tried.drafts:
        ways.observe(Way.PLAIN, 1, 0.02, 0.0)
        tried = ways.choose(may_try=True)
    for _ in range(3000):
        ways.observe(Way.PLAIN, 1, 0.02, 0.0)
    while ways.choose(may_try=True) is tried:  # in steps with prompts
        pass
    num_steps = 0
    while ways.choose(may_try=True) is not tried:
        ways.observe(Way.PLAIN, 1, 0.02, 0.0)
        num_steps += 1
    assert num_steps < 3000


def test_a_trial_that_came_to_nothing_says_nothing_of_those_behind_the_next() -> None:
    ways = Ways()
    serve(ways, WORSE, 2000)
    for _ in range(3):
        while not ways.choose(may_try=True).drafts:
            ways.observe(Way.PLAIN, 1, 0.02, 0.0)
        for _ in range(1000):  # which have prompts
            ways.choose(may_try=True)
        serve(ways, WORSE, 20_000)
    for _ in range(4):
        while not (way := ways.choose(may_try=True)).drafts:
            ways.observe(Way.PLAIN, 1, 0.02, 0.0)
        compared = ways._known[way].compared
        assert compared.gone.num_steps == compared.tried.num_steps == 0
        serve(ways, WORSE, 20_000)


def test_drafts_take_more_than_is_seen_of_them() -> None:
    """By 1 % of their steps: whoever takes in what they bring has the same cores. And plain steps on their own are
    taken to be faster by 4 % than those in turns with them."""
    ways = Ways()
    for _ in range(300):
        way = ways.choose(may_try=True)
        ways.observe(way, 2 if way.drafts else 1, 0.03 if way.drafts else 0.02, 0.0)
    assert ways.way.drafts
    assert ways.times(Way.PLAIN) == pytest.approx(0.75 * 1.01 * 1.04, rel=1e-3)
    assert ways._now.rate == pytest.approx(2 / 0.03 / 1.01, rel=1e-3)


def test_plain_steps_on_their_own_are_not_judged_by_those_in_turns_with_drafts() -> None:
    """Which take 1.1 times as long: a tree brings more than these, and 0.95 of what they bring when nobody drafts."""
    ways, gone = Ways(), []
    for step in range(20_000):
        tree = 0.01 if step < 500 else 0.003 / 0.95
        drafted = ways.may_draft()
        way = ways.choose(may_try=True) if drafted else Way.PLAIN
        ways.observe(way, 3 if way.drafts else 1, tree if way.drafts else 0.0011 if drafted else 0.001, 0.0)
        gone.append(way)
    assert gone[500:].count(Way.PLAIN) > 0.95 * 19_500


def test_what_is_gone_is_known_by_more_steps_than_those_of_a_trial() -> None:
    """Trees bring 1 or 9 tokens, as luck has it, and 1.08 of what plain steps do, who are taken to be faster on their
    own: of 32 the average errs by 14 %."""
    rng, shares = random.Random(1), []
    for _ in range(10):
        ways, gone = Ways(), []
        for _ in range(20_000):
            way = ways.choose(may_try=True)
            tokens = (9 if rng.random() < 0.5 else 1) if way is Way.TREE else 1
            ways.observe(way, tokens, 0.005 / 1.13 if way is Way.TREE else 0.001, 0.0)
            gone.append(way)
        num = gone.count(Way.TREE)
        shares.append(5 * num / (5 * num + len(gone) - num))
    assert mean(shares) > 0.8, "of the time"


def test_more_sequences_are_no_reason_to_go_another_way() -> None:
    """Now six of them, now eleven; trees bring 0.9 of what plain steps do, of either."""
    ways, gone, num = Ways(), [], 6
    for step in range(30_000):
        if step % 400 == 0:
            num = 17 - num
        way = ways.choose(may_try=True)
        ways.observe(way, num * (3 if way is Way.TREE else 1), 0.03 / 0.9 if way.drafts else 0.01, 0.0, num)
        gone.append(way)
    assert gone[1000:].count(Way.PLAIN) > 0.97 * 29_000


@pytest.mark.parametrize("spell", [100, 300, 1000])
def test_texts_in_which_every_way_brings_more_are_no_reason_to_draft(spell: int) -> None:
    """Four times the tokens in 1.5 times the time, in a third of the steps; trees bring 0.85 of what plain steps do."""
    shares = []
    for start in range(6):
        ways, gone = Ways(), []
        for step in range(start * spell // 2, 30_000):
            is_rich = step % (3 * spell) < spell
            way = ways.choose(may_try=True)
            tokens, seconds = (3, 3 / 0.85) if way.drafts else (1, 1)
            ways.observe(way, tokens * (4 if is_rich else 1), 0.02 * seconds * (1.5 if is_rich else 1), 0.0)
            gone.append(way)
        shares.append(gone[1000:].count(Way.PLAIN) / len(gone[1000:]))
    assert mean(shares) > 0.95


def test_drafts_that_win_on_the_steps_of_a_trial_alone_come_as_no_surprise_each_time() -> None:
    """In turns with them plain steps take 1.3 times as long, which is known."""
    ways, num_drafted = Ways(), 0
    for step in range(20_000):
        tree = 0.005 if step < 2000 else 0.003 / 0.93
        is_expected = ways.may_draft()
        way = ways.choose(may_try=True) if is_expected else Way.PLAIN
        ways.observe(way, 3 if way.drafts else 1, tree if way.drafts else 0.0013 if is_expected else 0.001, 0.0)
        num_drafted += way.drafts and step >= 5000
    assert num_drafted < 0.03 * 15_000
