"""How many tokens to draft: from measured acceptance and measured costs, down to none at all."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from shared.policy.acceptance import Acceptance, expected_tokens
from shared.policy.catching_up import CatchingUp
from shared.policy.drafting import Drafting, Situation
from shared.policy.overhead import nearest_power
from shared.policy.round_costs import RoundCosts
from shared.policy.scouting import Scouting
from shared.policy.shape import PLAIN, Shape
from shared.policy.step_costs import StepCosts
from shared.policy.step_looks import StepLooks
from shared.policy.trees import Trees

# Drafting begins when it promises so many times what plain decoding brings, and ends when it promises less
# than the second: estimates err, and changing between the two costs something itself. Likewise one γ gives
# way to another only if that promises more by the third.
_BEGIN_AT = 1.08
_STAY_AT = 1.03
_KEEP = 1.02
# But it begins where it promises anything, if rounds were never tried at that load: what they take is a guess then.
# Where those that are there end too soon for that to be worth knowing, within so many rounds, only where it promises
# more by the third.
_BEGIN_UNTRIED_AT = 1.0
_ROUNDS_THAT_TELL = 16.0
_BEGIN_UNTRIED_SHORT = 1.3
# Or once it was not tried so many times for that: the same load may come again and again.
_REFUSALS = 32
# And begins at so much more for each time in a row that it was in vain, four at most.
_MORE_BY_FAILURE = 0.05
# A choice stands for so many rounds or plain steps, and at least so long and so long for each sequence, up to half a
# second, as choosing takes time too, for each; unless the load has changed by more than this share.
_REST_ROUNDS = 8
_LEAST_REST_SECONDS = 0.1
_REST_SECONDS_EACH = 0.01
_MOST_REST_SECONDS_FOR_ALL = 0.5
_NEW_LOAD = 0.25
# For so many times as many it is none where prompts keep it from being changed.
_MANY_MORE = 2
# So many plain steps behind rounds, of requests that do not draft, say what those before would have taken; later ones
# how fast the machine is by then.
_STEPS_AFTER_ROUNDS = 24
# What share of a worker's sequences have to draft for their rounds to say what those of all take.
_EVERYBODY = 0.9
# What plain steps take is measured before drafting begins and again after so many seconds, and before it ends if
# that is so long ago; unless drafting promises so much that it hardly matters.
_MEASURE_EVERY_SECONDS = 20.0
_MEASURE_BEFORE_END_SECONDS = 1.0
_SURE_FROM = 1.3
_MEASURE_IF_SURE_EVERY_SECONDS = 60.0
# Where it promises little it tells most and costs least.
_CLOSE_UP_TO = 1.15
_MEASURE_IF_CLOSE_EVERY_SECONDS = 15.0
# And at once where rounds seem to take less than a plain step; but for this pause, which doubles while it seems so.
_FIRST_DOUBT_SECONDS = 1.0
# So soon after drafting began they are measured again: then both were measured at much the same time.
_ROUNDS_BEFORE_MEASURED = 16.0
# Where there are prompts for so much of the time few steps are without.
_MANY_PROMPTS = 0.7
# Where rounds are under way, so many of them are waited for.
_ROUNDS_LEFT = 1.2
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
    to pay, a single sequence scouts now and then whether it would with α as good as it may be by now, for a
    hundredth of the time. Rounds that were in vain begin again only for more.
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
        self._decided_at = -math.inf
        self._decided_load = 0
        # With those that waited.
        self._decided_for = 0
        # The power of two of the load at which rounds were seen last, and how many plain steps since.
        self._latest_rounds = 0, math.inf
        # What the best γ was then found to bring, times plain decoding.
        self._best_gain = 0.0
        # How long the last choice stands.
        self._rest = 0.0
        # Below, and in all that ages: seconds in which there was something to choose.
        self._busy_seconds = 0.0
        self._chosen_at = clock()
        # By power of two of the load: how often it was not tried, as those there were to end soon.
        self._refusals: Counter[int] = Counter()
        self._scouting = Scouting(self._costs, max_num_draft_tokens)
        self._doubt_seconds = _FIRST_DOUBT_SECONDS

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
        self._chosen_at = now
        sequence.situation, sequence.num_nodes = situation, 0
        self._members[sequence] = None
        self._catching_up.observe(situation, now)
        if situation.prefill_bound:
            sequence.num_scouting_rounds = 0
            return self._choose_beside_prefills(sequence, situation)
        # All whose rounds end together get the same answer: who drafts less only waits for who drafts more.
        if not self._decision_stands(situation.load, now):
            self._decided_at, self._decided_load = now, situation.load
            self._decided_for = situation.load + situation.num_waiting
            self.shape = self._best_for_all(situation)
            self._costs.note_trial(situation.load, self.gamma > 0, self._best_gain, self._busy_seconds)
            if self.gamma > 0:
                self._scouting.paid()
            self._rest = _REST_ROUNDS * self._costs.expected(situation.load, self.shape)
            if not self._costs.trials(situation.load).young:
                for_all = min(_REST_SECONDS_EACH * len(self._members), _MOST_REST_SECONDS_FOR_ALL)
                self._rest = max(self._rest, _LEAST_REST_SECONDS, for_all)
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
        return self.gamma == 0 and not self.measuring and self._decided_at > -math.inf

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
        self._scouting.observe_round(self._busy_seconds)
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
            self._decided_at = -math.inf

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
        if self._shadow_scout is not None and self._shadow_scout.num_scouting_rounds > 0:
            self._catching_up.interference.go_on(received)
        if step is None:
            return
        began = step.received - step.seconds
        if began < self._catching_up.interference.over_at:
            self._catching_up.interference.observe(began, step.received, step.seconds / self.plain_seconds(step.load))
            return  # the drafter, maybe on the same cores, was at work
        used = self.shape if self._num_active > 0 or self._follows_rounds(step.load) else None
        if self._costs.observe_plain(step.load, step.seconds, step.received, used, self._busy_seconds):
            self._decided_at = -math.inf  # now that it is known

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

    def _begin_anew(self) -> None:
        """Nobody was here for long."""
        self.shape = PLAIN
        self._decided_at = -math.inf
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

    def _decision_stands(self, load: int, now: float) -> bool:
        """Whether the last choice was made not long ago, for much the same load."""
        new_load = abs(load - self._decided_load) > _NEW_LOAD * self._decided_load
        return now - self._decided_at <= (0.5 * self._costs.target.seconds(1) if new_load else self._rest)

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
        begin_at = max(self._begin_at(now.load), self._begin_at(load))
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
        untried = self.gamma == 0 and begin_at == _BEGIN_UNTRIED_AT and best != PLAIN
        if untried and num_rounds < _ROUNDS_THAT_TELL and best_gain < _BEGIN_UNTRIED_SHORT:
            self._refusals[nearest_power(now.load)] += 1
            if self._refusals[nearest_power(now.load)] < _REFUSALS:
                best = PLAIN
        if best != PLAIN and self._costs.beat_plain_steps(now.load, self._busy_seconds):
            if self._measure_if_older(now.load, self._doubt_seconds):
                self._doubt_seconds *= 2
        else:
            self._doubt_seconds = _FIRST_DOUBT_SECONDS
        if best != PLAIN:
            sure = best_gain >= _SURE_FROM
            every = _measured_every(best_gain)
            self._measure_if_older(now.load, every, at_once=not sure)
            trials = self._costs.trials(now.load)
            unknown = not sure and trials.is_forgotten(self._busy_seconds)
            if not trials.running and (unknown or not self._costs.plain.is_settled(now.load)):
                first_rounds = _ROUNDS_BEFORE_MEASURED * self._costs.expected(now.load, best)
                self._costs.plain.measure_soon(now.load, every, first_rounds)
        elif self.gamma > 0 and self._measure_if_older(now.load, _MEASURE_BEFORE_END_SECONDS):
            return self.shape  # maybe everything takes longer now
        return best

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

    def _measure_if_older(self, load: int, seconds: float, at_once: bool = True) -> bool:
        """Has plain steps measured, if they were not for so long. Returns whether it does."""
        # Not beside rounds that are under way.
        round_seconds = self._round_seconds(load, self.shape)
        measured_from = self._clock() + (_ROUNDS_LEFT * round_seconds if self._num_active > 0 else 0.0)
        if not self._costs.plain.measure_if_older(load, seconds, self._busy_seconds, measured_from, at_once):
            return False
        self.plain_looks.wake()
        return True

    def _begin_at(self, load: int) -> float:
        """The gain from which drafting begins: more of it where that was in vain lately."""
        trials = self._costs.trials(load)
        if self._costs.is_untried(load) and trials.num_failed == 0:
            return _BEGIN_UNTRIED_AT
        return _BEGIN_AT + _MORE_BY_FAILURE * min(trials.num_failed, 4) * trials.confidence(self._busy_seconds)

    def _choose_beside_prefills(self, sequence: Drafting, situation: Situation) -> int:
        """Where prompts fill the steps: as many tokens as are each likely enough to be kept."""
        rate, most = self.acceptance.rate, self._max_num_draft_tokens
        gamma = next((i for i in range(most) if rate ** (i + 1) < _KEPT_BESIDE_PREFILLS), most)
        # What was chosen for a few that were left is nothing for the many that came since.
        drafts = self.gamma > 0 and situation.load + situation.num_waiting <= _MANY_MORE * self._decided_for
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
        if max(gains, default=0.0) <= self._begin_at(now.load):
            # The others' answer would hardly be another.
            self._scouting.put_off(self._busy_seconds, self._rest)
            return
        drafting = self._scouting.send(sequence, now.load, catch_up, self._busy_seconds)
        if sequence.coupled:
            self._shadow_scout = sequence
        self._catching_up.interference.begin(self._clock(), drafting if sequence.coupled else catch_up)


def _measured_every(gain: float) -> float:
    """After how many seconds plain steps are measured again, where drafting promises so much."""
    if gain >= _SURE_FROM:
        return _MEASURE_IF_SURE_EVERY_SECONDS
    return _MEASURE_EVERY_SECONDS if gain >= _CLOSE_UP_TO else _MEASURE_IF_CLOSE_EVERY_SECONDS
