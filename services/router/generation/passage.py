"""From the worker that prefills to the one that decodes: a prompt's KV on its way, and the sequences that follow it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from outrider.v1 import target_pb2

from services.router.workers.target_lane import TargetLane
from services.router.workers.target_link import TargetLink
from shared.sampling.params import SamplingParams


class Passage:
    """The KV of one or several sequences with one beginning, from `source` to `destination`.

    It sets out when the sequences do, and is dropped at both ends when the last of them has arrived or given up.
    """

    def __init__(
        self,
        source: TargetLink,
        destination: TargetLink,
        lanes: Sequence[TargetLane],
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        cache_salt: bytes,
        traceparent: str,
        pulled: Callable[[target_pb2.PullResult], None],
    ) -> None:
        """`lanes`: those on `source`; the first of them has the KV. `pulled` is told what came of the transfer."""
        self.destination = destination
        self._source = source
        self._num_prompt_tokens = num_prompt_tokens
        self._cache_salt = cache_salt
        self._ticket = secrets.token_bytes(16)
        self._num_open = len(lanes)
        source.export(lanes[0], self._ticket)
        self._pull_id = destination.pull(source.address, self._ticket, token_ids, cache_salt, traceparent, pulled)
        destination.num_incoming += len(lanes)

    def move(
        self, token_ids: Sequence[int], params: SamplingParams, num_steps: int, traceparent: str
    ) -> TargetLane | None:
        """The sequence's lane at the destination, behind the KV that is on its way; None if that worker is gone.

        It is to `leave` in any case, and not before the first result has come there.
        """
        if not self.destination.usable:
            return None
        [lane] = self.destination.prefill(
            token_ids,
            self._num_prompt_tokens,
            [params],
            num_steps,
            self._cache_salt,
            traceparent,
            self._pull_id,
            # All but the last, whose logits are wanted.
            num_held=len(token_ids) - 1,
        )
        return lane

    def leave(self) -> None:
        """A sequence has arrived, or ended before; once for each."""
        self.destination.num_incoming -= 1
        self._num_open -= 1
        if self._num_open == 0:
            self.destination.drop_pull(self._pull_id)
            self._source.withdraw(self._ticket)
