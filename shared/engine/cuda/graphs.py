"""Steps of few tokens, captured as CUDA graphs: all their launches in one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.grouping import Indices
from shared.engine.attention.layer import LayerAttention
from shared.engine.cuda.described import DescribedStep
from shared.engine.cuda.device import device_of
from shared.engine.cuda.step import CudaStep, Launch, WindowTensors, num_programs
from shared.engine.cuda.work import ITEM_FIELDS, Plan, most_pieces
from shared.engine.failure import is_device_error
from shared.engine.kv_pool import KVPool

logger = logging.getLogger(__name__)

# Tokens of a step beyond which its launches take no longer than what they compute.
MOST_TOKENS = 256
# Sizes are an eighth apart: what a step is filled up with takes no more than that.
_STEPS_IN_OCTAVE = 8
# Partial results that there is room for, for each token and each piece of a lone sequence.
_PARTS_EACH = 4
# Entries of block tables that there is room for, for each block.
_TABLES_EACH = 4

Replay = Callable[[], None]
Forward = Callable[[Tensor, Tensor, "StaticBatch", Tensor], tuple[Tensor, Tensor | None]]
"""Token ids `[T]`, positions `[T]`, the step and the rows wanted `[R]`, to logits `[R, vocab_size]` and what is
captured of its layers, `[T, layers, hidden]`."""


class Recorder(Protocol):
    """What captures launches."""

    def record(self, run: Callable[[], None]) -> Replay:
        """Runs it, and returns what launches all that it launched again, on the same memory."""


class CudaRecorder:
    """All graphs' memory is one pool, of one stream: only one of them runs at a time. What they read must live as long
    as they do: they do not know of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        stream = self._stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run()  # compiles and allocates what must not be captured
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads copy blocks meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                run()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own behind
        return graph.replay


class StaticBatch(NamedTuple):
    """A step whose tensors are always the same ones: in place of an `AttentionBatch`."""

    cuda: CudaStep

    @property
    def own(self) -> CudaStep:
        return self.cuda


class _Key(NamedTuple):
    """What graphs differ in: tokens, rows of a piece of attention for each window, and whether there are trees."""

    num_tokens: int
    num_rows: tuple[int, ...]
    has_trees: bool


class _Layout:
    """Where a step's numbers are, one behind the other, for steps of up to so many tokens; the tables come last."""

    def __init__(self, num_tokens: int, num_items: int, num_windows: int, num_tables: int) -> None:
        sizes = [num_tokens] * 4  # token ids, positions, places, rows
        for _ in range(num_windows):
            sizes += [1, num_tokens + 1, num_tokens, num_items * ITEM_FIELDS]  # count, first parts, ancestors, items
        self.firsts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self.size = self.firsts[-1] + num_tables
        self.sizes = [*sizes, num_tables]


class CapturedSteps:
    """Runs steps of up to `MOST_TOKENS` tokens by graphs: each size is captured when it first comes. Once one could not
    be captured, no other is tried.

    A graph has the logits of all its tokens, which takes little longer than those of some, and knows the number of
    tokens; sequences, contexts and trees are numbers on the device, which each step uploads in one copy. Tokens that
    fill a size up have a block of their own, which nobody may own.
    """

    def __init__(
        self,
        forward: Forward,
        pool: KVPool,
        layers: Sequence[LayerAttention],
        scratch_block: int,
        recorder: Recorder,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        self._forward = forward
        self._pool = pool
        self._recorder = recorder
        self._scratch_block = scratch_block
        num_kv_heads = pool.shape.num_kv_heads
        self._windows = sorted({(how.num_heads // num_kv_heads, how.sliding_window) for how in layers}, key=repr)
        self._most_tokens = most_tokens
        self._most_items = most_pieces(most_tokens, num_kv_heads)
        # Those of several sequences may hold the same blocks.
        self._most_tables = _TABLES_EACH * pool.num_blocks + most_tokens
        self._layout = _Layout(most_tokens, self._most_items, len(self._windows), self._most_tables)
        device = pool.data.device
        pinned = device.type == "cuda"
        self._host = torch.zeros(self._layout.size, dtype=torch.int64, pin_memory=pinned)
        self._numbers = self._host.numpy()
        self._device = torch.zeros(self._layout.size, dtype=torch.int64, device=device)
        # Until what is being uploaded is there, the host's numbers are not to be touched.
        self._uploaded = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._rows = torch.arange(most_tokens, device=device)
        # None: there was no memory for that one.
        self._graphs: dict[_Key, Replay | None] = {}
        self.captures = True
        """Whether all could be captured that were to be."""
        self.capture_seconds = 0.0
        """What that took."""
        self._logits: Tensor | None = None
        self._captured: Tensor | None = None

    def run(
        self, token_ids: Indices | Tensor, batch: AttentionBatch, rows: Indices
    ) -> tuple[Tensor, Tensor | None] | None:
        """As `Forward`; None if no graph is for such a step. What is returned is overwritten by the next.

        Ids that are on the device are not waited for.
        """
        num_tokens = len(token_ids)
        if not self.captures or num_tokens > self._most_tokens or len(rows) > num_tokens:
            return None
        if not batch.fits_words or len(batch.tables) > self._most_tables:
            return None
        step = DescribedStep(batch)
        plans = [step.plan(*window) for window in self._windows]
        if not all(map(self._has_room, plans)):
            return None
        key = _Key(size_of(num_tokens), tuple(plan.work[0].num_rows for plan in plans), step.has_trees)
        if key in self._graphs and self._graphs[key] is None:
            return None
        with device_of(self._device):
            self._stage(token_ids, batch, step, plans, rows)
            if key not in self._graphs:
                began = time.perf_counter()
                self._graphs[key] = self._record(key)
                self.capture_seconds += time.perf_counter() - began
            replay = self._graphs[key]
            if replay is None:
                return None
            replay()
        assert self._logits is not None
        captured = None if self._captured is None else self._captured[:num_tokens]
        if np.array_equal(rows, np.arange(num_tokens)):
            return self._logits[:num_tokens], captured
        first = self._layout.firsts[3]
        return self._logits[self._device[first : first + len(rows)]], captured

    @property
    def _most_parts(self) -> int:
        return _PARTS_EACH * self._most_items

    def _has_room(self, plan: Plan) -> bool:
        """Whether it is one launch, of no more than was counted on."""
        return (
            len(plan.work) == 1 and len(plan.work[0].items) <= self._most_items and plan.num_parts <= self._most_parts
        )

    def _stage(
        self,
        token_ids: Indices | Tensor,
        batch: AttentionBatch,
        step: DescribedStep,
        plans: Sequence[Plan],
        rows: Indices,
    ) -> None:
        """Uploads the step's numbers to where graphs look for them."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        num_tokens, most = len(token_ids), self._most_tokens
        stride, size = self._pool.data.stride(), self._pool.block_size
        on_device = isinstance(token_ids, Tensor)
        arrays = [np.zeros(num_tokens, dtype=np.int64) if on_device else token_ids, batch.positions, step.places, rows]
        for plan, (_, window) in zip(plans, self._windows, strict=True):
            [work] = plan.work
            arrays += [np.array([len(work.items)]), plan.first_parts, step.ancestors(window), work.items.reshape(-1)]
        for first, array in zip(self._layout.firsts, [*arrays, batch.tables], strict=True):
            self._numbers[first : first + len(array)] = array
        # What fills up is nobody's: no piece of attention is for it, it has no parts, and goes to the scratch block.
        firsts = self._layout.firsts
        for first in firsts[:2]:
            self._numbers[first + num_tokens : first + most] = 0
        offsets = np.arange(most - num_tokens) % size
        self._numbers[firsts[2] + num_tokens : firsts[2] + most] = self._scratch_block * stride[0] + offsets * stride[3]
        for i, plan in enumerate(plans):
            first = firsts[4 + 4 * i + 1]
            self._numbers[first + num_tokens : first + most + 1] = plan.num_parts
        used = firsts[-1] + len(batch.tables)
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if isinstance(token_ids, Tensor):
            self._device[:num_tokens].copy_(token_ids)
        if self._uploaded is not None:
            self._uploaded.record()

    def _record(self, key: _Key) -> Replay | None:
        """A graph for such steps, of which one is staged; None if there can be none."""
        parts = torch.split(self._device, self._layout.sizes)
        num_tokens, programs = key.num_tokens, num_programs(self._device.device)
        ids, positions, places = (part[:num_tokens] for part in parts[:3])
        windows: dict[tuple[int, int | None], WindowTensors] = {}
        for i, window in enumerate(self._windows):
            count, first_parts, ancestors, items = parts[4 + 4 * i : 8 + 4 * i]
            launch = Launch(key.num_rows[i], programs, count, items)
            windows[window] = WindowTensors([launch], first_parts, self._most_parts, ancestors)
        step = CudaStep(
            self._pool,
            num_tokens,
            places,
            parts[-1],
            positions,
            key.has_trees,
            lambda fold, window: windows[fold, window],
            is_filled_up=True,
        )
        rows = self._rows[:num_tokens]

        def run() -> None:
            logits, captured = self._forward(ids, positions, StaticBatch(step), rows)
            self._keep(logits, captured)

        try:
            return self._recorder.record(run)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                logger.warning("steps of %d tokens run without a graph: there is no memory for it", num_tokens)
                return None
            if is_device_error(error) and "captur" not in str(error):
                raise
            logger.warning("steps run without graphs from now on: one could not be captured", exc_info=error)
            self.captures = False
            return None

    def _keep(self, logits: Tensor, captured: Tensor | None) -> None:
        """Copies them to where all graphs leave them, so that none keeps memory of its own for that."""
        if self._logits is None:
            self._logits = logits.new_empty((self._most_tokens, *logits.shape[1:]))
        self._logits[: len(logits)].copy_(logits)
        if captured is not None:
            if self._captured is None:
                self._captured = captured.new_empty((self._most_tokens, *captured.shape[1:]))
            self._captured[: len(captured)].copy_(captured)


def size_of(num_tokens: int) -> int:
    """The size of steps that one of so many tokens is filled up to."""
    apart = max(1, (1 << (num_tokens - 1).bit_length()) // (2 * _STEPS_IN_OCTAVE))
    return -(-num_tokens // apart) * apart
