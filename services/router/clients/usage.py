"""What a request used: counted as it goes, told to its client and to the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outrider.v1 import inference_pb2

from shared.telemetry.metrics import RouterMetrics
from shared.worker.draft_sources import SOURCES


class UsageMeter:
    """Counts one request's tokens and rounds from its arrival on; seconds are measured from there too."""

    def __init__(self, metrics: RouterMetrics, operation: str) -> None:
        self.spend: Callable[[int], None] = lambda _: None
        """Told of tokens, of the prompt and of the output, as they are used."""
        self._metrics = metrics
        self._operation = operation
        self._arrival = time.monotonic()
        self._first_token_seconds: float | None = None
        # When it was placed, and how soon its first token was to come.
        self._placed: tuple[float, float] | None = None
        self._usage = inference_pb2.Usage()
        self._num_output_tokens: dict[int, int] = {}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._arrival

    def admitted(self) -> None:
        """The request has left the line."""
        self._metrics.admitted(self.seconds)

    def prompt_tokenized(self, num_prompt_tokens: int) -> None:
        self._usage.prompt_tokens = num_prompt_tokens
        self.spend(num_prompt_tokens)

    def placed(self, predicted_seconds: float) -> None:
        """The request was placed, anew perhaps; its first token is foreseen after so long."""
        self._placed = self.seconds, predicted_seconds

    def failed_over(self) -> None:
        """A sequence lost its worker, and begins again on another."""
        self._metrics.failed_over()

    def tokens_committed(self, sequence_index: int, num_tokens: int, cached_tokens: int) -> None:
        """`cached_tokens` counts once: for the first sequence's first result, not for later prefills."""
        if self._first_token_seconds is None:
            self._first_token_seconds = self.seconds
            self._metrics.first_token(self._first_token_seconds, self._operation)
            if self._placed is not None:
                placed_at, predicted = self._placed
                self._metrics.placed(predicted, self._first_token_seconds - placed_at)
            self._usage.cached_tokens = cached_tokens
        self._usage.output_tokens += num_tokens
        self.spend(num_tokens)
        self._num_output_tokens[sequence_index] = self._num_output_tokens.get(sequence_index, 0) + num_tokens

    def round_verified(
        self,
        sources: Sequence[str],
        path: Sequence[int],
        num_kept: int,
        depth: int,
    ) -> None:
        """A round whose result was taken, of draft tokens of these `sources`: the target accepted those of `path`, of
        which the first `num_kept` are output (a stop string may have ended it before the others). `depth`: of them all,
        the most in a line. The client is told of those kept; the metrics, which say how well who drafts guesses, of
        all."""
        usage = self._usage
        usage.rounds += 1
        usage.draft_tokens += len(sources)
        usage.accepted_tokens += num_kept
        while len(usage.acceptance_by_position) < depth:
            usage.acceptance_by_position.add()
        for position in range(depth):
            usage.acceptance_by_position[position].drafted += 1
            usage.acceptance_by_position[position].accepted += position < num_kept
        for name in dict.fromkeys(sources):
            source = SOURCES[name]
            its = next((each for each in usage.by_source if each.source == source), None)
            if its is None:
                its = usage.by_source.add(source=source)
            accepted = [sources[i] == name for i in path]
            its.rounds += 1
            its.draft_tokens += sources.count(name)
            its.accepted_tokens += sum(accepted[:num_kept])
            # Of a tree as many positions as it has.
            self._metrics.round_verified(name, min(sources.count(name), depth), sum(accepted))

    def finished(self, error_type: str | None) -> None:
        """The request ended; `error_type` is the gRPC status name unless all went well."""
        self._metrics.request_finished(self.seconds, self._operation, error_type)
        if self._first_token_seconds is not None:
            decoding = self.seconds - self._first_token_seconds
            for num_tokens in self._num_output_tokens.values():
                self._metrics.output_tokens(decoding, num_tokens, self._operation)

    def to_proto(self) -> inference_pb2.Usage:
        self._usage.total_seconds = self.seconds
        self._usage.time_to_first_token_seconds = self._first_token_seconds or 0.0
        return self._usage
