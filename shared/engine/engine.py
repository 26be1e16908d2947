"""Where scheduling and computing meet: one engine runs the steps of one model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from shared.engine.block_pool import BlockPool, OutOfBlocks
from shared.engine.commit_ahead import CommitAhead
from shared.engine.cuda.kernels import TritonKernels
from shared.engine.draws import DrawAhead
from shared.engine.failure import EngineBroken, is_device_error
from shared.engine.host_pool import make_host_tier
from shared.engine.kv_pool import KVPool
from shared.engine.memory import available_memory, device_cache_bytes, host_cache_bytes, measure_device
from shared.engine.model import CausalLM
from shared.engine.proposer import Proposer
from shared.engine.runner import ModelRunner
from shared.engine.scheduler import Scheduler
from shared.engine.self_test import check_kernels, least_blocks, self_test, try_captured
from shared.engine.sequence import Sequence
from shared.engine.settings import EngineSettings
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens
from shared.settings import StartupError

logger = logging.getLogger(__name__)

# Draws (and verifies) the tokens of a step: logits [R, vocab_size] and whose rows they are.
Sampler = Callable[[Tensor, List[SampleRows]], List[SampledTokens]]

# Batch sizes whose cost is measured at warm-up.
_MEASURED_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64, 128)
# Longest context at which the memory of a step is measured.
_MAX_MEASURED_CONTEXT = 1 << 17
# Failed steps in a row, with nothing else working either, after which an engine counts as broken.
_MAX_FAILED_STEPS = 3
# Steps follow one another in one go for so long: then somebody may wait for a sign of life, or have something to say.
# None takes less than the least.
_FOLLOWING_SECONDS = 0.5
_LEAST_SECONDS = 1e-6


class Gain(NamedTuple):
    """What a step brought one sequence, and how many draft tokens it verified; `self_drafted`: these themselves, where
    the engine drafted them."""

    sequence: Sequence
    sampled: SampledTokens
    num_draft_tokens: int
    self_drafted: Proposal = EMPTY_PROPOSAL


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`gains` of the sequences that sampled; `failed` holds those that cannot be computed, removed.

    `prefills`: whose prompts are in it, and with how many tokens; `num_attended`: what those and the others attend to,
    as in its plan. `following`: the tokens of each step that followed in one go, whose gains are here as well, and
    nothing else.
    """

    gains: list[Gain]
    failed: list[Sequence]
    num_tokens: int
    num_sequences: int
    began_ns: int
    seconds: float
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    num_attended: tuple[int, int] = (0, 0)
    following: list[int] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.prefills)


class Engine:
    """Continuous batching of one model's sequences. Not thread-safe: see `EngineLoop`.

    A step that fails is taken apart, in halves and these again, and only sequences that fail alone are lost. So one
    whose input breaks every step harms nobody else, and a step too large for memory goes through in smaller ones. When
    all of them fail, a step of one token that belongs to nobody tells a worker that cannot compute from requests that
    cannot be computed: a request sent again and again never takes the worker down.
    """

    def __init__(
        self, model: CausalLM, settings: EngineSettings, sample: Sampler, draw_ahead: DrawAhead | None = None
    ) -> None:
        """`draw_ahead`: as `sample`, for steps that nobody has a say in between."""
        self.model = model
        self.block_size = settings.block_size
        self.fingerprint = model.fingerprint(settings.block_size)
        if isinstance(model.attention_kernels, TritonKernels):
            check_kernels(model, self.block_size)  # before it is measured what a step takes
        num_blocks = settings.num_blocks or _blocks_that_fit(model, settings, sample)
        try:
            pool = KVPool(model.kv_shape, num_blocks, self.block_size, model.dtype, model.device)
            if model.kv_beside is not None:
                pool.add_beside(*model.kv_beside)
        except (RuntimeError, MemoryError, ValueError) as error:
            raise StartupError(
                f"{num_blocks} KV blocks cannot be had on {model.device}: lower num_blocks or kv_cache_gib"
            ) from error
        self._ahead: CommitAhead | None = None
        if settings.num_blocks is not None or settings.kv_cache_gib is not None:
            _commit(pool)
        elif model.device.type == "cpu":
            self._ahead = CommitAhead(pool)
        host = None
        if settings.host_cache_gib is not None:
            promised = 0 if self._ahead is None else self._ahead.num_bytes
            host = make_host_tier(pool, settings.host_cache_gib, promised)
        # Captured steps fill themselves up in a block that is nobody's.
        has_scratch = isinstance(model.attention_kernels, TritonKernels) and num_blocks > 1
        self._scratch_block = num_blocks - 1 if has_scratch else None
        num_usable = num_blocks - has_scratch
        self.blocks = BlockPool(num_usable, host)
        self.scheduler = Scheduler(self.blocks, self.block_size, settings.max_batch_tokens, settings.max_sequences)
        self.max_context = min(
            model.max_context, settings.max_context or model.max_context, num_usable * self.block_size
        )
        self._sample = sample
        self._draw_ahead = draw_ahead
        self._runner = ModelRunner(model, pool)
        self.step_costs: list[tuple[int, float]] = []
        self._proposer: Proposer | None = None
        self._num_failed_steps = 0
        self._captured_runners: list[ModelRunner] = []

    @property
    def pool(self) -> KVPool:
        return self._runner.pool

    def warm_up(self) -> None:
        """Admits the model by its self-test, which lays its weights out, and measures what steps cost.

        Raises StartupError if the model cannot be served.
        """
        self_test(self.model, self._runner)
        self.capture_steps(self._runner)
        self.step_costs = self._runner.measure(_MEASURED_SIZES)
        if self._ahead is not None:
            self._ahead.keep(self.blocks.num_used)

    def capture_steps(self, runner: ModelRunner) -> None:
        """Has steps of that one, over blocks of this engine's numbers, replayed as graphs where they can be; before
        anything is served."""
        if self._scratch_block is not None and runner.model.attention_kernels is not None:
            try_captured(runner.model, runner, self._scratch_block)
            self._captured_runners.append(runner)

    def clock(self) -> float:
        """Seconds, which stand still while a step is captured: that says nothing of what steps take."""
        return time.perf_counter() - sum(runner.capture_seconds for runner in self._captured_runners)

    def draft_by(self, proposer: Proposer) -> None:
        """From now on it proposes what sequences verify in the steps that they take by themselves; once warmed up."""
        self._proposer = proposer

    @property
    def drafts_with(self) -> str:
        """What drafts for those steps; empty if nothing does."""
        return "" if self._proposer is None else self._proposer.drafts_with

    def step(self) -> StepOutcome | None:
        """Runs one step, and those behind it that nobody could have a say in; None when there is nothing to do.

        Raises EngineBroken after an accelerator's own error, or when several steps in a row failed for all their
        sequences and for one token as well.
        """
        if self._proposer is not None:
            self._proposer.propose(self.scheduler)
        began, began_ns = self.clock(), time.time_ns()
        plan = self.scheduler.schedule()
        if self._proposer is not None and self._proposer.planned(plan) and plan is None:
            plan = self.scheduler.schedule()
        if plan is None:
            return None
        num_tokens, num_sequences = plan.num_tokens, len(plan.scheduled)
        prefills, num_attended = plan.prefills, plan.num_attended
        rows = self._compute(plan)
        gains, failed = (self._complete(plan, rows), []) if rows is not None else self._take_apart(plan)
        if len(failed) < num_sequences or self._can_compute():
            self._num_failed_steps = 0
        else:
            self._num_failed_steps += 1
            if self._num_failed_steps == _MAX_FAILED_STEPS:
                raise EngineBroken(f"{_MAX_FAILED_STEPS} steps in a row failed, and one of a single token after each")
        seconds = self.clock() - began
        if self._proposer is not None:
            self._proposer.settle(sum(len(gain.sampled.token_ids) for gain in gains), seconds, bool(prefills))
        if self._ahead is not None:
            self._ahead.keep(self.blocks.num_used)
        # What had to be taken apart, or fails, is tried again as a step of its own.
        following = [] if rows is None else self._follow(plan, seconds, gains)
        return StepOutcome(
            gains, failed, num_tokens, num_sequences, began_ns, seconds, prefills, num_attended, following
        )

    def _follow(self, plan: StepPlan, seconds: float, gains: list[Gain]) -> list[int]:
        """Adds what all gain in the steps that follow a completed one, which took so long, in one go; how many tokens
        each computed."""
        following: list[int] = []
        now = self.clock()
        ends = now + _FOLLOWING_SECONDS
        while most := int(max(0.0, ends - now) / max(seconds, _LEAST_SECONDS)):
            followed = self._follow_some(plan, most, gains)
            if not followed:
                break
            following += followed
            before, now = now, self.clock()
            seconds = (now - before) / len(followed)
        return following

    def _follow_some(self, plan: StepPlan, most: int, gains: list[Gain]) -> list[int]:
        """The same of at most so many steps, as far as they are known beforehand; none if there are none, or they
        failed."""
        if self._draw_ahead is None:
            return self._follow_one(plan, gains)
        sequences = [item.sequence for item in plan.scheduled]
        num_steps = min(most, *(sequence.num_steps for sequence in sequences))
        if num_steps == 0:
            return []
        try:
            rows = [_rows_of(sequence) for sequence in sequences]
            draws = self._draw_ahead(rows, num_steps, self.model.vocab_size, self.model.device)
            if draws is None:
                return self._follow_one(plan, gains)
            plans = self.scheduler.following(plan, num_steps)
            if not plans:
                return []
            sampled = self._runner.run_ahead(plans, draws)
        except Exception as error:
            self._note_failure(error, plan)
            return self._follow_one(plan, gains)
        gains += [Gain(*gained, 0) for gained in self.scheduler.complete_following(plans, sampled)]
        return [each.num_tokens for each in plans]

    def _follow_one(self, plan: StepPlan, gains: list[Gain]) -> list[int]:
        """The same of one step."""
        plans = self.scheduler.following(plan, 1)
        rows = self._compute(plans[0]) if plans else None
        if rows is None:
            return []
        gains += self._complete(plans[0], rows)
        return [plans[0].num_tokens]

    def _take_apart(self, plan: StepPlan) -> tuple[list[Gain], list[Sequence]]:
        """Of a plan that failed: what its sequences gained in parts of it, and those that failed even alone, which are
        removed."""
        gains: list[Gain] = []
        # A block that one copied may have been written to by the step that failed: not to be copied again.
        failed = [item.sequence for item in plan.scheduled if item.copies or len(plan.scheduled) == 1]
        for sequence in failed:
            self.scheduler.remove(sequence)
        again = [item for item in plan.scheduled if item.sequence not in failed]
        half = -(-len(again) // 2)
        for part in (StepPlan(again[:half]), StepPlan(again[half:])):
            if not part.scheduled:
                continue
            rows = self._compute(part)
            if rows is not None:
                gains += self._complete(part, rows)
            else:
                more_gains, more_failed = self._take_apart(part)
                gains, failed = gains + more_gains, failed + more_failed
        return gains, failed

    def _compute(self, plan: StepPlan) -> list[tuple[SampleRows, SampledTokens]] | None:
        """What the plan's sequences sample, none of them changed yet; None if it failed."""
        try:
            logits = self._runner.run(plan)
            rows = [_rows_of(item.sequence) for item in plan.scheduled if item.num_rows]
            return list(zip(rows, self._sample(logits, rows) if rows else [], strict=True))
        except Exception as error:
            self._note_failure(error, plan)
            return None

    def _note_failure(self, error: Exception, plan: StepPlan) -> None:
        """Raises EngineBroken if it is the device's."""
        if is_device_error(error):
            raise EngineBroken("the device failed") from error
        extra = {"sequences": len(plan.scheduled), "tokens": plan.num_tokens}
        logger.error("a step failed", exc_info=error, extra=extra)

    def _complete(self, plan: StepPlan, rows: list[tuple[SampleRows, SampledTokens]]) -> list[Gain]:
        sampled = [tokens for _, tokens in rows]
        self._runner.keep_paths(plan, sampled)
        proposer = self._proposer
        if proposer is not None:
            proposer.observe(plan, self.model.captured, sampled)
        gained = self.scheduler.complete(plan, sampled)
        return [
            Gain(
                sequence,
                tokens,
                len(row.proposal),
                EMPTY_PROPOSAL if proposer is None else proposer.drafted(sequence),
            )
            for (sequence, tokens), (row, _) in zip(gained, rows, strict=True)
        ]

    def _can_compute(self) -> bool:
        """Whether a step of one token succeeds that belongs to nobody."""
        try:
            [block] = self.blocks.allocate(1)
        except OutOfBlocks:
            return False
        sequence = Sequence([0], 1, SamplingParams(temperature=0.0), b"", num_steps=1)
        sequence.block_table = [block]
        sampled = self._compute(StepPlan([ScheduledSequence(sequence, 0, 1, 1, [])]))
        self.blocks.release([block])
        return sampled is not None


def _rows_of(sequence: Sequence) -> SampleRows:
    return SampleRows(
        sequence.drawn_by,
        sequence.token_ids,
        sequence.num_prompt_tokens,
        sequence.proposal,
        sequence.token_counts,
        sequence.first_row,
        sequence.num_children,
    )


def _blocks_that_fit(model: CausalLM, settings: EngineSettings, sample: Sampler) -> int:
    """Raises StartupError if not even two do."""
    block_bytes = KVPool.block_bytes(model.kv_shape, settings.block_size, model.dtype)
    if model.kv_beside is not None:
        shape, dtype = model.kv_beside
        block_bytes += KVPool.block_bytes(shape, settings.block_size, dtype)
    if settings.kv_cache_gib is not None:
        num_blocks = int(settings.kv_cache_gib * 2**30) // block_bytes
        if num_blocks < 2:
            raise StartupError(
                f"kv_cache_gib is {settings.kv_cache_gib}: a KV block alone takes {block_bytes / 2**30:.3f}"
            )
        return num_blocks
    max_context = min(model.max_context, settings.max_context or model.max_context)
    if model.device.type == "cuda":
        memory = measure_device(model.device, lambda: _run_largest_step(model, settings, sample, max_context))
        num_bytes = device_cache_bytes(memory, settings.memory_share)
    else:
        num_bytes = host_cache_bytes(available_memory(), settings.memory_share)
    if num_bytes < 2 * block_bytes:
        raise StartupError(
            f"the free memory of {model.device} leaves {max(0, num_bytes) / 2**30:.3f} GiB for the KV cache, "
            f"where a block alone takes {block_bytes / 2**30:.3f}: set kv_cache_gib, or free memory"
        )
    # More than all sequences could ever hold is of no use, but to admit the model.
    most = max(
        least_blocks(model, settings.block_size), settings.max_sequences * -(-max_context // settings.block_size)
    )
    return min(num_bytes // block_bytes, most)


def _commit(pool: KVPool) -> None:
    """What a setting asks for is taken at once, as far as there is so much. Raises StartupError if there is not."""
    if pool.data.is_cuda:
        return  # taken when it was made
    needed, available = pool.data.nbytes, available_memory()
    if pool.beside is not None:
        needed += pool.beside.data.nbytes
    if needed > available:
        raise StartupError(
            f"{pool.num_blocks} KV blocks take {needed / 2**30:.3f} GiB, and {available / 2**30:.3f} are free: "
            "lower num_blocks or kv_cache_gib"
        )
    pool.commit()


def _run_largest_step(model: CausalLM, settings: EngineSettings, sample: Sampler, max_context: int) -> None:
    """A step as large as they come, sampled. Raises StartupError if it cannot be."""
    num_tokens = min(settings.max_batch_tokens, max_context)
    pool = KVPool(model.kv_shape, 1, settings.block_size, model.dtype, model.device)
    try:
        num_rows = min(num_tokens, settings.max_sequences)
        logits = ModelRunner(model, pool).run_largest(num_tokens, min(max_context, _MAX_MEASURED_CONTEXT), num_rows)
        sample(logits, [SampleRows(SamplingParams(top_p=0.9), [0], 1)] * num_rows)
    except Exception as error:
        # Out of memory, or whatever unsuitable modelling code raises.
        raise StartupError(
            f"model {model.name} cannot be served: a step of max_batch_tokens, {num_tokens}, fails on "
            f"{model.device} ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
