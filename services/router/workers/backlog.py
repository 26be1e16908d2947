"""What sequences that were sent to a target worker have still to compute there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from services.router.workers.target_lane import TargetLane


@dataclass(slots=True)
class Backlog:
    """Sequences whose first result is still to come: what they have still to compute, in tokens, and full blocks that
    will be there then, by their hashes, each as often as it was sent."""

    num_tokens: int = 0
    block_hashes: Counter[bytes] = field(default_factory=Counter)

    # Tokens that each has still to compute, in the order in which they were sent, which is that of the worker.
    _num_left: dict[TargetLane, int] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return len(self._num_left)

    def depth(self, block_hashes: Sequence[bytes]) -> int:
        """Leading blocks of these that will be there."""
        return sum(1 for _ in takewhile(self.block_hashes.__contains__, block_hashes))

    def add(self, lane: TargetLane) -> None:
        self._num_left[lane] = lane.num_prefill_tokens
        self.num_tokens += lane.num_prefill_tokens
        self.block_hashes.update(lane.block_hashes)

    def computed(self, num_tokens: int) -> None:
        """The worker computed so many tokens of our prompts in a step: of those that came first. Its last token each
        keeps until it has its first result."""
        for lane, num_left in self._num_left.items():
            if not num_tokens:
                break
            num_computed = min(num_tokens, max(0, num_left - 1))
            self._num_left[lane] -= num_computed
            self.num_tokens -= num_computed
            num_tokens -= num_computed

    def remove(self, lane: TargetLane) -> None:
        self.num_tokens -= self._num_left.pop(lane)
        for block_hash in lane.block_hashes:
            self.block_hashes[block_hash] -= 1
            if not self.block_hashes[block_hash]:
                del self.block_hashes[block_hash]
