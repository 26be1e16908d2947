"""What it costs everybody that the drafter catches up with a sequence, and to whom that is worth it."""

from __future__ import annotations

from shared.policy.drafting import PREFILL_STEP_TOKENS, Drafting, Situation
from shared.policy.interference import Interference
from shared.policy.output_lengths import OutputLengths
from shared.policy.round_costs import RoundCosts
from shared.policy.utilisation import Utilisation


class CatchingUp:
    """Of the sequences of one target worker. Times are seconds of the caller's clock.

    `interference`: how much the drafter's work slows plain steps down. `prompts` and `prefill_bound`: the share of the
    time in which there are prompts to compute, and more of them than a step holds.
    """

    def __init__(self, costs: RoundCosts, now: float) -> None:
        self.interference = Interference()
        self.prompts = Utilisation(now)
        self.prefill_bound = Utilisation(now)
        self._costs = costs
        self._outputs = OutputLengths()

    def observe(self, situation: Situation, now: float) -> None:
        """One of them stands there."""
        self.prompts.observe(situation.num_waiting > 0, now)
        self.prefill_bound.observe(situation.prefill_bound, now)

    def ended(self, num_output_tokens: int) -> None:
        """One has ended, with that many tokens of output."""
        self._outputs.observe(num_output_tokens)

    def pays(self, where: Situation, now: Situation, tokens: float, share: float = 1.0) -> bool:
        """Whether a sequence that stands at `where` saves more by rounds of so many tokens in this share of its steps
        than its catching up costs all."""
        plain = self._costs.plain
        spared = 1 / plain.tokens(now.load) - 1 / tokens
        saved = self.num_to_follow(where) * spared * plain.seconds(now.load)
        catch_up = self._cost_to_each(self.prompts.delay(self._costs.catch_up_seconds(where.num_unseen)))
        return share * saved > (now.load + now.num_waiting) * catch_up

    def cost_of_rest(self, each: Drafting, where: Situation, load: int) -> float:
        """What it costs for the tokens that follow: what is still to be caught up with, and among several their share
        of what was. That is past, but those that take its place beside the others will have to do the same; who comes
        after one alone decides for itself."""
        num_follow = self.num_to_follow(where)
        past = each.catch_up * num_follow / (where.num_output + num_follow) if load > 1 else 0.0
        return self._cost_to_each(past + (0.0 if each.active else self._costs.catch_up_seconds(where.num_unseen)))

    def num_to_follow(self, where: Situation) -> float:
        """Tokens that a sequence may be expected still to generate."""
        return max(1.0, min(where.num_remaining, self._outputs.remaining(where.num_output)))

    def prefill_bound_steps(self, load: int) -> float:
        """The share of steps that prompts fill: less than that of the time, as such a step takes longer."""
        filled = self.prefill_bound.share / self._costs.target.seconds(PREFILL_STEP_TOKENS)
        others = (1 - self.prefill_bound.share) / self._costs.target.seconds(load)
        return filled / (filled + others)

    def _cost_to_each(self, catch_up: float) -> float:
        """What the drafter's catching up for so long costs every sequence: where it slows the target down, as much as
        it does; where not, others' rounds wait for it, but not while prompts fill the target's steps."""
        return catch_up * max(self.interference.slowdown - 1, 1 - self.prefill_bound.share)
