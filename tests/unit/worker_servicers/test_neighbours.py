"""What routers that share a worker are told of each other, and of prompts in steps."""

from __future__ import annotations

from outrider.v1 import target_pb2

from services.target.neighbours import Neighbours
from services.target.server import TargetServicer
from shared.telemetry.tracing import configure
from tests.support.worker_servicers import Sent, assert_empty, prefill, step, target_request, with_engine


def others(stream: Sent) -> list[tuple[int, int, int]]:
    """What was told of others since the last time: sequences with and without a first token, tokens of these."""
    told = [
        (each.others.num_decoding, each.others.num_waiting, each.others.num_prefill_tokens)
        for each in stream.sent
        if each.HasField("others")
    ]
    stream.sent.clear()
    return told


async def test_routers_are_told_of_each_others_sequences() -> None:
    servicer, now = with_engine(TargetServicer(configure("t", None), "x")), 0.0
    servicer._neighbours = Neighbours(lambda: now)
    one, other, third = Sent(), Sent(), Sent()
    servicer._on_stream_begin(one)
    assert one.sent == []
    servicer._on_request(one, target_request(prefill()))
    step(servicer)
    assert others(one) == [], "there is nobody else"
    servicer._on_stream_begin(other)
    servicer._on_stream_begin(third)
    # Two forks of the three wait for their place.
    assert others(other)[-1] == others(third)[-1]
    servicer._on_request(other, target_request(prefill(first_id=9)))
    while servicer.engine.scheduler.ready()[0]:
        step(servicer)
    assert others(one)[-1] == (3, 0, 0)
    assert others(other)[-1] == (3, 0, 0)
    assert others(third) == [], "who has nothing here is not told with every step"
    now = 1.0
    servicer._on_request(one, target_request(target_pb2.Verify(sequence_id=4, position=4, num_steps=1)))
    step(servicer)
    assert others(third) == [(6, 0, 0)]
    # A router that dies takes its sequences with it.
    servicer._on_stream_end(one)
    assert others(other)[-1] == (0, 0, 0)
    assert others(third)[-1] == (3, 0, 0)
    servicer._on_request(other, target_request(9, 10, 11))
    assert others(third) == [(0, 0, 0)], "no step tells of a worker that is idle"
    servicer._on_stream_end(third)
    assert others(other)[-1] == (0, 0, 0)
    assert_empty(servicer, other)


async def test_prompts_in_steps_are_told_by_whose_they_are() -> None:
    servicer = with_engine(TargetServicer(configure("t", None), "x"))
    one, other = Sent(), Sent()
    for stream, first_id in ((one, 4), (other, 7)):
        servicer._on_stream_begin(stream)
        long = prefill(first_id=first_id)
        long.token_ids.extend(range(10))
        long.num_prompt_tokens = len(long.token_ids)
        del long.forks[:]
        servicer._on_request(stream, target_request(long))
    waiting = [others(stream)[-1:] for stream in (one, other)]
    assert waiting[0] == [(0, 0, 0)]
    # Room for 20 tokens: the first whole, half of the second.
    step(servicer)
    told = {
        stream: [(each.stats.num_prefill_tokens, each.stats.num_own_prefill_tokens) for each in stream.sent]
        for stream in (one, other)
    }
    assert told == {one: [(19, 12)], other: [(19, 7)]}
    assert others(one) == [(0, 1, 6)]
    assert others(other) == [(1, 0, 0)]
