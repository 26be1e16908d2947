"""One sequence's token tree as it grows: best first, by how likely its lines are."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shared.sampling.proposal import Proposal
from shared.sampling.sampled import Children

# Tokens that a step computes of one tree: on a CPU so many rows cost hardly more than one.
WIDTH = 8


class _Node(NamedTuple):
    """`parent`: index of the node that it follows, -1 where that is the last committed token. `logprob`: of all of its
    line, from there on; `guess`: how likely its drafter took it to be behind the others."""

    token_id: int
    parent: int
    logprob: float
    guess: float


class Outcome(NamedTuple):
    """Of a token to propose, in its place, whose turn came: what its drafter took for its likelihood, whether it was
    the first choice behind what it follows, and whether it was the one."""

    place: int
    guess: float
    is_first: bool
    accepted: bool


class DraftTree:
    """The `num_nodes` likeliest tokens that `num_steps` steps of the drafter find, each behind one that is there, too.

    A step computes the likeliest that were not yet, of those that would be proposed by now, so that the tree is as
    deep as its likely lines are, and growing ends where nothing better can come (as in EAGLE-2, Li et al. 2024, but
    that its steps look at the last level alone).
    """

    def __init__(
        self,
        num_nodes: int,
        num_steps: int,
        *,
        branching: bool = True,
        least: float = 0.0,
        price: float = 0.0,
        likelihood: Callable[[float, bool], float] | None = None,
    ) -> None:
        """Not `branching`, it is a chain. No step looks behind tokens that are accepted less often than `least`.
        `price`: what it takes to verify one, in accepted tokens.
        `likelihood`: what to make of a drafter's guess, and whether it is its first choice for that place; None: it is
        taken as it is."""
        self._num_nodes = num_nodes
        self._num_steps = num_steps
        self._branching = branching
        self._least = math.log(least) if least > 0 else -math.inf
        self._price = price
        self._likelihood = likelihood
        self._nodes: list[_Node] = []
        # Those to propose by now, best first; None where that is to be found out.
        self._order: list[int] | None = None
        # Log-likelihoods of those to propose by now, negated, so the best first.
        self._best: list[float] = []
        # Those that the next step computes; None as above.
        self._next: list[int] | None = None
        # Those computed, in that order, and how many of them by the latest step; by the first one it was the root.
        self._computed: list[int] = []
        self._num_latest = 0

    @property
    def num_children(self) -> int:
        """How many tokens that may follow a row are worth to know."""
        return min(self._num_nodes, WIDTH) if self._branching else 1

    def take(self, children: Sequence[Children]) -> None:
        """Takes in what may follow each row that the latest step computed, as far as it would be proposed by now: later
        steps find only what takes its place."""
        latest = self._computed[-self._num_latest :] if self._num_latest else [-1]
        for parent, found in zip(latest, children, strict=True):
            before = self._nodes[parent].logprob if parent >= 0 else 0.0
            logprob, is_first = 0.0, True
            for token_id, own in zip(found.token_ids, found.logprobs, strict=True):
                guess = math.exp(own)
                if self._likelihood is not None:
                    own = math.log(max(self._likelihood(guess, is_first), 1e-9))
                # What its drafter likes less than another is no likelier.
                logprob = min(logprob, own)
                if not self._is_among_best(before + logprob):
                    break
                self._nodes.append(_Node(token_id, parent, before + logprob, guess))
                is_first = False
        self._num_steps -= 1
        self._order = self._next = None

    def advance(self) -> tuple[Proposal, int] | None:
        """What the next step computes: all tokens computed so far and behind them its own, and the first row of these;
        None if the tree has grown."""
        wanted = self._wanted()
        if not wanted:
            return None
        self._computed += wanted
        self._next = None
        self._num_latest = len(wanted)
        return self._proposal(self._computed), len(self._computed) - len(wanted) + 1

    @property
    def num_wanted(self) -> int:
        """Rows of the next step; none where the tree has grown."""
        return len(self._wanted())

    @property
    def prospect(self) -> float:
        """What the next step would find at best: as many tokens as those are likely to be accepted that it computes,
        without what verifying as many takes; 0 where the tree has grown."""
        return sum(max(0.0, math.exp(self._nodes[i].logprob) - self._price) for i in self._wanted())

    @property
    def worth(self) -> float:
        """How many of the tokens to propose may be expected to be accepted, without what verifying them takes."""
        return sum(max(0.0, its - self._price) for its in self.likelihoods())

    def likelihoods(self) -> list[float]:
        """Of each token to propose, with all those before it: best first, as in the proposal."""
        return [math.exp(self._nodes[i].logprob) for i in self._likeliest()]

    def outcomes(self, committed: Sequence[int]) -> list[Outcome]:
        """Of the tokens to propose whose turn came, by what was committed behind its beginning."""
        found: list[Outcome] = []
        parent: int | None = -1
        for token in committed:
            following, parent, is_first = parent, None, True
            for place, i in enumerate(self._likeliest()):
                node = self._nodes[i]
                if node.parent != following:
                    continue
                accepted = node.token_id == token and parent is None
                found.append(Outcome(place, node.guess, is_first, accepted))
                parent, is_first = i if accepted else parent, False
            if parent is None:
                break
        return found

    def proposal(self, num_nodes: int | None = None) -> Proposal:
        """The likeliest tokens, all or so many, best first, and so each behind the one that it follows."""
        return self._proposal(self._likeliest()[:num_nodes])

    def _is_among_best(self, logprob: float) -> bool:
        """Whether one more token that is so likely would be proposed by now; notes it then."""
        if len(self._best) == self._num_nodes:
            if -logprob >= self._best[-1]:
                return False
            self._best.pop()
        insort(self._best, -logprob)
        return True

    def _wanted(self) -> list[int]:
        if self._next is None:
            known = set(self._computed)
            wanted = [i for i in self._likeliest() if i not in known and self._nodes[i].logprob > self._least]
            self._next = wanted[:WIDTH] if self._num_steps > 0 else []
        return self._next

    def _likeliest(self) -> list[int]:
        """Indices of the nodes to propose, best first. Who follows another is no likelier, and comes later."""
        if self._order is None:
            order = sorted(range(len(self._nodes)), key=lambda i: -self._nodes[i].logprob)
            self._order = order[: self._num_nodes]
        return self._order

    def _proposal(self, nodes: Sequence[int]) -> Proposal:
        rows = {-1: 0} | {node: i + 1 for i, node in enumerate(nodes)}
        chosen = [self._nodes[node] for node in nodes]
        return Proposal(tuple(node.token_id for node in chosen), parents=tuple(rows[node.parent] for node in chosen))
