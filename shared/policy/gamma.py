"""How many tokens to draft: from measured acceptance and measured costs, down to none at all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from shared.policy.acceptance import Acceptance, expected_tokens
from shared.policy.overhead import Overhead
from shared.policy.step_costs import StepCosts

# Drafting begins when it promises this much more than plain decoding, and ends when it promises less than
# that: estimates err, and changing between the two costs something itself.
_BEGIN_AT = 1.05
_STAY_AT = 1.02
_KEEP = 1.03
_CURIOSITY = 0.04
_SURE_FROM = 1.3
_REST_ROUNDS = 8
# Prompt tokens in a step when there are more than enough of them.
_PREFILL_STEP_TOKENS = 512
# Share of the time that may go into finding out whether drafting would pay after all.
_SCOUTING_SHARE = 0.01
_SCOUTING_ROUNDS = 8
# What was learnt of rounds counts half after so many seconds without one.
_HALF_LIFE_SECONDS = 10.0
_UTILISATION_SECONDS = 5.0
_LEAST_IDLE = 0.05
_REMEASURE_SECONDS = 20.0
# Tokens of output before any sequence has ended; how much an ended one counts.
_PRIOR_OUTPUT_TOKENS = 128.0
_OUTPUT_WEIGHT = 0.1


class Situation(NamedTuple):
    """What a sequence's choice depends on besides itself.

    `load`: sequences on its target worker; `num_waiting` of them have no first token yet. `num_unseen`:
    committed tokens that the drafter has not taken in. `num_output`: tokens generated, `num_remaining`: the
    most that may follow.
    """

    load: int
    num_waiting: int
    num_prefill_tokens: int
    num_unseen: int
    num_output: int
    num_remaining: int


class Drafting:
    """What the controller keeps of one sequence: its acceptance, and whether it drafts."""

    def __init__(self, prior: Acceptance | None = None) -> None:
        self.acceptance = Acceptance(prior)
        self.active = False
        self.num_scouting_rounds = 0
        self.situation: Situation | None = None


class Utilisation:
    """The share of the time that prefills take, forgetting what is long ago."""

    def __init__(self, now: float) -> None:
        self.share = 0.0
        self._since = now

    def observe(self, busy: bool, now: float) -> None:
        """Since the last call there were prefills, or there were none."""
        kept = math.exp((self._since - now) / _UTILISATION_SECONDS)
        self.share = kept * self.share + (1 - kept) * busy
        self._since = now


class GammaController:
    """Chooses γ for the sequences of one target worker and the drafter."""

    def __init__(
        self,
        target: StepCosts,
        draft: StepCosts,
        max_num_draft_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.draft = draft
        self.acceptance = Acceptance()
        self._max_num_draft_tokens = max_num_draft_tokens
        self._clock = clock
        self._rounds = Overhead()
        self._plain = Overhead()
        self._num_output_tokens = _PRIOR_OUTPUT_TOKENS
        self._last_round = clock()
        self._scouts_from = clock()
        # By power of two of the load: when plain steps were last measured.
        self._plain_known: dict[int, float] = {}
        self._num_to_measure = 0.0
        self._members: dict[Drafting, None] = {}
        self._decided_at = -math.inf
        self._decided_load = 0
        self._utilisation = Utilisation(clock())
        self.gamma = 0  # of the group

    def choose(self, sequence: Drafting, situation: Situation) -> int:
        """Draft tokens for the sequence's next round; 0: plain decoding."""
        sequence.situation = situation
        if sequence not in self._members:
            self._members[sequence] = None
        self._utilisation.observe(situation.num_waiting > 0, self._clock())
        # All whose rounds ended together get the same answer: who drafts less waits for who drafts more.
        load = situation.load
        changed = abs(load - self._decided_load) > 0.25 * self._decided_load
        rest = 0.5 * self.target.seconds(1) if changed else _REST_ROUNDS * self.round_seconds(load, self.gamma)
        if self._clock() - self._decided_at > rest:
            self._decided_at, self._decided_load = self._clock(), load
            self._decide(situation)
        if self.measuring and not _prefill_bound(situation):
            return 0
        if self.gamma:
            sequence.active = sequence.active or self._joins(sequence, situation, self.gamma)
            return self.gamma if sequence.active else 0
        if sequence.num_scouting_rounds > 0:
            sequence.num_scouting_rounds -= 1
            return min(2, self._max_num_draft_tokens)
        sequence.active = False
        if self._clock() < self._scouts_from or _prefill_bound(situation):
            return 0
        return self._scout(sequence, situation)

    def leave(self, sequence: Drafting, num_output_tokens: int | None) -> None:
        self._members.pop(sequence, None)
        if num_output_tokens is not None:
            self._num_output_tokens += _OUTPUT_WEIGHT * (num_output_tokens - self._num_output_tokens)

    @property
    def measuring(self) -> bool:
        """Whether everybody decodes plainly for a few steps, so that it is known what they take."""
        return self._num_to_measure > 0

    def catch_up_seconds(self, num_unseen: int) -> float:
        """What the drafter takes for the committed tokens it has not seen, beyond the last one."""
        return self.draft.seconds(num_unseen) - self.draft.seconds(1) if num_unseen > 1 else 0.0

    def plain_seconds(self, load: int) -> float:
        """What a plain decode step takes."""
        return self.target.seconds(load) * (1 + self._plain.share(load, 0))

    def round_seconds(self, load: int, gamma: int) -> float:
        """What a round of everybody takes, by the step costs and what plain steps take."""
        verify = self.target.seconds(load * (gamma + 1)) - self.target.seconds(load)
        return self.plain_seconds(load) + verify + gamma * self.draft.seconds(load)

    def observe_round(self, load: int, num_draft_tokens: int, num_unseen: int, num_tokens: int, seconds: float) -> None:
        """A round of γ draft tokens among `load` sequences took that long, from the last result to its own.

        `num_unseen`: tokens the drafter caught up with in it; `num_tokens`: all that the target's step held.
        """
        self._last_round = self._clock()
        num_drafting = min(max(1.0, (num_tokens - load) / num_draft_tokens), load)
        if num_drafting < 0.5 * load:
            return
        expected = self.round_seconds(load, num_draft_tokens) + self.catch_up_seconds(num_unseen)
        self._rounds.observe(load, num_draft_tokens, expected, seconds, 1 / num_drafting)

    def observe_plain(self, load: int, seconds: float) -> None:
        """A plain decode step among `load` sequences took that long, from result to result."""
        if (self.gamma == 0 or self.measuring) and not any(each.num_scouting_rounds for each in self._members):
            self._plain_known[load.bit_length()] = self._clock()
            self._num_to_measure -= 1 / load
            self._plain.observe(load, 0, self.target.seconds(load), seconds, 1 / load)

    def _decide(self, s: Situation) -> None:
        """The group's γ: rounds of everybody, or none."""
        load = s.load
        plain = self.plain_seconds(load)
        confidence = 0.5 ** ((self._clock() - self._last_round) / (3 * _HALF_LIFE_SECONDS))
        catch_up = num_follow = 0.0
        rates = []
        for each in self._members:
            if each.active or self._joins(each, s, self.gamma or 2):
                rates.append(each.acceptance.rate)
                assert each.situation is not None
                num_follow += self._num_expected(each.situation)
                if not each.active:
                    catch_up += self.catch_up_seconds(each.situation.num_unseen)
        if not rates:
            self.gamma = 0
            return
        num_follow /= len(rates)
        num_others = len(self._members) - len(rates)
        best, best_gain = 0, _STAY_AT if self.gamma else _BEGIN_AT
        for gamma in range(1, self._max_num_draft_tokens + 1):
            tokens = (sum(expected_tokens(rate, gamma) for rate in rates) + num_others) / len(self._members)
            if _prefill_bound(s):
                price = num_follow / (num_follow + s.num_prefill_tokens / s.num_waiting)
                gain = 1 + (1 - self._utilisation.share) * (tokens - 1) - price * gamma
            else:
                overhead = self._rounds.share(load, gamma)
                overhead = min(overhead, confidence * overhead)
                seconds = self.round_seconds(load, gamma) * (1 + overhead)
                gain = plain * num_follow / (catch_up + num_follow * seconds / tokens)
                gain *= 1 + _CURIOSITY / (1 + self._rounds.count(load, gamma))
            if gamma == self.gamma:
                gain *= _KEEP
            if gain > best_gain:
                best, best_gain = gamma, gain
        self.gamma = best
        known = self._plain_known.get(load.bit_length(), -1e9)
        if best and best_gain < _SURE_FROM and not _prefill_bound(s) and self._clock() - known > _REMEASURE_SECONDS:
            self._plain_known[load.bit_length()] = self._clock()
            self._num_to_measure = 4.0 if known < 0 else 2.0

    def _joins(self, sequence: Drafting, now: Situation, gamma: int) -> bool:
        s = sequence.situation
        assert s is not None
        tokens = expected_tokens(sequence.acceptance.rate, gamma)
        catch_up = self._delay(now, self.catch_up_seconds(s.num_unseen))
        saved = (1 - 1 / tokens) * self.plain_seconds(now.load)
        return self._num_expected(s) * saved > catch_up

    def _delay(self, now: Situation, seconds: float) -> float:
        """Seconds that so much further work costs all sequences together, those behind it in the queue included."""
        return (now.load + now.num_waiting) * seconds / max(_LEAST_IDLE, 1 - self._utilisation.share)

    def _num_expected(self, s: Situation) -> float:
        return max(1.0, min(s.num_remaining, max(self._num_output_tokens - s.num_output, s.num_output, 16.0)))

    def _scout(self, sequence: Drafting, s: Situation) -> int:
        age = self._clock() - self._last_round
        at_best = sequence.acceptance.rate_at_best(0.5 ** (age / _HALF_LIFE_SECONDS))
        load = s.load
        plain = self.plain_seconds(load)
        num_follow = self._num_expected(s)
        best, gain = 0, _BEGIN_AT
        for gamma in range(1, self._max_num_draft_tokens + 1):
            each = plain / (
                load * self.catch_up_seconds(s.num_unseen) / num_follow
                + self.round_seconds(load, gamma) / expected_tokens(at_best, gamma)
            )
            if each > gain:
                best, gain = gamma, each
        if best == 0:
            return 0
        rounds = best * self.draft.seconds(1) + self.target.seconds(load + best) - self.target.seconds(load)
        own = max(0.0, 2 - expected_tokens(sequence.acceptance.rate, best)) * plain / load
        cost = self.catch_up_seconds(s.num_unseen) + _SCOUTING_ROUNDS * (rounds + own)
        self._scouts_from = self._clock() + cost / _SCOUTING_SHARE
        sequence.num_scouting_rounds = _SCOUTING_ROUNDS - 1
        return best


def _prefill_bound(s: Situation) -> bool:
    return s.num_prefill_tokens > _PREFILL_STEP_TOKENS
