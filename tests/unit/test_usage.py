from __future__ import annotations

from typing import Any

import pytest
from outrider.v1 import inference_pb2

from services.router.clients import usage as usage_module
from services.router.clients.usage import UsageMeter


class Recorder:
    """Stands in for the metrics: what was called with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


class Clock:
    now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(usage_module, "time", clock)
    return clock


def meter(recorder: Recorder) -> UsageMeter:
    return UsageMeter(recorder, "chat")  # type: ignore[arg-type]


def test_rounds_are_counted_by_position() -> None:
    recorder = Recorder()
    usage = meter(recorder)
    rounds = [(3, 3), (3, 0), (1, 1), (5, 2), (2, 1)]
    for drafted, accepted in rounds:
        usage.round_verified(["model"] * drafted, range(accepted), accepted, drafted)
    told = usage.to_proto()
    assert (told.rounds, told.draft_tokens, told.accepted_tokens) == (5, 14, 7)
    assert [(entry.drafted, entry.accepted) for entry in told.acceptance_by_position] == [
        (5, 4),
        (4, 2),
        (3, 1),
        (1, 0),
        (1, 0),
    ]
    assert sum(entry.accepted for entry in told.acceptance_by_position) == told.accepted_tokens
    assert recorder.calls == [("round_verified", "model", drafted, accepted) for drafted, accepted in rounds]


def test_the_client_is_told_what_was_kept_and_the_metrics_what_was_accepted() -> None:
    recorder = Recorder()
    usage = meter(recorder)
    usage.round_verified(["target"] * 4, range(3), 3, 4)
    usage.round_verified(["suffix"] * 4, range(4), 1, 4)
    told = usage.to_proto()
    assert (told.rounds, told.draft_tokens, told.accepted_tokens) == (2, 8, 4)
    assert [entry.drafted for entry in told.acceptance_by_position] == [2, 2, 2, 2]
    assert [entry.accepted for entry in told.acceptance_by_position] == [2, 1, 1, 0]
    assert recorder.calls == [("round_verified", "target", 4, 3), ("round_verified", "suffix", 4, 4)]
    assert [(its.source, its.rounds, its.draft_tokens, its.accepted_tokens) for its in told.by_source] == [
        (inference_pb2.DRAFT_SOURCE_TARGET, 1, 4, 3),
        (inference_pb2.DRAFT_SOURCE_SUFFIX, 1, 4, 1),
    ]


def test_each_source_has_its_own_tokens_of_a_round_of_several() -> None:
    recorder = Recorder()
    usage = meter(recorder)
    usage.round_verified(["target", "suffix", "target", "suffix", "suffix"], [0, 1, 4], 2, 3)
    told = usage.to_proto()
    assert (told.rounds, told.draft_tokens, told.accepted_tokens) == (1, 5, 2)
    assert [entry.accepted for entry in told.acceptance_by_position] == [1, 1, 0]
    assert recorder.calls == [("round_verified", "target", 2, 1), ("round_verified", "suffix", 3, 2)]
    assert [(its.source, its.rounds, its.draft_tokens, its.accepted_tokens) for its in told.by_source] == [
        (inference_pb2.DRAFT_SOURCE_TARGET, 1, 2, 1),
        (inference_pb2.DRAFT_SOURCE_SUFFIX, 1, 3, 1),
    ]


def test_tokens_and_times_of_a_request_of_two_sequences(clock: Clock) -> None:
    recorder = Recorder()
    usage = meter(recorder)
    clock.now += 0.5
    usage.admitted()
    usage.prompt_tokenized(7)
    clock.now += 1.5
    usage.tokens_committed(0, 1, cached_tokens=4)
    usage.tokens_committed(1, 1, cached_tokens=3)
    clock.now += 2.0
    usage.tokens_committed(0, 3, cached_tokens=0)
    # After a failover the new worker's prefix is no saving of the client's.
    usage.tokens_committed(0, 1, cached_tokens=6)
    told = usage.to_proto()
    assert (told.prompt_tokens, told.cached_tokens, told.output_tokens) == (7, 4, 6)
    assert told.time_to_first_token_seconds == pytest.approx(2.0)
    assert told.total_seconds == pytest.approx(4.0)
    usage.finished(None)
    assert recorder.calls == [
        ("admitted", 0.5),
        ("first_token", 2.0, "chat"),
        ("request_finished", 4.0, "chat", None),
        ("output_tokens", 2.0, 5, "chat"),
        ("output_tokens", 2.0, 1, "chat"),
    ]


def test_a_request_that_fails_before_its_first_token_tells_no_times_of_tokens(clock: Clock) -> None:
    recorder = Recorder()
    usage = meter(recorder)
    clock.now += 0.25
    usage.finished("UNAVAILABLE")
    assert recorder.calls == [("request_finished", 0.25, "chat", "UNAVAILABLE")]
    assert usage.to_proto().time_to_first_token_seconds == 0


def test_the_metrics_hear_how_well_the_first_token_was_foreseen(clock: Clock) -> None:
    recorder = Recorder()
    usage = meter(recorder)
    clock.now += 3.0
    usage.placed(0.5)
    clock.now += 1.0
    usage.placed(0.25)  # the first worker was lost
    clock.now += 0.5
    usage.tokens_committed(0, 1, 0)
    clock.now += 1.0
    usage.tokens_committed(0, 1, 0)
    assert [call for call in recorder.calls if call[0] == "placed"] == [("placed", 0.25, 0.5)]
