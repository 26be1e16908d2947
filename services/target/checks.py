"""What a router may say: looked at before it reaches the engine's thread, whose end would cost every router."""

from __future__ import annotations

from outrider.v1 import target_pb2

from shared.rpc.checks import check_count, check_range, check_token_ids
from shared.rpc.errors import InvalidArgument
from shared.worker.checks import check_beginning

_MAX_FORKS = 64
_MAX_STEPS = 1 << 24
_TICKET_BYTES = 16


def check_request(request: target_pb2.TargetRequest, vocab_size: int) -> None:
    """Raises InvalidArgument, naming field, value and limit."""
    for index, operation in enumerate(request.operations):
        name = f"operations[{index}]"
        match operation.WhichOneof("operation"):
            case "prefill":
                _check_prefill(f"{name}.prefill", operation.prefill, vocab_size)
            case "verify":  # any draft tokens: a drafter may have ids that the target lacks, none of which is accepted
                check_range(f"{name}.verify.num_steps", operation.verify.num_steps, 0, _MAX_STEPS)
            case "export":
                _check_ticket(f"{name}.export.ticket", operation.export.ticket)
            case "pull":
                check_token_ids(f"{name}.pull.token_ids", operation.pull.token_ids, vocab_size)
                if operation.pull.ticket:
                    _check_ticket(f"{name}.pull.ticket", operation.pull.ticket)


def _check_prefill(name: str, prefill: target_pb2.Prefill, vocab_size: int) -> None:
    check_beginning(name, prefill.token_ids, prefill.num_prompt_tokens, prefill.params, vocab_size)
    check_range(f"{name}.num_steps", prefill.num_steps, 0, _MAX_STEPS)
    check_count(f"{name}.forks", prefill.forks, _MAX_FORKS, "forks")
    sequence_ids = {prefill.sequence_id, *(fork.sequence_id for fork in prefill.forks)}
    if len(sequence_ids) <= len(prefill.forks):
        raise InvalidArgument(f"{name}.forks", f"{len(prefill.forks)} forks", "of sequence ids that are given once")


def _check_ticket(name: str, ticket: bytes) -> None:
    if len(ticket) != _TICKET_BYTES:
        raise InvalidArgument(name, f"{len(ticket)} bytes", f"{_TICKET_BYTES} bytes")
