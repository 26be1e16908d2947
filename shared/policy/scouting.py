"""Whether drafting would pay by now, where it did not: one sequence finds out for all."""

from __future__ import annotations

from shared.policy.acceptance import Acceptance, expected_tokens
from shared.policy.drafting import Drafting
from shared.policy.interference import SAME_CORES
from shared.policy.round_costs import RoundCosts

# A scout drafts for so many rounds, so many tokens each (behind a rejected one they say nothing, so few at a time say
# most), for this share of the time at most; half of it after each that brought nothing new, twice at most. Where its
# rounds are verified, they take so many of the others' plain steps.
_ROUNDS = 10
_TOKENS = 2
_SHARE = 0.005
_HALVINGS = 2
_STEPS = 3
# What a scout's round takes of everybody's cores beside its draft steps: messages, and the processes that they wake.
_ROUND_SECONDS = 0.002
# A step that was looked at speaks for those not looked at, of so much time.
_LOOKED_AT_SECONDS = 0.04
# What was learnt of acceptance counts half after so many seconds without a round.
_ACCEPTANCE_HALF_LIFE = 10.0


class Scouting:
    """When one may be sent, so that it takes half a hundredth of the time. `busy`: see `RoundCosts`."""

    def __init__(self, costs: RoundCosts, max_num_draft_tokens: int) -> None:
        self._costs = costs
        self._num_tokens = min(_TOKENS, max_num_draft_tokens)
        self._last_round = 0.0
        self._from = 0.0
        # The latest scout: when and for what share of the time it was sent, what it was found to take of the others'
        # time, and up to when.
        self._sent_at, self._share = 0.0, _SHARE
        self._taken = 0.0
        self._taken_until = 0.0
        self._num_vain = 0

    def is_due(self, busy: float) -> bool:
        return busy >= self._from

    def rate_at_best(self, acceptance: Acceptance, busy: float) -> float:
        """α as good as it may be by now."""
        return acceptance.rate_at_best(0.5 ** ((busy - self._last_round) / _ACCEPTANCE_HALF_LIFE))

    def observe_round(self, busy: float, of_all: bool) -> None:
        """What is known of α is fresh; if there was a round `of_all` who draft, no scout is needed for a while."""
        self._last_round = busy
        if of_all:
            self._from = max(self._from, busy + _ACCEPTANCE_HALF_LIFE)

    def observe_step(self, received: float, seconds: float, plain: float) -> None:
        """Beside a scout a plain step took `seconds` up to then, one of those that are looked at, and would have taken
        `plain` without: what scouts take on the same cores may be several times what their draft steps do."""
        if received <= self._taken_until:
            return  # it ended before there was one
        believed = min(seconds, SAME_CORES * plain)  # what takes longer was held up by something else
        since = min(received - self._taken_until, max(believed, _LOOKED_AT_SECONDS))
        self._taken += since * max(0.0, 1 - plain / believed)
        self._taken_until = received
        self._from = max(self._from, self._sent_at + self._taken / self._share)

    def put_off(self, busy: float, seconds: float) -> None:
        """What it might find would change nothing for so long."""
        self._from = busy + seconds

    def send(self, sequence: Drafting, load: int, catch_up: float, now: float, busy: float) -> float:
        """Has a sequence scout from `now` on, whose drafter takes so long to catch up. Returns how long drafting for it
        takes."""
        sequence.num_scouting_rounds, sequence.num_scouting_tokens = _ROUNDS, self._num_tokens
        drafting = catch_up + _ROUNDS * (self._num_tokens * self._costs.draft.seconds(1) + _ROUND_SECONDS)
        verifying = 0.0
        if sequence.coupled:
            self._last_round = busy
        else:
            target, rate = self._costs.target, sequence.acceptance.rate
            longer = target.seconds(load + self._num_tokens) - target.seconds(load)
            num_fewer = max(0.0, _STEPS - expected_tokens(rate, self._num_tokens))
            verifying = _ROUNDS * (longer + num_fewer * self._costs.plain.seconds(load))
        self._sent_at, self._share = busy, _SHARE / 2 ** min(self._num_vain, _HALVINGS)
        self._taken, self._taken_until = 0.0, now
        self._from = busy + (drafting + verifying) / self._share
        self._num_vain += 1
        return drafting

    def paid(self) -> None:
        """Drafting goes on: the next scout is sent as the first was."""
        self._num_vain = 0
