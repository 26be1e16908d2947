"""Rejection sampling: keep of a draft what the target's distribution allows, and draw one token more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Draft(NamedTuple):
    """Draft tokens of S sequences, one sequence behind the other, with what each was drawn from.

    `num_draft_tokens`: S numbers, D in all. `token_ids` [D] int64. Token d was drawn from
    `candidate_counts[d]` of the pairs (`candidate_ids` [E] int64, `candidate_probs` [E] float32).
    Tensors are on the target's device. Ids may exceed the target's vocabulary.
    """

    num_draft_tokens: Sequence[int]
    token_ids: Tensor
    candidate_counts: Sequence[int]
    candidate_ids: Tensor
    candidate_probs: Tensor


def truncate(logprobs: Tensor, mass: float = 0.98, max_entries: int = 512) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, renormalised: ids [R, K] int64 and probabilities [R, K] float32.

    A row keeps the fewest entries that hold `mass` of `logprobs` [R, V] (normalised), at most `max_entries`.
    K is the most that a row needs; others are padded at the end with probability 0. Best first.
    """
    ids, probs, counts = _likeliest(logprobs, mass, max_entries)
    width = int(counts.max())
    return ids[:, :width], _renormalised(probs[:, :width], counts)


def likeliest(logprobs: Tensor, mass: float, max_entries: int) -> tuple[Tensor, Tensor]:
    """`truncate`, padded to K = `max_entries`, or V where that is less: nothing is waited for."""
    ids, probs, counts = _likeliest(logprobs, mass, max_entries)
    return ids, _renormalised(probs, counts)


def _likeliest(logprobs: Tensor, mass: float, max_entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and probabilities [R, K], best first, and how many of them each row keeps [R, 1]."""
    values, ids = logprobs.topk(min(max_entries, logprobs.shape[1]))
    probs = values.exp()
    before = probs.cumsum(1)[:, :-1]
    return ids, probs, 1 + (before < mass).sum(1, keepdim=True)


def _renormalised(probs: Tensor, counts: Tensor) -> Tensor:
    """The first `counts` [R, 1] of each row of `probs` [R, K], and 0."""
    probs = probs * (torch.arange(probs.shape[1], device=probs.device) < counts)
    return probs / probs.sum(1, keepdim=True)


def draw(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One index [R] int64 for each row of `weights` [R, N], drawn in proportion to them.

    Inverse of the cumulated weights, in float64; a weight of 0 is never drawn. Rows need not sum to 1.
    """
    cumulated = weights.cumsum(1, dtype=torch.float64)
    uniform = torch.rand(len(weights), 1, dtype=torch.float64, device=weights.device, generator=generator)
    index = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True).squeeze(1)
    # Whatever the weights, NaN too, the index is one of the row's.
    return index.clamp_(max=weights.shape[1] - 1)


def accept(probs: Tensor, draft: Draft, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """How many draft tokens each sequence keeps [S] int64, and the token that follows them [S] int64.

    `probs` [R, V] float32: the target's probabilities, sequence s having 1 + num_draft_tokens[s] rows, one
    sequence behind the other. Leviathan et al. 2023, algorithm 1 (Chen et al. 2023, theorem 1): draft token
    x is kept with probability min(1, p(x) / q(x)); behind the first one that is not, the recovered token
    comes from norm(max(0, p − q)); if all are kept, the bonus token comes from p. Where rounding leaves
    nothing of p − q, p and q are the same and p serves.
    """
    device, vocab_size = probs.device, probs.shape[1]
    lengths = torch.tensor(draft.num_draft_tokens)
    num_sequences, num_tokens = len(lengths), len(draft.token_ids)
    sequence = torch.arange(num_sequences).repeat_interleave(lengths)  # [D]
    position = torch.arange(num_tokens) - (lengths.cumsum(0) - lengths)[sequence]  # [D] in its sequence's draft
    owner = torch.arange(num_tokens).repeat_interleave(torch.tensor(draft.candidate_counts, dtype=torch.int64))  # [E]
    first_row = (lengths + 1).cumsum(0) - (lengths + 1)  # [S]
    row = first_row[sequence] + position  # [D]
    sequence, position, owner, first_row, row = (x.to(device) for x in (sequence, position, owner, first_row, row))

    drawn = draft.candidate_ids == draft.token_ids[owner]
    q = probs.new_zeros(num_tokens).index_add_(0, owner, draft.candidate_probs * drawn)
    p = probs[row, draft.token_ids.clamp(max=vocab_size - 1)] * (draft.token_ids < vocab_size)
    kept = torch.rand(num_tokens, device=device, generator=generator) * q < p

    # A last column that is never kept ends every run.
    runs = torch.zeros(num_sequences, max(draft.num_draft_tokens) + 1, dtype=torch.int64, device=device)
    runs[sequence, position] = kept.long()
    num_accepted = runs.cumprod(1).sum(1)

    target = probs[first_row + num_accepted]  # [S, V]
    # No draft position equals num_accepted where all were kept: nothing is taken from the bonus row.
    rejected = (position == num_accepted[sequence])[owner] & (draft.candidate_ids < vocab_size)
    offsets = sequence[owner] * vocab_size + draft.candidate_ids.clamp(max=vocab_size - 1)
    residual = target.flatten().index_add(0, offsets, draft.candidate_probs * rejected, alpha=-1)
    residual = residual.view_as(target).clamp_(min=0)
    weights = torch.where(residual.sum(1, keepdim=True) > 0, residual, target)
    return num_accepted, draw(weights, generator)
