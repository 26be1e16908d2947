"""What a target worker takes in and refuses, and how."""

from __future__ import annotations

import pytest
from outrider.v1 import target_pb2, worker_pb2

from services.target.server import TargetServicer
from shared.engine.block_pool import BlockPool
from shared.engine.host_tier import HostTier
from shared.telemetry.tracing import configure
from tests.support.machine import SimulatedMover
from tests.support.worker_servicers import MAX_CONTEXT, Sent, prefill, sequences, step, target_request, with_engine


async def test_a_refused_prefill_answers_for_every_fork() -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_request(prefill(max_tokens=MAX_CONTEXT)))
    servicer._draining = True
    servicer._on_request(stream, target_request(prefill()))
    too_large, unknown = stream.sent
    assert [(each.sequence_id, each.status) for each in too_large.results] == [
        (id, target_pb2.STEP_STATUS_TOO_LARGE) for id in (4, 5, 6)
    ]
    assert [(each.sequence_id, each.status) for each in unknown.results] == [
        (id, target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE) for id in (4, 5, 6)
    ]
    assert stream.lanes == {}


async def test_a_prefill_worker_draws_first_tokens_and_no_more() -> None:
    servicer = with_engine(TargetServicer(configure("t", None), "x", worker_pb2.ROLE_PREFILL))
    stream = Sent()
    greedy_for_more = prefill()
    greedy_for_more.num_steps = 2
    servicer._on_request(stream, target_request(greedy_for_more))
    refused = [result for response in stream.sent for result in response.results]
    assert [(each.sequence_id, each.status) for each in refused] == [
        (sequence_id, target_pb2.STEP_STATUS_WRONG_ROLE) for sequence_id in (4, 5, 6)
    ]
    assert not stream.lanes
    stream.sent.clear()
    servicer._on_request(stream, target_request(prefill()))
    step(servicer)
    step(servicer)
    assert sum(len(response.results) for response in stream.sent) == 3
    stream.sent.clear()
    servicer._on_request(stream, target_request(target_pb2.Verify(sequence_id=4, position=4, num_steps=1)))
    [refusal] = [result for response in stream.sent for result in response.results]
    assert (refusal.sequence_id, refusal.status) == (4, target_pb2.STEP_STATUS_WRONG_ROLE)
    assert set(stream.lanes) == {5, 6}


async def test_a_malformed_proposal_is_not_verified_and_costs_nobody_a_step() -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_request(prefill()))
    sequence = sequences(servicer)[0]
    sequence.num_steps = 0
    # Rejection sampling, and no word on what the second token was drawn from.
    proposal = worker_pb2.Proposal(
        token_ids=[7, 8], candidate_counts=[1], candidate_ids=bytes(4), candidate_probs=bytes(4)
    )
    verify = target_pb2.Verify(sequence_id=4, position=3, proposal=proposal, num_steps=1)
    servicer._on_request(stream, target_request(verify))
    assert stream.sent == []
    assert len(sequence.proposal) == 0
    assert sequence.num_steps == 1


class Index:
    """What the prefix index hears of a worker."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.num_evicted = 0

    def stored(self, hashes: list[bytes]) -> None:
        self.held |= set(hashes)

    def evicted(self, hashes: list[bytes]) -> None:
        self.held -= set(hashes)
        self.num_evicted += len(hashes)


@pytest.mark.parametrize("num_slots", [0, 2, 50])
async def test_the_index_counts_a_block_as_held_until_it_has_left_host_memory_too(num_slots: int) -> None:
    blocks = BlockPool(8, HostTier(num_slots, SimulatedMover({})) if num_slots else None)
    servicer, index = with_engine(TargetServicer(configure("t", None), "x"), blocks), Index()
    servicer.publish_to(index)
    for first_token in (1, 11, 1, 21, 31, 11):
        request = prefill(max_tokens=1)
        request.token_ids[:] = range(first_token, first_token + 17)
        del request.forks[:]
        servicer._on_request(Sent(), target_request(request))
        while not servicer.engine.scheduler.is_empty:
            step(servicer)
        assert index.held == set(blocks.findable())
    assert (index.num_evicted > 0) == (num_slots < 50)
    # One of the pool's blocks is free: it held the last prompt's last token.
    assert len(index.held) == min(7 + num_slots, 16)


async def test_a_sequence_out_of_step_is_unknown_and_released() -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_request(prefill()))
    verify = target_pb2.Verify(sequence_id=4, position=9, num_steps=1)
    servicer._on_request(stream, target_request(verify))
    assert [each.status for each in stream.sent[0].results] == [target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE]
    assert set(stream.lanes) == {5, 6}
    servicer._on_stream_end(stream)
    assert servicer._lanes == {}
