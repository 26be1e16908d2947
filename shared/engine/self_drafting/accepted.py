"""Where the tokens that a step keeps stand among those that it computed."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import NamedTuple

from shared.engine.scheduler import ScheduledSequence, StepPlan
from shared.sampling.sampled import SampledTokens


class Kept(NamedTuple):
    """A scheduled sequence, the packed places of the computed tokens that it keeps, in text order, and the token that
    follows the last of them: drawn now, or of the prompt."""

    item: ScheduledSequence
    places: list[int]
    next_token: int


def kept_tokens(plan: StepPlan, sampled: List[SampledTokens]) -> Iterator[Kept]:
    """Of each scheduled sequence in order; `sampled` has an entry for each that has rows, which has not taken it in."""
    outcomes = iter(sampled)
    first = 0
    for item in plan.scheduled:
        if not item.num_rows:
            following = item.sequence.token_ids[item.start + item.num_tokens]
            yield Kept(item, list(range(first, first + item.num_tokens)), following)
        else:
            tokens = next(outcomes)
            row_0 = first + item.num_tokens - item.num_rows
            path = tokens.path or range(1, tokens.num_accepted + 1)
            yield Kept(item, [*range(first, row_0 + 1), *(row_0 + row for row in path)], tokens.token_ids[-1])
        first += item.num_tokens
