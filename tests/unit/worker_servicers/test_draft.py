"""What a draft worker takes in and refuses, and how."""

from __future__ import annotations

from outrider.v1 import draft_pb2

from services.draft.server import DraftServicer
from shared.copying.suffix_source import SuffixSource
from shared.telemetry.tracing import configure
from tests.support.worker_servicers import (
    MAX_CONTEXT,
    Sent,
    assert_empty,
    disappoint,
    draft_request,
    propose,
    sequences,
    step,
    tell,
    with_engine,
)


async def test_a_drafter_with_no_context_left_says_so_and_lets_go() -> None:
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", False, SuffixSource(0))), Sent()
    servicer._on_request(stream, draft_request(propose(0, MAX_CONTEXT)))
    servicer._on_request(stream, draft_request(propose(0, MAX_CONTEXT - 2)))
    sequence = sequences(servicer)[0]
    assert sequence.num_steps == 2, "no more than the context holds"
    servicer._on_request(stream, draft_request(propose(MAX_CONTEXT - 2, 2)))
    assert [(each.position, each.status) for sent in stream.sent for each in sent.results] == [
        (MAX_CONTEXT, draft_pb2.DRAFT_STATUS_CONTEXT_EXCEEDED)
    ] * 2
    assert servicer._drafters == {}
    assert_empty(servicer, stream)


async def test_a_drafter_does_not_know_what_it_was_not_told() -> None:
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", False, SuffixSource(0))), Sent()
    servicer._on_request(stream, draft_request(propose(3, 1)))
    servicer._on_request(stream, draft_request(propose(0, 3, num_draft_tokens=0)))
    servicer._on_request(stream, draft_request(propose(4, 1)))
    assert [each.status for sent in stream.sent for each in sent.results] == [
        draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE
    ] * 2
    assert stream.lanes.keys() == {1}
    servicer._on_request(stream, draft_request(1, 77))
    assert servicer._drafters == servicer._lanes == {}


async def test_what_may_be_copied_is_answered_with_at_once_and_to_its_own_tenant_alone() -> None:
    source = SuffixSource(100)
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", False, source)), Sent()
    disappoint(servicer)

    def proposed() -> list[list[int]]:
        results = [each for sent in stream.sent for each in sent.results]
        stream.sent.clear()
        return [list(each.proposal.token_ids) for each in results]

    servicer._on_request(stream, draft_request(tell([7, 8, 9, 7, 8], cache_salt=b"a")))
    assert proposed() == [[9, 7]]
    servicer._on_request(stream, draft_request(tell([9, 7, 5, 6], base_length=5), 1))
    assert_empty(servicer, stream)
    assert source.num_tokens == 6, "the output"
    for sequence_id, tenant, copied in ((2, b"b", []), (3, b"a", [[5, 6]])):
        servicer._on_request(
            stream, draft_request(tell([3, 9, 7], sequence_id=sequence_id, cache_salt=tenant), sequence_id)
        )
        assert proposed() == copied
    assert_empty(servicer, stream)


async def test_a_model_draws_no_further_where_its_tokens_are_not_wanted() -> None:
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", True, SuffixSource(100))), Sent()
    servicer._on_request(stream, draft_request(tell([1, 2, 3])))
    for _ in range(3):
        step(servicer)
    [sequence] = sequences(servicer)
    assert sequence.num_steps > 0, "on the guess that all is accepted"
    disappoint(servicer)
    stream.sent.clear()
    servicer._on_request(stream, draft_request(tell([1, 1, 7, 8, 9, 7, 8], base_length=3)))
    [result] = [each for sent in stream.sent for each in sent.results]
    assert list(result.proposal.token_ids) == [9, 7]
    assert (result.position, result.num_computed) == (10, 5), "what it had guessed right is computed"
    assert sequence.num_steps == 0
    assert servicer.engine.scheduler.schedule() is None
    servicer._on_request(stream, draft_request(1))
    assert_empty(servicer, stream)


async def test_without_a_model_every_question_is_answered_at_once() -> None:
    source = SuffixSource(100)
    servicer, stream = with_engine(DraftServicer(configure("d", None), "", False, source, has_model=False)), Sent()
    servicer._on_request(stream, draft_request(tell([7, 8, 9]), tell([1, 2], base_length=3), tell([7, 8], 5)))
    assert [list(each.proposal.token_ids) for sent in stream.sent for each in sent.results] == [[], [], [9, 1]]
    assert servicer.engine.scheduler.schedule() is None, "nothing is to be computed"
    servicer._on_request(stream, draft_request(1))
    assert_empty(servicer, stream)


async def test_a_proposal_and_its_release_in_one_message_leave_nothing() -> None:
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", False, SuffixSource(0))), Sent()
    servicer._on_request(stream, draft_request(propose(0, 3), 1, propose(0, 4, sequence_id=2), propose(4, 1), 1))
    assert set(stream.lanes) == {2}
    assert [(each.sequence_id, each.status) for sent in stream.sent for each in sent.results] == [
        (1, draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE)
    ]
    servicer._on_request(stream, draft_request(2))
    assert servicer._drafters == {}
    assert_empty(servicer, stream)


async def test_a_drafter_waits_for_nobody() -> None:
    assert with_engine(DraftServicer(configure("d", None), "x", False, SuffixSource(0)))._seconds_to_wait() == 0.0
