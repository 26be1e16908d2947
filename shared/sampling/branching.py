"""What may follow each row of a token tree."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from shared.sampling.coupled import coupled_scores
from shared.sampling.filters import sampling_logprobs
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import Child

Children = tuple[tuple[Child, ...], ...]
"""Of each row of a sequence, likeliest first."""


def branch(logits: Tensor, rows: Sequence[SampleRows]) -> list[Children]:
    """What the target may draw at each row, whose noise the drafter knows: the largest `num_children` of its own
    logprobs + noise, and as how likely a softmax of these sees them.

    `logits` [R, V]: the drafter's, of the `num_rows` of each sequence, which is greedy or seeded. Raises ValueError if
    one is not.
    """
    scores = coupled_scores(sampling_logprobs(logits, rows), rows)
    most = min(max(sequence.num_children for sequence in rows), scores.shape[1])
    # On CPUs torch normalises all of them in half the time that `logsumexp` takes.
    best, ids = scores.log_softmax(1).topk(most)
    token_ids, logprobs = ids.tolist(), best.tolist()
    branched, row = [], 0
    for sequence in rows:
        children = []
        for _ in range(sequence.num_rows):
            pairs = zip(token_ids[row], logprobs[row], strict=True)
            likely = [Child(token, logprob) for token, logprob in pairs if math.isfinite(logprob)]
            children.append(tuple(likely[: sequence.num_children]))
            row += 1
        branched.append(tuple(children))
    return branched
