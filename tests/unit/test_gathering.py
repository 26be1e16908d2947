"""Whether a step waits for drafts on their way, and that it never waits for long: by a clock of the test's own."""

from __future__ import annotations

import random
import statistics

import pytest

from services.target import gathering
from services.target.gathering import Gathering

PATIENCE = 1 + gathering._LATENESS  # as a share of the usual absence
ALWAYS = 1e9  # a step so dear that waiting costs less


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    def __init__(self, usual: float | None = None) -> None:
        self.clock = Clock()
        self.gathering = Gathering(self.clock)
        if usual is not None:
            self.absence(usual)

    def absence(self, seconds: float) -> None:
        self.gathering.left("learnt from")
        self.clock.now += seconds
        self.gathering.returned("learnt from")

    @property
    def usual(self) -> float:
        """What absences usually take, as far as it knows: from how long it would wait."""
        self.gathering.left("looked at")
        wait = self.gathering.seconds_to_wait(1, ALWAYS)
        self.gathering.forget("looked at")
        return wait


def test_with_nobody_away_no_step_waits() -> None:
    bench = Bench()
    assert not bench.gathering.any_away
    assert bench.gathering.seconds_to_wait(1, ALWAYS) == 0.0
    bench.absence(0.5)
    assert not bench.gathering.any_away
    assert bench.gathering.seconds_to_wait(1, ALWAYS) == 0.0


def test_with_nothing_ready_there_is_no_step_to_wait() -> None:
    bench = Bench(usual=0.5)
    bench.gathering.left("a")
    assert bench.gathering.any_away
    assert bench.gathering.seconds_to_wait(0, ALWAYS) == 0.0


def test_nothing_is_waited_for_before_anything_ever_came_back() -> None:
    bench = Bench()
    bench.gathering.left("a")
    assert bench.gathering.seconds_to_wait(1, ALWAYS) == 0.0


@pytest.mark.parametrize("num_away", [1, 2, 7])
@pytest.mark.parametrize("num_ready", [1, 2, 7])
@pytest.mark.parametrize("step", [0.01, 0.2, 0.6, 1.0, 5.0, 20.0])
def test_a_step_waits_while_that_costs_less_than_it_saves(num_away: int, num_ready: int, step: float) -> None:
    bench = Bench(usual=1.0)
    for i in range(num_away):
        bench.gathering.left(i)
    # Those away would lose steps, those ready lose the time until they usually come.
    pays = gathering._STEPS_LOST * num_away * step > num_ready * 1.0
    assert bench.gathering.seconds_to_wait(num_ready, step) == pytest.approx(1.0 if pays else 0.0)


@pytest.mark.parametrize(("late", "left"), [(0.2, 0.3), (0.49, 0.01)])
def test_for_those_already_late_a_step_waits_if_the_rest_of_patience_pays(late: float, left: float) -> None:
    bench = Bench(usual=1.0)
    bench.gathering.left("late")
    bench.clock.now += 1.0 + late
    assert bench.gathering.seconds_to_wait(1, 1.1 * left / gathering._STEPS_LOST) == pytest.approx(left)
    assert bench.gathering.seconds_to_wait(1, 0.9 * left / gathering._STEPS_LOST) == 0.0


def test_it_waits_for_the_latest_and_no_longer_than_till_then() -> None:
    bench = Bench(usual=1.0)
    bench.gathering.left("early")
    bench.clock.now += 0.75
    bench.gathering.left("late")
    assert bench.gathering.seconds_to_wait(1, ALWAYS) == pytest.approx(1.0)
    bench.clock.now += 0.5
    assert bench.gathering.seconds_to_wait(1, ALWAYS) == pytest.approx(0.5)
    bench.gathering.returned("late")
    bench.gathering.returned("early")
    assert bench.gathering.seconds_to_wait(1, ALWAYS) == 0.0


def test_patience_ends_and_one_that_never_returns_is_waited_for_once() -> None:
    bench = Bench(usual=1.0)
    bench.gathering.left("gone")
    waited = 0.0
    num_delayed = 0
    for _ in range(100):
        delayed = False
        while (wait := bench.gathering.seconds_to_wait(1, ALWAYS)) > 0:
            bench.clock.now += wait
            waited += wait
            delayed = True
        num_delayed += delayed
    assert num_delayed == 1
    assert waited == pytest.approx(PATIENCE * 1.0)
    # Nor does it count among those whom a wait for another would serve.
    for i in range(9):
        bench.gathering.left(f"gone {i}")
    bench.clock.now += 2 * PATIENCE
    bench.gathering.left("away")
    assert bench.gathering.seconds_to_wait(1, step_seconds=0.9 / gathering._STEPS_LOST) == 0.0
    assert bench.gathering.seconds_to_wait(1, step_seconds=1.1 / gathering._STEPS_LOST) > 0.0


def test_one_that_was_given_up_is_not_waited_for() -> None:
    bench = Bench(usual=1.0)
    bench.gathering.left("a")
    bench.gathering.forget("a")
    bench.gathering.forget("a")
    bench.gathering.forget("never seen")
    assert not bench.gathering.any_away
    assert bench.gathering.seconds_to_wait(1, ALWAYS) == 0.0
    # And says nothing of how long absences take.
    bench.clock.now += 500
    bench.gathering.returned("a")
    assert bench.usual == pytest.approx(1.0)


def test_the_usual_absence_is_learnt_and_a_long_one_says_little() -> None:
    bench = Bench(usual=0.1)
    assert bench.usual == pytest.approx(0.1)
    for _ in range(50):
        bench.absence(0.3)
    assert bench.usual == pytest.approx(0.3, rel=1e-3)
    bench.absence(1000.0)
    most = 1 + gathering._WEIGHT * (gathering._MOST_TIMES - 1)
    assert 0.3 < bench.usual <= 0.3 * most * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_usual_absence_stays_near_the_median_with_a_heavy_tail(seed: int) -> None:
    dice = random.Random(seed)
    bench = Bench(usual=0.05)
    seen, known = [], []
    for _ in range(1000):
        absence = 0.05 * dice.lognormvariate(0, 0.1) * (dice.uniform(10, 1000) if dice.random() < 0.03 else 1.0)
        seen.append(absence)
        bench.absence(absence)
        known.append(bench.usual)
    assert statistics.fmean(known) == pytest.approx(statistics.median(seen), rel=0.25)
    assert statistics.fmean(seen) > 5 * statistics.median(seen), "or there would be nothing to tell apart"


def test_sequences_out_of_step_with_each_other_come_together() -> None:
    """Two halves that take turns would each wait out the other's steps for ever."""

    def num_in_steps(patient: bool) -> list[int]:
        bench = Bench()
        back_at = {i: bench.clock.now + (0.0 if i < 4 else 0.005) for i in range(8)}
        away: set[int] = set()
        sizes = []

        def pass_time(until: float) -> None:
            bench.clock.now = until
            for i in sorted(away, key=back_at.__getitem__):
                if back_at[i] <= until:
                    bench.clock.now = back_at[i]
                    bench.gathering.returned(i)
                    away.discard(i)
            bench.clock.now = until

        for _ in range(20):
            pass_time(max(bench.clock.now, min(back_at.values())))
            while True:
                ready = [i for i in range(8) if i not in away and back_at[i] <= bench.clock.now]
                wait = bench.gathering.seconds_to_wait(len(ready), 0.03) if patient else 0.0
                if wait <= 0:
                    break
                end = bench.clock.now + wait
                pass_time(min(end, min((back_at[i] for i in away), default=end)))
            pass_time(bench.clock.now + 0.03)
            for i in ready:
                bench.gathering.left(i)
                away.add(i)
                back_at[i] = bench.clock.now + 0.01
            sizes.append(len(ready))
        return sizes

    assert num_in_steps(patient=False) == [4] * 20
    assert num_in_steps(patient=True)[5:] == [8] * 15


@pytest.mark.parametrize("seed", range(60))
def test_whatever_comes_and_goes_waiting_is_bounded(seed: int) -> None:
    """Sequences leave, come back soon, late or never, or are given up; a step is tried again and again.

    No step waits for longer than patience with the longest absence, nor for more than it can save; and all
    steps together no longer than patience once for each absence.
    """
    dice = random.Random(seed)
    bench = Bench()
    longest = dice.choice([0.01, 0.1, 1.0])
    tail = dice.choice([1.0, 20.0])
    lost = dice.choice([0.0, 0.1, 0.9])
    absences = num_left = 0
    returns: dict[int, float] = {}  # of those away that do return: when
    ready: set[int] = set(range(dice.randint(1, 9)))
    num_sequences, most_known, total = len(ready), 0.0, 0.0

    def pass_time(until: float) -> None:
        for i in sorted(returns, key=returns.__getitem__):
            if returns[i] <= until:
                bench.clock.now = returns.pop(i)
                bench.gathering.returned(i)
                ready.add(i)
        bench.clock.now = until

    for _ in range(150):
        step = dice.choice([0.001, 0.01, 0.1, 1.0])
        waited = 0.0
        while (wait := bench.gathering.seconds_to_wait(len(ready), step)) > 0:
            num_away = num_left - absences + len(returns)
            assert len(ready) * wait < gathering._STEPS_LOST * num_away * step
            end = min([bench.clock.now + wait, *returns.values()])
            waited += end - bench.clock.now
            pass_time(end)
        assert waited <= PATIENCE * most_known + 1e-9
        total += waited
        pass_time(bench.clock.now + step)
        for i in list(ready):
            if dice.random() < 0.8:
                ready.discard(i)
                bench.gathering.left(i)
                num_left += 1
                if dice.random() < lost:
                    if dice.random() < 0.5:
                        bench.gathering.forget(i)
                    ready.add(num_sequences)  # another takes its place
                    num_sequences += 1
                else:
                    absence = dice.uniform(0.2, 1.0) * longest * (tail if dice.random() < 0.1 else 1.0)
                    most_known = max(most_known, absence)
                    returns[i] = bench.clock.now + absence
                    absences += 1
        if not ready and returns:
            pass_time(min(returns.values()))
    assert total <= PATIENCE * most_known * num_left + 1e-9
    assert num_left > 20
