"""The router's end of the draft worker's stream: proposals for sequences, or none when it can't."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from outrider.v1 import draft_pb2, draft_pb2_grpc, inference_pb2, worker_pb2

from services.router.workers.connection import INFO_TIMEOUT_SECONDS, WorkerConnection
from shared.policy.shape import Shape
from shared.sampling.params import SamplingParams
from shared.security.identity import PLAIN, Identity
from shared.worker.messages import params_to_proto

logger = logging.getLogger(__name__)

# A proposal may take so many times what the step costs make of it, within these limits.
_PATIENCE = 4.0
_LEAST_PATIENCE_SECONDS = 0.5
_MOST_PATIENCE_SECONDS = 5.0
# A sequence that got none decodes plainly for so long, each time in a row twice as long.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 16.0
# A worker from which nothing at all comes for so long, while answers are overdue, hangs.
_SILENCE_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class Ask:
    """A proposal asked for and not yet there. `num_unseen` tokens come before it that the drafter may not have
    computed yet, and each of its steps computes `num_rows`; `due` (`time.monotonic`) is when it should be there.
    `answer` is None if the connection is lost."""

    sequence_id: int
    position: int
    num_unseen: int
    num_rows: int
    due: float
    answer: asyncio.Future[draft_pb2.DraftResult | None]


class DraftLane:
    """One sequence's place on a draft worker, made anew, there or on another, whenever it was lost.

    The drafter is expendable: every failure is an absent proposal, never an error. A late answer is waited for
    no longer, but not asked for again either before it has come.
    """

    def __init__(
        self,
        choose: Callable[[], DraftLink | None],
        num_prompt_tokens: int,
        params: SamplingParams,
        cache_salt: bytes,
        sources: Sequence[inference_pb2.DraftSource] = (),
    ) -> None:
        """`choose` says on which worker the sequence is to begin, if there is any; `sources`: who there may draft, if
        not whoever can."""
        self._choose = choose
        self._link = choose()
        self._num_prompt_tokens = num_prompt_tokens
        self._params = params
        self._cache_salt = cache_salt
        self._sources = sources
        self._sequence_id = 0
        # Committed tokens the worker was told of, over the connection of that epoch, and those it has surely computed.
        self._num_told = 0
        self._num_computed = 0
        self._epoch = 0
        self._ask: Ask | None = None
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._paused_until = 0.0
        self._outgrown = False

    @property
    def link(self) -> DraftLink | None:
        """The worker it is on; where it is on none, that on which it would begin."""
        if self._link is None or not self.num_told:
            # What one worker was told another does not know, whose connection may have an epoch of the same number.
            self._num_told = 0
            self._link = self._choose() or self._link
        return self._link

    @property
    def num_told(self) -> int:
        there = self._link is not None and self._link.connected and self._epoch == self._link.epoch
        return self._num_told if there else 0

    @property
    def available(self) -> bool:
        """Whether the drafter is there and has room for this sequence, as far as is known."""
        return self.may_ask(self.link)

    def may_ask(self, link: DraftLink | None) -> bool:
        """The same for who has just looked up the `link`."""
        waiting = self._ask is not None and not self._ask.answer.done()
        return (
            link is not None
            and link.connected
            and not self._outgrown
            and not waiting
            and time.monotonic() >= self._paused_until
        )

    def prefill(self, token_ids: Sequence[int], traceparent: str) -> None:
        """Has the drafter compute the prompt's KV while the target does."""
        if self.available and self._fits(token_ids):
            self._tell(token_ids, draft_pb2.Propose(traceparent=traceparent))

    async def propose(
        self,
        token_ids: Sequence[int],
        shape: Shape,
        traceparent: str,
        least_likelihood: float = 0.0,
    ) -> worker_pb2.Proposal | None:
        """A proposal of at most that shape behind the committed `token_ids`, or None. Tokens known to be accepted less
        often than `least_likelihood` are left out: maybe all."""
        wanted = draft_pb2.Propose(
            num_draft_tokens=shape.num_draft_tokens,
            num_nodes=shape.num_nodes,
            least_likelihood=least_likelihood,
            sources=self._sources,
            traceparent=traceparent,
        )
        for _ in range(2):  # the second time with all tokens, if the drafter had forgotten the sequence
            self._take_late_answer()
            if not self.available or not self._fits(token_ids):
                return None
            link = self._tell(token_ids, wanted)
            num_unseen = len(token_ids) - self._num_computed
            ask = self._ask = link.ask(self._sequence_id, len(token_ids), num_unseen, shape)
            await asyncio.wait([ask.answer], timeout=ask.due - time.monotonic())
            if not ask.answer.done():
                logger.info("no proposal in time", extra={"address": link.address, "unseen": num_unseen})
                self._pause()
                link.watch()
                return None
            if self._ask is not ask:
                return None  # somebody else asked meanwhile, and took this answer in
            self._ask = None
            result = ask.answer.result()
            if result is None:
                return None
            self._take(result)
            if result.status == draft_pb2.DRAFT_STATUS_PROPOSED:
                self._pause_seconds = _FIRST_PAUSE_SECONDS
                return result.proposal
        # Told everything and lost again: it may fail on this very sequence, and all others with it.
        self._pause()
        return None

    def release(self) -> None:
        """Gives the place up. Safe to call again, and to propose after it."""
        ask, self._ask = self._ask, None
        if self.num_told and self._link is not None:
            self._link.release(self._sequence_id, ask)
        self._num_told = 0

    def _fits(self, token_ids: Sequence[int]) -> bool:
        info = self._link.info if self._link is not None else None
        self._outgrown = info is not None and len(token_ids) >= info.max_context
        return not self._outgrown

    def _tell(self, token_ids: Sequence[int], wanted: draft_pb2.Propose) -> DraftLink:
        """Tells the drafter what it has not heard of, and what is `wanted` behind it."""
        link, told = self.link, self.num_told
        assert link is not None
        if told == 0:
            self._sequence_id = link.begin()
            self._num_computed = 0
            # An answer that is still to be looked at is about the sequence as it was elsewhere.
            self._ask = None
        propose = draft_pb2.Propose(sequence_id=self._sequence_id, base_length=told, token_ids=token_ids[told:])
        propose.MergeFrom(wanted)
        if told == 0:
            propose.params.CopyFrom(params_to_proto(self._params))
            propose.num_prompt_tokens = self._num_prompt_tokens
            propose.cache_salt = self._cache_salt
        link.send(draft_pb2.DraftOperation(propose=propose), [self._sequence_id], begins=told == 0)
        self._num_told, self._epoch = len(token_ids), link.epoch
        return link

    def _take_late_answer(self) -> None:
        """An answer that nobody waited for any more still tells whether the drafter has the sequence."""
        if self._ask is not None and self._ask.answer.done():
            ask, self._ask = self._ask, None
            if (result := ask.answer.result()) is not None:
                self._take(result)

    def _take(self, result: draft_pb2.DraftResult) -> None:
        if result.status == draft_pb2.DRAFT_STATUS_PROPOSED:
            self._num_computed = result.num_computed
            return
        # Whatever the worker makes of it, it is not to keep what we begin anew.
        if self.num_told and self._link is not None:
            self._link.release(self._sequence_id, None)
        self._num_told = 0
        if result.status == draft_pb2.DRAFT_STATUS_EXHAUSTED:
            self._pause()
        self._outgrown = result.status == draft_pb2.DRAFT_STATUS_CONTEXT_EXCEEDED

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)


class DraftLink(WorkerConnection[draft_pb2.DraftOperation, draft_pb2.DraftRequest, draft_pb2.DraftResponse]):
    """The draft worker as the router sees it."""

    service = "draft"

    def __init__(
        self,
        address: str,
        check: Callable[[worker_pb2.WorkerInfo], None],
        changed: asyncio.Condition,
        identity: Identity = PLAIN,
    ) -> None:
        super().__init__(address, check, changed, identity)
        # By sequence and position: an answer that comes too late must not pass for the next one.
        self._asks: dict[tuple[int, int], Ask] = {}
        self._sequence_ids = itertools.count(1)
        self._begun: set[int] = set()
        self._last_response = 0.0
        self._watching: asyncio.TimerHandle | None = None

    @property
    def num_sequences(self) -> int:
        """Those it keeps, or is to begin."""
        return len(self._begun)

    def begin(self) -> int:
        """The id of a new sequence."""
        sequence_id = next(self._sequence_ids)
        self._begun.add(sequence_id)
        return sequence_id

    def ended(self, sequence_id: int) -> None:
        """The worker does not have it any more."""
        self._begun.discard(sequence_id)

    def ask(self, sequence_id: int, position: int, num_unseen: int, shape: Shape) -> Ask:
        """Notes that the worker was asked for a proposal behind that many committed tokens."""
        now = time.monotonic()
        due = now + self._patience(num_unseen, shape)
        answer = asyncio.get_running_loop().create_future()
        ask = Ask(sequence_id, position, num_unseen, shape.num_step_rows, due, answer)
        self._asks[sequence_id, position] = ask
        return ask

    def release(self, sequence_id: int, ask: Ask | None) -> None:
        """Gives a sequence up, and the proposal asked for it if there is one. One that is overdue is let come: it
        tells a worker that is slow from one that hangs."""
        if ask is not None and not ask.answer.done():
            if ask.due <= time.monotonic():
                ask.answer.add_done_callback(lambda _: self.release(sequence_id, None))
                return
            del self._asks[sequence_id, ask.position]
        self.ended(sequence_id)
        if self.connected:
            self.send_release(sequence_id)

    def watch(self) -> None:
        """Hangs up once nothing at all has come from the worker for long while answers are overdue."""
        if self._watching is None:
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        self._watching = None
        first_due = min((ask.due for ask in self._asks.values()), default=math.inf)
        if first_due > now:
            return
        silent_until = max(first_due, self._last_response) + _SILENCE_SECONDS
        if silent_until <= now:
            logger.warning("no answers for %g s", _SILENCE_SECONDS, extra={"address": self.address})
            self.hang_up()
        else:
            self._watching = asyncio.get_running_loop().call_later(silent_until - now, self._look)

    def _patience(self, num_unseen: int, shape: Shape) -> float:
        """Seconds to wait for a proposal: the drafter catches up with all sequences that wait, then drafts for all."""
        num_unseen += sum(ask.num_unseen for ask in self._asks.values())
        num_rows = shape.num_step_rows + sum(ask.num_rows for ask in self._asks.values())
        expected = self.costs.seconds(num_unseen) + shape.num_draft_tokens * self.costs.seconds(num_rows)
        return min(max(_LEAST_PATIENCE_SECONDS, _PATIENCE * expected), _MOST_PATIENCE_SECONDS)

    def _new_request(self, operations: Sequence[draft_pb2.DraftOperation]) -> draft_pb2.DraftRequest:
        return draft_pb2.DraftRequest(operations=operations)

    def _release_operation(self, sequence_id: int) -> draft_pb2.DraftOperation:
        return draft_pb2.DraftOperation(release=sequence_id)

    async def _get_info(self, channel: grpc.aio.Channel) -> worker_pb2.WorkerInfo:
        stub = draft_pb2_grpc.DrafterStub(channel)
        return await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=INFO_TIMEOUT_SECONDS)

    def _open(self, channel: grpc.aio.Channel) -> object:
        return draft_pb2_grpc.DrafterStub(channel).Serve()

    def _on_response(self, response: draft_pb2.DraftResponse) -> None:
        self._last_response = time.monotonic()
        if response.HasField("stats"):
            self.costs.observe(response.stats.num_tokens, response.stats.seconds)
        for result in response.results:
            ask = self._asks.pop((result.sequence_id, result.position), None)
            if ask is not None:
                ask.answer.set_result(result)

    def _on_lost(self) -> None:
        self._begun.clear()
        asks, self._asks = self._asks, {}
        for ask in asks.values():
            ask.answer.set_result(None)
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
