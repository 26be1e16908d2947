"""What may follow each row of a token tree."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from shared.sampling.coupled import likeliest_coupled
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import Children


def branch(logits: Tensor, rows: Sequence[SampleRows]) -> list[tuple[Children, ...]]:
    """What the target may draw at each row, whose noise the drafter knows: the largest `num_children` of its own
    logprobs + noise, and as how likely a softmax of these sees them.

    `logits` [R, V]: the drafter's, of the `num_rows` of each sequence, which is greedy or seeded. Raises ValueError if
    one is not.
    """
    most = min(max(sequence.num_children for sequence in rows), logits.shape[1])
    token_ids, logprobs = likeliest_coupled(logits, rows, most)
    branched, row = [], 0
    for sequence in rows:
        last = row + sequence.num_rows
        branched.append(tuple(_first(sequence.num_children, token_ids[i], logprobs[i]) for i in range(row, last)))
        row = last
    return branched


def _first(most: int, token_ids: list[int], logprobs: list[float]) -> Children:
    """So many of them, as far as there are."""
    most = min(most, len(token_ids))
    while most > 0 and not math.isfinite(logprobs[most - 1]):
        most -= 1
    return Children(token_ids[:most], logprobs[:most])
