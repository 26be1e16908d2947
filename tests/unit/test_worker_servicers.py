"""What the workers' servicers refuse, and how: without an engine's steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from outrider.v1 import draft_pb2, target_pb2, worker_pb2

from services.draft.server import DraftServicer
from services.target.server import TargetServicer
from shared.engine.block_pool import BlockPool
from shared.engine.engine import StepOutcome
from shared.sampling.params import SamplingParams
from shared.telemetry.tracing import configure
from shared.worker.messages import params_to_proto
from shared.worker.stream import RouterStream

MAX_CONTEXT = 32


class Scheduler:
    """Keeps what it is given, forks aside."""

    def __init__(self) -> None:
        self.sequences: list[Any] = []

    def add(self, sequence: Any) -> None:
        self.sequences.append(sequence)

    def remove(self, sequence: Any) -> None:
        self.sequences = [each for each in self.sequences if each is not sequence]


class Sent(RouterStream[Any]):
    """A stream that keeps what is sent over it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def send(self, response: Any) -> None:
        self.sent.append(response)


def with_engine(servicer: Any) -> Any:
    engine = SimpleNamespace(max_context=MAX_CONTEXT, fingerprint="f", scheduler=Scheduler())
    servicer._engine_loop = SimpleNamespace(engine=engine)
    return servicer


def prefill(max_tokens: int = 8) -> target_pb2.Prefill:
    return target_pb2.Prefill(
        sequence_id=4,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        params=params_to_proto(SamplingParams(max_tokens=max_tokens)),
        forks=[target_pb2.Fork(sequence_id=5, sequence_index=1), target_pb2.Fork(sequence_id=6, sequence_index=2)],
        num_steps=1,
    )


async def test_a_refused_prefill_answers_for_every_fork() -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_pb2.TargetRequest(prefills=[prefill(max_tokens=MAX_CONTEXT)]))
    servicer._draining = True
    servicer._on_request(stream, target_pb2.TargetRequest(prefills=[prefill()]))
    too_large, unknown = stream.sent
    assert [(each.sequence_id, each.status) for each in too_large.results] == [
        (id, target_pb2.STEP_STATUS_TOO_LARGE) for id in (4, 5, 6)
    ]
    assert [(each.sequence_id, each.status) for each in unknown.results] == [
        (id, target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE) for id in (4, 5, 6)
    ]
    assert stream.lanes == {}


async def test_a_malformed_proposal_is_not_verified_and_costs_nobody_a_step() -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_pb2.TargetRequest(prefills=[prefill()]))
    [sequence] = servicer.engine.scheduler.sequences
    sequence.num_steps = 0
    # Rejection sampling, and no word on what the tokens were drawn from.
    proposal = worker_pb2.Proposal(token_ids=[7, 8])
    verify = target_pb2.Verify(sequence_id=4, position=3, proposal=proposal, num_steps=1)
    servicer._on_request(stream, target_pb2.TargetRequest(verifies=[verify]))
    assert stream.sent == []
    assert len(sequence.proposal) == 0
    assert sequence.num_steps == 1


async def test_a_sequence_out_of_step_is_unknown_and_released() -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_pb2.TargetRequest(prefills=[prefill()]))
    verify = target_pb2.Verify(sequence_id=4, position=9, num_steps=1)
    servicer._on_request(stream, target_pb2.TargetRequest(verifies=[verify]))
    assert [each.status for each in stream.sent[0].results] == [target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE]
    assert set(stream.lanes) == {5, 6}
    servicer._on_stream_end(stream)
    assert servicer._lanes == {}


def propose(base_length: int, num_tokens: int, num_draft_tokens: int = 4) -> draft_pb2.DraftRequest:
    return draft_pb2.DraftRequest(
        proposes=[
            draft_pb2.Propose(
                sequence_id=1,
                base_length=base_length,
                token_ids=[1] * num_tokens,
                num_draft_tokens=num_draft_tokens,
                num_prompt_tokens=3,
                params=params_to_proto(SamplingParams()),
            )
        ]
    )


async def test_a_drafter_with_no_context_left_says_so_and_lets_go() -> None:
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", False)), Sent()
    servicer._on_request(stream, propose(0, MAX_CONTEXT))
    servicer._on_request(stream, propose(0, MAX_CONTEXT - 2))
    [sequence] = servicer.engine.scheduler.sequences
    assert sequence.num_steps == 2, "no more than the context holds"
    servicer._on_request(stream, propose(MAX_CONTEXT - 2, 2))
    assert [(each.position, each.status) for sent in stream.sent for each in sent.results] == [
        (MAX_CONTEXT, draft_pb2.DRAFT_STATUS_EXHAUSTED)
    ] * 2
    assert servicer._drafters == servicer._lanes == stream.lanes == {}
    assert servicer.engine.scheduler.sequences == []


async def test_a_drafter_does_not_know_what_it_was_not_told() -> None:
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", False)), Sent()
    servicer._on_request(stream, propose(3, 1))
    servicer._on_request(stream, propose(0, 3, num_draft_tokens=0))
    servicer._on_request(stream, propose(4, 1))
    assert [each.status for sent in stream.sent for each in sent.results] == [
        draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE
    ] * 2
    assert stream.lanes.keys() == {1}
    servicer._on_request(stream, draft_pb2.DraftRequest(releases=[1, 77]))
    assert servicer._drafters == servicer._lanes == {}


async def test_a_step_that_brings_a_router_nothing_is_still_a_sign_of_life() -> None:
    """A chunk of a long prefill; routers measure a worker's silence against single steps."""
    servicer, stream, bystander = with_engine(TargetServicer(configure("t", None), "x")), Sent(), Sent()
    servicer.engine.scheduler.num_running, servicer.engine.scheduler.num_waiting = 1, 0
    servicer.engine.blocks = BlockPool(4)
    servicer._on_request(stream, target_pb2.TargetRequest(prefills=[prefill()]))
    servicer._on_outcome(StepOutcome([], [], num_tokens=512, num_sequences=1, began_ns=0, seconds=0.25))
    [sent] = stream.sent
    assert (list(sent.results), sent.stats.num_tokens, sent.stats.seconds) == ([], 512, 0.25)
    assert bystander.sent == [], "of a router that has no sequences here"


async def test_a_worker_whose_engine_hangs_does_not_say_what_it_is() -> None:
    servicer = TargetServicer(configure("t", None), "x")
    submitted: asyncio.Queue[Any] = asyncio.Queue()
    info = worker_pb2.WorkerInfo(model="m")
    servicer._engine_loop = SimpleNamespace(submit=submitted.put_nowait)  # type: ignore[assignment]
    servicer._info = lambda: info  # type: ignore[method-assign]
    context: Any = None
    asked = asyncio.create_task(servicer.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), context))
    answer = await submitted.get()
    assert not asked.done(), "the engine's thread has not come to it"
    answer()
    assert await asked == info
