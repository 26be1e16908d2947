"""What both kinds of worker check of a sequence that is to begin."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.v1 import worker_pb2

from shared.rpc.checks import check_count, check_range, check_token_ids
from shared.rpc.errors import InvalidArgument
from shared.worker.messages import params_from_proto
from shared.worker.sampling_limits import check_sampling

_MAX_OUTPUT_TOKENS = 1 << 24
# The request's own, and the model's.
_MAX_STOP_TOKEN_IDS = 1024
# Tokens that a target drafts itself for a step.
_MAX_SELF_DRAFT = 256


def check_beginning(
    name: str, token_ids: Sequence[int], num_prompt_tokens: int, params: worker_pb2.SequenceParams, vocab_size: int
) -> None:
    """Raises InvalidArgument for what no sequence can begin with; `name` is the message's that says all this."""
    if not token_ids:
        raise InvalidArgument(f"{name}.token_ids", "0 tokens", "at least 1 token")
    check_token_ids(f"{name}.token_ids", token_ids, vocab_size)
    check_range(f"{name}.num_prompt_tokens", num_prompt_tokens, 1, len(token_ids))
    # One that has all its output is over.
    check_range(
        f"{name}.params.max_tokens", params.max_tokens, len(token_ids) - num_prompt_tokens + 1, _MAX_OUTPUT_TOKENS
    )
    check_count(f"{name}.params.stop_token_ids", params.stop_token_ids, _MAX_STOP_TOKEN_IDS, "ids")
    for field in ("num_draft_tokens", "num_nodes"):
        check_range(f"{name}.params.self_draft.{field}", getattr(params.self_draft, field), 0, _MAX_SELF_DRAFT)
    check_sampling(params_from_proto(params), vocab_size, f"{name}.params")
