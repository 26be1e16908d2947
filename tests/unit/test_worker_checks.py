"""What workers refuse before it reaches their engine's thread: by field, value and limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from outrider.v1 import draft_pb2, target_pb2, worker_pb2

from services.draft import checks as draft_checks
from services.target import checks as target_checks
from shared.rpc.errors import InvalidArgument

VOCAB_SIZE = 100


def params() -> worker_pb2.SequenceParams:
    return worker_pb2.SequenceParams(temperature=1.0, top_p=1.0, repetition_penalty=1.0, max_tokens=4)


def target_request() -> target_pb2.TargetRequest:
    """One of each operation, all as they should be."""
    forks = [target_pb2.Fork(sequence_id=number, sequence_index=number) for number in (2, 3)]
    prefill = target_pb2.Prefill(
        sequence_id=1, token_ids=[1, 2, 99], num_prompt_tokens=2, params=params(), forks=forks, num_steps=1
    )
    verify = target_pb2.Verify(sequence_id=1, position=4, num_steps=2)
    verify.proposal.token_ids.extend([5, 6])
    return target_pb2.TargetRequest(
        operations=[
            target_pb2.TargetOperation(prefill=prefill),
            target_pb2.TargetOperation(verify=verify),
            target_pb2.TargetOperation(export=target_pb2.Export(sequence_id=1, ticket=b"t" * 16)),
            target_pb2.TargetOperation(pull=target_pb2.Pull(pull_id=9, ticket=b"t" * 16, token_ids=[1])),
            target_pb2.TargetOperation(pull=target_pb2.Pull(pull_id=8, from_store=True, token_ids=[1])),
            target_pb2.TargetOperation(withdraw=b"?"),
            target_pb2.TargetOperation(release=1),
            target_pb2.TargetOperation(),
        ]
    )


def draft_request() -> draft_pb2.DraftRequest:
    begin = draft_pb2.Propose(sequence_id=1, token_ids=[1, 2], num_prompt_tokens=2, params=params())
    more = draft_pb2.Propose(sequence_id=1, base_length=2, token_ids=[3], num_draft_tokens=4)
    return draft_pb2.DraftRequest(
        operations=[
            draft_pb2.DraftOperation(propose=begin),
            draft_pb2.DraftOperation(propose=more),
            draft_pb2.DraftOperation(release=1),
        ]
    )


def test_what_is_as_it_should_be() -> None:
    target_checks.check_request(target_request(), VOCAB_SIZE)
    draft_checks.check_request(draft_request())


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        *names, last = path.split(".")
        for name in names:
            message = getattr(message, name)
        if isinstance(value, list):
            del getattr(message, last)[:]
            getattr(message, last).extend(value)
        elif isinstance(value, dict):
            getattr(message, last).update(value)
        else:
            setattr(message, last, value)

    return change


NAN = float("nan")
SPOILT_BEGINNINGS = {
    "token_ids": [],
    "num_prompt_tokens": 0,
    "num_prompt_tokens ": 4,
    "params.max_tokens": 0,
    "params.max_tokens ": (1 << 32) - 1,
    "params.temperature": NAN,
    "params.temperature ": -1.0,
    "params.top_p": 0.0,
    "params.min_p": 1.5,
    "params.repetition_penalty": 0.0,
    "params.presence_penalty": float("inf"),
    "params.frequency_penalty": -3.0,
    "params.logit_bias": dict.fromkeys(range(1025), 1.0),
    "params.logprobs": 21,
    "params.stop_token_ids": list(range(1025)),
    "params.self_draft.num_draft_tokens": 257,
    "params.self_draft.num_nodes": (1 << 32) - 1,
}


@pytest.mark.parametrize("spoilt", SPOILT_BEGINNINGS)
def test_what_no_sequence_begins_with(spoilt: str) -> None:
    path, value = spoilt.strip(), SPOILT_BEGINNINGS[spoilt]
    prefill = target_request()
    _set(path, value)(prefill.operations[0].prefill)
    with pytest.raises(InvalidArgument) as caught:
        target_checks.check_request(prefill, VOCAB_SIZE)
    assert caught.value.field.startswith(f"operations[0].prefill.{path}")
    propose = draft_request()
    _set(path, value)(propose.operations[0].propose)
    with pytest.raises(InvalidArgument) as caught:
        draft_checks.check_request(propose)
    assert caught.value.field.startswith(f"operations[0].propose.{path}")


@pytest.mark.parametrize(
    ("operation", "path", "value", "field"),
    [
        (0, "prefill.token_ids", [1, 100], "prefill.token_ids[1]"),
        (0, "prefill.params.logit_bias", {100: 1.0}, "prefill.params.logit_bias key"),
        (0, "prefill.params.logit_bias", {1: NAN}, "prefill.params.logit_bias[1]"),
        (0, "prefill.num_steps", (1 << 32) - 1, "prefill.num_steps"),
        (0, "prefill.sequence_id", 3, "prefill.forks"),
        (1, "verify.num_steps", (1 << 32) - 1, "verify.num_steps"),
        (2, "export.ticket", b"t" * 15, "export.ticket"),
        (3, "pull.ticket", b"t" * 17, "pull.ticket"),
        (4, "pull.token_ids", [100], "pull.token_ids[0]"),
    ],
)
def test_what_a_target_refuses(operation: int, path: str, value: Any, field: str) -> None:
    request = target_request()
    _set(path, value)(request.operations[operation])
    with pytest.raises(InvalidArgument) as caught:
        target_checks.check_request(request, VOCAB_SIZE)
    assert caught.value.field == f"operations[{operation}].{field}"


def test_forks_of_one_id_and_forks_without_end() -> None:
    request = target_request()
    request.operations[0].prefill.forks[0].sequence_id = 3
    with pytest.raises(InvalidArgument, match="sequence ids that are given once"):
        target_checks.check_request(request, VOCAB_SIZE)
    request.operations[0].prefill.forks.extend(target_pb2.Fork(sequence_id=number) for number in range(10, 100))
    with pytest.raises(InvalidArgument, match="at most 64 forks"):
        target_checks.check_request(request, VOCAB_SIZE)


def test_a_drafter_takes_ids_of_a_larger_vocabulary_but_no_endless_positions() -> None:
    request = draft_request()
    request.operations[0].propose.token_ids[0] = 5_000_000
    draft_checks.check_request(request)
    request.operations[1].propose.base_length = (1 << 32) - 1
    with pytest.raises(InvalidArgument) as caught:
        draft_checks.check_request(request)
    assert caught.value.field == "operations[1].propose.base_length"


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_draft_tokens", 257), ("num_nodes", 257), ("least_likelihood", NAN), ("least_likelihood", 1.1)],
)
def test_what_no_drafter_is_asked_for(name: str, value: float) -> None:
    request = draft_request()
    _set(name, value)(request.operations[1].propose)
    with pytest.raises(InvalidArgument) as caught:
        draft_checks.check_request(request)
    assert caught.value.field == f"operations[1].propose.{name}"
