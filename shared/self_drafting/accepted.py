"""Where the tokens that a step keeps stand among those that it computed."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import NamedTuple

from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.sampling.sampled import SampledTokens


class Kept(NamedTuple):
    """A scheduled sequence, the packed places of the computed tokens that it keeps, which stand at its positions from
    `item.start` on, and of each the token that follows it: of the prompt, accepted, or drawn now."""

    item: ScheduledSequence
    places: list[int]
    following: list[int]


def kept_tokens(plan: StepPlan, sampled: List[SampledTokens]) -> Iterator[Kept]:
    """Of each scheduled sequence in order; `sampled` has an entry for each that has rows, which has not taken it in."""
    outcomes = iter(sampled)
    first = 0
    for item in plan.scheduled:
        places = list(range(first, first + item.num_tokens))
        following = item.sequence.token_ids[item.start + 1 : item.start + item.num_tokens + 1]
        if item.num_rows:
            tokens = next(outcomes)
            row_0 = item.num_tokens - item.num_rows
            path = tokens.path or range(1, tokens.num_accepted + 1)
            places = [*places[: row_0 + 1], *(first + row_0 + row for row in path)]
            following = [*following[:row_0], *tokens.token_ids]
        yield Kept(item, places, following)
        first += item.num_tokens
