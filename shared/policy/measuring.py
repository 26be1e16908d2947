"""When everybody decodes plainly for a few steps, so that it is known what drafting is held against."""

from __future__ import annotations

from collections.abc import Callable

from shared.policy.round_costs import RoundCosts
from shared.policy.shape import PLAIN, Shape
from shared.policy.step_looks import StepLooks

# What plain steps take is measured before drafting begins and again after so many seconds, and before it ends if
# that is so long ago; unless drafting promises so much that it hardly matters.
_EVERY_SECONDS = 20.0
_BEFORE_END_SECONDS = 1.0
_SURE_FROM = 1.3
_IF_SURE_EVERY_SECONDS = 60.0
# Where it promises little it tells most and costs least.
_CLOSE_UP_TO = 1.15
_IF_CLOSE_EVERY_SECONDS = 15.0
# And at once where rounds seem to take less than a plain step; but for this pause, which doubles while it seems so.
_FIRST_DOUBT_SECONDS = 1.0
# So soon after drafting began they are measured again: then both were measured at much the same time.
_ROUNDS_BEFORE_MEASURED = 16.0
# Where rounds are under way, so many of them are waited for.
_ROUNDS_LEFT = 1.2


class Measuring:
    """Has plain steps measured again when what is known of them is old, the sooner the more hangs on it."""

    def __init__(self, costs: RoundCosts, looks: StepLooks, clock: Callable[[], float]) -> None:
        """`looks`: woken where plain steps are to be seen."""
        self._costs = costs
        self._looks = looks
        self._clock = clock
        self._doubt_seconds = _FIRST_DOUBT_SECONDS

    def check(self, load: int, best: Shape, gain: float, shape: Shape, under_way: bool, busy: float) -> bool:
        """`best` is thought to be, by that `gain`, where it was `shape`, whose rounds may be `under_way`. Returns
        whether it is to be seen first if that should end: maybe everything takes longer now. `busy`: see
        `RoundCosts`."""

        def if_older(seconds: float, at_once: bool = True) -> bool:
            rounds_left = _ROUNDS_LEFT * self._costs.seconds(load, shape, busy) if under_way else 0.0
            measured_from = self._clock() + rounds_left
            if not self._costs.plain.measure_if_older(load, seconds, busy, measured_from, at_once):
                return False
            self._looks.wake()
            return True

        if best == PLAIN:
            self._doubt_seconds = _FIRST_DOUBT_SECONDS
            return shape != PLAIN and if_older(_BEFORE_END_SECONDS)
        if not self._costs.beat_plain_steps(load, busy):
            self._doubt_seconds = _FIRST_DOUBT_SECONDS
        elif if_older(self._doubt_seconds):
            self._doubt_seconds *= 2
        sure, every = gain >= _SURE_FROM, _every(gain)
        if_older(every, at_once=not sure)
        trials = self._costs.trials(load)
        unknown = not sure and trials.is_forgotten(busy)
        if not trials.running and (unknown or not self._costs.plain.is_settled(load)):
            first_rounds = _ROUNDS_BEFORE_MEASURED * self._costs.expected(load, best)
            self._costs.plain.measure_soon(load, every, first_rounds)
        return False


def _every(gain: float) -> float:
    """After how many seconds they are measured again, where drafting promises so much."""
    if gain >= _SURE_FROM:
        return _IF_SURE_EVERY_SECONDS
    return _EVERY_SECONDS if gain >= _CLOSE_UP_TO else _IF_CLOSE_EVERY_SECONDS
