"""What a router may say: looked at before it reaches the engine's thread, whose end would cost every router."""

from __future__ import annotations

from outrider.v1 import draft_pb2

from shared.rpc.checks import check_range
from shared.worker.checks import check_beginning

# Beyond any context.
_MAX_TOKENS = 1 << 30
# In a round, and of a tree, whose steps look over them all.
_MAX_DRAFT_TOKENS = 256
# The target's vocabulary may be larger than the drafter's, which takes an id that it does not know for its last.
_MAX_VOCABULARY = 1 << 32


def check_request(request: draft_pb2.DraftRequest) -> None:
    """Raises InvalidArgument, naming field, value and limit."""
    for index, operation in enumerate(request.operations):
        if operation.WhichOneof("operation") != "propose":
            continue
        name, propose = f"operations[{index}].propose", operation.propose
        check_range(f"{name}.base_length", propose.base_length, 0, _MAX_TOKENS)
        check_range(f"{name}.num_draft_tokens", propose.num_draft_tokens, 0, _MAX_DRAFT_TOKENS)
        check_range(f"{name}.least_likelihood", propose.least_likelihood, 0, 1)
        check_range(f"{name}.num_nodes", propose.num_nodes, 0, _MAX_DRAFT_TOKENS)
        if propose.base_length == 0:
            check_beginning(name, propose.token_ids, propose.num_prompt_tokens, propose.params, _MAX_VOCABULARY)
