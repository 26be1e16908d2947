"""Whom a step of a target worker waits for."""

from __future__ import annotations

import pytest
from outrider.v1 import target_pb2, worker_pb2

from services.target.gathering import Gathering
from services.target.server import TargetServicer
from shared.engine.engine import StepOutcome
from shared.sampling.params import SamplingParams
from shared.telemetry.tracing import configure
from shared.worker.messages import params_to_proto
from tests.support.worker_servicers import Sent, sequences, step, target_request, with_engine


class Away:
    """A target servicer whose sequence 1 has ended a round, with a clock of its own.

    Absences take a second, steps ten; sequence 2 has a step to do.
    """

    def __init__(self, max_tokens: int = 20) -> None:
        self.now = 0.0
        self.servicer = with_engine(TargetServicer(configure("t", None), "x"))
        self.servicer.engine.step_costs = [(1, 10.0), (100, 10.0)]
        self.gathering = self.servicer._gathering = Gathering(lambda: self.now)
        self.stream, self.other = Sent(), Sent()
        self.begin(self.stream, 1, max_tokens)
        step(self.servicer)
        assert not self.gathering.any_away, "a prefill, or a plain step, is no round"
        self.servicer._on_request(self.stream, self.verify(position=4))
        step(self.servicer)

    @property
    def wait(self) -> float:
        found: float = self.servicer._seconds_to_wait()
        return found

    def begin(self, stream: Sent, sequence_id: int, max_tokens: int = 20) -> None:
        params = params_to_proto(SamplingParams(temperature=0.0, max_tokens=max_tokens))
        begins = target_pb2.Prefill(
            sequence_id=sequence_id, token_ids=[1, 2, 3], num_prompt_tokens=3, params=params, num_steps=1
        )
        self.servicer._on_request(stream, target_request(begins))

    def verify(self, position: int, num_draft_tokens: int = 2, num_steps: int = 1) -> target_pb2.TargetRequest:
        proposal = worker_pb2.Proposal(token_ids=[7] * num_draft_tokens) if num_draft_tokens else None
        return target_request(
            target_pb2.Verify(sequence_id=1, position=position, proposal=proposal, num_steps=num_steps)
        )


@pytest.mark.parametrize("num_draft_tokens", [2, 0])
async def test_a_step_waits_for_a_sequence_whose_round_ended_until_it_speaks_again(num_draft_tokens: int) -> None:
    away = Away()
    assert away.gathering.any_away
    assert away.wait == 0.0, "nothing is known of how long it takes"
    away.now += 1.0
    away.servicer._on_request(away.stream, away.verify(position=5, num_draft_tokens=num_draft_tokens))
    assert not away.gathering.any_away
    assert away.wait == 0.0
    step(away.servicer)
    assert away.gathering.any_away is bool(num_draft_tokens)
    if num_draft_tokens:
        assert away.wait == 0.0, "there is no step to be done"
        away.begin(away.other, 2)
        assert 1.0 <= away.wait < 10.0
        away.servicer.engine.step_costs = []
        assert away.wait == 0.0, "before the warm-up"


async def test_one_that_goes_on_without_a_draft_says_nothing_of_how_long_drafts_take() -> None:
    away = Away()
    for position, num_draft_tokens, absence in ((5, 2, 1.0), (6, 0, 0.001), (7, 2, 0.0)):
        away.now += absence
        away.servicer._on_request(away.stream, away.verify(position, num_draft_tokens))
        step(away.servicer)
    away.begin(away.other, 2)
    assert away.wait == pytest.approx(1.0)


async def test_a_round_with_more_steps_granted_behind_it_is_not_waited_for() -> None:
    away = Away()
    away.servicer._on_request(away.stream, away.verify(position=5, num_steps=2))
    step(away.servicer)
    assert not away.gathering.any_away


async def test_a_sequence_that_ends_by_its_round_is_not_waited_for() -> None:
    away = Away(max_tokens=2)
    assert away.stream.sent[-1].results[0].status == target_pb2.STEP_STATUS_LENGTH
    assert away.stream.sent[-1].results[0].num_draft_tokens > 0
    assert not away.gathering.any_away


@pytest.mark.parametrize("how", ["release", "stream end", "out of step", "failure", "begun again"])
async def test_a_sequence_that_is_gone_is_not_waited_for(how: str) -> None:
    away = Away()
    [sequence] = sequences(away.servicer)
    assert away.gathering.any_away
    match how:
        case "release":
            away.servicer._on_request(away.stream, target_request(1))
        case "stream end":
            away.servicer._on_stream_end(away.stream)
        case "out of step":
            away.servicer._on_request(away.stream, away.verify(position=9))
        case "failure":
            away.servicer._on_outcome(StepOutcome([], [sequence], 1, 1, 0, 0.01))
        case "begun again":
            away.begin(away.stream, 1)
    assert not away.gathering.any_away
    assert away.wait == 0.0
