"""What may follow each row of a token tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from shared.sampling.coupled import coupled_scores
from shared.sampling.filters import sampling_scores
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import Children

LikeliestFinder = Callable[[Tensor, int], tuple[list[list[int]], list[list[float]]]]
"""Of scores [R, V] float32 so many of the likeliest, at most V, best first: ids and, by a softmax of all, logprobs; not
finite where there are fewer."""


def branch(logits: Tensor, rows: Sequence[SampleRows]) -> list[tuple[Children, ...]]:
    """What the target may draw at each row, whose noise the drafter knows: the largest `num_children` of its own
    logprobs + noise, and as how likely a softmax of these sees them.

    `logits` [R, V]: the drafter's, of the `num_rows` of each sequence, which is greedy or seeded. Raises ValueError if
    one is not.
    """
    scores = coupled_scores(sampling_scores(logits, rows), rows)
    most = min(max(sequence.num_children for sequence in rows), scores.shape[1])
    token_ids, logprobs = _likeliest(scores, most)
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


def find_likeliest_by(finder: LikeliestFinder) -> None:
    """From now on they are found by that."""
    global _likeliest
    _likeliest = finder


def likeliest_by_torch(scores: Tensor, most: int) -> tuple[list[list[int]], list[list[float]]]:
    """A `LikeliestFinder` for any device."""
    # On CPUs torch normalises all of them in half the time that `logsumexp` takes.
    best, ids = scores.log_softmax(1).topk(most)
    return ids.tolist(), best.tolist()


_likeliest: LikeliestFinder = likeliest_by_torch
