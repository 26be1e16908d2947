"""What rounds take, and what plain steps do instead: measured at warm-up, and learnt from all that are made."""

from __future__ import annotations

import math

from shared.policy.account import Closed
from shared.policy.overhead import Overhead, forgotten, nearest_power
from shared.policy.plain_steps import PlainSteps
from shared.policy.shape import PLAIN, Shape
from shared.policy.step_costs import StepCosts
from shared.policy.trees import shallower
from shared.policy.trials import Trials

# How much more a shape that was never tried is taken to promise, so that each that comes close gets its chance. Smaller
# ones are taken to be free of what larger ones were found to take beyond their model, too, but not to take less than
# their share of those. And the next smaller one that was not tried for long, ever more of it, but slowly: what the one
# in use takes may have been learnt while the machine was faster, and nothing else tells the two apart. Of trees the
# larger and the next deeper ones, too, up to so many times its tokens: they may have met a bad moment. And beside
# chains any tree, as long as no other was: what their rows take may have been measured in one.
_CURIOSITY = 0.04
_CURIOSITY_AGAIN = 0.05
_CURIOSITY_GROWS = 0.5
_MUCH_LARGER = 2
# Rounds that seem to take less than this share of a plain step, which each of them holds, are not believed.
_IMPOSSIBLE_SHARE = 0.9


class RoundCosts:
    """Of one target worker and the drafter: P, which a plain step of everybody takes, and R, which a round does.

    With L sequences a plain step takes P = T(L) (1 + overhead) and brings S tokens (more than 1 where the target drafts
    itself), a round of γ draft tokens

        R = (P + T(L (γ + 1)) - T(L) + γ D(L)) (1 + overhead)

    and one of trees of n tokens verifies L (n + 1) rows, and takes D(L) + (γ - 1) D(L min(n, 8)) to draft. T and D are
    the step costs that target and drafter measured at warm-up; the overheads are learnt from what steps and rounds
    really take, transport, waiting and contexts included, but neither prompts in the same steps nor the drafter's
    catching up. Where nobody drafts, rounds are taken to become slower and faster with the plain steps; while they go
    on it is known, and plain steps to some extent with them. What rounds took is forgotten while there are none, each
    time that they were in vain more slowly.

    `busy`, of the methods that take it, are seconds in which there was something to choose.
    """

    def __init__(self, target: StepCosts, draft: StepCosts) -> None:
        self.target = target
        self.draft = draft
        self.plain = PlainSteps(target)
        self._overhead = Overhead()
        # How many rounds of trees still say how things are; to begin with what was measured counts as one. This, and
        # trials, by power of two of the load, as the overheads.
        self._recent_trees: dict[int, float] = {}
        self._trials: dict[int, Trials] = {}

    def catch_up_seconds(self, num_unseen: int) -> float:
        """What the drafter takes for committed tokens it has not seen, beyond what the last one always takes."""
        return self.draft.seconds(num_unseen) - self.draft.seconds(1) if num_unseen > 1 else 0.0

    def expected(self, load: int, shape: Shape) -> float:
        """What a round of everybody should take, without overhead."""
        verify = self.target.seconds(load * (shape.num_verified + 1)) - self.target.seconds(load)
        drafting = shape.num_draft_tokens * self.draft.seconds(load)
        if shape.is_tree:
            level = self.draft.seconds(load * shape.num_step_rows)
            drafting = self.draft.seconds(load) + (shape.num_draft_tokens - 1) * level
        return self.plain.seconds(load) + verify + drafting

    def seconds(self, load: int, shape: Shape, busy: float) -> float:
        """What a round of everybody takes, as far as was seen: R. A bad one is forgotten while there are none."""
        share = self._overhead.share(load, shape)
        return self.expected(load, shape) * (1 + min(share, share * self._trials_at(load).confidence(busy)))

    def gain(self, load: int, shape: Shape, tokens: float, num_follow: float, catch_up: float, busy: float) -> float:
        """What rounds that bring so many `tokens` bring, times plain decoding: P m / S / (C + R m / E)."""
        plain = self.plain.seconds(load) * num_follow / self.plain.tokens(load)
        return plain / (catch_up + num_follow * self.seconds(load, shape, busy) / tokens)

    def least_likelihood(self, load: int, num_verified: int) -> float:
        """How likely each of so many draft tokens must be to be accepted so as to pay for its row of verification: at
        least what that takes, in plain steps."""
        longer = self.target.seconds(load * (num_verified + 1)) - self.target.seconds(load)
        return min(longer / num_verified * self.plain.tokens(load) / self.plain.seconds(load), 1.0)

    def is_untried(self, load: int) -> bool:
        """Whether there were no rounds at that load."""
        return not self._overhead.is_known(load)

    def curiosity(self, load: int, shape: Shape, used: Shape, busy: float) -> float:
        """How many times more a shape is taken to promise for not having been tried, or not lately, while one is
        `used`."""
        credit, again = _CURIOSITY, 0.0
        gamma, of_used = shape.num_draft_tokens, used.num_draft_tokens
        if gamma <= of_used and shape.num_verified <= used.num_verified and shape != used:
            next_chain = of_used if used.is_tree else of_used - 1
            next_smaller = shallower(of_used) if shape.is_tree else next_chain
            again = _CURIOSITY_AGAIN if gamma == next_smaller else 0.0
            at_least = max(self.expected(load, shape), self.seconds(load, used, busy) * gamma / of_used)
            credit += max(0.0, self.seconds(load, shape, busy) / at_least - 1)
        elif shape.is_tree and used.is_tree and of_used in (gamma, shallower(gamma)) and shape != used:
            again = _CURIOSITY_AGAIN if shape.num_verified < _MUCH_LARGER * used.num_verified else 0.0
        count, num_recent = self._overhead.count(load, shape), self._overhead.num_recent(load, shape)
        if shape.is_tree and used != PLAIN and not used.is_tree:
            again, num_recent = _CURIOSITY_AGAIN, self._recent_trees.get(nearest_power(load), 1.0)
        if 0 < num_recent < 1:  # its logarithm: how long ago
            again *= 1 + _CURIOSITY_GROWS * math.log(1 - math.log(num_recent) / 2)
        return (1 + credit / (1 + count)) * (1 + again / (1 + num_recent))

    def beat_plain_steps(self, load: int, busy: float) -> bool:
        """Whether rounds take less than a plain step, though each holds one: it is not known what these take."""
        return self.seconds(load, Shape(1), busy) < _IMPOSSIBLE_SHARE * self.plain.seconds(load)

    def observe_round(
        self, load: int, shape: Shape, num_unseen: int, seconds: float, weight: float, of_all: bool, busy: float
    ) -> bool:
        """A round took that long, in which the drafter caught up with `num_unseen` tokens. `weight`: its say among
        those that ended with it; `of_all`: whether everybody drafts.

        Returns whether rounds turn out to take something quite different, or what was to be found out is.
        """
        recent = self._recent_trees.get(nearest_power(load), 1.0)
        self._recent_trees[nearest_power(load)] = recent + weight if shape.is_tree else forgotten(recent, weight)
        before = self.expected(load, shape)
        expected = before + self.catch_up_seconds(num_unseen)
        change = self._overhead.observe(load, shape, expected, seconds, weight)
        trials = self.trials(load)
        found_out = change is None and not trials.measuring
        if change:  # the machine's: plain steps would take as much longer, and rounds take what they do
            self.plain.follow(load, change)
            self._overhead.rescale(load, before / self.expected(load, shape))
        which = (nearest_power(load), shape) if of_all else None
        first = trials.observe_round(busy, which, expected, seconds, weight)
        if first:  # one that pays goes on, and one that does not has cost little
            self._overhead.correct(load, shape, first)
        return found_out or bool(first)

    def observe_plain(self, load: int, seconds: float, received: float, used: Shape | None, busy: float) -> bool:
        """A plain step took that long, whose results came then. `used`: shape of the rounds that go on, if any do: what
        those take was seen too, and is no other for what plain steps do. Returns whether that ends a measurement."""
        before = None if used is None else self.expected(load, used)
        measured = self.plain.observe(load, seconds, received, busy)
        if used is not None and before is not None:
            self._overhead.rescale(load, before / self.expected(load, used))
        return measured

    def trials(self, load: int) -> Trials:
        """Those at this load."""
        return self._trials.setdefault(nearest_power(load), Trials())

    def account(self, load: int, closed: Closed) -> None:
        """What the sequences came by, whatever they did."""
        worth = closed.tokens_each / self.plain.tokens(load) * self.plain.seconds(load)
        self.trials(load).account(closed.seconds, worth, closed.num_tokens)

    def note_trial(self, load: int, drafting: bool, gain: float, busy: float) -> None:
        """Rounds are to be made at this load, or are not, that seem to bring so many times what plain decoding does."""
        trials = self.trials(load)
        if drafting:
            trials.go_on(busy, gain)
            self.cancel_trials(busy, trials)
        else:
            if gain > 0:  # else it was found for nobody, who may end soon or come with too much to catch up with
                trials.end(busy, gain)
            self.cancel_trials(busy)

    def cancel_trials(self, busy: float, but: Trials | None = None) -> None:
        """Rounds at other loads end, for another reason than what they took."""
        for trials in self._trials.values():
            if trials is not but:
                trials.cancel(busy)

    def _trials_at(self, load: int) -> Trials:
        """Of the load from whose rounds the share for this one comes."""
        return self._trials.setdefault(self._overhead.bucket(load), Trials())
