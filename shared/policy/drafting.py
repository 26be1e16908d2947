"""One sequence's drafting: where it stands, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shared.policy.acceptance import Acceptance, outcome_of_likeliest
from shared.policy.shape import Shape
from shared.policy.trees import Trees

# Prompt tokens in a step where there are more than enough of them.
PREFILL_STEP_TOKENS = 512


class Situation(NamedTuple):
    """What a sequence's choice depends on besides itself.

    `load`: sequences on its target worker that decode; `num_waiting`: those without a first token yet, whose
    prompts have `num_prefill_tokens` together. `num_unseen`: the sequence's committed tokens that the drafter
    has not taken in. `num_output`: tokens generated, `num_remaining`: the most that may follow. Its latest result was
    `received` then, in seconds; what prompts had added to the worker's steps by then took `prefill_seconds` in all.
    """

    load: int
    num_waiting: int
    num_prefill_tokens: int
    num_unseen: int
    num_output: int
    num_remaining: int
    received: float
    prefill_seconds: float

    @property
    def prefill_bound(self) -> bool:
        """Whether the worker has more prompt tokens to compute than a step holds."""
        return self.num_prefill_tokens > PREFILL_STEP_TOKENS


class Drafting:
    """What the controller keeps of one sequence: its acceptance, whether it drafts, and where it stands.

    One that is `coupled`, whose drafter foresees the target's own draws, may have trees drafted (of `num_nodes` tokens;
    0: a chain), and scouts in the shadow of plain decoding: `num_scouting_rounds` of `num_scouting_tokens` each are for
    its owner to make and observe. Another one scouts with rounds.
    """

    def __init__(self, prior: Acceptance | None = None, coupled: bool = False) -> None:
        self.acceptance = Acceptance(prior)
        self.coupled = coupled
        self.num_nodes = 0
        self.active = False
        self.catch_up = 0.0
        self.num_scouting_rounds = 0
        self.num_scouting_tokens = 0
        self.situation: Situation | None = None

    def observe_tree(
        self, followed_rows: Sequence[int], path: Sequence[int], asked: Shape, ended: bool, trees: Trees | None
    ) -> None:
        """Of what was proposed, asked for a tree of that shape, the nodes of `path` were accepted, and with the last of
        them the sequence `ended`. `followed_rows`: see `outcome_of_likeliest`, as what is learnt of chains is that."""
        num_examined, num_kept = outcome_of_likeliest(followed_rows, path)
        if ended:
            num_examined = len(path)
        elif num_examined == len(path) < asked.num_draft_tokens and len(followed_rows) < asked.num_nodes:
            num_examined += 1  # what the drafter left out is none that would have been accepted
        if trees is not None:
            trees.observe(self.acceptance.rate, asked, len(path), ended)
        self.acceptance.observe_each(num_examined, num_kept)

    def observe_in_shadow(self, num_draft_tokens: int, num_accepted: int) -> None:
        """A scouting round in the shadow of plain decoding had this outcome."""
        self.acceptance.observe(num_draft_tokens, num_accepted)
        self.num_scouting_rounds = max(0, self.num_scouting_rounds - 1)
