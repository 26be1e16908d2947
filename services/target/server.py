"""The `Target` service: sequences in, committed tokens out."""

from __future__ import annotations

import functools
import logging
from collections import Counter, defaultdict
from contextlib import AsyncExitStack

from outrider.v1 import target_pb2, target_pb2_grpc, transfer_pb2, transfer_pb2_grpc, worker_pb2

from services.target.checks import check_request
from services.target.gathering import Gathering
from services.target.hand_over import HandOver
from services.target.neighbours import Neighbours, Stream
from services.target.self_drafting import self_drafting
from services.target.settings import TargetSettings
from services.target.step_log import StepLog
from services.target.stored_prefixes import StoredPrefixes
from shared.engine.engine import Engine, Gain, StepOutcome
from shared.engine.sequence import Finish, Sequence
from shared.engine.tokenizer_fingerprint import tokenizer_fingerprint
from shared.policy.step_costs import StepCosts
from shared.prefix.block_hash import root_hash
from shared.prefix.publisher import PrefixPublisher
from shared.prefix.store import PrefixStore
from shared.sampling.proposal import Proposal
from shared.sampling.verifier import check_proposal, verify
from shared.security.identity import Identity
from shared.settings import StartupError
from shared.telemetry.attributes import CACHED_TOKENS, NUM_ACCEPTED, NUM_DRAFT_TOKENS, NUM_SEQUENCES, NUM_TOKENS
from shared.telemetry.logs import configure_logging
from shared.telemetry.service import configure_service
from shared.telemetry.tracing import Telemetry
from shared.transfer.engines import make_engines
from shared.transfer.fetch import Fetcher
from shared.transfer.offers import Offers
from shared.transfer.servicer import TransferServicer
from shared.worker.bundles import bundles
from shared.worker.messages import logprobs_to_proto, params_from_proto, proposal_from_proto, proposal_to_proto
from shared.worker.server import worker_server
from shared.worker.service import load_engine, run_worker
from shared.worker.servicer import WorkerServicer
from shared.worker.stream import Lane

logger = logging.getLogger(__name__)

# Copies of blocks that wait until the prefix store has them, at most.
_MAX_PENDING_BYTES = 256 << 20

_STATUS = {
    None: target_pb2.STEP_STATUS_RUNNING,
    Finish.STOPPED: target_pb2.STEP_STATUS_STOPPED,
    Finish.LENGTH: target_pb2.STEP_STATUS_LENGTH,
}


class TargetServicer(
    WorkerServicer[target_pb2.TargetRequest, target_pb2.TargetResponse], target_pb2_grpc.TargetServicer
):
    """Puts routers' sequences into the engine and streams back what its steps commit.

    Methods named `_on_…` run on the engine's thread.
    """

    def __init__(self, telemetry: Telemetry, fingerprint: str, role: worker_pb2.Role = worker_pb2.ROLE_BOTH) -> None:
        super().__init__(telemetry, fingerprint)
        self._role = role
        self._publisher: PrefixPublisher | None = None
        self._hand_over: HandOver | None = None
        self._stored: StoredPrefixes | None = None
        self._step_log: StepLog | None = None
        self._gathering = Gathering()
        self._neighbours = Neighbours()

    def publish_to(self, publisher: PrefixPublisher) -> None:
        """From now on the prefix index learns which blocks this worker holds."""
        self._publisher = publisher

    def store_in(self, stored: StoredPrefixes) -> None:
        """From now on the blocks computed here are kept there."""
        self._stored = stored
        if self._metrics is not None:
            self._metrics.watch_prefix_store(stored.counts)

    def log_steps(self, log: StepLog) -> None:
        """From now on every step has a line there."""
        self._step_log = log

    def hand_over_by(self, hand_over: HandOver) -> None:
        """From now on KV comes from other workers and goes to them."""
        self._hand_over = hand_over

    async def drain(self) -> None:
        """Takes no new sequences, and returns when those here have ended or gone elsewhere with their KV."""
        await super().drain()
        if self._hand_over is not None:
            await self._hand_over.drain()
        if self._stored is not None:
            await self._stored.drain()

    def _info(self) -> worker_pb2.WorkerInfo:
        info = super()._info()
        info.role = self._role
        info.drafts_with = self.engine.drafts_with
        return info

    def _announce_drain(self, stream: Stream) -> None:
        stream.send(target_pb2.TargetResponse(draining=True))

    def _check(self, request: target_pb2.TargetRequest) -> None:
        check_request(request, self.engine.model.vocab_size)

    def _on_request(self, stream: Stream, request: target_pb2.TargetRequest) -> None:
        refusals = [refusal for operation in request.operations for refusal in self._on_operation(stream, operation)]
        for bundle in bundles(refusals):
            stream.send(target_pb2.TargetResponse(results=bundle))

    def _on_operation(self, stream: Stream, operation: target_pb2.TargetOperation) -> list[target_pb2.StepResult]:
        """Acts on one operation; the results of what cannot be."""
        match operation.WhichOneof("operation"):
            case "prefill":
                return self._on_prefill(stream, operation.prefill)
            case "verify":
                return self._on_verify(stream, operation.verify)
            case "release":
                self._on_release(stream, operation.release)
                if self._hand_over is not None:
                    self._hand_over.on_drop(stream, operation.release)
            case "export":
                lane = stream.lanes.get(operation.export.sequence_id)
                if lane is not None and self._hand_over is not None:
                    self._hand_over.on_export(operation.export.ticket, lane.sequence)
            case "pull":
                if self._hand_over is not None:
                    self._hand_over.on_pull(stream, operation.pull)
            case "withdraw":
                if self._hand_over is not None:
                    self._hand_over.on_withdraw(operation.withdraw)
        return []

    def _on_stream_begin(self, stream: Stream) -> None:
        self._neighbours.begin(stream)
        if not self._neighbours.alone:
            self._tell_others()

    def _tell_others(self) -> None:
        for stream, load in self._neighbours.loads(self._lanes.values(), self._kv_usage()).items():
            stream.send(target_pb2.TargetResponse(others=load))

    def _on_prefill(self, stream: Stream, prefill: target_pb2.Prefill) -> list[target_pb2.StepResult]:
        """Begins a sequence and its forks; if that cannot be, a result for each of them."""
        sequence_ids = [prefill.sequence_id, *(fork.sequence_id for fork in prefill.forks)]
        params = params_from_proto(prefill.params)
        num_output_tokens = len(prefill.token_ids) - prefill.num_prompt_tokens
        if len(prefill.token_ids) + params.max_tokens - num_output_tokens > self.engine.max_context:
            return [_refusal(id, target_pb2.STEP_STATUS_TOO_LARGE) for id in sequence_ids]
        if self._draining:
            return [_refusal(id, target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE) for id in sequence_ids]
        if self._role == worker_pb2.ROLE_PREFILL and prefill.num_steps > 1:
            return [_refusal(id, target_pb2.STEP_STATUS_WRONG_ROLE) for id in sequence_ids]
        root = root_hash(self.engine.fingerprint, prefill.cache_salt)

        def begin(sequence_id: int, sequence_index: int) -> Sequence:
            self._on_release(stream, sequence_id)
            prefill.params.sequence_index = sequence_index
            sequence = Sequence(
                prefill.token_ids,
                prefill.num_prompt_tokens,
                params_from_proto(prefill.params),
                root,
                num_steps=prefill.num_steps,
            )
            self._add_lane(stream, sequence_id, sequence, prefill.traceparent)
            return sequence

        sequence = begin(prefill.sequence_id, params.sequence_index)
        sequence.forks = [begin(fork.sequence_id, fork.sequence_index) for fork in prefill.forks]
        if prefill.pull_id and self._hand_over is not None:
            self._hand_over.on_begin(stream, prefill.pull_id, sequence)
        self.engine.scheduler.add(sequence)
        return []

    def _on_verify(self, stream: Stream, verification: target_pb2.Verify) -> list[target_pb2.StepResult]:
        """Lets a sequence go on; a result only if it is not here, or not where the router thinks it is."""
        if self._role == worker_pb2.ROLE_PREFILL:
            self._on_release(stream, verification.sequence_id)
            return [_refusal(verification.sequence_id, target_pb2.STEP_STATUS_WRONG_ROLE)]
        lane = stream.lanes.get(verification.sequence_id)
        proposal = proposal_from_proto(verification.proposal)
        if lane is not None:
            if proposal:
                self._gathering.returned(lane.sequence)
            else:  # it goes on without, which says nothing of how long drafts take
                self._gathering.forget(lane.sequence)
            position = len(lane.sequence.token_ids)
            in_step = position == verification.position if proposal else position >= verification.position
            if in_step:
                if self._is_sound(proposal, lane.sequence):
                    lane.sequence.proposal = proposal
                lane.sequence.num_steps += verification.num_steps
                lane.traceparent = verification.traceparent
                return []
            self._on_release(stream, verification.sequence_id)
        return [_refusal(verification.sequence_id, target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE)]

    def _is_sound(self, proposal: Proposal, sequence: Sequence) -> bool:
        """Whether a proposal can be verified. A malformed one must not spoil the step of all others: its own
        sequence decodes plainly."""
        try:
            check_proposal(proposal, sequence.params)
        except ValueError as error:
            logger.error("malformed proposal", extra={"reason": str(error)})
            return False
        room = min(self.engine.max_context - len(sequence.token_ids), self.engine.scheduler.max_batch_tokens - 1)
        return len(proposal) <= room

    def _on_release(self, stream: Stream, sequence_id: int) -> None:
        lane = stream.lanes.get(sequence_id)
        kv_import = None
        if lane is not None:
            self._gathering.forget(lane.sequence)
            kv_import = lane.sequence.kv_import
        super()._on_release(stream, sequence_id)
        if lane is not None and not self._lanes and not self._neighbours.alone:
            # No step would tell.
            self._tell_others()
        if self._hand_over is not None:
            self._hand_over.on_left(kv_import)

    def _on_stream_end(self, stream: Stream) -> None:
        super()._on_stream_end(stream)
        self._neighbours.end(stream)
        self._tell_others()
        if self._hand_over is not None:
            self._hand_over.on_stream_end(stream)

    def _seconds_to_wait(self) -> float:
        if not self._gathering.any_away or not self.engine.step_costs:
            return 0.0
        num_ready, num_tokens = self.engine.scheduler.ready()
        return self._gathering.seconds_to_wait(num_ready, StepCosts(self.engine.step_costs).seconds(num_tokens))

    def _on_outcome(self, outcome: StepOutcome) -> None:
        if self._step_log is not None:
            self._step_log.write(outcome)
        results: defaultdict[Stream, list[target_pb2.StepResult]] = defaultdict(list)
        prefill_tokens: Counter[Stream] = Counter()
        for sequence, num_tokens in outcome.prefills:
            prefill_tokens[self._lanes[sequence].stream] += num_tokens
        for gain in outcome.gains:
            lane = self._lanes[gain.sequence]
            results[lane.stream].append(self._result(lane, gain, outcome))
            if gain.num_draft_tokens and not gain.self_drafted and gain.sequence.num_steps == 0:
                self._gathering.left(gain.sequence)
            if gain.sequence.finish is not None:
                self._on_release(lane.stream, lane.sequence_id)
        for sequence in outcome.failed:
            lane = self._lanes[sequence]
            results[lane.stream].append(_refusal(lane.sequence_id, target_pb2.STEP_STATUS_FAILED))
            self._on_release(lane.stream, lane.sequence_id)
        others = {} if self._neighbours.alone else self._neighbours.loads(self._lanes.values(), self._kv_usage())
        for stream, entries in results.items():
            for place, bundle in enumerate(bundles(entries)):
                response = target_pb2.TargetResponse(results=bundle, others=others.get(stream))
                # Once: routers take what comes with each for a step of its own.
                if place == 0:
                    response.stats.CopyFrom(self._stats(outcome, prefill_tokens[stream]))
                stream.send(response)
        # Where the step brought nothing (a chunk of a prefill), routers tell by its stats that this worker is alive.
        without = {lane.stream for lane in self._lanes.values()} - results.keys()
        for stream in without:
            stats = self._stats(outcome, prefill_tokens[stream])
            stream.send_sign_of_life(target_pb2.TargetResponse(stats=stats, others=others.get(stream)))
        if others:
            for stream in self._neighbours.due(results.keys() | without):
                stream.send_sign_of_life(target_pb2.TargetResponse(others=others[stream]))
        events = self.engine.blocks.take_events()
        if self._publisher is not None:
            self._publisher.evicted(events.evicted)
            self._publisher.stored(events.stored)
        if self._stored is not None:
            self._stored.on_stored(events.stored)

    def _result(self, lane: Lane[target_pb2.TargetResponse], gain: Gain, outcome: StepOutcome) -> target_pb2.StepResult:
        sequence, sampled = gain.sequence, gain.sampled
        position = len(sequence.token_ids) - len(sampled.token_ids)
        first = not lane.answered
        lane.answered = True
        if first and self._metrics is not None:
            self._metrics.prefix_hit(sequence.num_cached_tokens)
        if lane.traceparent:
            self.telemetry.record_span(
                "prefill" if first else "verify",
                lane.traceparent,
                lane.began_ns if first else outcome.began_ns,
                outcome.began_ns + int(outcome.seconds * 1e9),
                {
                    NUM_DRAFT_TOKENS: gain.num_draft_tokens,
                    NUM_ACCEPTED: sampled.num_accepted,
                    CACHED_TOKENS: sequence.num_cached_tokens,
                    NUM_TOKENS: outcome.num_tokens,
                    NUM_SEQUENCES: outcome.num_sequences,
                },
            )
        return target_pb2.StepResult(
            sequence_id=lane.sequence_id,
            position=position,
            status=_STATUS[sequence.finish],
            token_ids=sampled.token_ids,
            num_draft_tokens=gain.num_draft_tokens,
            num_accepted=sampled.num_accepted,
            logprobs=logprobs_to_proto(sampled.logprobs),
            cached_tokens=sequence.num_cached_tokens if first else 0,
            self_drafted=proposal_to_proto(gain.self_drafted) if gain.self_drafted else None,
        )


def _refusal(sequence_id: int, status: target_pb2.StepStatus) -> target_pb2.StepResult:
    return target_pb2.StepResult(sequence_id=sequence_id, status=status)


_ROLES = {
    "both": worker_pb2.ROLE_BOTH,
    "prefill": worker_pb2.ROLE_PREFILL,
    "decode": worker_pb2.ROLE_DECODE,
}


async def serve(settings: TargetSettings) -> None:
    """Runs a target worker until it is drained. Raises StartupError if it cannot start."""
    configure_logging("target", settings.log_level)
    telemetry = configure_service("outrider-target", settings)
    servicer = TargetServicer(telemetry, tokenizer_fingerprint(settings.model), _ROLES[settings.role])
    transfers = TransferServicer()
    identity = Identity.of(settings, settings.deployment)
    server = worker_server(settings, identity, telemetry, callers=("router", "target"))
    server.add("outrider.v1.Target", target_pb2_grpc.add_TargetServicer_to_server, servicer)
    # Also while it drains: what runs here goes to other workers then.
    server.add("outrider.v1.Transfer", transfer_pb2_grpc.add_TransferServicer_to_server, transfers, while_draining=True)
    async with AsyncExitStack() as closing:
        closing.callback(telemetry.shutdown)
        if settings.step_log is not None:
            step_log = StepLog(settings.step_log)
            closing.callback(step_log.close)
            servicer.log_steps(step_log)

        async def connect(engine: Engine) -> None:
            """Joins the other workers, before this one is SERVING."""
            stored = _make_stored_prefixes(settings, servicer)
            if stored is not None:
                servicer.store_in(stored)
                closing.push_async_callback(stored.close)
            hand_over = await _make_hand_over(settings, servicer, transfers, stored, identity, closing)
            servicer.hand_over_by(hand_over)
            closing.push_async_callback(hand_over.close)
            if (redis_url := settings.redis_at(settings.redis_url)) is not None:
                publisher = PrefixPublisher(redis_url, engine.fingerprint, servicer.instance_id, engine.blocks.findable)
                publisher.start()
                closing.push_async_callback(publisher.close)
                servicer.publish_to(publisher)

        load = functools.partial(load_engine, settings, verify, lambda model: self_drafting(settings, model))
        await run_worker(server, servicer, settings, load, connect, settings.role)


def _make_stored_prefixes(settings: TargetSettings, servicer: TargetServicer) -> StoredPrefixes | None:
    """None without a prefix store. Raises StartupError if its limit is too low for a block."""
    url = settings.redis_at(settings.prefix_store)
    if url is None:
        return None
    engine = servicer.engine
    block_bytes = engine.pool.block_num_bytes
    try:
        store = PrefixStore(
            url,
            engine.fingerprint,
            block_bytes,
            max_bytes=int(settings.prefix_store_gib * 2**30),
            ttl_seconds=settings.prefix_store_ttl_seconds,
            max_pending_bytes=max(_MAX_PENDING_BYTES, block_bytes),
        )
    except ValueError as error:
        raise StartupError(f"prefix_store_gib is {settings.prefix_store_gib:g}: {error}") from error
    store.start()
    return StoredPrefixes(servicer.engine_loop, store)


async def _make_hand_over(
    settings: TargetSettings,
    servicer: TargetServicer,
    transfers: TransferServicer,
    stored: StoredPrefixes | None,
    identity: Identity,
    closing: AsyncExitStack,
) -> HandOver:
    engine, loop = servicer.engine, servicer.engine_loop
    engines = make_engines(settings.kv_transfer, engine.pool, servicer.instance_id, identity)
    for each in engines.values():
        closing.push_async_callback(each.close)
    layout = transfer_pb2.BlockLayout(
        fingerprint=engine.fingerprint,
        model=engine.model.name,
        dtype=str(engine.model.dtype).removeprefix("torch."),
        block_size=engine.block_size,
        block_bytes=engine.pool.block_num_bytes,
    )
    offers = Offers(loop, settings.lease_seconds)
    transfers.attach(offers, engine.pool, layout, engines)
    fetcher = Fetcher(loop, layout, engines, identity)
    return HandOver(loop, offers, fetcher, stored, servicer.telemetry, servicer.metrics)
