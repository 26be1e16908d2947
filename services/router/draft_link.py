"""The router's end of the draft worker's stream: proposals for sequences, or none when it can't."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

import grpc
from outrider.v1 import draft_pb2, draft_pb2_grpc, worker_pb2

from services.router.connection import INFO_TIMEOUT_SECONDS, WorkerConnection
from shared.sampling.params import SamplingParams
from shared.worker.messages import params_to_proto

logger = logging.getLogger(__name__)

# A drafter that takes longer than this is no help; the sequence goes on without it.
_PROPOSAL_TIMEOUT_SECONDS = 5.0


class DraftLane:
    """One sequence's place on the draft worker, made anew there whenever it was lost.

    The drafter is expendable: every failure is an absent proposal, never an error.
    """

    def __init__(self, link: DraftLink, num_prompt_tokens: int, params: SamplingParams, cache_salt: bytes) -> None:
        self._link = link
        self._num_prompt_tokens = num_prompt_tokens
        self._params = params
        self._cache_salt = cache_salt
        self._sequence_id = link.new_sequence_id()
        # Committed tokens the worker was told of, over the connection of that epoch.
        self._num_told = 0
        self._epoch = link.epoch
        self._given_up = False

    @property
    def num_told(self) -> int:
        return self._num_told if self._epoch == self._link.epoch else 0

    @property
    def available(self) -> bool:
        """Whether the drafter is there, and has not let this sequence wait too long once already."""
        return self._link.connected and not self._given_up

    def prefill(self, token_ids: Sequence[int], traceparent: str) -> None:
        """Has the drafter compute the prompt's KV while the target does."""
        if self._link.connected:
            self._tell(token_ids, 0, traceparent)

    async def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, traceparent: str
    ) -> worker_pb2.Proposal | None:
        """A proposal of at most `num_draft_tokens` behind the committed `token_ids`, or None."""
        for _ in range(2):  # the second time with all tokens, if the drafter had forgotten the sequence
            if not self.available:
                return None
            num_responses = self._link.num_responses
            answer = self._link.expect(self._sequence_id, len(token_ids))
            self._tell(token_ids, num_draft_tokens, traceparent)
            try:
                async with asyncio.timeout(_PROPOSAL_TIMEOUT_SECONDS):
                    result = await answer
            except TimeoutError:
                logger.warning("no proposal in %g s", _PROPOSAL_TIMEOUT_SECONDS, extra={"address": self._link.address})
                self.release()
                self._given_up = True
                if self._link.num_responses == num_responses:
                    # No sequence got an answer meanwhile: the worker hangs.
                    self._link.hang_up()
                return None
            finally:
                self._link.forget(self._sequence_id, len(token_ids))
            if result is None:
                return None
            if result.status == draft_pb2.DRAFT_STATUS_PROPOSED:
                return result.proposal
            self._num_told = 0
            if result.status == draft_pb2.DRAFT_STATUS_EXHAUSTED:
                return None
        return None

    def release(self) -> None:
        """Gives the place up. Safe to call again, and to propose after it."""
        if self.num_told:
            self._link.release(self._sequence_id)
        self._num_told = 0

    def _tell(self, token_ids: Sequence[int], num_draft_tokens: int, traceparent: str) -> None:
        told = self.num_told
        propose = self._link.pending().proposes.add(
            sequence_id=self._sequence_id,
            base_length=told,
            token_ids=token_ids[told:],
            num_draft_tokens=num_draft_tokens,
            traceparent=traceparent,
        )
        if told == 0:
            propose.params.CopyFrom(params_to_proto(self._params))
            propose.num_prompt_tokens = self._num_prompt_tokens
            propose.cache_salt = self._cache_salt
        self._num_told, self._epoch = len(token_ids), self._link.epoch


class DraftLink(WorkerConnection[draft_pb2.DraftRequest, draft_pb2.DraftResponse]):
    """The draft worker as the router sees it. `num_responses` counts the messages that came from it."""

    def __init__(
        self, address: str, check: Callable[[worker_pb2.WorkerInfo], None], changed: asyncio.Condition
    ) -> None:
        super().__init__(address, check, changed)
        self.num_responses = 0
        # By sequence and position: an answer that comes too late must not pass for the next one.
        self._answers: dict[tuple[int, int], asyncio.Future[draft_pb2.DraftResult | None]] = {}
        self._sequence_ids = itertools.count(1)

    def new_sequence_id(self) -> int:
        return next(self._sequence_ids)

    def expect(self, sequence_id: int, position: int) -> asyncio.Future[draft_pb2.DraftResult | None]:
        """The sequence's result behind that many committed tokens; None if the connection is lost."""
        answer: asyncio.Future[draft_pb2.DraftResult | None] = asyncio.get_running_loop().create_future()
        self._answers[sequence_id, position] = answer
        return answer

    def forget(self, sequence_id: int, position: int) -> None:
        self._answers.pop((sequence_id, position), None)

    def release(self, sequence_id: int) -> None:
        if self.connected:
            self.pending().releases.append(sequence_id)

    def _new_request(self) -> draft_pb2.DraftRequest:
        return draft_pb2.DraftRequest()

    async def _get_info(self, channel: grpc.aio.Channel) -> worker_pb2.WorkerInfo:
        stub = draft_pb2_grpc.DrafterStub(channel)
        return await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=INFO_TIMEOUT_SECONDS)

    def _open(self, channel: grpc.aio.Channel) -> object:
        return draft_pb2_grpc.DrafterStub(channel).Serve()

    def _on_response(self, response: draft_pb2.DraftResponse) -> None:
        self.num_responses += 1
        if response.HasField("stats"):
            self.costs.observe(response.stats.num_tokens, response.stats.seconds)
        for result in response.results:
            answer = self._answers.get((result.sequence_id, result.position))
            if answer is not None and not answer.done():
                answer.set_result(result)

    def _on_lost(self) -> None:
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_result(None)
