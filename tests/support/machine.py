"""The scheduler driving a model of arithmetic: every plan's KV is simulated as the tokens that stand in it."""

from __future__ import annotations

import random

from shared.engine.block_pool import BlockPool
from shared.engine.host_tier import BlockMover, HostTier
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Finish, Sequence
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.sampling.params import SamplingParams
from shared.sampling.sampled import SampledTokens

BLOCK_SIZE = 4
VOCAB_SIZE = 50
ROOT = bytes(32)


def next_token(tokens: list[int], sequence_index: int) -> int:
    """The model: what follows depends on every token before, and on the sequence's own noise."""
    state = 7 + 13 * sequence_index
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB_SIZE


def decoded(prompt: list[int], params: SamplingParams) -> list[int]:
    """Plain decoding, one token at a time."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + params.max_tokens:
        tokens.append(next_token(tokens, params.sequence_index))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens


class SimulatedMover(BlockMover):
    """Moves simulated KV."""

    def __init__(self, kv: dict[tuple[int, int], tuple[int, ...]]) -> None:
        self._kv = kv
        self._slots: dict[int, list[tuple[int, ...] | None]] = {}
        self.num_settled = 0

    def save(self, block: int, slot: int) -> None:
        self._slots[slot] = [self._kv.get((block, i)) for i in range(BLOCK_SIZE)]

    def load(self, slot: int, block: int) -> None:
        for i, value in enumerate(self._slots[slot]):
            self._kv.pop((block, i), None)
            if value is not None:
                self._kv[block, i] = value

    def settle(self) -> None:
        self.num_settled += 1


class Machine:
    """Runner and verifier over KV that is simulated: `kv[block, offset]` is every token up to that position.

    A position that holds anything but its sequence's own past (a stale block, a missed copy) fails at once.
    """

    def __init__(
        self, num_blocks: int, max_batch_tokens: int = 64, max_sequences: int = 64, num_host_blocks: int = 0
    ) -> None:
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.mover = SimulatedMover(self.kv)
        self.host = HostTier(num_host_blocks, self.mover) if num_host_blocks else None
        self.pool = BlockPool(num_blocks, self.host)
        self.scheduler = Scheduler(self.pool, BLOCK_SIZE, max_batch_tokens, max_sequences)
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.num_steps = 0
        self.num_computed = 0
        self.num_following = 0

    @property
    def sequences(self) -> list[Sequence]:
        return list(self.scheduler.sequences())

    def step(self) -> StepPlan | None:
        """One step of everything, and those that follow in one go. Returns the first one's plan."""
        before = dict.fromkeys(self.sequences)
        plan = self.scheduler.schedule()
        if plan is None:
            able = [each for each in self.sequences if each.num_pending_tokens and not each.awaits_import]
            idle = [each for each in self.sequences if not each.num_pending_tokens]
            # Only what is held for those whose owners are silent, or for other workers, may keep others from running.
            held = len(self.scheduler.exports) + len(self.scheduler.imports) > 0
            assert not able or held or any(each.block_table for each in idle), "work is left, but nothing is planned"
            self.scheduler.check()
            return None
        self._carry_out(plan)
        assert all(sequence.block_table or not sequence.num_computed_tokens for sequence in before)
        assert before.keys() >= {item.sequence for item in plan.scheduled}
        latest = plan
        while following := self.scheduler.following(latest, most=8):
            latest = following[0]
            for step in following:
                assert [item.sequence for item in step.scheduled] == [item.sequence for item in latest.scheduled]
                assert not step.copies
            assert {item.sequence for item in latest.scheduled} == set(self.sequences)
            if self.num_steps % 2:
                self._carry_out(latest)
            else:
                self._carry_out_together(following)
            self.num_following += 1
        return plan

    def _carry_out(self, plan: StepPlan) -> None:
        self.num_steps += 1
        self.num_computed += plan.num_tokens
        assert 0 < plan.num_tokens <= self.max_batch_tokens
        assert len(plan.scheduled) == len({item.sequence for item in plan.scheduled})
        assert self.scheduler.num_running <= self.max_sequences
        self._compute(plan)
        self.scheduler.complete(plan, [self._verify(item.sequence) for item in plan.scheduled if item.num_rows])
        self.scheduler.check()

    def _carry_out_together(self, plans: list[StepPlan]) -> None:
        """Its sequences know what was drawn in between only when all is complete."""
        drawn = []
        for plan in plans:
            self.num_steps += 1
            self.num_computed += plan.num_tokens
            self._compute(plan)
            drawn.append([self._verify(item.sequence) for item in plan.scheduled])
            for item, sampled in zip(plan.scheduled, drawn[-1], strict=True):
                item.sequence.token_ids += sampled.token_ids
        for item in plans[0].scheduled:
            del item.sequence.token_ids[-len(plans) :]
        self.scheduler.complete_following(plans, drawn)
        self.scheduler.check()

    def _compute(self, plan: StepPlan) -> None:
        read = {key: self.kv.get(key) for key in [(src, i) for src, _ in plan.copies for i in range(BLOCK_SIZE)]}
        for source, destination in plan.copies:
            for i in range(BLOCK_SIZE):
                value = read[source, i]
                self.kv.pop((destination, i), None)
                if value is not None:
                    self.kv[destination, i] = value
        written: set[tuple[int, int]] = set()
        for item in plan.scheduled:
            end = item.start + item.num_tokens
            tokens = item.sequence.tokens_between(0, end)
            assert len(tokens) == end
            for position in range(item.start, end):
                slot = self._slot(item.sequence, position)
                assert slot not in written, "two tokens in one slot"
                written.add(slot)
                self.kv[slot] = tuple(tokens[: position + 1])
        for item in plan.scheduled:
            self._read(item)

    def _read(self, item: ScheduledSequence) -> None:
        """What attention would see: every position, written by exactly this past."""
        end = item.start + item.num_tokens
        tokens = tuple(item.sequence.tokens_between(0, end))
        for position in range(end):
            assert self.kv[self._slot(item.sequence, position)] == tokens[: position + 1]
        if item.num_rows:
            assert item.num_rows == item.sequence.num_rows <= item.num_tokens
            assert end == len(item.sequence.token_ids) + len(item.sequence.proposal)

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE

    def _verify(self, sequence: Sequence) -> SampledTokens:
        tokens = list(sequence.token_ids)
        index = sequence.params.sequence_index
        for count, drafted in enumerate(sequence.proposal.token_ids):
            own = next_token(tokens, index)
            tokens.append(own)
            if own != drafted:
                return SampledTokens(tuple(tokens[len(sequence.token_ids) :]), count)
        tokens.append(next_token(tokens, index))
        return SampledTokens(tuple(tokens[len(sequence.token_ids) :]), len(sequence.proposal))


def new_sequence(prompt: list[int], max_tokens: int = 8, sequence_index: int = 0, num_steps: int = 1 << 20) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, sequence_index=sequence_index)
    return Sequence(prompt, len(prompt), params, ROOT, num_steps=num_steps)


def run(machine: Machine, *sequences: Sequence, limit: int = 2000) -> None:
    """Steps until nothing is left to do, and checks that each of these got what it should."""
    for _ in range(limit):
        if machine.step() is None:
            break
    else:
        raise AssertionError("does not end")
    for sequence in sequences:
        assert sequence.token_ids == decoded(sequence.token_ids[: sequence.num_prompt_tokens], sequence.params)
        assert sequence.finish is Finish.LENGTH
        assert sequence not in machine.sequences


def serve(machine: Machine, *sequences: Sequence) -> None:
    """Adds sequences, and runs until they have ended as they should."""
    for sequence in sequences:
        machine.scheduler.add(sequence)
    run(machine, *sequences)


def random_guess(rng: random.Random, sequence: Sequence, length: int) -> tuple[int, ...]:
    """Draft tokens that are right for a while, then mostly not."""
    tokens = list(sequence.token_ids)
    for _ in range(length):
        right = rng.random() < 0.7
        tokens.append(next_token(tokens, sequence.params.sequence_index) if right else rng.randrange(VOCAB_SIZE))
    return tuple(tokens[len(sequence.token_ids) :])
