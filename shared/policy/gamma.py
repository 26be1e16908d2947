"""How many tokens to draft: from measured acceptance and measured costs, down to none at all."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from shared.policy.acceptance import Acceptance, expected_tokens
from shared.policy.account import Account
from shared.policy.beginning import Beginning
from shared.policy.catching_up import CatchingUp
from shared.policy.decision import Decision
from shared.policy.drafting import Drafting, Situation
from shared.policy.measuring import Measuring
from shared.policy.overhead import nearest_power
from shared.policy.round_costs import RoundCosts
from shared.policy.scouting import Scouting
from shared.policy.shape import PLAIN, Shape
from shared.policy.step_costs import StepCosts
from shared.policy.step_looks import StepLooks
from shared.policy.trees import Trees

# Drafting ends when it promises less than so many times what plain decoding brings; that is less than it begins at (see
# `Beginning`). Likewise one γ gives way to another only if that promises more by the second.
_STAY_AT = 1.03
_KEEP = 1.02
# So many plain steps behind rounds, of requests that do not draft, say what those before would have taken; later ones
# how fast the machine is by then.
_STEPS_AFTER_ROUNDS = 24
# What share of a worker's sequences have to draft for their rounds to say what those of all take.
_EVERYBODY = 0.9
# Where there are prompts for so much of the time few steps are without.
_MANY_PROMPTS = 0.7
# After a longer time with nobody, in seconds and in plain steps, whoever comes then is another load: what was chosen
# for those before is void.
_NEW_BEGINNING_SECONDS = 0.4
_NEW_BEGINNING_STEPS = 64
# Between two loads nothing is unlearnt, and nothing earns a scout its time: a longer pause without any choice counts as
# this one, in plain steps, and at most in seconds.
_LONGEST_PAUSE_STEPS = 16
_LONGEST_PAUSE = 0.5
# A draft token that takes the place of a prompt token must be kept so likely: it is one token of output less to decode
# for one of a prompt put off.
_KEPT_BESIDE_PREFILLS = 0.5


class GammaController:
    """Chooses γ, and whether in trees, for the sequences of one target worker and the drafter.

    The sequences of a worker share its steps, so one shape is chosen for all of them. Drafting gains

        P m / S / (C + R m / E)

    over plain decoding, where m tokens are expected to follow, a plain step takes P and brings S, and a round takes R
    (see `RoundCosts`), E is the mean of expected_tokens(α, γ) over the sequences, with trees' α (see `Trees`) for those
    that may have some, and C what the drafter needs to catch up with them. The shape of most gain wins; plain decoding
    unless that is clearly above 1. A sequence joins in when that saves it more than its own catching up costs
    everybody.

    While prompts fill the steps they take much the same time whatever is drafted, but every draft token takes a
    prompt token's place: so they draft as far as each draft token, α^i, is kept more likely than not. Where nobody
    drafts in other steps, those join in whose catching up the tokens of such steps alone make up for.

    It explores when it is unsure, not when it was unlucky: plain steps are measured before rounds begin, soon
    after and before they end, a γ that was not tried yet is given a little credit, and when drafting seemed not
    to pay, a single sequence scouts now and then whether it would with α as good as it may be by now, for
    half a hundredth of the time. Rounds that were in vain, by all that came of them, begin again only for more.
    """

    def __init__(
        self,
        target: StepCosts,
        draft: StepCosts,
        max_num_draft_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        max_num_nodes: int = 0,
    ) -> None:
        """`max_num_nodes`: of trees; 0 for chains alone."""
        self.acceptance = Acceptance()
        # By how they draw, which tells them apart.
        self._priors: dict[tuple[bool, bool], Acceptance] = {}
        self.trees = Trees(max_num_nodes)
        self.shape = PLAIN
        # Between `quiet_from` and `quiet_until` it has no use for plain steps: asked at every token, that has to cost
        # less than a call.
        self.plain_looks = StepLooks()
        self._costs = RoundCosts(target, draft)
        self._max_num_draft_tokens = max_num_draft_tokens
        self._clock = clock
        self._members: dict[Drafting, None] = {}
        self._num_active = 0
        self._catching_up = CatchingUp(self._costs, clock())
        # Who scouted last in the shadow of plain decoding: the drafter is at work for it, maybe on the same cores.
        self._shadow_scout: Drafting | None = None
        self._decision = Decision(target)
        # The power of two of the load at which rounds were seen last, and how many plain steps since.
        self._latest_rounds = 0, math.inf
        # What the best γ was then found to bring, times plain decoding.
        self._best_gain = 0.0
        # Below, and in all that ages: seconds in which there was something to choose.
        self._busy_seconds = 0.0
        self._chosen_at = clock()
        self._account = Account()
        self._beginning = Beginning(self._costs)
        self._measuring = Measuring(self._costs, self.plain_looks, clock)
        self._scouting = Scouting(self._costs, max_num_draft_tokens)

    def choose(self, sequence: Drafting, situation: Situation) -> int:
        """Draft tokens for the sequence's next round, in a tree of its `num_nodes` if that is more; 0: plain
        decoding."""
        now = self._clock()
        longest = min(_LONGEST_PAUSE_STEPS * self._costs.target.seconds(situation.load), _LONGEST_PAUSE)
        self._busy_seconds += min(now - self._chosen_at, longest)
        if not self._members:
            plain_steps = _NEW_BEGINNING_STEPS * self._costs.target.seconds(situation.load)
            if now - self._chosen_at > max(_NEW_BEGINNING_SECONDS, plain_steps):
                self._begin_anew()
            self._account.begin(situation)
        self._chosen_at = now
        before, sequence.situation, sequence.num_nodes = sequence.situation, situation, 0
        self._members[sequence] = None
        self._account.note(before, situation, len(self._members), self.plain_seconds(situation.load))
        self._catching_up.observe(situation, now)
        if situation.prefill_bound:
            sequence.num_scouting_rounds = 0
            return self._choose_beside_prefills(sequence, situation)
        # All whose rounds end together get the same answer: who drafts less only waits for who drafts more.
        if not self._decision.stands(situation.load, now):
            self._decision.make(situation.load, situation.num_waiting, now)
            self._note_account(situation.load)
            self.shape = self._best_for_all(situation)
            self._costs.note_trial(situation.load, self.gamma > 0, self._best_gain, self._busy_seconds)
            if self.gamma > 0:
                self._scouting.paid()
            seconds, young = self._costs.expected(situation.load, self.shape), self._costs.trials(situation.load).young
            self._decision.let_rest(seconds, len(self._members), young)
        if self.measuring:
            sequence.num_scouting_rounds = 0
            return 0
        if self.gamma > 0:
            sequence.num_scouting_rounds = 0
            if not sequence.active:
                tokens = self._tokens(self.shape, sequence.acceptance.rate, sequence.coupled)
                if not self._catching_up.pays(situation, situation, tokens):
                    return 0
                self._activate(sequence, situation)
            if sequence.coupled and self.shape.is_tree:
                sequence.num_nodes = self.shape.num_nodes
            return self.gamma
        if sequence.num_scouting_rounds == 0:
            self._deactivate(sequence)
            self._scout(sequence, situation)
        if sequence.num_scouting_rounds == 0 or sequence.coupled:
            return 0
        sequence.num_scouting_rounds -= 1
        return sequence.num_scouting_tokens

    def prior(self, *, greedy: bool, coupled: bool) -> Acceptance:
        """What a new sequence that draws so starts from: drafts of greedy text are accepted more often than of text at
        a temperature, and with the target's own noise other ones than by rejection sampling."""
        return self._priors.setdefault((greedy, coupled), Acceptance(self.acceptance))

    def leave(self, sequence: Drafting, num_output_tokens: int | None) -> None:
        """The sequence is no longer here; if it has ended, with that many tokens of output. Safe to call again."""
        if sequence not in self._members:
            return
        situation, sequence.situation = sequence.situation, None
        if num_output_tokens is not None and situation is not None:
            self._account.note_tokens(num_output_tokens - situation.num_output, len(self._members))
        del self._members[sequence]
        self._deactivate(sequence)
        if self._shadow_scout is sequence:
            self._shadow_scout = None
        if num_output_tokens is not None:
            self._catching_up.ended(num_output_tokens)

    @property
    def gamma(self) -> int:
        """Steps of the drafter in a round of everybody; 0: plain decoding."""
        return self.shape.num_draft_tokens

    @property
    def declines(self) -> bool:
        """Whether the last choice was that nobody drafts, for reasons that still hold as far as is known."""
        return self.gamma == 0 and not self.measuring and self._decision.is_made

    @property
    def measuring(self) -> bool:
        """Whether everybody decodes plainly for a few steps, so that it is known what these take."""
        return self._costs.plain.measuring

    def catch_up_seconds(self, num_unseen: int) -> float:
        """What the drafter takes for committed tokens it has not seen, beyond what the last one always takes."""
        return self._costs.catch_up_seconds(num_unseen)

    def plain_seconds(self, load: int) -> float:
        """What a plain decode step takes: P."""
        return self._costs.plain.seconds(load)

    def least_likelihood(self, load: int, num_verified: int) -> float:
        """How likely each of so many draft tokens must be to be accepted so as to pay for its row of verification."""
        return self._costs.least_likelihood(load, num_verified)

    def steps_meanwhile(self, catch_up: float, load: int) -> int:
        """Steps of the target worker in that time. Beside rounds of others only such as end within it: a step of one
        sequence that still decodes plainly holds up the drafts of all."""
        if self._num_active > 1:
            return int(catch_up / self._round_seconds(load, self.shape))
        return math.ceil(catch_up / self.plain_seconds(load) - 0.5)

    def observe_round(
        self, load: int, shape: Shape, num_unseen: int, seconds: float, mostly_prompts: bool = False
    ) -> None:
        """A round of that shape among `load` sequences took that long, from the last result to its own, prompts that
        were computed meanwhile not counted; `mostly_prompts`: they took more than that.

        `num_unseen`: tokens the drafter caught up with in it. Whether the others' rounds ended in the same
        step does not matter: where they take turns, each waits longer.
        """
        self._scouting.observe_round(self._busy_seconds, of_all=self._num_active > 0)
        if not self._tells(mostly_prompts):
            return
        if seconds <= 0 or self._num_active < 0.5 * load:
            return  # few draft among many that decode plainly: no measure of what it would take if all did
        if self.shape.is_tree and not shape.is_tree:
            return  # the others' trees were in its steps
        if self._clock() - seconds < self._catching_up.interference.over_at:
            return  # it waited for others that caught up
        self._latest_rounds = nearest_power(load), 0
        of_all = self._num_active >= _EVERYBODY * load
        weight = 1 / self._num_active
        if self._costs.observe_round(load, shape, num_unseen, seconds, weight, of_all, self._busy_seconds):
            self._decision.make_void()

    def observe_plain(
        self, load: int, seconds: float, received: float, num_tokens: int | None = 1, mostly_prompts: bool = False
    ) -> None:
        """A plain decode step among `load` sequences took that long, from result to result, prompts not counted
        (`mostly_prompts`: they took more than that), and brought a sequence so many tokens; None: one that never
        drafts, of which it says nothing, nor of the time either where others' plain steps have the target's own drafts.

        `received`: when its results came, by the controller's clock. Not needed while `plain_looks` are quiet.
        """
        if num_tokens is not None:
            self._costs.plain.observe_tokens(load, num_tokens)
        elif self._costs.plain.bring_several:
            return
        if seconds <= 0 or (self._num_active > 0 and not self.measuring):
            return  # of a sequence that has not joined the others' rounds, or beside what they drafted beside prompts
        if not self._tells(mostly_prompts) or not self.plain_looks.wants(received, self.measuring):
            return
        step = self.plain_looks.add(load, seconds, received, self.measuring or self._costs.plain.bring_several)
        scouts = self._shadow_scout is not None and self._shadow_scout.num_scouting_rounds > 0
        if scouts:
            self._catching_up.interference.go_on(received)
        if step is None:
            return
        if scouts:
            self._scouting.observe_step(step.received, step.seconds, self.plain_seconds(step.load))
        began = step.received - step.seconds
        if began < self._catching_up.interference.over_at:
            self._catching_up.interference.observe(began, step.received, step.seconds / self.plain_seconds(step.load))
            return  # the drafter, maybe on the same cores, was at work
        used = self.shape if self._num_active > 0 or self._follows_rounds(step.load) else None
        if self._costs.observe_plain(step.load, step.seconds, step.received, used, self._busy_seconds):
            self._decision.make_void()

    def _follows_rounds(self, load: int) -> bool:
        """Whether a plain step comes right behind rounds at that load which were not to end: nobody who drafts is here
        for the moment."""
        bucket, num_since = self._latest_rounds
        if self.gamma == 0 or bucket != nearest_power(load):
            return False
        self._latest_rounds = bucket, num_since + 1
        return num_since < _STEPS_AFTER_ROUNDS

    def _tells(self, mostly_prompts: bool) -> bool:
        """Whether a step with prompts in it says what it takes without: what these took is no more than reckoned, and
        errs by much of what is left. Those that were most of it have to do where few are without, or one is waited
        for."""
        return not mostly_prompts or self.measuring or self._catching_up.prompts.share >= _MANY_PROMPTS

    def _note_account(self, load: int) -> None:
        """What all came by since the last choice for all, if others that are not asked had hardly any part in it."""
        closed = self._account.close()
        if len(self._members) >= _EVERYBODY * load:
            self._costs.account(load, closed)

    def _begin_anew(self) -> None:
        """Nobody was here for long."""
        self.shape = PLAIN
        self._decision.make_void()
        self._costs.plain.give_up_measuring()
        self._costs.cancel_trials(self._busy_seconds)

    def _activate(self, sequence: Drafting, situation: Situation) -> None:
        sequence.active = True
        catch_up = self.catch_up_seconds(situation.num_unseen)
        sequence.catch_up += catch_up
        self._num_active += 1
        self._catching_up.interference.begin(self._clock(), catch_up)

    def _deactivate(self, sequence: Drafting) -> None:
        self._num_active -= sequence.active
        sequence.active = False

    def _best_for_all(self, now: Situation) -> Shape:
        """The shape that gains most if all draft who are drafting or would join in; plain if none gains enough."""
        catching_up = self._catching_up
        joining = [
            (each, where)
            for each in self._members
            if (where := each.situation) is not None and (each.active or self._would_join(each, where, now))
        ]
        self._best_gain = 0.0
        if not joining:
            return PLAIN
        # Many have the same, above all where nobody drafts: a round of each is reckoned once.
        rates = Counter((each.acceptance.rate, each.coupled) for each, _ in joining)
        num_follow = sum(catching_up.num_to_follow(where) for _, where in joining) / len(joining)
        # Those that wait will soon decode with the others.
        load = now.load + now.num_waiting
        catch_up = sum(catching_up.cost_of_rest(each, where, load) for each, where in joining)
        begin_at = max(self._beginning.gain(each, self._busy_seconds) for each in (now.load, load))
        best, best_gain, num_rounds = PLAIN, _STAY_AT if self.gamma > 0 else begin_at, math.inf
        num_others = len(self._members) - len(joining)
        # Where one may have no tree its rounds would be others than those of all.
        for shape in self._shapes(load, all(coupled for _, coupled in rates)):
            of_joining = sum(num * self._tokens(shape, *rate) for rate, num in rates.items())
            tokens = (of_joining + num_others) / len(self._members)
            gain = self._costs.gain(load, shape, tokens, num_follow, catch_up, self._busy_seconds)
            self._best_gain = max(self._best_gain, gain)
            gain *= self._costs.curiosity(load, shape, self.shape, self._busy_seconds)
            if shape == self.shape:
                gain *= _KEEP
            if gain > best_gain:
                best, best_gain, num_rounds = shape, gain, num_follow / tokens
        begins = self.gamma == 0 and best != PLAIN
        if begins and self._beginning.refuses(now.load, begin_at, best_gain, num_rounds):
            best = PLAIN
        under_way = self._num_active > 0
        ends_too_soon = self._measuring.check(now.load, best, best_gain, self.shape, under_way, self._busy_seconds)
        return self.shape if ends_too_soon else best

    def _would_join(self, each: Drafting, where: Situation, now: Situation) -> bool:
        """Whether it would be worth its catching up, if all drafted as they do or at least a little."""
        shape = self.shape if self.shape.is_tree else Shape(max(2, self.gamma))
        return self._catching_up.pays(where, now, self._tokens(shape, each.acceptance.rate, each.coupled))

    def _shapes(self, load: int, coupled: bool) -> list[Shape]:
        """Those there are to choose among."""
        chains = [Shape(gamma) for gamma in range(1, self._max_num_draft_tokens + 1)]
        if not coupled:
            return chains
        return [*chains, *self.trees.shapes(self._costs.target, load, self._max_num_draft_tokens)]

    def _tokens(self, shape: Shape, rate: float, coupled: bool) -> float:
        """What a round of that shape brings a sequence."""
        if shape.is_tree and coupled:
            return self.trees.tokens(rate, shape)
        return expected_tokens(rate, shape.num_draft_tokens)

    def _choose_beside_prefills(self, sequence: Drafting, situation: Situation) -> int:
        """Where prompts fill the steps: as many tokens as are each likely enough to be kept."""
        rate, most = self.acceptance.rate, self._max_num_draft_tokens
        gamma = next((i for i in range(most) if rate ** (i + 1) < _KEPT_BESIDE_PREFILLS), most)
        # What was chosen for a few that were left is nothing for the many that came since.
        drafts = self.gamma > 0 and self._decision.holds_for(situation.load + situation.num_waiting)
        share = 1.0 if drafts else self._catching_up.prefill_bound_steps(situation.load)
        # Nobody scouts meanwhile: of what is not known yet the best is hoped for.
        rate_at_best = sequence.acceptance.rate_at_best(1.0)
        tokens = expected_tokens(rate_at_best, gamma)
        joins = not self.measuring and self._catching_up.pays(situation, situation, tokens, share)
        if not sequence.active and joins:
            self._activate(sequence, situation)
        return gamma if sequence.active else 0

    def _round_seconds(self, load: int, shape: Shape) -> float:
        return self._costs.seconds(load, shape, self._busy_seconds)

    def _scout(self, sequence: Drafting, now: Situation) -> None:
        """Has the sequence scout, if it is time for that and may turn out well."""
        if not self._scouting.is_due(self._busy_seconds):
            return
        at_best = self._scouting.rate_at_best(sequence.acceptance, self._busy_seconds)
        num_follow, catch_up = self._catching_up.num_to_follow(now), self.catch_up_seconds(now.num_unseen)
        for_all = now.load * catch_up
        gains = [
            self._costs.gain(
                now.load,
                shape,
                self._tokens(shape, at_best, sequence.coupled),
                num_follow,
                for_all,
                self._busy_seconds,
            )
            for shape in self._shapes(now.load, sequence.coupled)
        ]
        if max(gains, default=0.0) <= self._beginning.gain(now.load, self._busy_seconds):
            # The others' answer would hardly be another.
            self._scouting.put_off(self._busy_seconds, self._decision.rest)
            return
        drafting = self._scouting.send(sequence, now.load, catch_up, self._clock(), self._busy_seconds)
        if sequence.coupled:
            self._shadow_scout = sequence
        self._catching_up.interference.begin(self._clock(), drafting if sequence.coupled else catch_up)
