"""Drafts of several sources as one tree: every line of each, once, the likeliest first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from shared.drafting.merged_draft import MergedDraft
from shared.sampling.proposal import Proposal


@dataclass
class Drafted:
    """A draft of one source."""

    whole: Proposal
    likelihoods: Sequence[float]

    def proposal(self, count: int) -> Proposal:
        return Proposal(
            self.whole.token_ids[:count], parents=self.whole.parents[:count], sources=self.whole.sources[:count]
        )


def drafted(source: str, *nodes: tuple[int, int, float]) -> Drafted:
    """Of (token, row it follows, likelihood) each."""
    tokens, parents, likelihoods = zip(*nodes, strict=True)
    return Drafted(Proposal(tokens, parents=parents, sources=(source,) * len(nodes)), likelihoods)


def lines(proposal: Proposal) -> list[tuple[int, ...]]:
    return [tuple(proposal.token_ids[i] for i in proposal.lineage(row)) for row in range(1, len(proposal) + 1)]


def random_draft(source: str, rng: random.Random) -> Drafted:
    """A tree of few tokens, so that two have much in common; best first."""
    found: dict[tuple[int, ...], float] = {}
    for _ in range(rng.randint(1, 12)):
        line = rng.choice([(), *found])
        found.setdefault((*line, rng.randrange(3)), found.get(line, 1.0) * rng.choice([0.2, 0.5, 0.9, 1.0]))
    order = sorted(found, key=lambda line: (-found[line], len(line)))
    rows = {(): 0} | {line: row for row, line in enumerate(order, 1)}
    return drafted(source, *((line[-1], rows[line[:-1]], found[line]) for line in order))


def test_what_both_have_is_one_and_the_surers() -> None:
    model = drafted("model", (5, 0, 0.9), (6, 1, 0.5), (7, 0, 0.1))
    suffix = drafted("suffix", (5, 0, 0.7), (6, 1, 0.6), (8, 2, 0.55))
    merged = MergedDraft([model, suffix])
    assert merged.likelihoods == [0.9, 0.6, 0.55, 0.1]
    proposal = merged.proposal(4)
    assert lines(proposal) == [(5,), (5, 6), (5, 6, 8), (7,)]
    assert proposal.sources == ("model", "suffix", "suffix", "model")
    # Up to there it is a chain.
    assert merged.proposal(3) == Proposal((5, 6, 8), sources=("model", "suffix", "suffix"))


@pytest.mark.parametrize("seed", range(50))
def test_every_line_of_each_is_there_once(seed: int) -> None:
    rng = random.Random(seed)
    drafts = [random_draft(source, rng) for source in ("model", "suffix", "target")[: rng.randint(1, 3)]]
    merged = MergedDraft(drafts)
    assert list(merged.likelihoods) == sorted(merged.likelihoods, reverse=True)
    everything = lines(merged.proposal(len(merged.likelihoods)))
    assert sorted(everything) == sorted({line for draft in drafts for line in lines(draft.whole)})
    likeliest = {
        line: max(
            (likelihood, draft.whole.sources[0])
            for draft in drafts
            for each, likelihood in zip(lines(draft.whole), draft.likelihoods, strict=True)
            if each == line
        )[0]
        for line in everything
    }
    assert [likeliest[line] for line in everything] == list(merged.likelihoods)
    for count in range(len(everything) + 1):
        proposal = merged.proposal(count)
        # Each behind the one that it follows.
        assert all(parent <= i for i, parent in enumerate(proposal.followed_rows()))
        assert lines(proposal) == everything[:count]
