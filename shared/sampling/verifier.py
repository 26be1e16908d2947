"""Verification: which draft tokens stand, and the token that follows them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.sampling.coupled import draw_coupled
from shared.sampling.filters import sampling_logprobs
from shared.sampling.logprobs import token_logprobs
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from shared.sampling.rejection import Draft, accept
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens, TokenLogprobs
from shared.sampling.unseeded import draw_unseeded


def check_proposal(proposal: Proposal, params: SamplingParams) -> None:
    """Raises ValueError, naming the field, if the proposal does not hold what its sequence's rule needs.

    Meant for the edge, where a malformed proposal still ends its own sequence only.
    """
    if proposal.parents:
        _check_tree(proposal, params)
    if params.coupled or not _by_rejection(proposal):
        return
    if len(proposal.candidate_counts) != len(proposal):
        raise ValueError(
            f"proposal.candidate_counts has {len(proposal.candidate_counts)} entries for {len(proposal)} draft tokens"
        )
    if proposal.candidate_counts and min(proposal.candidate_counts) < 1:
        raise ValueError("proposal.candidate_counts has an entry below 1")
    size = 4 * sum(proposal.candidate_counts)
    for name, packed in (("ids", proposal.candidate_ids), ("probs", proposal.candidate_probs)):
        if len(packed) != size:
            raise ValueError(
                f"proposal.candidate_{name} has {len(packed)} bytes where candidate_counts asks for {size}"
            )


def _by_rejection(proposal: Proposal) -> bool:
    """Whether it says anything of what its tokens were drawn from."""
    return bool(proposal.candidate_counts or proposal.candidate_ids or proposal.candidate_probs)


def _check_tree(proposal: Proposal, params: SamplingParams) -> None:
    if not params.coupled and _by_rejection(proposal):
        raise ValueError("proposal.parents is set for a sequence that is verified by rejection sampling")
    if len(proposal.parents) != len(proposal):
        raise ValueError(f"proposal.parents has {len(proposal.parents)} entries for {len(proposal)} draft tokens")
    for i, parent in enumerate(proposal.parents):
        if parent > i:
            raise ValueError(f"proposal.parents[{i}] is {parent}: it must be at most {i}, so as to come before")


def verify(logits: Tensor, rows: Sequence[SampleRows], generator: torch.Generator | None = None) -> list[SampledTokens]:
    """For each sequence the draft tokens that are accepted and one token more.

    `logits` [R, V]: the target's, raw, of any float dtype, R the sum of `num_rows`. Sequences that are
    greedy or seeded are verified by coupled sampling: a draft token is accepted if the target draws the
    same. So are the others, by random numbers from `generator` or else torch's global one, where the proposal does not
    say what its tokens were drawn from: those that are copied could be no others, and of such rejection sampling keeps
    as many, p each. With that, by rejection sampling (`rejection.accept`). A sequence without a proposal is a plain
    draw. One device-to-host copy, and a second one if any sequence asks for log-probabilities. Raises ValueError for a
    malformed proposal.
    """
    first_rows: list[int] = []
    total_rows = 0
    for sequence in rows:
        first_rows.append(total_rows)
        total_rows += sequence.num_rows
    if total_rows != len(logits):
        raise ValueError(f"logits has {len(logits)} rows where the sequences have {total_rows}")
    sampled: list[SampledTokens | None] = [None] * len(rows)
    coupled: list[int] = []
    unseeded: list[int] = []
    others: list[int] = []
    for i, sequence in enumerate(rows):
        check_proposal(sequence.proposal, sequence.params)
        drawn = unseeded if not _by_rejection(sequence.proposal) else others
        (coupled if sequence.params.coupled else drawn).append(i)

    def part(members: list[int]) -> tuple[Tensor, list[SampleRows]]:
        chosen = [rows[i] for i in members]
        if len(members) == len(rows):
            return logits, chosen
        index = [first_rows[i] + j for i in members for j in range(rows[i].num_rows)]
        return logits[torch.tensor(index, device=logits.device)], chosen

    results: list[Tensor] = []
    if coupled:
        results.append(draw_coupled(*part(coupled)))
    if unseeded:
        results.append(draw_unseeded(*part(unseeded), generator))
    if others:
        results.extend(_verify_by_rejection(*part(others), generator))
    host = iter((torch.cat(results) if len(results) > 1 else results[0]).tolist() if results else ())

    for i in (*coupled, *unseeded):
        sampled[i] = _coupled_outcome(rows[i].proposal, [next(host) for _ in range(rows[i].num_rows)])
    num_accepted = [next(host) for _ in others]
    for i, count in zip(others, num_accepted, strict=True):
        sampled[i] = SampledTokens((*rows[i].proposal.token_ids[:count], next(host)), count)
    return _with_logprobs(logits, rows, first_rows, [tokens for tokens in sampled if tokens is not None])


def _coupled_outcome(proposal: Proposal, own_ids: Sequence[int]) -> SampledTokens:
    """The target's own draws, as long as a draft token that may follow is the same, and one that none is."""
    draft_ids = proposal.token_ids
    if not proposal.parents:
        count = 0
        while count < len(draft_ids) and draft_ids[count] == own_ids[count]:
            count += 1
        return SampledTokens(tuple(own_ids[: count + 1]), count)
    # Of siblings with one id the first stands for all.
    children: dict[tuple[int, int], int] = {}
    for i, (parent, token) in enumerate(zip(proposal.parents, draft_ids, strict=True)):
        children.setdefault((parent, token), i + 1)
    path = [0]
    while (child := children.get((path[-1], own_ids[path[-1]]))) is not None:
        path.append(child)
    return SampledTokens(tuple(own_ids[row] for row in path), len(path) - 1, path=tuple(path[1:]))


def _verify_by_rejection(
    logits: Tensor, rows: Sequence[SampleRows], generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """`rejection.accept` for sequences that are neither greedy nor seeded, whose proposals say what they were drawn
    from."""
    probs = sampling_logprobs(logits, rows).exp_()
    proposals = [sequence.proposal for sequence in rows]
    packed_ids = bytearray().join(proposal.candidate_ids for proposal in proposals)
    packed_probs = bytearray().join(proposal.candidate_probs for proposal in proposals)
    draft = Draft(
        num_draft_tokens=[len(proposal) for proposal in proposals],
        token_ids=torch.tensor([token for proposal in proposals for token in proposal.token_ids], device=logits.device),
        candidate_counts=[count for proposal in proposals for count in proposal.candidate_counts],
        candidate_ids=torch.frombuffer(packed_ids, dtype=torch.uint32).long().to(logits.device),
        candidate_probs=torch.frombuffer(packed_probs, dtype=torch.float32).to(logits.device),
    )
    return accept(probs, draft, generator)


def _with_logprobs(
    logits: Tensor, rows: Sequence[SampleRows], first_rows: Sequence[int], sampled: list[SampledTokens]
) -> list[SampledTokens]:
    """`sampled`, with log-probabilities for the sequences that ask."""
    row_ids: list[int] = []
    token_ids: list[int] = []
    num_top: list[int] = []
    for sequence, first_row, tokens in zip(rows, first_rows, sampled, strict=True):
        if sequence.params.logprobs is not None:
            row_ids.extend(first_row + row for row in (0, *(tokens.path or range(1, len(tokens.token_ids)))))
            token_ids.extend(tokens.token_ids)
            num_top.extend([sequence.params.logprobs] * len(tokens.token_ids))
    if not row_ids:
        return sampled
    reported = iter(token_logprobs(logits, row_ids, token_ids, num_top))

    def take(tokens: SampledTokens) -> tuple[TokenLogprobs, ...]:
        return tuple(next(reported) for _ in tokens.token_ids)

    return [
        tokens if sequence.params.logprobs is None else tokens._replace(logprobs=take(tokens))
        for sequence, tokens in zip(rows, sampled, strict=True)
    ]
