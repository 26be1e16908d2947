"""What the client gets of one sequence's results."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.v1 import inference_pb2, target_pb2, worker_pb2

from services.router.text.detokenizer import Detokenizer
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.worker.draft_sources import SOURCES
from shared.worker.messages import proposal_from_proto

if TYPE_CHECKING:
    from services.router.generation.session import Session

logger = logging.getLogger(__name__)


class SequenceOutput:
    """Turns results into chunks with their text.

    A worker waits for what is next, and a client would not notice: where a result's text cannot end the sequence, it is
    made when workers have been told. Should that fail, the next result cannot be taken.
    """

    def __init__(
        self,
        session: Session,
        params: SamplingParams,
        detokenizer: Detokenizer,
        emit: Callable[[inference_pb2.GenerateResponse], None],
    ) -> None:
        self._session = session
        self._params = params
        self._detokenizer = detokenizer
        self._emit = emit
        # Results, with what the router had drafted for them.
        self._untold: deque[tuple[target_pb2.StepResult, worker_pb2.Proposal]] = deque()
        self._failure: Exception | None = None

    def take(
        self, result: target_pb2.StepResult, proposal: worker_pb2.Proposal
    ) -> tuple[Sequence[int], inference_pb2.FinishReason]:
        """Which tokens of a result are output, and how they end the sequence, if they do. `proposal`: what the router
        had drafted for it, if anything. Raises what kept the client from being told of one before."""
        if self._failure is not None:
            raise self._failure
        if result.status != target_pb2.STEP_STATUS_RUNNING or self._detokenizer.may_stop:
            self.tell()
            return self._tell(result, proposal)
        if not self._untold:
            # What goes on now wakes those who write to workers: they are one turn of the loop away, this is two.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._tell_untold)
        self._untold.append((result, proposal))
        return result.token_ids, inference_pb2.FINISH_REASON_UNSPECIFIED

    def tell(self) -> None:
        """Tells the client now of what was taken. What cannot be told ends that: nothing behind it is, either."""
        try:
            while self._untold:
                self._tell(*self._untold.popleft())
        finally:
            self._untold.clear()

    def _tell_untold(self) -> None:
        try:
            self.tell()
        except Exception as error:
            # The sequence may end before another result comes, by something else.
            logger.exception("what a client is to get could not be made")
            self._failure = error

    def _tell(
        self, result: target_pb2.StepResult, proposal: worker_pb2.Proposal
    ) -> tuple[Sequence[int], inference_pb2.FinishReason]:
        """The client gets one result's text; what of it is output, and how it ends the sequence."""
        tokens = list(result.token_ids)
        finish_reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_UNSPECIFIED
        stopped = result.status == target_pb2.STEP_STATUS_STOPPED
        delta = self._detokenizer.push(tokens[:-1] if stopped else tokens)
        text = delta.text
        if delta.stopped:
            tokens = tokens[: delta.num_tokens]
            finish_reason = inference_pb2.FINISH_REASON_STOP
        elif result.status != target_pb2.STEP_STATUS_RUNNING:
            rest = self._detokenizer.flush()
            text += rest.text
            ended_by_text = stopped or rest.stopped
            finish_reason = inference_pb2.FINISH_REASON_STOP if ended_by_text else inference_pb2.FINISH_REASON_LENGTH
        usage = self._session.usage
        usage.tokens_committed(self._params.sequence_index, len(tokens), result.cached_tokens)
        # What a stop string cut off is no output, and so not accepted.
        num_kept = min(result.num_accepted, len(tokens))
        drafted = EMPTY_PROPOSAL
        if result.num_draft_tokens:
            drafted = proposal_from_proto(result.self_drafted if result.HasField("self_drafted") else proposal)
            depth = max(drafted.depths) if drafted.parents else result.num_draft_tokens
            path = drafted.path(result.token_ids[: result.num_accepted])
            usage.round_verified(_sources(drafted)[: result.num_draft_tokens], path, num_kept, depth)
        chunk = inference_pb2.GenerateResponse(
            index=self._params.sequence_index,
            text=text,
            token_ids=tokens,
            logprobs=result.logprobs[: len(tokens)],
            finish_reason=finish_reason,
        )
        if self._session.options.include_draft_tokens:
            self._show_draft(chunk, drafted, result, tokens, num_kept)
        self._emit(chunk)
        return tokens, finish_reason

    def _show_draft(
        self,
        chunk: inference_pb2.GenerateResponse,
        drafted: Proposal,
        result: target_pb2.StepResult,
        tokens: Sequence[int],
        num_kept: int,
    ) -> None:
        """Tells what became of the round's tokens: accepted, rejected, then what the target drew itself."""
        nobody = inference_pb2.DRAFT_SOURCE_UNSPECIFIED
        shown: list[tuple[int, inference_pb2.TokenOrigin, inference_pb2.DraftSource]] = []
        if result.num_draft_tokens == 0:
            shown = [(token, inference_pb2.TOKEN_ORIGIN_TARGET, nobody) for token in tokens]
        else:
            path, sources = drafted.path(result.token_ids[: result.num_accepted]), _sources(drafted)
            rejected = drafted.following(path[:num_kept])
            last = inference_pb2.TOKEN_ORIGIN_RECOVERED if drafted.following(path) else inference_pb2.TOKEN_ORIGIN_BONUS
            for indices, origin in (
                (path[:num_kept], inference_pb2.TOKEN_ORIGIN_ACCEPTED),
                (rejected, inference_pb2.TOKEN_ORIGIN_REJECTED),
            ):
                shown += [(drafted.token_ids[i], origin, SOURCES[sources[i]]) for i in indices]
            shown += [(token, last, nobody) for token in tokens[num_kept:]]
        for token, origin, source in shown:
            chunk.draft_tokens.add(token_id=token, text=self._session.text_of(token), origin=origin, source=source)


def _sources(drafted: Proposal) -> Sequence[str]:
    """Who drafted each token: a worker that does not say has a model and no more."""
    return drafted.sources or ("model",) * len(drafted)
