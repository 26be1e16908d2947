"""Draft tokens copied from where the text's end occurred before."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.copying.suffix_index import LONGEST_MATCH, Match
from shared.policy.calibration import Calibration, observe_proposal
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal


@dataclass(frozen=True, slots=True)
class Copied:
    """A proposal, best first, and what was taken for the likelihood of each of its tokens when its turn comes:
    `guesses`. `likelihoods`: what experience makes of that, for each token with all those before it."""

    proposal: Proposal = EMPTY_PROPOSAL
    guesses: tuple[float, ...] = ()
    likelihoods: tuple[float, ...] = ()

    @property
    def num_expected(self) -> float:
        """How many of its tokens may be expected to be accepted."""
        return sum(self.likelihoods)

    def first(self, count: int) -> Copied:
        """The first so many of its tokens."""
        proposal = replace(
            self.proposal,
            token_ids=self.proposal.token_ids[:count],
            parents=self.proposal.parents[:count],
            sources=self.proposal.sources[:count],
        )
        return Copied(proposal.as_chain(), self.guesses[:count], self.likelihoods[:count])

    def observe(self, committed: Sequence[int], calibration: Calibration) -> None:
        """Tells what became of those whose turn came, by the tokens that were committed behind the proposal's
        beginning."""
        observe_proposal(
            self.proposal.token_ids,
            self.proposal.followed_rows(),
            committed,
            lambda i, accepted: calibration.observe(self.guesses[i], accepted),
        )


def copy(
    matches: Sequence[Match],
    most_tokens: int,
    least_likelihood: float,
    calibration: Calibration,
    branching: bool,
    most_depth: int | None = None,
) -> Copied:
    """What followed where the text's end occurred before, the likeliest first: `most_tokens` at most, in lines of at
    most `most_depth`, and none that is accepted less often than `least_likelihood`.

    Not `branching`, it is a chain. Occurrences that go on alike add up, and a longer match says more; a token is taken
    to be as likely as its share of these, the less so the shorter the match is. A line goes on as long as that is
    likely, so it is the longer the longer the match.
    """
    # (-likelihood of the line, order of arrival, token, guess, row it follows, matches that go on with it, its depth)
    open_lines: list[tuple[float, int, int, float, int, Sequence[Match], int]] = []
    arrivals = itertools.count()
    token_ids: list[int] = []
    parents: list[int] = []
    guesses: list[float] = []
    likelihoods: list[float] = []

    def branch(row: int, likelihood: float, agreeing: Sequence[Match], depth: int) -> None:
        if depth == most_depth:
            return
        for token, guess, followers in _nexts(agreeing, depth)[: None if branching else 1]:
            its = likelihood * calibration.likelihood(guess)
            if its >= least_likelihood:
                heapq.heappush(open_lines, (-its, next(arrivals), token, guess, row, followers, depth + 1))

    branch(0, 1.0, matches, 0)
    while open_lines and len(token_ids) < most_tokens:
        negative, _, token, guess, row, followers, depth = heapq.heappop(open_lines)
        token_ids.append(token)
        parents.append(row)
        guesses.append(guess)
        likelihoods.append(-negative)
        branch(len(token_ids), -negative, followers, depth)
    proposal = Proposal(tuple(token_ids), parents=tuple(parents), sources=("suffix",) * len(token_ids)).as_chain()
    return Copied(proposal, tuple(guesses), tuple(likelihoods))


def most_likely(length: int) -> float:
    """What is taken for the likelihood of a token that all matches agree on, of which none is longer."""
    return length / (length + 1)


def _nexts(agreeing: Sequence[Match], depth: int) -> list[tuple[int, float, Sequence[Match]]]:
    """The tokens that follow matches which agreed for `depth` tokens already, likeliest first: each with a guess of how
    likely it is, and whose it is."""
    if len(agreeing) == 1:  # as it mostly is, and several times as fast
        [match] = agreeing
        token = match.next(depth)
        return [] if token is None else [(token, most_likely(min(match.length + depth, LONGEST_MATCH)), agreeing)]
    by_token: defaultdict[int, list[Match]] = defaultdict(list)
    for match in agreeing:
        token = match.next(depth)
        if token is not None:
            by_token[token].append(match)
    if not by_token:
        return []
    weights = {token: sum(match.length + depth for match in its) for token, its in by_token.items()}
    longest = min(max(match.length for its in by_token.values() for match in its) + depth, LONGEST_MATCH)
    scale = most_likely(longest) / sum(weights.values())
    order = sorted(by_token, key=lambda token: -weights[token])
    return [(token, weights[token] * scale, by_token[token]) for token in order]
