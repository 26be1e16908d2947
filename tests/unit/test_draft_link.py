"""How long a proposal is waited for, and when a drafter counts as hanging: by a clock of the test's own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from outrider.v1 import draft_pb2, worker_pb2

from services.router.workers import draft_link
from services.router.workers.draft_link import DraftLane, DraftLink
from shared.policy.shape import Shape
from shared.policy.step_costs import StepCosts
from shared.sampling.params import SamplingParams


class Link(DraftLink):
    """Counts how often it hangs up."""

    def __init__(self) -> None:
        super().__init__("localhost:1", lambda _: None, asyncio.Condition())
        self.costs = StepCosts([(1, 0.01), (101, 0.11)])
        self.num_hung_up = 0

    def hang_up(self) -> None:
        self.num_hung_up += 1


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only element."""
    time = [1000.0]
    monkeypatch.setattr(draft_link, "time", SimpleNamespace(monotonic=lambda: time[0]))
    return time


async def test_a_proposal_may_take_a_small_multiple_of_what_it_should_cost(now: list[float]) -> None:
    def patience(num_unseen: int, num_draft_tokens: int, others: int = 0, others_unseen: int = 1) -> float:
        link = Link()
        for sequence_id in range(others):
            link.ask(sequence_id, 9, others_unseen, Shape(4))
        return link.ask(99, 9, num_unseen, Shape(num_draft_tokens)).due - now[0]

    assert patience(1, 1) == pytest.approx(0.5), "not less: a step may be held up by many things"
    assert patience(101, 16) == pytest.approx(4 * (0.11 + 16 * 0.01))
    assert patience(101, 8, others=50) == pytest.approx(4 * (0.11 * 151 / 101 + 8 * 0.06))
    assert patience(1, 4, others=1, others_unseen=500) == pytest.approx(4 * (0.11 * 501 / 101 + 4 * 0.011))
    assert patience(100_000, 4) == pytest.approx(5.0), "not more, whatever it costs"


async def test_a_drafter_hangs_if_nothing_comes_while_answers_are_overdue(now: list[float]) -> None:
    link = Link()
    link._last_response = now[0] - 100  # nobody asked
    ask = link.ask(1, 9, 1, Shape(4))
    now[0] = ask.due
    link.watch()
    now[0] += 4.9
    link._look()
    assert link.num_hung_up == 0
    link._on_response(draft_pb2.DraftResponse())  # a sign of life
    for _ in range(5):
        now[0] += 4.9
        link._look()
        assert link.num_hung_up == 0
        link._on_response(draft_pb2.DraftResponse())
    now[0] += 5.0
    link._look()
    assert link.num_hung_up == 1


async def test_a_silent_drafter_of_which_nothing_is_overdue_does_not_hang(now: list[float]) -> None:
    link = Link()
    ask = link.ask(1, 9, 1, Shape(4))
    now[0] = ask.due
    link.watch()
    link._on_response(draft_pb2.DraftResponse(results=[draft_pb2.DraftResult(sequence_id=1, position=9)]))
    assert ask.answer.done()
    now[0] += 100
    link.ask(2, 9, 1, Shape(4))
    link._look()
    assert link.num_hung_up == 0


async def test_an_overdue_answer_is_let_come_before_its_sequence_is_released(now: list[float]) -> None:
    link = Link()
    link.info = SimpleNamespace()  # type: ignore[assignment]
    early, late = link.ask(1, 9, 1, Shape(4)), link.ask(2, 9, 1, Shape(4))
    link.release(1, early)
    now[0] = late.due
    link.release(2, late)
    assert [operation.release for operation in link._outbox.take()] == [1]
    link._on_response(draft_pb2.DraftResponse(results=[draft_pb2.DraftResult(sequence_id=2, position=9)]))
    await asyncio.sleep(0)
    assert [operation.release for operation in link._outbox.take()] == [2]
    assert link._asks == {}


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (draft_pb2.DRAFT_STATUS_PROPOSED, [(1, 3, 2)]),
        (draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE, [(2, 0, 5)]),
        (draft_pb2.DRAFT_STATUS_EXHAUSTED, []),
        (draft_pb2.DRAFT_STATUS_CONTEXT_EXCEEDED, []),
    ],
)
async def test_a_late_answer_is_heeded_before_the_next_is_asked_for(
    now: list[float], monkeypatch: pytest.MonkeyPatch, status: draft_pb2.DraftStatus, told: list[tuple[int, int, int]]
) -> None:
    monkeypatch.setattr(draft_link, "_LEAST_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(draft_link, "_PATIENCE", 0.0)
    link = Link()
    link.info = worker_pb2.WorkerInfo(max_context=100)
    lane = DraftLane(lambda: link, 3, SamplingParams(), b"")
    assert await lane.propose([1, 2, 3], Shape(4), "") is None
    assert [operation.propose.token_ids for operation in link._outbox.take()] == [[1, 2, 3]]
    now[0] += 100
    assert not lane.available, "it owes an answer"
    assert await lane.propose([1, 2, 3, 4], Shape(4), "") is None
    assert link._outbox.take() == []
    link._on_response(
        draft_pb2.DraftResponse(results=[draft_pb2.DraftResult(sequence_id=1, position=3, status=status)])
    )
    assert lane.available
    assert await lane.propose([1, 2, 3, 4, 5], Shape(4), "") is None
    operations = link._outbox.take()
    asked = [operation.propose for operation in operations if operation.HasField("propose")]
    assert [(each.sequence_id, each.base_length, len(each.token_ids)) for each in asked] == told
    # A sequence that is begun anew, or given up, is not left there either.
    released = [operation.release for operation in operations if operation.HasField("release")]
    assert released == ([] if status == draft_pb2.DRAFT_STATUS_PROPOSED else [1])


async def test_on_another_worker_it_begins_anew(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both count connections and sequences from the same number on."""
    monkeypatch.setattr(draft_link, "_LEAST_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(draft_link, "_PATIENCE", 0.0)
    one, other = Link(), Link()
    for link in (one, other):
        link.info = worker_pb2.WorkerInfo(max_context=100)
        link.epoch = 1
    usable = [one]
    lane, resident = (DraftLane(lambda: usable[0], 3, SamplingParams(), b"") for _ in range(2))
    lane.prefill([1, 2, 3], "")
    usable[0] = other
    resident.prefill([7, 8, 9], "")
    one.info = None
    one._on_lost()
    assert lane.num_told == 0
    assert lane.link is other
    assert lane.num_told == 0, "the same numbers mean nothing there"
    lane.prefill([1, 2, 3, 4], "")
    begun = [operation.propose for operation in other._outbox.take()]
    assert [(each.sequence_id, each.base_length, list(each.token_ids)) for each in begun] == [
        (1, 0, [7, 8, 9]),
        (2, 0, [1, 2, 3, 4]),
    ]
    lane.release()
    resident.release()
    assert [operation.release for operation in other._outbox.take()] == [2, 1]


async def test_a_late_answer_of_before_says_nothing_of_a_sequence_begun_anew(now: list[float]) -> None:
    link = Link()
    lane = drafting_lane(link)
    asking = asyncio.create_task(lane.propose([1, 2, 3], Shape(4), ""))
    await asyncio.sleep(0)
    answer(link, 1, 3, draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE)
    # Not looked at yet, and already on a new connection.
    link.epoch += 1
    lane.prefill([1, 2, 3, 4], "")
    for _ in range(5):
        await asyncio.sleep(0)
    lane.release()
    await asyncio.gather(asking, return_exceptions=True)
    kept = set()
    for operation in link._outbox.take():
        if operation.HasField("propose"):
            kept.add(operation.propose.sequence_id)
        else:
            kept.discard(operation.release)
    assert kept <= {1}, "what was begun on the new connection is released there"


def answer(link: Link, sequence_id: int, position: int, status: draft_pb2.DraftStatus) -> None:
    result = draft_pb2.DraftResult(sequence_id=sequence_id, position=position, status=status)
    link._on_response(draft_pb2.DraftResponse(results=[result]))


def drafting_lane(link: Link) -> DraftLane:
    link.info = worker_pb2.WorkerInfo(max_context=100)
    return DraftLane(lambda: link, 3, SamplingParams(), b"")


@pytest.mark.parametrize("num_computed", [0, 2, 40])
async def test_what_was_copied_for_says_nothing_of_what_the_model_has_still_to_compute(num_computed: int) -> None:
    """Whoever asks next waits for that, too."""
    link = Link()
    lane = drafting_lane(link)
    tokens = list(range(40))
    asking = asyncio.create_task(lane.propose(tokens, Shape(4), ""))
    await asyncio.sleep(0)
    result = draft_pb2.DraftResult(
        sequence_id=1, position=40, status=draft_pb2.DRAFT_STATUS_PROPOSED, num_computed=num_computed
    )
    link._on_response(draft_pb2.DraftResponse(results=[result]))
    assert await asking is not None
    asking = asyncio.create_task(lane.propose([*tokens, 7], Shape(4), ""))
    await asyncio.sleep(0)
    assert link._asks[1, 41].num_unseen == 41 - num_computed
    lane.release()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("status", [draft_pb2.DRAFT_STATUS_PROPOSED, draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE])
async def test_of_two_who_ask_the_one_who_looks_late_leaves_the_other_its_proposal(
    status: draft_pb2.DraftStatus,
) -> None:
    link = Link()
    lane = drafting_lane(link)
    scout = asyncio.create_task(lane.propose([1, 2, 3], Shape(4), ""))
    await asyncio.sleep(0)
    answer(link, 1, 3, status)
    # Before the scout gets to see it.
    other = lane.propose([1, 2, 3, 4], Shape(4), "")
    other.send(None)
    assert await scout is None or status == draft_pb2.DRAFT_STATUS_PROPOSED
    assert len(link._asks) == 1
    other.close()
    lane.release()
    assert link._asks == {}, "what was asked for is forgotten with the lane"
    operations = link._outbox.take()
    begun = {each.propose.sequence_id for each in operations if each.HasField("propose")}
    assert begun <= {each.release for each in operations if each.HasField("release")} | {1}


async def test_a_sequence_lost_again_and_again_is_not_told_again_at_once(now: list[float]) -> None:
    link = Link()
    lane = drafting_lane(link)
    proposing = asyncio.create_task(lane.propose([1, 2, 3], Shape(4), ""))
    for sequence_id in (1, 2):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answer(link, sequence_id, 3, draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE)
    assert await proposing is None
    assert not lane.available
    now[0] += 0.2
    assert lane.available
