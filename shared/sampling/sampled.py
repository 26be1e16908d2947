"""What one step's sampling gives one sequence."""

from __future__ import annotations

from collections.abc import Sequence
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


class Children(NamedTuple):
    """Tokens that may come next in a tree, likeliest first, and how likely each is, given what comes before it: natural
    logarithms."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class SampledTokens(NamedTuple):
    """New tokens of one sequence: `num_accepted` draft tokens, then one drawn now.

    `logprobs` has an entry for each token where the request asks for them; `candidates` is set when
    a drafter draws for rejection sampling. `path`: of a token tree the rows of the accepted draft tokens; empty where
    they are a chain's first ones. `children`: what may follow each row of a tree that a drafter grows, in place of any
    token.
    """

    token_ids: tuple[int, ...]
    num_accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    candidates: Candidates | None = None
    path: tuple[int, ...] = ()
    children: tuple[Children, ...] = ()
