"""Early exit: the target's first layers draft, with its own norm and head (Elhoushi et al. 2024, LayerSkip)."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as List

from torch import Tensor

from shared.engine.runner import ModelRunner
from shared.engine.sequence import Sequence
from shared.engine.step_plan import StepPlan
from shared.sampling.sampled import SampledTokens
from shared.self_drafting.drafter import Growing
from shared.self_drafting.newest import run_newest

# Tokens in a line, at most.
_MOST_STEPS = 8


class EarlyExit:
    """Its KV is that of the target in these layers: what verification computes anew is the same."""

    source = "early exit"
    most_steps = _MOST_STEPS
    uses_kv = True

    def __init__(self, runner: ModelRunner) -> None:
        """`runner`: of these layers, over the target's own pool."""
        self._runner = runner

    def observe(
        self, plan: StepPlan, captured: Tensor | None, sampled: List[SampledTokens], followed: Collection[Sequence]
    ) -> None:
        """It needs nothing but the tokens."""

    def keeps_up(self, sequence: Sequence) -> bool:
        return False

    def num_lacking(self, sequence: Sequence) -> int:
        return 0

    def follow(self, sequences: List[Sequence]) -> None:
        """The target's KV is its own."""

    def ready(self, sequence: Sequence) -> bool:
        return True

    def begin(self, sequences: List[Sequence]) -> Tensor:
        return self._runner.run_packed(
            [sequence.token_ids[-1] for sequence in sequences],
            [len(sequence.token_ids) - 1 for sequence in sequences],
            [1] * len(sequences),
            [sequence.block_table for sequence in sequences],
            range(len(sequences)),
        )

    def extend(self, growing: List[Growing]) -> Tensor:
        return run_newest(self._runner, growing)
