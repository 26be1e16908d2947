"""Messages as they should be, for a fuzzer to spoil: what is nearly right gets furthest."""

from __future__ import annotations

import random

from google.protobuf.message import Message
from outrider.v1 import draft_pb2, inference_pb2, target_pb2, transfer_pb2, worker_pb2

VOCABULARY = 4096


def generate(rng: random.Random) -> Message:
    return inference_pb2.GenerateRequest(
        text="def main():\n",
        max_tokens=rng.randint(1, 4),
        temperature=rng.choice((0.0, 0.8)),
        top_k=5,
        top_p=0.9,
        stop=["\n"],
        stop_token_ids=[1],
        logit_bias={3: 1.0},
        n=rng.randint(1, 2),
        seed=rng.randrange(9),
        logprobs=2,
        speculation=inference_pb2.Speculation(enabled=True, num_draft_tokens=2),
    )


def tokenize(rng: random.Random) -> Message:
    return inference_pb2.TokenizeRequest(text="x" * rng.randrange(1, 50))


def target(rng: random.Random) -> Message:
    number = rng.randrange(1, 1 << 32)
    prefill = target_pb2.Prefill(
        sequence_id=number,
        token_ids=_token_ids(rng, 20),
        num_prompt_tokens=rng.randint(1, 20),
        params=_params(rng),
        num_steps=rng.randint(1, 3),
        forks=[target_pb2.Fork(sequence_id=number + 1, sequence_index=1)] * rng.randint(0, 1),
        cache_salt=b"salt" * 8,
    )
    proposal = worker_pb2.Proposal(token_ids=_token_ids(rng, 3))
    verify = target_pb2.Verify(sequence_id=number, position=21, proposal=proposal, num_steps=1)
    pull = target_pb2.Pull(pull_id=number + 2, address="127.0.0.1:1", token_ids=_token_ids(rng, 40), ticket=b"t" * 16)
    operations = [
        target_pb2.TargetOperation(prefill=prefill),
        target_pb2.TargetOperation(verify=verify),
        target_pb2.TargetOperation(export=target_pb2.Export(sequence_id=number, ticket=rng.randbytes(16))),
        target_pb2.TargetOperation(pull=pull),
        target_pb2.TargetOperation(withdraw=rng.randbytes(16)),
        target_pb2.TargetOperation(release=number),
    ]
    return target_pb2.TargetRequest(operations=operations[: rng.randint(1, len(operations))])


def draft(rng: random.Random) -> Message:
    number = rng.randrange(1, 1 << 32)
    first = draft_pb2.Propose(
        sequence_id=number,
        token_ids=_token_ids(rng, 20),
        num_draft_tokens=rng.randint(0, 3),
        params=_params(rng),
        num_prompt_tokens=rng.randint(1, 20),
    )
    more = draft_pb2.Propose(sequence_id=number, base_length=20, token_ids=_token_ids(rng, 2), num_draft_tokens=2)
    operations = [
        draft_pb2.DraftOperation(propose=first),
        draft_pb2.DraftOperation(propose=more),
        draft_pb2.DraftOperation(release=number),
    ]
    return draft_pb2.DraftRequest(operations=operations[: rng.randint(1, len(operations))])


def fetch(rng: random.Random) -> Message:
    prefix = transfer_pb2.Prefix(block_hashes=rng.randbytes(32 * rng.randint(1, 3)))
    begin = transfer_pb2.FetchBegin(layout=_layout(rng), engines=["grpc"], prefix=prefix)
    renew, done = transfer_pb2.FetchRequest(renew={}), transfer_pb2.FetchRequest(done={})
    return rng.choice((transfer_pb2.FetchRequest(begin=begin), renew, done))


def _layout(rng: random.Random) -> transfer_pb2.BlockLayout:
    return transfer_pb2.BlockLayout(
        fingerprint="f" * 16, model="m", dtype="float32", block_size=16, block_bytes=rng.choice((1, 98304))
    )


def _params(rng: random.Random) -> worker_pb2.SequenceParams:
    made = worker_pb2.SequenceParams(
        temperature=rng.choice((0.0, 0.8)),
        top_p=1.0,
        repetition_penalty=1.0,
        max_tokens=rng.randint(1, 8),
        logit_bias={5: -1.0},
        stop_token_ids=[0],
    )
    if rng.random() < 0.5:
        made.seed = rng.randrange(1 << 32)
    return made


def _token_ids(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(1, VOCABULARY) for _ in range(number)]
