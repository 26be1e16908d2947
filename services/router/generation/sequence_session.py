"""One sequence of a request: rounds until it has ended, on one worker after another if need be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from outrider.v1 import inference_pb2, target_pb2, worker_pb2

from services.router.generation.passage import Passage
from services.router.generation.scout import Scout
from services.router.generation.sequence_output import SequenceOutput
from services.router.text.detokenizer import Detokenizer
from services.router.workers.draft_link import DraftLink
from services.router.workers.target_lane import LaneResult, TargetLane, WorkerLost
from services.router.workers.target_link import TargetLink
from shared.policy.drafting import Situation
from shared.policy.gamma import GammaController
from shared.policy.pace import Pace
from shared.policy.shape import PLAIN, Shape
from shared.rpc.errors import Unavailable
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import EMPTY_PROPOSAL
from shared.telemetry.attributes import NUM_ACCEPTED, NUM_DRAFT_TOKENS, ROUND, SEQUENCE_INDEX
from shared.telemetry.tracing import current_traceparent
from shared.worker.messages import proposal_from_proto

if TYPE_CHECKING:
    from services.router.generation.session import Session

logger = logging.getLogger(__name__)

# Prefills of a sequence in a row that may fail before the request does.
_MAX_FAILURES = 4
# Sequences that leave a worker at a time, with their KV: the others go on there meanwhile.
_MOST_LEAVING = 4
# What a worker answers when it does not have a sequence, or not any more.
_LOST = (
    target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE,
    target_pb2.STEP_STATUS_FAILED,
    target_pb2.STEP_STATUS_TOO_LARGE,
)


class SequenceSession:
    """One sequence: its committed tokens, its lanes on the workers, its rounds.

    The committed tokens are held here; workers are caches. A worker lost costs a prefill, never a token.
    """

    def __init__(
        self,
        session: Session,
        params: SamplingParams,
        lane: TargetLane,
        passage: Passage | None,
        detokenizer: Detokenizer,
    ) -> None:
        """`passage`: to the worker where it goes on behind its first token, if not on that of `lane`."""
        self._session = session
        self._options = session.options
        self._params = params
        self._traceparent = current_traceparent()
        self._lane = lane
        self._passage = passage
        self._draft = session.draft_lane(params)
        self._detokenizer = detokenizer
        self._token_ids = list(session.options.prompt_ids)
        self._num_rounds = 0
        # What the router had drafted for the latest round.
        self._proposal = worker_pb2.Proposal()
        self._finish_reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_UNSPECIFIED
        # One that never drafts tells those that do what plain steps take.
        self._other_drafter = session.fleet.choose_draft() if self._draft is None else None
        self._gamma = session.fleet.gamma(lane.link if passage is None else passage.destination, self._drafter)
        prior = None if self._gamma is None else self._gamma.prior(greedy=params.greedy, coupled=params.coupled)
        options = session.options
        # A shape that the client fixed is none that all draft.
        self._fixed = None
        if options.num_draft_tokens is not None:
            self._fixed = Shape(options.num_draft_tokens, options.num_nodes)
        self._pace = Pace(prior, self._fixed, coupled=params.coupled)
        # While it scouts in the shadow of plain decoding.
        self._scout: Scout | None = None

    async def run(self, emit: Callable[[inference_pb2.GenerateResponse], None]) -> None:
        """Rounds until the sequence ends; everything is released on every way out."""
        # By which worker, since the latest result.
        failures: list[TargetLink] = []
        output = SequenceOutput(self._session, self._params, self._detokenizer, emit)
        try:
            while not self._finish_reason:
                try:
                    entry = await self._lane.next()
                    while True:
                        _check(entry.result, len(self._token_ids), self._lane.link.draining)
                        failures.clear()
                        tokens, self._finish_reason = output.take(entry.result, self._proposal)
                        self._token_ids += tokens
                        if self._finish_reason:
                            return
                        entry = await (self._next_result(entry) if self._passage is None else self._move())
                except WorkerLost as error:
                    self.release()
                    failures.append(self._lane.link)
                    if not error.drained:
                        self._session.blame(self._lane.link)
                    logger.info("sequence lost", extra={"address": self._lane.link.address, "reason": str(error)})
                    if len(failures) > _MAX_FAILURES:
                        # Which worker and how is for the log: clients have no business with our addresses.
                        where = self._lane.link.address
                        logger.error(
                            "target workers failed %d times in a row, last %s: %s", len(failures), where, error
                        )
                        raise Unavailable(f"target workers failed {len(failures)} times in a row") from error
                    self._session.usage.failed_over()
                    await self._begin_again(failures)
        finally:
            if self._gamma is not None and self._draft is not None:
                self._gamma.leave(self._pace.drafting, self._num_output_tokens if self._finish_reason else None)
            if self._finish_reason:
                self._session.fleet.placer.observe_output(self._num_output_tokens)
            self.release()
            if self._scout is not None:
                self._scout.end()
            if self._draft is not None:
                self._draft.release()
            output.tell()

    def release(self) -> None:
        """Gives up its place on the target workers. Safe to call again."""
        self._lane.release()
        passage, self._passage = self._passage, None
        if passage is not None:
            passage.leave()

    async def _begin_again(self, avoided: Collection[TargetLink]) -> None:
        [self._lane], self._passage = await self._session.begin(self._token_ids, [self._params], avoided)

    async def _move(self) -> LaneResult:
        """Goes on where its KV went, behind its first token; the first result there."""
        assert self._passage is not None
        num_steps = self._session.num_first_steps(self._passage.destination)
        lane = self._passage.move(self._token_ids, self._params, num_steps, self._traceparent)
        self._lane.release()
        if lane is None:
            self.release()
            await self._begin_again(())
            return await self._lane.next()
        self._lane = lane
        entry = await lane.next()
        passage, self._passage = self._passage, None
        passage.leave()
        return entry

    async def _next_result(self, last: LaneResult) -> LaneResult:
        """The result of a round, or in plain decoding simply the next one."""
        lane = self._lane
        if lane.link.draining and lane.num_steps == 0 and lane.link.num_leaving < _MOST_LEAVING:
            lane.link.num_leaving += 1
            try:
                self._passage = await self._session.away_from(lane, self._token_ids)
                if self._passage is not None:
                    return await self._move()
            finally:
                lane.link.num_leaving -= 1
        ahead = lane.num_steps > 0
        # What a worker that is going has been granted is waited for, and then the sequence leaves.
        if not self._pace.enough_granted(lane.num_steps) and not (lane.link.draining and ahead):
            situation = self._situation(last)
            move = self._pace.next(self._controller(), situation, lane.num_steps, lane.link.num_ahead)
            if move.shape != PLAIN:
                return await self._round(move.shape, last, situation)
            if move.catch_up and self._draft is not None:
                self._draft.prefill(self._token_ids, self._traceparent)
            if move.num_steps > 0:
                lane.verify(len(self._token_ids), None, move.num_steps, self._traceparent)
            if self._scout is None and self._draft is not None and self._params.coupled:
                self._scout = Scout.sent(self._draft, self._pace.drafting)
        if self._scout is not None and not self._scout.advance(self._token_ids, self._traceparent):
            self._scout = None
        load = max(1, lane.link.num_decoding)
        entry = await lane.next()
        # A worker running ahead began this step when it ended the last, however late we come to look.
        gamma = self._gamma
        if gamma is None or not ahead or gamma.plain_looks.quiet_from < entry.received < gamma.plain_looks.quiet_until:
            return entry
        # Nor is it a plain step in which the target drafted for one whom nobody else does.
        if not _is_round(last.result) and not (self._draft is None and entry.result.HasField("self_drafted")):
            num_tokens = None if self._draft is None else len(entry.result.token_ids)
            mostly_prompts = entry.mostly_prompts(last)
            gamma.observe_plain(load, entry.seconds_since(last), entry.received, num_tokens, mostly_prompts)
        return entry

    async def _round(self, shape: Shape, last: LaneResult, situation: Situation) -> LaneResult:
        """Draft, verify: one span, with the workers' spans as its children."""
        assert self._draft is not None
        lane = self._lane
        with self._session.telemetry.noted_span("round", self._traceparent) as span:
            controller = self._controller()
            least = 0.0
            if controller is not None and self._fixed is None:
                least = controller.least_likelihood(situation.load, shape.num_verified)
            proposal = await self._draft.propose(self._token_ids, shape, span.traceparent, least)
            # Without a proposal it decodes plainly for a while before the drafter is asked again.
            num_steps = lane.link.num_ahead if proposal is None else 1
            lane.verify(len(self._token_ids), proposal, num_steps, span.traceparent)
            entry = await lane.next()
            self._num_rounds += 1
            span.attributes = {
                ROUND: self._num_rounds,
                SEQUENCE_INDEX: self._params.sequence_index,
                NUM_DRAFT_TOKENS: entry.result.num_draft_tokens,
                NUM_ACCEPTED: entry.result.num_accepted,
            }
        if proposal is not None:
            # Where the drafter found nothing, what the target drafted itself is none of it.
            verified = _is_round(entry.result)
            if verified:
                self._proposal = proposal
            if verified or len(proposal.token_ids) < shape.num_draft_tokens:
                controller = self._controller()
                self._learn(shape, proposal, entry.result if verified else None)
                # What it takes beside prompts that fill the steps says little of others.
                if controller is not None and self._fixed is None and not situation.prefill_bound:
                    seconds, mostly_prompts = entry.seconds_since(last), entry.mostly_prompts(last)
                    controller.observe_round(situation.load, shape, situation.num_unseen, seconds, mostly_prompts)
        return entry

    def _learn(self, asked: Shape, proposal: worker_pb2.Proposal, result: target_pb2.StepResult | None) -> None:
        """Takes note of what became of a proposal of the drafter's, asked for like that; None: nothing was in it."""
        num_accepted = 0 if result is None else result.num_accepted
        # By a token that was drafted: there was none behind it to be looked for.
        ended = (
            result is not None
            and result.status == target_pb2.STEP_STATUS_STOPPED
            and num_accepted == len(result.token_ids)
        )
        drafting, gamma = self._pace.drafting, self._gamma
        if not asked.is_tree:
            # What the drafter left out is none that would have been accepted.
            num_draft_tokens = num_accepted if ended else max(asked.num_draft_tokens, num_accepted)
            drafting.acceptance.observe(num_draft_tokens, num_accepted)
        elif self._fixed is None:
            found = EMPTY_PROPOSAL if result is None else proposal_from_proto(proposal)
            path = found.path(() if result is None else result.token_ids[:num_accepted])
            trees = None if gamma is None else gamma.trees
            drafting.observe_tree(found.followed_rows(), path, asked, ended, trees)

    def _controller(self) -> GammaController | None:
        """γ's controller of the worker we are on; None while there is no drafting."""
        drafter = self._drafter
        gamma = self._session.fleet.gamma(self._lane.link, drafter)
        if gamma is not self._gamma:
            if self._gamma is not None:
                self._gamma.leave(self._pace.drafting, None)
            self._gamma = gamma
        return gamma if self._draft is not None and self._draft.may_ask(drafter) else None

    @property
    def _drafter(self) -> DraftLink | None:
        """Who drafts for it; for one that never drafts who would have."""
        return self._other_drafter if self._draft is None else self._draft.link

    def _situation(self, last: LaneResult) -> Situation:
        link = self._lane.link
        return Situation(
            # This sequence is one of them.
            load=max(1, link.num_decoding),
            num_waiting=link.num_waiting,
            num_prefill_tokens=link.backlog_tokens,
            num_unseen=len(self._token_ids) - (self._draft.num_told if self._draft is not None else 0),
            num_output=self._num_output_tokens,
            num_remaining=self._params.max_tokens - self._num_output_tokens,
            received=last.received,
            prefill_seconds=last.prefill_seconds,
        )

    @property
    def _num_output_tokens(self) -> int:
        return len(self._token_ids) - len(self._options.prompt_ids)


def _is_round(result: target_pb2.StepResult) -> bool:
    """Whether the router had it draft; what a target drafts itself makes its plain steps shorter, and no round."""
    return result.num_draft_tokens > 0 and not result.HasField("self_drafted")


def _check(result: target_pb2.StepResult, num_committed: int, draining: bool) -> None:
    """Raises WorkerLost for a result that calls for another prefill; `draining`: its worker is going."""
    if result.status in _LOST:
        drained = draining and result.status == target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE
        raise WorkerLost(target_pb2.StepStatus.Name(result.status), drained)
    if result.position != num_committed:
        raise WorkerLost(f"a result at position {result.position} where {num_committed} was next")
