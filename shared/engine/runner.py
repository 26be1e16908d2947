"""Turns a step plan into tensors, runs the model on them, and measures what steps cost."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shared.engine.attention.batch import AttentionBatch
from shared.engine.draws import Draws
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.step_plan import StepPlan
from shared.sampling.sampled import SampledTokens

if TYPE_CHECKING:
    from shared.engine.cuda.graphs import CapturedSteps

# Step costs: each size is measured so often, or less often, but not less than twice, once it takes this long.
_MEASURED_TURNS = 6
_LEAST_MEASURED_TURNS = 2
_MEASURED_SECONDS = 6.0


class ModelRunner:
    """Runs packed steps of one model over one KV pool."""

    def __init__(self, model: CausalLM, pool: KVPool) -> None:
        self.model = model
        self.pool = pool
        self._captured_steps: CapturedSteps | None = None

    def run_captured(self, steps: CapturedSteps | None) -> None:
        """From now on what these can run is run by them."""
        self._captured_steps = steps

    @property
    def capture_seconds(self) -> float:
        """What capturing took up to now."""
        return 0.0 if self._captured_steps is None else self._captured_steps.capture_seconds

    def run(self, plan: StepPlan) -> Tensor:
        """Logits `[R, vocab_size]`: for each scheduled sequence in order, its `num_rows` last positions."""
        self.pool.copy_blocks(plan.copies)
        moving = [item.sequence for item in plan.scheduled if item.sequence.moves]
        self._move([(sequence.block_table, sequence.moves) for sequence in moving])
        for sequence in moving:
            sequence.moves = []
        tokens: list[int] = []
        rows: list[int] = []
        for item in plan.scheduled:
            tokens += item.sequence.tokens_between(item.start, item.start + item.num_tokens)
            rows += range(len(tokens) - item.num_rows, len(tokens))
        logits = self.run_packed(
            tokens,
            [item.start for item in plan.scheduled],
            [item.num_tokens for item in plan.scheduled],
            [item.sequence.block_table for item in plan.scheduled],
            rows,
            [item.parents for item in plan.scheduled],
        )
        if not rows and self.model.device.type == "cuda":
            # Nobody waits for its result, but others may read these blocks from now on, past the device's own queue.
            torch.cuda.current_stream(self.model.device).synchronize()
        return logits

    def run_ahead(self, plans: Sequence[StepPlan], draws: Draws) -> list[list[SampledTokens]]:
        """Steps of one token a sequence, each the one that was drawn in the step before: what they draw, by steps.

        A device is never waited for in between; the host prepares a step's inputs while it computes the one before.
        """
        tokens: Sequence[int] | Tensor = [item.sequence.token_ids[-1] for item in plans[0].scheduled]
        num_sequences = len(tokens)
        for plan in plans:
            self.pool.copy_blocks(plan.copies)
            logits = self.run_packed(
                tokens,
                [item.start for item in plan.scheduled],
                [1] * num_sequences,
                [item.sequence.block_table for item in plan.scheduled],
                range(num_sequences),
            )
            tokens = draws.draw(logits)
        return draws.take()

    def keep_paths(self, plan: StepPlan, sampled: Sequence[SampledTokens]) -> None:
        """Moves the KV of draft tokens accepted out of trees to where their sequences go on; `sampled`: what each
        scheduled sequence with rows gains, and has not taken in yet."""
        paths = []
        sampling = (item.sequence for item in plan.scheduled if item.num_rows)
        for sequence, tokens in zip(sampling, sampled, strict=True):
            if tokens.path:
                before = len(sequence.token_ids)
                moves = [(before + row - 1, before + i) for i, row in enumerate(tokens.path) if row != i + 1]
                paths.append((sequence.block_table, moves))
        self._move(paths)

    def _move(self, moved: Sequence[tuple[Sequence[int], Sequence[tuple[int, int]]]]) -> None:
        """Of sequences with these block tables, KV from positions to others."""
        size = self.pool.block_size
        self.pool.move_positions(
            [
                ((table[source // size], source % size), (table[destination // size], destination % size))
                for table, moves in moved
                for source, destination in moves
            ]
        )

    def run_packed(
        self,
        tokens: Sequence[int] | Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        rows: Sequence[int],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """One forward of packed `tokens`: `lengths[i]` of them from position `starts[i]` on are sequence i's, the last
        `len(parents[i])` a tree. A tensor of int64 may be on the device.

        Raises ValueError if they are not as many: kernels believe what they are told.
        """
        if len(tokens) != sum(lengths):
            raise ValueError(f"a step of {sum(lengths)} tokens has {len(tokens)}")
        batch = AttentionBatch.build(self.pool, starts, lengths, block_tables, self.model.attention_kernels, parents)
        # A drafter's vocabulary may be padded further than the target's: such ids are never accepted,
        # but must not break the step they are verified in.
        last = self.model.vocab_size - 1
        token_ids: array[int] | Tensor
        if isinstance(tokens, Tensor):
            token_ids = tokens.clamp(max=last)
        else:
            token_ids = array("q", [token if token < last else last for token in tokens])
        wanted = array("q", rows)
        if self._captured_steps is not None:
            ids = token_ids if isinstance(token_ids, Tensor) else np.asarray(token_ids)
            replayed = self._captured_steps.run(ids, batch, np.asarray(wanted))
            if replayed is not None:
                logits, self.model.captured = replayed
                return logits
        return self.model.forward(token_ids, batch, wanted)

    def run_largest(self, num_tokens: int, context: int, num_rows: int) -> Tensor:
        """Logits `[num_rows, vocab_size]` of a prefill chunk at the end of a context as long as that.

        For what it takes of memory: every position's KV is in block 0.
        """
        num_tokens = min(num_tokens, context)
        table = [0] * -(-context // self.pool.block_size)
        rows = [i % num_tokens for i in range(num_rows)]
        return self.run_packed([0] * num_tokens, [context - num_tokens], [num_tokens], [table], rows)

    def measure(self, batch_sizes: Sequence[int]) -> list[tuple[int, float]]:
        """(tokens, seconds): the fastest decode of that many one-token sequences. Warms up too.

        All sizes are measured in turns, so that what disturbs the machine for a while disturbs all alike. Uses
        block 0 as scratch space: only before anything is served.
        """
        fastest = dict.fromkeys(batch_sizes, float("inf"))
        began = time.perf_counter()
        for turn in range(_MEASURED_TURNS):
            if turn >= _LEAST_MEASURED_TURNS and time.perf_counter() - began > _MEASURED_SECONDS:
                break
            for size in batch_sizes:
                fastest[size] = min(fastest[size], self._measure(size))
        return list(fastest.items())

    def _measure(self, size: int) -> float:
        began = time.perf_counter()
        logits = self.run_packed([0] * size, [0] * size, [1] * size, [[0]] * size, list(range(size)))
        logits[0, 0].item()  # waits for the device
        return time.perf_counter() - began
