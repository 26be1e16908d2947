"""A small model that drafts inside the target worker, without a message (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as List
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from shared.engine.runner import ModelRunner
from shared.engine.sequence import Sequence
from shared.engine.step_plan import StepPlan
from shared.sampling.sampled import SampledTokens
from shared.self_drafting.drafter import Growing
from shared.self_drafting.newest import run_newest

# Tokens in a line, at most.
_MOST_STEPS = 8
# So many tokens that it lacks are computed when it begins to draft: they cost it little more than one.
_MOST_LACKING = 16
# More of them, in each step before, this many at once.
_MOST_FOLLOWED = 512


class _Computed(NamedTuple):
    """KV of the first so many tokens is in `blocks`, while these are the sequence's."""

    num_tokens: int
    blocks: list[int]


class DraftModel:
    """Its KV is beside the target's, in the same blocks: where a sequence shares a block, or finds it, so does this.

    A sequence's tokens are computed when it is to draft, and as often again as it was preempted. What was accepted out
    of trees is computed once more with the token behind it. Blocks that came from elsewhere hold nothing of it.
    """

    source = "model"
    most_steps = _MOST_STEPS
    uses_kv = True

    def __init__(self, runner: ModelRunner) -> None:
        """`runner`: over the pool beside the target's."""
        self._runner = runner
        self._block_size = runner.pool.block_size
        self._computed: WeakKeyDictionary[Sequence, _Computed] = WeakKeyDictionary()
        # Full blocks that hold KV of all that they are found by.
        self._full: dict[int, bytes] = {}
        runner.pool.on_copied = self._forget

    def observe(
        self, plan: StepPlan, captured: Tensor | None, sampled: List[SampledTokens], followed: Collection[Sequence]
    ) -> None:
        """It needs nothing but the tokens."""

    def keeps_up(self, sequence: Sequence) -> bool:
        return False

    def num_lacking(self, sequence: Sequence) -> int:
        num_lacking = len(sequence.token_ids) - 1 - self._num_computed(sequence)
        return num_lacking if num_lacking > _MOST_LACKING and self._fits(sequence) else 0

    def follow(self, sequences: List[Sequence]) -> None:
        room = _MOST_FOLLOWED
        followed: list[tuple[Sequence, int]] = []
        for sequence in sequences:
            num_lacking = self.num_lacking(sequence)
            if num_lacking > 0 and room > 0:
                followed.append((sequence, min(num_lacking, room)))
                room -= followed[-1][1]
        if followed:
            self._compute([(each, self._num_computed(each) + count) for each, count in followed], samples=False)

    def ready(self, sequence: Sequence) -> bool:
        return len(sequence.token_ids) - 1 - self._num_computed(sequence) <= _MOST_LACKING and self._fits(sequence)

    def begin(self, sequences: List[Sequence]) -> Tensor:
        return self._compute([(each, len(each.token_ids)) for each in sequences], samples=True)

    def extend(self, growing: List[Growing]) -> Tensor:
        return run_newest(self._runner, growing)

    def _forget(self, blocks: Iterable[int]) -> None:
        """Something else is in them."""
        for block in blocks:
            self._full.pop(block, None)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether its context has room for what is drafted."""
        return len(sequence.token_ids) + _MOST_STEPS <= self._runner.model.max_context

    def _num_computed(self, sequence: Sequence) -> int:
        """Of its tokens but the last, which is always computed: what follows it is asked for."""
        computed = self._computed.get(sequence)
        if computed is None or computed.blocks is not sequence.block_table:
            num_full = 0
            for block, block_hash in zip(sequence.block_table, sequence.block_hashes, strict=False):
                if self._full.get(block) != block_hash:
                    break
                num_full += 1
            computed = self._computed[sequence] = _Computed(num_full * self._block_size, sequence.block_table)
        return min(computed.num_tokens, len(sequence.token_ids) - 1)

    def _compute(self, ends: List[tuple[Sequence, int]], samples: bool) -> Tensor:
        """Computes these sequences' tokens up to there; logits of what follows the last ones if it `samples`."""
        starts = [self._num_computed(sequence) for sequence, _ in ends]
        lengths = [end - start for (_, end), start in zip(ends, starts, strict=True)]
        tokens: list[int] = []
        rows: list[int] = []
        for (sequence, end), start in zip(ends, starts, strict=True):
            tokens += sequence.token_ids[start:end]
            rows.append(len(tokens) - 1)
            # Trees are computed there, too, and whatever is behind.
            self._forget(sequence.block_table[start // self._block_size :])
        tables = [sequence.block_table for sequence, _ in ends]
        logits = self._runner.run_packed(tokens, starts, lengths, tables, rows if samples else ())
        for (sequence, end), start in zip(ends, starts, strict=True):
            self._computed[sequence] = _Computed(end, sequence.block_table)
            # The block before may have been full without being known by its hash yet.
            first, last = max(0, start - 1) // self._block_size, end // self._block_size
            named = zip(sequence.block_table[first:last], sequence.block_hashes[first:last], strict=False)
            self._full.update(named)
        return logits
