"""The `Drafter` service: committed tokens in, proposals out."""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict

from outrider.v1 import draft_pb2, draft_pb2_grpc, inference_pb2

from services.draft.checks import check_request
from services.draft.drafter import Drafter
from services.draft.draws import draw_ahead
from services.draft.no_model import engine_without_model
from services.draft.proposer import draw
from services.draft.settings import NO_MODEL, DraftSettings
from shared.copying.copied import Copied
from shared.copying.suffix_source import Manuscript, SuffixSource
from shared.drafting.copied_draft import CopiedDraft
from shared.engine.engine import StepOutcome
from shared.engine.sequence import Sequence
from shared.engine.tokenizer_fingerprint import tokenizer_fingerprint
from shared.policy.acceptance import Acceptance
from shared.policy.foresight import Foresight
from shared.prefix.block_hash import root_hash
from shared.sampling.draft_tree import WIDTH
from shared.sampling.proposal import Proposal
from shared.security.identity import Identity
from shared.settings import StartupError
from shared.telemetry.attributes import DRAFT_SOURCE, NUM_DRAFT_TOKENS
from shared.telemetry.logs import configure_logging
from shared.telemetry.service import configure_service
from shared.telemetry.tracing import Telemetry
from shared.worker.bundles import bundles
from shared.worker.messages import params_from_proto, proposal_to_proto
from shared.worker.server import worker_server
from shared.worker.service import load_engine, run_worker
from shared.worker.servicer import WorkerServicer
from shared.worker.stream import Lane, RouterStream

Stream = RouterStream[draft_pb2.DraftResponse]
DraftLane = Lane[draft_pb2.DraftResponse]

# A drafter may be prefilling for long with nothing to answer: how often routers hear that it is alive.
_SIGN_SECONDS = 1.0


class DraftServicer(WorkerServicer[draft_pb2.DraftRequest, draft_pb2.DraftResponse], draft_pb2_grpc.DrafterServicer):
    """Keeps a `Drafter` for each sequence of each router, and answers when its proposal is drawn; or at once, where
    more may be hoped of what `source` copies.

    Methods named `_on_…` run on the engine's thread.
    """

    def __init__(
        self, telemetry: Telemetry, fingerprint: str, optimistic: bool, source: SuffixSource, has_model: bool = True
    ) -> None:
        """Without a model all is copied."""
        super().__init__(telemetry, fingerprint)
        self._optimistic = optimistic
        self._source = source
        self._has_model = has_model
        self._drafters: dict[Sequence, Drafter] = {}
        self._manuscripts: dict[Sequence, Manuscript] = {}
        # Everybody's, which a new sequence's starts from.
        self._acceptance = Acceptance()
        self._foresight = Foresight()
        self._last_sign = -math.inf

    async def drain(self) -> None:
        """Routers go on without a drafter, so there is nothing to wait for."""
        for stream in self._streams:
            self._announce_drain(stream)

    def _check(self, request: draft_pb2.DraftRequest) -> None:
        check_request(request)

    def _on_request(self, stream: Stream, request: draft_pb2.DraftRequest) -> None:
        answers = [answer for operation in request.operations for answer in self._on_operation(stream, operation)]
        for bundle in bundles(answers):
            stream.send(draft_pb2.DraftResponse(results=bundle))

    def _on_operation(self, stream: Stream, operation: draft_pb2.DraftOperation) -> list[draft_pb2.DraftResult]:
        """Acts on one operation; the answer if there is one already."""
        match operation.WhichOneof("operation"):
            case "propose":
                return self._on_propose(stream, operation.propose)
            case "release":
                self._on_release(stream, operation.release)
        return []

    def _on_propose(self, stream: Stream, propose: draft_pb2.Propose) -> list[draft_pb2.DraftResult]:
        """Sets a sequence to drafting; a result only if it is ready already, or can't be."""
        position = propose.base_length + len(propose.token_ids)
        if position >= self.engine.max_context:
            self._on_release(stream, propose.sequence_id)
            return [_refusal(propose.sequence_id, position, draft_pb2.DRAFT_STATUS_CONTEXT_EXCEEDED)]
        if propose.base_length == 0:
            self._on_release(stream, propose.sequence_id)
            self._begin(stream, propose)
        lane = stream.lanes.get(propose.sequence_id)
        if lane is None or lane.sequence.num_committed != (propose.base_length or position):
            return [_refusal(propose.sequence_id, position, draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE)]
        lane.traceparent = propose.traceparent
        drafter, manuscript = self._drafters[lane.sequence], self._manuscripts[lane.sequence]
        if propose.base_length:
            drafter.commit(propose.base_length, propose.token_ids)
            self._source.commit(manuscript, propose.token_ids)
        if propose.num_draft_tokens == 0:
            if self._has_model:
                drafter.prefill()
            return []
        room = self.engine.max_context - position
        # A tree takes more room than what it proposes: who has none left for it gets a chain.
        in_tree = propose.num_nodes > propose.num_draft_tokens and room >= WIDTH * propose.num_draft_tokens
        in_tree = in_tree and lane.sequence.params.coupled
        most_tokens = propose.num_nodes if in_tree else min(propose.num_draft_tokens, room)
        may_copy = not propose.sources or inference_pb2.DRAFT_SOURCE_SUFFIX in propose.sources
        wants_model = not propose.sources or inference_pb2.DRAFT_SOURCE_MODEL in propose.sources
        found = Copied()
        if may_copy:
            found = self._source.propose(manuscript, most_tokens, propose.least_likelihood, in_tree)
        copied = CopiedDraft(found)
        asks_model = wants_model and self._has_model
        if not asks_model or found.num_expected > drafter.num_expected(propose.num_draft_tokens):
            drafter.rest()
            return [self._result(lane, copied.proposal(len(copied.likelihoods)), time.time_ns())]
        if in_tree:
            drafter.ask_for_tree(propose.num_draft_tokens, propose.num_nodes, copied)
            return []
        drafter.ask(min(propose.num_draft_tokens, room))
        return [self._answer(lane, drafter)] if drafter.answerable else []

    def _begin(self, stream: Stream, propose: draft_pb2.Propose) -> None:
        sequence = Sequence(
            propose.token_ids,
            propose.num_prompt_tokens,
            params_from_proto(propose.params),
            root_hash(self.engine.fingerprint, propose.cache_salt),
            drafting=True,
        )
        self._add_lane(stream, propose.sequence_id, sequence, propose.traceparent)
        self._drafters[sequence] = Drafter(
            sequence, Foresight(self._foresight), acceptance=Acceptance(self._acceptance)
        )
        self._manuscripts[sequence] = self._source.begin(
            propose.token_ids, propose.num_prompt_tokens, propose.cache_salt, sequence.params.greedy
        )
        self.engine.scheduler.add(sequence)

    def _on_release(self, stream: Stream, sequence_id: int) -> None:
        lane = stream.lanes.get(sequence_id)
        if lane is not None:
            del self._drafters[lane.sequence]
            self._source.end(self._manuscripts.pop(lane.sequence))
        super()._on_release(stream, sequence_id)

    def _on_outcome(self, outcome: StepOutcome) -> None:
        results: defaultdict[Stream, list[draft_pb2.DraftResult]] = defaultdict(list)
        for gain in outcome.gains:
            self._drafters[gain.sequence].take(gain.sampled)
        for sequence in dict.fromkeys(gain.sequence for gain in outcome.gains):
            lane, drafter = self._lanes[sequence], self._drafters[sequence]
            if drafter.answerable:
                results[lane.stream].append(self._answer(lane, drafter))
        for sequence in outcome.failed:
            lane = self._lanes[sequence]
            results[lane.stream].append(
                _refusal(lane.sequence_id, sequence.num_committed, draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE)
            )
            self._on_release(lane.stream, lane.sequence_id)
        sign_is_due = time.monotonic() - self._last_sign >= _SIGN_SECONDS
        if results or sign_is_due:
            stats = self._stats(outcome)
            for stream, entries in results.items():
                for bundle in bundles(entries):
                    stream.send(draft_pb2.DraftResponse(results=bundle, stats=stats))
            if sign_is_due:
                self._last_sign = time.monotonic()
                for stream in {lane.stream for lane in self._lanes.values()} - results.keys():
                    stream.send_sign_of_life(draft_pb2.DraftResponse(stats=stats))
        # Nobody is told which prefixes a drafter holds, but the record must not grow.
        self.engine.blocks.take_events()

    def _answer(self, lane: DraftLane, drafter: Drafter) -> draft_pb2.DraftResult:
        proposal = drafter.answer()
        if self._optimistic and drafter.sequence.tree is None:
            room = self.engine.max_context - len(drafter.sequence.token_ids)
            drafter.guess_on(min(len(proposal), room - 1))
        return self._result(lane, proposal, drafter.asked_ns)

    def _result(self, lane: DraftLane, proposal: Proposal, began_ns: int) -> draft_pb2.DraftResult:
        """An answer with that proposal, asked for then (Unix nanoseconds)."""
        ended_ns, sequence = time.time_ns(), lane.sequence
        if lane.traceparent:
            sources = " ".join(sorted(set(proposal.sources)))
            attributes: dict[str, str | int] = {NUM_DRAFT_TOKENS: len(proposal), DRAFT_SOURCE: sources}
            self.telemetry.record_span("draft", lane.traceparent, began_ns, ended_ns, attributes)
        return draft_pb2.DraftResult(
            sequence_id=lane.sequence_id,
            position=sequence.num_committed,
            status=draft_pb2.DRAFT_STATUS_PROPOSED,
            proposal=proposal_to_proto(proposal),
            seconds=(ended_ns - began_ns) / 1e9,
            num_computed=min(sequence.num_computed_tokens, sequence.num_committed),
        )

    def _announce_drain(self, stream: Stream) -> None:
        stream.end()


def _refusal(sequence_id: int, position: int, status: draft_pb2.DraftStatus) -> draft_pb2.DraftResult:
    return draft_pb2.DraftResult(sequence_id=sequence_id, position=position, status=status)


async def serve(settings: DraftSettings) -> None:
    """Runs a draft worker until it is drained. Raises StartupError if it cannot start."""
    has_model = settings.model != NO_MODEL
    if not has_model and settings.copied_tokens == 0:
        raise StartupError("model is none and copied_tokens is 0: there would be nothing to draft from")
    configure_logging("draft", settings.log_level)
    telemetry = configure_service("outrider-draft", settings)
    # Without a model it copies the target's own tokens, whose names it need not know.
    fingerprint = tokenizer_fingerprint(settings.model) if has_model else ""
    source = SuffixSource(settings.copied_tokens)
    servicer = DraftServicer(telemetry, fingerprint, settings.optimistic, source, has_model)
    server = worker_server(settings, Identity.of(settings, settings.deployment), telemetry, callers=("router",))
    server.add("outrider.v1.Drafter", draft_pb2_grpc.add_DrafterServicer_to_server, servicer)
    mass, most = settings.proposal_mass, settings.max_candidates
    sample = functools.partial(draw, mass=mass, max_entries=most)
    ahead = functools.partial(draw_ahead, mass=mass, max_entries=most)
    with_model = functools.partial(load_engine, settings, sample, draw_ahead=ahead)
    load = with_model if has_model else lambda: engine_without_model(settings)
    try:
        await run_worker(server, servicer, settings, load)
    finally:
        telemetry.shutdown()
