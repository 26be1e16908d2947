"""The instruments of router and workers. Units are in the names' descriptions; times are seconds.

Names and buckets of `gen_ai.server.*` follow OpenTelemetry's conventions for generative AI metrics;
there are none for speculation, so the rest is `outrider.*`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.util.types import AttributeValue

from shared.telemetry.attributes import (
    DRAFT_SOURCE,
    ERROR_TYPE,
    GEN_AI_OPERATION_NAME,
    GEN_AI_PROVIDER_NAME,
    GEN_AI_REQUEST_MODEL,
    NUM_DRAFT_TOKENS,
    POSITION,
    PROVIDER,
    STATE,
    STORE_OUTCOME,
    TRANSFER_ENGINE,
    TRANSFER_SOURCE,
    WORKER_KIND,
)

# Advised by the conventions.
REQUEST_DURATION_BUCKETS: Final = [
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
]  # fmt: skip
TIME_TO_FIRST_TOKEN_BUCKETS: Final = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
]  # fmt: skip
TIME_PER_OUTPUT_TOKEN_BUCKETS: Final = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
]  # fmt: skip
# Actual over predicted: from a hundredth to a hundred times.
_RATIO_BUCKETS: Final = [
    0.01,
    0.03,
    0.1,
    0.2,
    0.33,
    0.5,
    0.67,
    0.8,
    0.9,
    1.1,
    1.25,
    1.5,
    2.0,
    3.0,
    5.0,
    10.0,
    30.0,
    100.0,
]
# Prefixes span decades.
_COUNT_BUCKETS: Final = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


# Half a block over loopback to a long prompt over a slow link.
_TRANSFER_BUCKETS: Final = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]


class RouterMetrics:
    """What the router sees of requests and rounds."""

    def __init__(self, meter: Meter, model: str) -> None:
        self._meter = meter
        self._attributes: dict[str, AttributeValue] = {GEN_AI_PROVIDER_NAME: PROVIDER, GEN_AI_REQUEST_MODEL: model}
        self._request_duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            unit="s",
            description="From a request's arrival to its last token.",
            explicit_bucket_boundaries_advisory=REQUEST_DURATION_BUCKETS,
        )
        self._time_to_first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="From a request's arrival to its first token.",
            explicit_bucket_boundaries_advisory=TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self._time_per_output_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            unit="s",
            description="Mean time per output token after the first one.",
            explicit_bucket_boundaries_advisory=TIME_PER_OUTPUT_TOKEN_BUCKETS,
        )
        self._queue_time = meter.create_histogram(
            "outrider.queue_time",
            unit="s",
            description="From a request's arrival to its admission.",
            explicit_bucket_boundaries_advisory=TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self._placement_error = meter.create_histogram(
            "outrider.placement.ttft_ratio",
            unit="1",
            description="From placement to the first token: seconds that it took, over those foreseen.",
            explicit_bucket_boundaries_advisory=_RATIO_BUCKETS,
        )
        self._failovers = meter.create_counter(
            "outrider.failovers", unit="{sequence}", description="Sequences that lost their worker and went to another."
        )
        # There are hundreds of rounds a second, so they are only counted here until somebody asks: an instrument takes
        # longer for one than all else that the router does for it.
        self._by_length: Counter[tuple[str, int]] = Counter()
        self._by_accepted: Counter[tuple[str, int]] = Counter()
        self._count_when_asked(
            "outrider.rounds",
            "{round}",
            "Rounds of a sequence that verified drafts, by who drafted and how many tokens.",
            NUM_DRAFT_TOKENS,
            lambda: dict(self._by_length),
        )
        self._count_when_asked(
            "outrider.acceptance.drafted",
            "{token}",
            "Draft tokens verified, by who drafted them and position.",
            POSITION,
            lambda: _by_position(self._by_length),
        )
        self._count_when_asked(
            "outrider.acceptance.accepted",
            "{token}",
            "Draft tokens accepted, by who drafted them and position.",
            POSITION,
            lambda: _by_position(self._by_accepted),
        )

    def watch_requests(self, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        """Sequences that are served, and requests in line; from any thread."""

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for state, number in (("running", num_running()), ("waiting", num_waiting())):
                yield Observation(number, {**self._attributes, STATE: state})

        self._meter.create_observable_gauge(
            "outrider.requests",
            callbacks=[observe],
            unit="{request}",
            description="Sequences that are served (running), and requests in line (waiting).",
        )

    def watch_workers(self, states: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Workers by what they are for and how they are; from any thread."""

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for (kind, state), number in states().items():
                yield Observation(number, {**self._attributes, WORKER_KIND: kind, STATE: state})

        self._meter.create_observable_gauge(
            "outrider.workers",
            callbacks=[observe],
            unit="{worker}",
            description="Workers that the router knows: serving, failing (left alone for a while), draining, or away.",
        )

    def request_finished(self, seconds: float, operation: str, error_type: str | None = None) -> None:
        """A request ended after `seconds`; `error_type` is the gRPC status name unless all went well."""
        attributes = {**self._attributes, GEN_AI_OPERATION_NAME: operation}
        if error_type is not None:
            attributes[ERROR_TYPE] = error_type
        self._request_duration.record(seconds, attributes)

    def first_token(self, seconds: float, operation: str) -> None:
        """A request's first token came after `seconds`."""
        self._time_to_first_token.record(seconds, {**self._attributes, GEN_AI_OPERATION_NAME: operation})

    def output_tokens(self, seconds: float, num_tokens: int, operation: str) -> None:
        """A finished sequence of `num_tokens` took `seconds` from first token to last."""
        if num_tokens > 1:
            attributes = {**self._attributes, GEN_AI_OPERATION_NAME: operation}
            self._time_per_output_token.record(seconds / (num_tokens - 1), attributes)

    def admitted(self, seconds: float) -> None:
        """A request left the admission queue after `seconds`."""
        self._queue_time.record(seconds, self._attributes)

    def placed(self, predicted: float, seconds: float) -> None:
        """A request's first token came `seconds` after it was placed, where `predicted` were foreseen."""
        if predicted > 0:
            self._placement_error.record(seconds / predicted, self._attributes)

    def failed_over(self) -> None:
        """A sequence lost its worker, and goes on elsewhere."""
        self._failovers.add(1, self._attributes)

    def round_verified(self, source: str, num_draft_tokens: int, num_accepted: int) -> None:
        """One round of one sequence: the first `num_accepted` of `num_draft_tokens`, which are of that source, were
        kept."""
        self._by_length[source, num_draft_tokens] += 1
        self._by_accepted[source, num_accepted] += 1

    def _count_when_asked(
        self,
        name: str,
        unit: str,
        description: str,
        attribute: str,
        counts: Callable[[], Mapping[tuple[str, int], int]],
    ) -> None:
        """A counter of `counts`, by who drafted and the value of `attribute`; from any thread."""

        def observe(_: CallbackOptions) -> list[Observation]:
            return [
                Observation(count, {**self._attributes, DRAFT_SOURCE: source, attribute: value})
                for (source, value), count in counts().items()
            ]

        self._meter.create_observable_counter(name, callbacks=[observe], unit=unit, description=description)


def _by_position(by_length: Counter[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Of counts by source and length, those by source and position: a length counts at each position below it."""
    counts: Counter[tuple[str, int]] = Counter()
    for (source, length), count in dict(by_length).items():
        for position in range(length):
            counts[source, position] += count
    return counts


class WorkerMetrics:
    """What a draft or target worker sees of its engine."""

    def __init__(self, meter: Meter, model: str) -> None:
        self._meter = meter
        self._attributes: dict[str, AttributeValue] = {GEN_AI_PROVIDER_NAME: PROVIDER, GEN_AI_REQUEST_MODEL: model}
        # As with rounds there are hundreds a second, which the engine's thread only counts.
        self._num_steps = self._num_step_tokens = self._num_step_sequences = 0
        self._watch_count("outrider.steps", "{step}", "Steps of the engine.", lambda: self._num_steps)
        self._watch_count(
            "outrider.step.tokens", "{token}", "Tokens in steps' packed batches.", lambda: self._num_step_tokens
        )
        self._watch_count(
            "outrider.step.sequences",
            "{sequence}",
            "Sequences in steps' packed batches.",
            lambda: self._num_step_sequences,
        )
        self._prefix_hit_tokens = meter.create_histogram(
            "outrider.prefix_hit_tokens",
            unit="{token}",
            description="Prompt tokens of a sequence found in the KV cache.",
            explicit_bucket_boundaries_advisory=_COUNT_BUCKETS,
        )
        self._transfer_seconds = meter.create_histogram(
            "outrider.kv_transfer.duration",
            unit="s",
            description="Reading KV from another worker or the prefix store, by engine.",
            explicit_bucket_boundaries_advisory=_TRANSFER_BUCKETS,
        )
        self._transfer_bytes = meter.create_counter(
            "outrider.kv_transfer.bytes", unit="By", description="KV read from other workers and the prefix store."
        )
        self._transfer_failures = meter.create_counter(
            "outrider.kv_transfer.failures", unit="{transfer}", description="Transfers that brought nothing."
        )

    def watch_engine(self, blocks: Callable[[], Mapping[str, int]], sequences: Callable[[], Mapping[str, int]]) -> None:
        """KV blocks (free, cached, owned) and sequences (running, waiting) by state; from any thread."""

        def observe_blocks(_: CallbackOptions) -> Iterable[Observation]:
            for state, number in blocks().items():
                yield Observation(number, {**self._attributes, STATE: state})

        def observe_usage(_: CallbackOptions) -> Iterable[Observation]:
            counts = blocks()
            yield Observation(counts["owned"] / sum(counts.values()), self._attributes)

        def observe_sequences(_: CallbackOptions) -> Iterable[Observation]:
            for state, number in sequences().items():
                yield Observation(number, {**self._attributes, STATE: state})

        self._meter.create_observable_gauge(
            "outrider.kv_blocks", callbacks=[observe_blocks], unit="{block}", description="KV blocks by state."
        )
        self._meter.create_observable_gauge(
            "outrider.kv_usage",
            callbacks=[observe_usage],
            unit="1",
            description="Share of KV blocks owned by sequences, 0 to 1.",
        )
        self._meter.create_observable_gauge(
            "outrider.sequences",
            callbacks=[observe_sequences],
            unit="{sequence}",
            description="Sequences in steps (running), and without blocks yet (waiting).",
        )

    def watch_pressure(self, num_restored: Callable[[], int], num_preempted: Callable[[], int]) -> None:
        """What a full KV cache has cost so far; from any thread."""
        self._watch_count(
            "outrider.kv_restored_blocks", "{block}", "KV blocks brought back from host memory.", num_restored
        )
        self._watch_count(
            "outrider.preemptions",
            "{sequence}",
            "Sequences that lost their blocks to others, to be computed again.",
            num_preempted,
        )

    def _watch_count(self, name: str, unit: str, description: str, count: Callable[[], int]) -> None:
        self._meter.create_observable_counter(
            name, callbacks=[lambda _: [Observation(count(), self._attributes)]], unit=unit, description=description
        )

    def watch_prefix_store(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Blocks that went to the prefix store or came from it so far, by what became of them; from any thread."""

        def observe(_: CallbackOptions) -> list[Observation]:
            return [
                Observation(number, {**self._attributes, STORE_OUTCOME: outcome})
                for outcome, number in counts().items()
            ]

        self._meter.create_observable_counter(
            "outrider.prefix_store.blocks",
            callbacks=[observe],
            unit="{block}",
            description="KV blocks written to the prefix store and read from it, by outcome.",
        )

    def step(self, num_tokens: int, num_sequences: int) -> None:
        """One engine step: its packed batch."""
        self._num_steps += 1
        self._num_step_tokens += num_tokens
        self._num_step_sequences += num_sequences

    def prefix_hit(self, num_tokens: int) -> None:
        """A new sequence found `num_tokens` of its prompt in the KV cache; 0 is a miss."""
        self._prefix_hit_tokens.record(num_tokens, self._attributes)

    def transferred(self, source: str, engine: str, num_bytes: int, seconds: float) -> None:
        """KV was read from there, "worker" or "store"; nothing if all of it was here."""
        if num_bytes:
            attributes = {**self._attributes, TRANSFER_SOURCE: source, TRANSFER_ENGINE: engine}
            self._transfer_bytes.add(num_bytes, attributes)
            self._transfer_seconds.record(seconds, attributes)

    def transfer_failed(self, source: str) -> None:
        """Nothing came from there."""
        self._transfer_failures.add(1, {**self._attributes, TRANSFER_SOURCE: source})
