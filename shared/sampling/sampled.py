"""What one step's sampling gives one sequence."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """A token's log-probability (nats) under the target at temperature 1, before penalties and filters,
    and the likeliest (token id, log-probability) pairs, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Candidates(NamedTuple):
    """The truncated, renormalised distribution a draft token was drawn from, packed as in `Proposal`:
    `num_entries` little-endian uint32 ids and float32 probabilities."""

    num_entries: int
    ids: bytes
    probs: bytes


class Child(NamedTuple):
    """A token that may come next in a tree, and how likely it is, given what comes before it: a natural logarithm."""

    token_id: int
    logprob: float


class SampledTokens(NamedTuple):
    """New tokens of one sequence: `num_accepted` draft tokens, then one drawn now.

    `logprobs` has an entry for each token where the request asks for them; `candidates` is set when
    a drafter draws for rejection sampling. `path`: of a token tree the rows of the accepted draft tokens; empty where
    they are a chain's first ones. `children`: what may follow each row of a tree that a drafter grows, likeliest first,
    in place of any token.
    """

    token_ids: tuple[int, ...]
    num_accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    candidates: Candidates | None = None
    path: tuple[int, ...] = ()
    children: tuple[tuple[Child, ...], ...] = ()
