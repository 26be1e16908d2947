"""What a scout learns while its sequence decodes plainly, with a drafter that answers when the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest
from outrider.v1 import worker_pb2

from services.router.generation.scout import Scout
from services.router.workers.draft_link import DraftLane
from shared.policy.drafting import Drafting
from shared.policy.shape import Shape


class Drafter:
    """A lane whose proposals the test gives. `asked` holds the committed tokens and γ of every one."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Shape, str]] = []
        self.answers: list[asyncio.Future[worker_pb2.Proposal | None]] = []
        self.num_cancelled = 0

    async def propose(self, token_ids: Sequence[int], shape: Shape, traceparent: str) -> worker_pb2.Proposal | None:
        self.asked.append((list(token_ids), shape, traceparent))
        self.answers.append(asyncio.get_running_loop().create_future())
        try:
            return await self.answers[-1]
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def answer(self, *token_ids: int) -> None:
        self.answers[-1].set_result(worker_pb2.Proposal(token_ids=token_ids))
        await settle()


async def settle() -> None:
    """Everything that can go on has."""
    for _ in range(3):
        await asyncio.sleep(0)


class ScoutingSequence:
    """One sequence with its scout: `commit` is a plain step's result."""

    def __init__(self, num_rounds: int = 2) -> None:
        self.drafter = Drafter()
        self.drafting = Drafting(coupled=True)
        self.drafting.num_scouting_rounds, self.drafting.num_scouting_tokens = num_rounds, 3
        self.scout = Scout(cast(DraftLane, self.drafter), self.drafting)
        self.token_ids = [1, 2]

    async def commit(self, *token_ids: int) -> None:
        self.token_ids += token_ids
        self.scout.advance(self.token_ids, "parent")
        await settle()

    @property
    def observed(self) -> tuple[float, float]:
        """Draft tokens examined, and the rate learnt from them and the prior's."""
        return self.drafting.acceptance.num_examined, self.drafting.acceptance.rate


def expected(num_drafted: int, num_accepted: int) -> tuple[float, float]:
    """What one verified round with this outcome teaches."""
    verified = Drafting()
    verified.acceptance.observe(num_drafted, num_accepted)
    return verified.acceptance.num_examined, verified.acceptance.rate


@pytest.mark.parametrize(("drafted", "num_accepted"), [((4, 5, 6), 3), ((4, 9, 6), 1), ((9, 5, 6), 0), ((4, 5, 9), 2)])
async def test_it_learns_what_a_round_would_have_taught(drafted: tuple[int, ...], num_accepted: int) -> None:
    sequence = ScoutingSequence()
    await sequence.commit(3)
    assert sequence.drafter.asked == [([1, 2, 3], Shape(3), "parent")]
    await sequence.commit(4)
    await sequence.drafter.answer(*drafted)
    await sequence.commit(5)
    assert sequence.observed[0] == 0, "the third token is still to come"
    await sequence.commit(6)
    assert sequence.observed == expected(3, num_accepted)
    assert sequence.drafting.num_scouting_rounds == 1
    assert sequence.drafter.asked[1:] == [([1, 2, 3, 4, 5, 6], Shape(3), "parent")], "the next at once"


async def test_a_late_proposal_is_compared_with_tokens_long_committed() -> None:
    sequence = ScoutingSequence(1)
    for token in range(3, 20):
        await sequence.commit(token)
    assert len(sequence.drafter.asked) == 1, "one at a time"
    await sequence.drafter.answer(4, 5, 6)
    await sequence.commit(20)
    assert sequence.observed == expected(3, 3)
    await sequence.commit(21)
    assert sequence.drafting.num_scouting_rounds == 0
    assert len(sequence.drafter.asked) == 1


@pytest.mark.parametrize(("proposed", "num_accepted"), [((), 0), ((4,), 1), ((9,), 0), ((4, 5), 2)])
async def test_what_the_drafter_leaves_out_is_not_accepted(proposed: tuple[int, ...], num_accepted: int) -> None:
    sequence = ScoutingSequence()
    await sequence.commit(3)
    await sequence.drafter.answer(*proposed)
    await sequence.commit(4, 5, 6)
    assert sequence.observed == expected(3, num_accepted)
    assert sequence.drafting.num_scouting_rounds == 1


async def test_a_proposal_that_fails_ends_the_scouting() -> None:
    sequence = ScoutingSequence(5)
    await sequence.commit(3)
    sequence.drafter.answers[-1].set_result(None)
    await settle()
    await sequence.commit(4)
    assert sequence.drafting.num_scouting_rounds == 0
    assert sequence.observed[0] == 0
    assert len(sequence.drafter.asked) == 1


async def test_nothing_is_drafted_unless_wanted() -> None:
    sequence = ScoutingSequence(0)
    await sequence.commit(3)
    assert sequence.drafter.asked == []


async def test_what_is_under_way_when_the_sequence_ends_is_given_up() -> None:
    sequence = ScoutingSequence()
    await sequence.commit(3)
    sequence.scout.end()
    sequence.scout.end()
    await settle()
    assert sequence.drafter.num_cancelled == 1
