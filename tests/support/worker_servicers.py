"""A worker's servicer without a model, what routers send it, and what it sends them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.v1 import draft_pb2, target_pb2

from services.draft.server import DraftServicer
from shared.engine.block_pool import BlockPool
from shared.engine.engine import Gain, StepOutcome
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Sequence
from shared.sampling.params import SamplingParams
from shared.sampling.sampled import SampledTokens
from shared.worker.messages import params_to_proto
from shared.worker.stream import RouterStream

MAX_CONTEXT = 32


class Sent(RouterStream[Any]):
    """A stream that keeps what is sent over it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def send(self, response: Any) -> None:
        self.sent.append(response)

    def send_sign_of_life(self, response: Any) -> None:
        self.sent.append(response)


def with_engine(servicer: Any, blocks: BlockPool | None = None) -> Any:
    blocks = blocks or BlockPool(64)
    scheduler = Scheduler(blocks, block_size=4, max_batch_tokens=20, max_sequences=6)
    engine = SimpleNamespace(max_context=MAX_CONTEXT, fingerprint="f", scheduler=scheduler, blocks=blocks)
    servicer._engine_loop = SimpleNamespace(engine=engine)
    return servicer


def sequences(servicer: Any) -> list[Sequence]:
    """What the engine has, forks that wait for their first included."""
    return [each for first in servicer.engine.scheduler.sequences() for each in (first, *first.forks)]


def step(servicer: Any) -> None:
    """One step of an engine whose model always says 1."""
    scheduler = servicer.engine.scheduler
    plan = scheduler.schedule()
    if plan is None:
        return
    prefills = plan.prefills
    sampling = [item.sequence for item in plan.scheduled if item.num_rows]
    drafted = [len(each.proposal) for each in sampling]
    gained = scheduler.complete(plan, [SampledTokens((1,)) for _ in sampling])
    gains = [Gain(sequence, sampled, count) for (sequence, sampled), count in zip(gained, drafted, strict=True)]
    servicer._on_outcome(StepOutcome(gains, [], plan.num_tokens, len(plan.scheduled), 0, 0.01, prefills))


def target_request(*operations: target_pb2.Prefill | target_pb2.Verify | int) -> target_pb2.TargetRequest:
    """A message of these operations in this order; a number is the id of a sequence to release."""
    request = target_pb2.TargetRequest()
    for operation in operations:
        if isinstance(operation, target_pb2.Prefill):
            request.operations.add(prefill=operation)
        elif isinstance(operation, target_pb2.Verify):
            request.operations.add(verify=operation)
        else:
            request.operations.add(release=operation)
    return request


def draft_request(*operations: draft_pb2.Propose | int) -> draft_pb2.DraftRequest:
    request = draft_pb2.DraftRequest()
    for operation in operations:
        if isinstance(operation, draft_pb2.Propose):
            request.operations.add(propose=operation)
        else:
            request.operations.add(release=operation)
    return request


def assert_empty(servicer: Any, stream: Sent) -> None:
    assert stream.lanes == servicer._lanes == {}
    assert sequences(servicer) == []
    assert servicer.engine.blocks.counts().owned == 0


def prefill(max_tokens: int = 8, first_id: int = 4) -> target_pb2.Prefill:
    return target_pb2.Prefill(
        sequence_id=first_id,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        params=params_to_proto(SamplingParams(max_tokens=max_tokens)),
        forks=[target_pb2.Fork(sequence_id=first_id + i, sequence_index=i) for i in (1, 2)],
        num_steps=1,
    )


def propose(base_length: int, num_tokens: int, num_draft_tokens: int = 4, sequence_id: int = 1) -> draft_pb2.Propose:
    return draft_pb2.Propose(
        sequence_id=sequence_id,
        base_length=base_length,
        token_ids=[1] * num_tokens,
        num_draft_tokens=num_draft_tokens,
        num_prompt_tokens=3,
        params=params_to_proto(SamplingParams()),
    )


def tell(token_ids: list[int], base_length: int = 0, sequence_id: int = 1, **fields: Any) -> draft_pb2.Propose:
    params = params_to_proto(SamplingParams(temperature=0.0))
    return draft_pb2.Propose(
        sequence_id=sequence_id, base_length=base_length, token_ids=token_ids, num_draft_tokens=2, num_prompt_tokens=3,
        params=params, **fields,
    )  # fmt: skip


def disappoint(servicer: DraftServicer) -> None:
    """None of the model's tokens is accepted, and more is hoped of what is copied."""
    for _ in range(1000):
        servicer._acceptance.observe(1, 0)
