"""The streams of a simulated worker that decode: when they end, and when they need blocks."""

from __future__ import annotations

import heapq

from services.simulator.stream import Stream


class Decoding:
    """Every stream has a token more after each step. What any number of steps takes is known without taking them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_steps = 0
        self._streams: list[tuple[int, Stream]] = []  # heap by last step
        # How many need a block in a step, by its number modulo the block size.
        self._needs = [0] * block_size
        # Of all of them together.
        self.context_tokens = 0

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_steps_to_end(self) -> int:
        """Until the first of them ends; there must be one."""
        return self._streams[0][0] - self._num_steps

    def join(self, stream: Stream) -> None:
        """The stream, whose context is computed, decodes from the next step on."""
        stream.join_step = self._num_steps
        stream.end_step = self._num_steps + stream.request.num_output_tokens - stream.num_generated
        self._needs[self._phase(stream)] += 1
        self.context_tokens += stream.num_context
        heapq.heappush(self._streams, (stream.end_step, stream))

    def advance(self, num_steps: int) -> list[Stream]:
        """So many steps have been taken, no more than to the first end; those that ended with them."""
        self._num_steps += num_steps
        self.context_tokens += num_steps * len(self._streams)
        ended = []
        while self._streams and self._streams[0][0] == self._num_steps:
            _, stream = heapq.heappop(self._streams)
            self._left(stream)
            ended.append(stream)
        return ended

    def youngest(self) -> Stream | None:
        return max((stream for _, stream in self._streams), default=None)

    def remove(self, stream: Stream) -> int:
        """The stream ends before its time; how many tokens it got here."""
        self._streams.remove((stream.end_step, stream))
        heapq.heapify(self._streams)
        self._left(stream)
        return self._num_steps - stream.join_step

    def num_needed(self, num_steps: int) -> int:
        """Blocks that the next so many steps take together."""
        size = self._block_size
        num_cycles, rest = divmod(num_steps, size)
        first = (self._num_steps + 1) % size
        in_rest = sum(self._needs[first : first + rest]) + sum(self._needs[: max(0, first + rest - size)])
        return num_cycles * len(self._streams) + in_rest

    def num_grown(self, stream: Stream) -> int:
        """Blocks that the stream took since it joined."""
        before, size = stream.num_context, self._block_size
        now = before + self._num_steps - stream.join_step
        return (now + size - 1) // size - (before + size - 1) // size

    def check_empty(self) -> None:
        """Raises AssertionError if there are any."""
        assert not self._streams
        assert not any(self._needs)
        assert not self.context_tokens

    def _left(self, stream: Stream) -> None:
        self._needs[self._phase(stream)] -= 1
        self.context_tokens -= stream.num_context + self._num_steps - stream.join_step

    def _phase(self, stream: Stream) -> int:
        """The steps in which it needs a block, modulo the block size: in step join + i it computes position
        context + i - 1."""
        return (stream.join_step + 1 - stream.num_context) % self._block_size
