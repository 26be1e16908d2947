"""One sequence's drafting: where it stands, and what is kept of it."""

from __future__ import annotations

from typing import NamedTuple

from shared.policy.acceptance import Acceptance

# Prompt tokens in a step where there are more than enough of them.
PREFILL_STEP_TOKENS = 512


class Situation(NamedTuple):
    """What a sequence's choice depends on besides itself.

    `load`: sequences on its target worker that decode; `num_waiting`: those without a first token yet, whose
    prompts have `num_prefill_tokens` together. `num_unseen`: the sequence's committed tokens that the drafter
    has not taken in. `num_output`: tokens generated, `num_remaining`: the most that may follow.
    """

    load: int
    num_waiting: int
    num_prefill_tokens: int
    num_unseen: int
    num_output: int
    num_remaining: int

    @property
    def prefill_bound(self) -> bool:
        """Whether the worker has more prompt tokens to compute than a step holds."""
        return self.num_prefill_tokens > PREFILL_STEP_TOKENS


class Drafting:
    """What the controller keeps of one sequence: its acceptance, whether it drafts, and where it stands.

    One that is `in_shadow` scouts while it decodes plainly: `num_scouting_rounds` of `num_scouting_tokens` each are
    for its owner to make and observe. Another one scouts with rounds.
    """

    def __init__(self, prior: Acceptance | None = None, in_shadow: bool = False) -> None:
        self.acceptance = Acceptance(prior)
        self.in_shadow = in_shadow
        self.active = False
        self.catch_up = 0.0
        self.num_scouting_rounds = 0
        self.num_scouting_tokens = 0
        self.situation: Situation | None = None

    def observe_in_shadow(self, num_draft_tokens: int, num_accepted: int) -> None:
        """A scouting round of one that is `in_shadow` had this outcome."""
        self.acceptance.observe(num_draft_tokens, num_accepted)
        self.num_scouting_rounds = max(0, self.num_scouting_rounds - 1)
