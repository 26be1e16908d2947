from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from outrider.v1 import worker_pb2

from shared.sampling.params import SamplingParams, SelfDraft
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.sampled import Candidates, TokenLogprobs
from shared.worker.messages import (
    logprobs_to_proto,
    params_from_proto,
    params_to_proto,
    proposal_from_proto,
    proposal_to_proto,
)

# Fractions that a float32 holds, none of them a default.
FULL = SamplingParams(
    temperature=0.75,
    top_k=40,
    top_p=0.875,
    min_p=0.0625,
    repetition_penalty=1.25,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    logit_bias={3: -100.0, 2**17: 0.25},
    seed=2**64 - 1,
    sequence_index=15,
    min_tokens=2,
    max_tokens=4000,
    stop_token_ids=frozenset({0, 9, 151_645}),
    logprobs=20,
    self_draft=SelfDraft(4, 12, ("suffix",)),
)


def over_the_wire(params: SamplingParams) -> SamplingParams:
    return params_from_proto(worker_pb2.SequenceParams.FromString(params_to_proto(params).SerializeToString()))


def test_every_field_differs_from_its_default_and_comes_through() -> None:
    assert all(getattr(FULL, each.name) != getattr(SamplingParams(), each.name) for each in fields(SamplingParams))
    assert over_the_wire(FULL) == FULL


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        replace(FULL, seed=None, logprobs=None),
        # Present, and zero: not the same as absent.
        replace(FULL, seed=0, logprobs=0, self_draft=SelfDraft(0)),
        replace(FULL, self_draft=SelfDraft()),
        replace(FULL, self_draft=SelfDraft(None, 0, ("suffix", "target"))),
        replace(FULL, temperature=0.0, top_k=0, max_tokens=1, stop_token_ids=frozenset(), logit_bias={}),
    ],
)
def test_absent_and_zero_come_through_as_they_are(params: SamplingParams) -> None:
    assert over_the_wire(params) == params


def test_every_field_of_the_message_is_filled() -> None:
    filled = {descriptor.name for descriptor, _ in params_to_proto(FULL).ListFields()}
    assert filled == set(worker_pb2.SequenceParams.DESCRIPTOR.fields_by_name)


def packed(*pairs: tuple[int, float]) -> Candidates:
    ids = struct.pack(f"<{len(pairs)}I", *(id for id, _ in pairs))
    return Candidates(len(pairs), ids, struct.pack(f"<{len(pairs)}f", *(prob for _, prob in pairs)))


def test_a_proposal_carries_each_tokens_distribution() -> None:
    message = proposal_to_proto(
        Proposal((7, 2**31)).drawn_from([packed((7, 0.5), (9, 0.25), (1, 0.25)), packed((2**31, 1.0))])
    )
    proposal = proposal_from_proto(worker_pb2.Proposal.FromString(message.SerializeToString()))
    assert proposal.token_ids == (7, 2**31)
    assert proposal.candidate_counts == (3, 1)
    assert struct.unpack("<4I", proposal.candidate_ids) == (7, 9, 1, 2**31)
    assert struct.unpack("<4f", proposal.candidate_probs) == (0.5, 0.25, 0.25, 1.0)


def test_a_coupled_proposal_carries_ids_alone() -> None:
    assert proposal_from_proto(proposal_to_proto(Proposal((4, 5)))) == Proposal((4, 5))


def test_no_proposal_is_the_empty_one() -> None:
    assert proposal_from_proto(worker_pb2.Proposal()) is EMPTY_PROPOSAL
    assert proposal_from_proto(worker_pb2.Proposal(candidate_ids=b"1234")) is EMPTY_PROPOSAL


def test_logprobs() -> None:
    [first, second] = logprobs_to_proto((TokenLogprobs(-0.5, ((3, -0.25), (1, -2.0))), TokenLogprobs(-4.0, ())))
    assert first.logprob == -0.5
    assert [(entry.token_id, entry.logprob) for entry in first.top] == [(3, -0.25), (1, -2.0)]
    assert second.logprob == -4.0
    assert len(second.top) == 0
    assert logprobs_to_proto(None) == []


def test_it_imports_no_torch() -> None:
    code = "import sys, shared.worker.messages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


def test_a_tree_comes_through() -> None:
    tree = Proposal((7, 8, 9), parents=(0, 0, 2), sources=("model", "suffix", "target"))
    sent = proposal_to_proto(tree)
    assert proposal_from_proto(worker_pb2.Proposal.FromString(sent.SerializeToString())) == tree
    # Who is not known, or not said of each token, is nobody.
    del sent.sources[:]
    for sources in (b"\x01", b"\x01\x02\x63"):
        said = sent.SerializeToString() + bytes([6 << 3 | 2, len(sources)]) + sources
        assert proposal_from_proto(worker_pb2.Proposal.FromString(said)).sources == ()
    assert proposal_from_proto(worker_pb2.Proposal(parents=[0, 1])) == EMPTY_PROPOSAL
