from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint

from shared.telemetry.metrics import RouterMetrics, WorkerMetrics
from shared.telemetry.tracing import configure


class Recorded:
    """A meter, and what was recorded with it."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.meter: Meter = self._provider.get_meter("test")

    def points(self, name: str) -> list[HistogramDataPoint | NumberDataPoint]:
        data = self._reader.get_metrics_data()
        assert data is not None
        metrics = [metric for r in data.resource_metrics for scope in r.scope_metrics for metric in scope.metrics]
        (metric,) = [metric for metric in metrics if metric.name == name]
        return list(metric.data.data_points)  # type: ignore[arg-type]

    def histogram(self, name: str) -> HistogramDataPoint:
        (point,) = self.points(name)
        assert isinstance(point, HistogramDataPoint)
        return point

    def by_position(self, name: str) -> dict[object, int | float]:
        return self._by("outrider.position", name)

    def by_length(self, name: str) -> dict[object, int | float]:
        return self._by("outrider.num_draft_tokens", name)

    def by_state(self, name: str) -> dict[object, int | float]:
        return self._by("outrider.state", name)

    def _by(self, attribute: str, name: str) -> dict[object, int | float]:
        counts: dict[object, int | float] = {}
        for point in self.points(name):
            assert isinstance(point, NumberDataPoint)
            assert point.attributes is not None
            counts[point.attributes[attribute]] = point.value
        return counts

    def shutdown(self) -> None:
        self._provider.shutdown()


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorder = Recorded()
    yield recorder
    recorder.shutdown()


def test_a_request_follows_the_conventions(recorded: Recorded) -> None:
    metrics = RouterMetrics(recorded.meter, "tiny")
    metrics.request_finished(0.5, "chat")
    metrics.first_token(0.03, "chat")
    metrics.output_tokens(1.2, 13, "chat")
    metrics.admitted(0.002)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "tiny",
    }
    # Advised boundaries: first, last and how many.
    for name, total, first, last, num_boundaries in (
        ("gen_ai.server.request.duration", 0.5, 0.01, 81.92, 14),
        ("gen_ai.server.time_to_first_token", 0.03, 0.001, 10.0, 16),
        ("gen_ai.server.time_per_output_token", 0.1, 0.01, 2.5, 13),
    ):
        point = recorded.histogram(name)
        assert point.attributes == expected
        assert point.sum == pytest.approx(total)
        assert (point.explicit_bounds[0], point.explicit_bounds[-1]) == (first, last)
        assert len(point.explicit_bounds) == num_boundaries
        assert list(point.explicit_bounds) == sorted(point.explicit_bounds)
    assert recorded.histogram("outrider.queue_time").sum == pytest.approx(0.002)


def test_a_failed_request_carries_its_status(recorded: Recorded) -> None:
    RouterMetrics(recorded.meter, "tiny").request_finished(0.1, "text_completion", "RESOURCE_EXHAUSTED")
    attributes = recorded.histogram("gen_ai.server.request.duration").attributes
    assert attributes is not None
    assert attributes["error.type"] == "RESOURCE_EXHAUSTED"


def test_one_token_has_no_time_per_output_token(recorded: Recorded) -> None:
    metrics = RouterMetrics(recorded.meter, "tiny")
    metrics.output_tokens(0.0, 1, "chat")
    metrics.output_tokens(0.4, 3, "chat")
    point = recorded.histogram("gen_ai.server.time_per_output_token")
    assert point.count == 1
    assert point.sum == pytest.approx(0.2)


def test_acceptance_is_counted_by_position(recorded: Recorded) -> None:
    metrics = RouterMetrics(recorded.meter, "tiny")
    rounds = [(4, 4), (4, 1), (2, 0), (0, 0), (3, 2)]
    for num_draft_tokens, num_accepted in rounds:
        metrics.round_verified("model", num_draft_tokens, num_accepted)
    drafted = recorded.by_position("outrider.acceptance.drafted")
    accepted = recorded.by_position("outrider.acceptance.accepted")
    assert drafted == {0: 4, 1: 4, 2: 3, 3: 2}
    assert accepted == {0: 3, 1: 2, 2: 1, 3: 1}
    assert sum(drafted.values()) == sum(gamma for gamma, _ in rounds)
    assert sum(accepted.values()) == sum(kept for _, kept in rounds)
    assert recorded.by_length("outrider.rounds") == {4: 2, 2: 1, 0: 1, 3: 1}


def test_a_worker_reports_batch_usage_and_hits(recorded: Recorded) -> None:
    metrics = WorkerMetrics(recorded.meter, "tiny")
    metrics.step(num_tokens=40, num_sequences=8)
    metrics.step(num_tokens=2, num_sequences=1)
    blocks = {"free": 1, "cached": 3, "owned": 12}
    metrics.watch_engine(lambda: blocks, lambda: {"running": 3, "waiting": 2})
    metrics.prefix_hit(0)
    metrics.prefix_hit(96)
    metrics.watch_pressure(lambda: 5, lambda: 2)
    for name, expected in (("steps", 2), ("step.tokens", 42), ("step.sequences", 9)):
        (counted,) = recorded.points(f"outrider.{name}")
        assert isinstance(counted, NumberDataPoint)
        assert counted.value == expected
    (usage,) = recorded.points("outrider.kv_usage")
    assert isinstance(usage, NumberDataPoint)
    assert usage.value == 0.75
    assert recorded.by_state("outrider.kv_blocks") == blocks
    assert recorded.by_state("outrider.sequences") == {"running": 3, "waiting": 2}
    hits = recorded.histogram("outrider.prefix_hit_tokens")
    assert (hits.count, hits.sum) == (2, 96)
    (restored,) = recorded.points("outrider.kv_restored_blocks")
    assert isinstance(restored, NumberDataPoint)
    assert restored.value == 5
    (preempted,) = recorded.points("outrider.preemptions")
    assert isinstance(preempted, NumberDataPoint)
    assert preempted.value == 2


def test_a_worker_reports_transfers(recorded: Recorded) -> None:
    metrics = WorkerMetrics(recorded.meter, "tiny")
    metrics.transferred("worker", "nixl", 4096, 0.25)
    # All of it was here.
    metrics.transferred("store", "", 0, 0.0)
    metrics.transfer_failed("store")
    (sent,) = recorded.points("outrider.kv_transfer.bytes")
    assert isinstance(sent, NumberDataPoint)
    assert sent.value == 4096
    seconds = recorded.histogram("outrider.kv_transfer.duration")
    assert (seconds.count, seconds.sum) == (1, 0.25)
    assert seconds.attributes is not None
    assert (seconds.attributes["outrider.transfer.source"], seconds.attributes["outrider.transfer.engine"]) == (
        "worker",
        "nixl",
    )
    (failed,) = recorded.points("outrider.kv_transfer.failures")
    assert isinstance(failed, NumberDataPoint)
    assert failed.value == 1


def test_the_router_reports_how_it_stands(recorded: Recorded) -> None:
    metrics = RouterMetrics(recorded.meter, "tiny")
    metrics.watch_requests(lambda: 3, lambda: 7)
    metrics.watch_workers(lambda: {("target", "serving"): 2, ("target", "away"): 1, ("draft", "serving"): 1})
    metrics.failed_over()
    assert recorded.by_state("outrider.requests") == {"running": 3, "waiting": 7}
    workers = {
        (point.attributes["outrider.worker.kind"], point.attributes["outrider.state"]): point.value
        for point in recorded.points("outrider.workers")
        if isinstance(point, NumberDataPoint) and point.attributes is not None
    }
    assert workers == {("target", "serving"): 2, ("target", "away"): 1, ("draft", "serving"): 1}
    (failovers,) = recorded.points("outrider.failovers")
    assert isinstance(failovers, NumberDataPoint)
    assert failovers.value == 1


def test_instruments_do_nothing_when_telemetry_is_off() -> None:
    telemetry = configure("test", None)
    RouterMetrics(telemetry.meter, "tiny").round_verified("model", 4, 2)
    WorkerMetrics(telemetry.meter, "tiny").step(1, 1)
    telemetry.shutdown()


def test_how_well_placement_foresaw_is_a_ratio(recorded: Recorded) -> None:
    metrics = RouterMetrics(recorded.meter, "tiny")
    metrics.placed(0.5, 1.0)
    metrics.placed(0.0, 1.0)  # nothing foreseen, nothing to compare
    assert recorded.histogram("outrider.placement.ttft_ratio").sum == 2.0
    assert recorded.histogram("outrider.placement.ttft_ratio").count == 1
