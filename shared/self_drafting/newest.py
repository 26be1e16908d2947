"""The newest tokens of growing trees, computed by a model that keeps their KV behind their sequences'."""

from __future__ import annotations

from collections.abc import Sequence as List

from torch import Tensor

from shared.engine.runner import ModelRunner
from shared.self_drafting.drafter import Growing


def run_newest(runner: ModelRunner, growing: List[Growing]) -> Tensor:
    """Logits `[R, vocab_size]` of what follows each of the newest tokens, tree by tree."""
    tokens = [token for each in growing for token in each.proposal.token_ids[each.first_row - 1 :]]
    return runner.run_packed(
        tokens,
        [len(each.sequence.token_ids) - 1 + each.first_row for each in growing],
        [each.num_new for each in growing],
        [each.sequence.block_table for each in growing],
        range(len(tokens)),
        [each.proposal.parents for each in growing],
    )
