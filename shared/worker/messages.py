"""Conversions between worker messages and the sampling types."""

from __future__ import annotations

from outrider.v1 import inference_pb2, worker_pb2

from shared.sampling.params import SamplingParams, SelfDraft
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.sampled import TokenLogprobs
from shared.worker.draft_sources import SOURCE_NAMES, SOURCES


def params_to_proto(params: SamplingParams) -> worker_pb2.SequenceParams:
    return worker_pb2.SequenceParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
        sequence_index=params.sequence_index,
        min_tokens=params.min_tokens,
        max_tokens=params.max_tokens,
        stop_token_ids=sorted(params.stop_token_ids),
        logprobs=params.logprobs,
        self_draft=None if params.self_draft is None else _self_draft_to_proto(params.self_draft),
    )


def params_from_proto(message: worker_pb2.SequenceParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed if message.HasField("seed") else None,
        sequence_index=message.sequence_index,
        min_tokens=message.min_tokens,
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        self_draft=_self_draft(message.self_draft) if message.HasField("self_draft") else None,
    )


def _self_draft_to_proto(wanted: SelfDraft) -> worker_pb2.SelfDraft:
    sources = [SOURCES[name] for name in wanted.sources]
    return worker_pb2.SelfDraft(num_draft_tokens=wanted.num_draft_tokens, num_nodes=wanted.num_nodes, sources=sources)


def _self_draft(message: worker_pb2.SelfDraft) -> SelfDraft:
    num_draft_tokens = message.num_draft_tokens if message.HasField("num_draft_tokens") else None
    # One that is not known here is nobody, and not whoever there is.
    sources = tuple(dict.fromkeys(SOURCE_NAMES.get(source, "") for source in message.sources))
    return SelfDraft(num_draft_tokens, message.num_nodes, sources)


def proposal_to_proto(proposal: Proposal) -> worker_pb2.Proposal:
    return worker_pb2.Proposal(
        token_ids=proposal.token_ids,
        candidate_counts=proposal.candidate_counts,
        candidate_ids=proposal.candidate_ids,
        candidate_probs=proposal.candidate_probs,
        parents=proposal.parents,
        sources=[SOURCES[name] for name in proposal.sources],
    )


def proposal_from_proto(message: worker_pb2.Proposal) -> Proposal:
    """Whose its tokens are is left out where that is not said of each."""
    if not message.token_ids:
        return EMPTY_PROPOSAL
    sources = tuple(SOURCE_NAMES[source] for source in message.sources if source in SOURCE_NAMES)
    return Proposal(
        tuple(message.token_ids),
        tuple(message.candidate_counts),
        message.candidate_ids,
        message.candidate_probs,
        tuple(message.parents),
        sources if len(sources) == len(message.token_ids) else (),
    )


def logprobs_to_proto(entries: tuple[TokenLogprobs, ...] | None) -> list[inference_pb2.TokenLogprobs]:
    return [
        inference_pb2.TokenLogprobs(
            logprob=entry.logprob,
            top=[inference_pb2.TopLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top],
        )
        for entry in entries or ()
    ]
