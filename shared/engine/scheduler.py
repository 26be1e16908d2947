"""Continuous batching: which tokens of which sequences the next step computes.

One counter drives everything (as in vLLM v1): a sequence has tokens it knows and `num_computed_tokens` that
must catch up. A step takes verifications and decodes first, then fills its token budget with prefill chunks
(SARATHI, Agrawal et al. 2023). Out of blocks, or of places for more sequences, what a drafter keeps for a
sequence that nobody waits for goes first, then blocks that came from other workers for sequences that have not begun;
then the youngest sequence is preempted. All of it is recomputed later, or comes back from host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from itertools import chain, count

from shared.engine.block_pool import BlockPool, OutOfBlocks
from shared.engine.kv_export import Exports
from shared.engine.kv_import import Imports, KVImport
from shared.engine.sequence import Sequence
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.prefix.block_hash import hash_blocks
from shared.sampling.sampled import SampledTokens

# Where prompts are to be computed, drafts get this part of a step's room at most.
_PROMPTS_SHARE = 4


class Scheduler:
    """Plans steps over a block pool and takes in what they sampled.

    `max_batch_tokens` bounds the tokens of a step, `max_sequences` those that hold blocks at once.
    Sequences must each fit the pool alone; then the oldest always gets on, and all end.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_batch_tokens: int, max_sequences: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._running: dict[Sequence, None] = {}  # hold blocks
        self._waiting: dict[Sequence, None] = {}  # hold none, oldest first
        self.exports = Exports(pool, block_size)
        self.imports = Imports(pool, block_size)
        self.num_preempted = 0
        """Times that a sequence lost its blocks to others."""
        self._arrivals = count()
        self._num_steps = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return not self._running and not self._waiting

    @property
    def has_work(self) -> bool:
        """Whether any sequence has something to compute."""
        return any(sequence.num_pending_tokens > 0 for sequence in self.sequences())

    def ready(self) -> tuple[int, int]:
        """How many sequences have something to compute, and how many tokens of it the next step could hold."""
        able = (sequence for sequence in self.sequences() if not sequence.awaits_import)
        pending = [sequence.num_pending_tokens for sequence in able if sequence.num_pending_tokens > 0]
        return len(pending), min(sum(pending), self.max_batch_tokens)

    def sequences(self) -> Iterable[Sequence]:
        return chain(self._running, self._waiting)

    def decoding(self) -> list[Sequence]:
        """Those that draw in the next step behind their last token, which alone is to be computed, with no proposal."""
        return [
            each for each in self._running if each.num_steps > 0 and each.num_pending_tokens == 1 and not each.forks
        ]

    def coming(self) -> list[Sequence]:
        """Those that will soon be `decoding` beside those that are: their prompts are being computed, or wait for that,
        and there is room for these, whoever stays. None whose KV is on the way: that may take long."""
        computed = [each for each in self._running if each.num_pending_tokens > each.num_rows]
        coming = list(chain.from_iterable(map(_who_decode_on, computed)))
        num_places, num_free = self._max_sequences - len(self._running), self.pool.num_allocatable
        for sequence in self._waiting:
            num_places -= 1 + len(sequence.forks)
            num_free -= -(-sequence.num_pending_tokens // self.block_size)
            if min(num_places, num_free) < 0:
                break
            if not sequence.awaits_import:
                coming += _who_decode_on(sequence)
        return coming

    def draft_room(self) -> int:
        """Tokens that drafts for those that are `decoding` may add to the next step: what all others that draw, and
        verify, leave of it; and where prompts are to be computed, the smaller part of that."""
        num_decoding, num_others, has_prompts = 0, 0, False
        for sequence in self.sequences():
            pending = sequence.num_pending_tokens
            if pending == 0 or sequence.awaits_import:
                continue
            if sequence not in self._running or pending > sequence.num_rows:
                has_prompts = True
            elif sequence.num_steps > 0 and pending == 1:
                num_decoding += 1
            else:
                num_others += pending
        room = max(0, self.max_batch_tokens - num_decoding - num_others)
        return room // _PROMPTS_SHARE if has_prompts else room

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Blocks for so many tokens of one that is decoding, from its last token on, to write to before the next step;
        copies to make first, as in a step. None if there is no room: every other one must be able to go on."""
        start = sequence.num_computed_tokens
        end = start + num_tokens
        num_needed = len(sequence.block_table) - start // self.block_size + -(-num_tokens // self.block_size)
        if self.pool.num_allocatable < num_needed + len(self._running):
            return None
        return self._prepare_blocks(sequence, start, end)

    def num_slots_left(self, sequence: Sequence) -> int:
        """Positions to be computed that its own blocks have room for, if they are nobody else's."""
        first = sequence.num_computed_tokens // self.block_size
        if any(self.pool.is_shared(block) for block in sequence.block_table[first:]):
            return 0
        return len(sequence.block_table) * self.block_size - sequence.num_computed_tokens

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence with its forks; each gets its blocks when a step has room for it."""
        if sequence.kv_import is None:
            sequence.arrival = next(self._arrivals)
        else:
            # It came when its KV was sent for.
            sequence.arrival = sequence.kv_import.arrival
            self.imports.waits(sequence.kv_import)
        self._wait(sequence)

    def begin_import(self, token_ids: List[int], root_hash: bytes) -> KVImport:
        """KV of these committed tokens, of their full blocks at least, is to come from elsewhere."""
        return self.imports.begin(hash_blocks(token_ids, self.block_size, root_hash), next(self._arrivals))

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence and drops its blocks; unknown ones are ignored. Forks that have not split off yet
        go on without it."""
        if sequence in self._running:
            del self._running[sequence]
            self._release(sequence)
            self.exports.ended(sequence)
        elif sequence in self._waiting:
            del self._waiting[sequence]
            self._leave_import(sequence)
            self.exports.ended(sequence)
        else:
            for parent in self.sequences():
                if sequence in parent.forks:
                    parent.forks.remove(sequence)
            return
        if sequence.forks:
            heir, *heir.forks = sequence.forks
            sequence.forks = []
            self.add(heir)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when no sequence has anything to compute."""
        plan = StepPlan()
        self._num_steps += 1
        budget = self.max_batch_tokens
        ready = [sequence for sequence in self._running if sequence.num_pending_tokens > 0]
        # Verifications and decodes first: they are what a client is waiting to read.
        ready.sort(key=lambda sequence: sequence.num_pending_tokens > sequence.num_rows)
        for sequence in ready:
            if sequence in self._running:  # not preempted meanwhile
                budget -= self._schedule_running(sequence, budget, plan)
        for sequence in list(self._waiting):
            if budget <= 0:
                break
            if sequence.num_pending_tokens > 0 and not sequence.awaits_import:
                # Blocks come back from host memory at once, but the step's copies are made when it runs: what they
                # are made of may be free by now, and is not to be written to before.
                if plan.copies and None in self._match(sequence):
                    break
                admitted = self._admit(sequence)
                while not admitted and self._make_room(sequence, plan):
                    admitted = self._admit(sequence)
                if not admitted:
                    break
                budget -= self._schedule_running(sequence, budget, plan)
        return plan if plan.scheduled else None

    def following(self, plan: StepPlan, most: int) -> list[StepPlan]:
        """The steps behind a completed one, `most` at most, in which all draw once more behind what they drew in the
        one before, or have their trees grow by a level, if nothing that comes meanwhile could be for them: everybody
        here was in that step and draws on. Else none, and `schedule` says what is next."""
        sequences = [item.sequence for item in plan.scheduled]
        if self._waiting or len(sequences) != len(self._running):
            return []
        if not all(each.draws_on and each.num_pending_tokens == each.num_rows for each in sequences):
            return []
        num_rows = [each.num_rows for each in sequences]
        if sum(num_rows) > self.max_batch_tokens:
            return []
        num_steps, room = min(most, *(each.num_steps for each in sequences)), self.pool.num_allocatable
        while num_steps and sum(map(self._num_missing, sequences, (rows + num_steps - 1 for rows in num_rows))) > room:
            num_steps -= 1
        following = [StepPlan() for _ in range(num_steps)]
        for sequence, rows in zip(sequences, num_rows, strict=True) if num_steps else ():
            start = sequence.num_computed_tokens
            # Behind what it has just written to, so that nothing is shared.
            copies = self._prepare_blocks(sequence, start, start + rows + num_steps - 1)
            for i, step in enumerate(following):
                step.scheduled.append(ScheduledSequence(sequence, start + i, rows, rows, [] if i else copies))
        return following

    def complete(self, plan: StepPlan, sampled: List[SampledTokens]) -> list[tuple[Sequence, SampledTokens]]:
        """Takes in a step's outcome: one entry of `sampled` for each scheduled sequence that has rows.

        Returns what each of them gained. Ended sequences are removed.
        """
        outcomes = iter(sampled)
        gained = []
        for item in plan.scheduled:
            sequence = item.sequence
            sequence.num_computed_tokens = item.start + item.num_tokens
            if item.num_rows:
                gained.append((sequence, sequence.advance(next(outcomes))))
            self._settle(sequence)
        return gained

    def complete_following(
        self, plans: List[StepPlan], sampled: List[List[SampledTokens]]
    ) -> list[tuple[Sequence, SampledTokens]]:
        """`complete` of steps that were `following`, by steps."""
        gained = []
        for plan, drawn in zip(plans, sampled, strict=True):
            for item, tokens in zip(plan.scheduled, drawn, strict=True):
                item.sequence.num_computed_tokens = item.start + 1
                gained.append((item.sequence, item.sequence.advance(tokens)))
        for item in plans[-1].scheduled:
            self._settle(item.sequence)
        return gained

    def check(self) -> None:
        """Proves that blocks are conserved. Raises AssertionError."""
        tables = (sequence.block_table for sequence in self.sequences())
        self.pool.check(chain(tables, self.exports.tables(), self.imports.tables()))
        assert not any(sequence.block_table for sequence in self._waiting), "a waiting sequence owns blocks"

    def _settle(self, sequence: Sequence) -> None:
        """Steps it was in are complete."""
        self._register_blocks(sequence)
        self._drop_surplus_blocks(sequence)
        self.exports.computed(sequence)
        if sequence.finish is not None:
            self.remove(sequence)
        else:
            self._split_forks(sequence)

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that it has not for so many tokens more."""
        return max(0, -(-(sequence.num_computed_tokens + num_tokens) // self.block_size) - len(sequence.block_table))

    def _schedule_running(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Puts as much of the sequence into the plan as budget and blocks allow; returns the tokens taken."""
        num_tokens, num_rows = sequence.num_pending_tokens, sequence.num_rows if sequence.num_steps > 0 else 0
        if num_tokens > budget or sequence.forks:
            # A chunk ends before the first row that is sampled, the last committed token's or of a tree that grows a
            # later one, so that all of them are in one step; forks split there, so that each draws from logits of its
            # own.
            first_row = len(sequence.token_ids) - 1 + sequence.first_row
            num_tokens = min(budget, first_row - sequence.num_computed_tokens)
            num_rows = 0
        if num_tokens <= 0:
            return 0
        start = sequence.num_computed_tokens
        returned = 0
        while True:
            try:
                copies = self._prepare_blocks(sequence, start, start + num_tokens)
                break
            except OutOfBlocks:
                if self._idle_draft() is None and self.imports.surrender(-1):
                    continue
                victim = self._idle_draft() or max(self._running, key=lambda other: other.arrival)
                returned += self._preempt(victim, plan)
                if victim is sequence:
                    return -returned
        sequence.last_step = self._num_steps
        plan.scheduled.append(ScheduledSequence(sequence, start, num_tokens, num_rows, copies))
        return num_tokens - returned

    def _prepare_blocks(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Makes positions start to end writable: new blocks, and copies of shared ones. Raises OutOfBlocks."""
        table = sequence.block_table
        first = start // self.block_size
        shared = [i for i in range(first, len(table)) if self.pool.is_shared(table[i])]
        num_new = max(0, -(-end // self.block_size) - len(table))
        blocks = self.pool.allocate(len(shared) + num_new)
        copies = []
        for i in shared:
            copies.append((table[i], blocks[0]))
            self.pool.release([table[i]])
            table[i] = blocks.pop(0)
        table += blocks
        return copies

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a place and its cached prefix, if the pool has room for all it knows now."""
        if len(self._running) >= self._max_sequences:
            return False
        prefix = self._match(sequence)
        here = [block for block in prefix if block is not None]
        num_full, num_cached = len(prefix), len(prefix) * self.block_size
        imported = sequence.kv_import
        tail: list[int] = []
        # Of a prompt computed elsewhere the last block, partly filled, has come as well.
        whole = imported is not None and imported.num_held == num_full and imported.num_tokens < len(sequence.token_ids)
        if imported is not None and imported.tail is not None and whole:
            tail = [imported.tail]
            num_cached = imported.num_tokens
        num_known = sequence.num_computed_tokens + sequence.num_pending_tokens
        num_needed = -(-num_known // self.block_size) - len(here) - len(tail)
        # Of a drafter less may be wanted than it begins with.
        num_needed = max(num_needed, num_full - len(here))
        if num_needed + self.pool.num_unowned(here) > self.pool.num_allocatable:
            return False
        del self._waiting[sequence]
        self._running[sequence] = None
        self.pool.acquire(tail)
        sequence.block_table = self.pool.find(sequence.block_hashes[:num_full]) + tail
        sequence.num_computed_tokens = sequence.num_cached_tokens = num_cached
        sequence.num_registered_blocks = num_full
        self._leave_import(sequence)
        self._split_forks(sequence)  # of one token, or all in cache: nothing is left to compute together
        return True

    def _match(self, sequence: Sequence) -> list[int | None]:
        """Where the full blocks are that a waiting sequence begins with; None for those in host memory."""
        # The last token is always computed: its logits are what the next one is drawn from.
        num_full = (len(sequence.token_ids) - 1) // self.block_size
        return self.pool.match(self._hashes(sequence, len(sequence.token_ids))[:num_full])

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> int:
        """Takes all blocks from a sequence, and the sequence out of the plan; returns the tokens it had there."""
        returned = 0
        for item in plan.scheduled:
            if item.sequence is sequence:
                returned = item.num_tokens
                plan.scheduled.remove(item)
                break
        self.num_preempted += 1
        del self._running[sequence]
        self._release(sequence)
        # Half of it held for others would keep its own room from it.
        self.exports.ended(sequence)
        sequence.num_wanted_tokens = 0
        self._wait(sequence)
        return returned

    def _wait(self, sequence: Sequence) -> None:
        waiting = [*self._waiting, sequence]
        if len(waiting) > 1 and waiting[-2].arrival > sequence.arrival:
            waiting.sort(key=lambda other: other.arrival)
            self._waiting = dict.fromkeys(waiting)
        else:
            self._waiting[sequence] = None

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """For a waiting sequence, at the cost of what can better wait; whether there was any."""
        idle = self._idle_draft()
        if idle is None:
            # What comes from elsewhere holds blocks, and no place.
            return len(self._running) < self._max_sequences and self.imports.surrender(sequence.arrival)
        self._preempt(idle, plan)
        return True

    def _leave_import(self, sequence: Sequence) -> None:
        """It has its blocks, or never will."""
        imported, sequence.kv_import = sequence.kv_import, None
        if imported is not None:
            self.imports.adopted(imported)

    def _idle_draft(self) -> Sequence | None:
        """Of the drafting sequences that hold blocks and that nobody waits for, the one idle for longest.

        They may stay idle for long (γ = 0). A target's sequences are idle for moments only: they keep theirs.
        """
        idle = (sequence for sequence in self._running if sequence.drafting and sequence.num_pending_tokens == 0)
        return min(idle, key=lambda sequence: sequence.last_step, default=None)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.moves = []
        sequence.num_computed_tokens = sequence.num_registered_blocks = 0

    def _split_forks(self, sequence: Sequence) -> None:
        """Once all but the last token is computed, lets each fork share the blocks; whoever writes to a shared
        one copies it first. Forks that there are too many of for now wait, and find full blocks in the cache."""
        if sequence.num_computed_tokens < len(sequence.token_ids) - 1:
            return
        for fork in sequence.forks:
            if len(self._running) >= self._max_sequences:
                self.add(fork)
                continue
            self.pool.acquire(sequence.block_table)
            fork.block_table = list(sequence.block_table)
            fork.block_hashes = list(sequence.block_hashes)
            fork.num_computed_tokens = sequence.num_computed_tokens
            fork.num_cached_tokens = sequence.num_cached_tokens
            fork.num_registered_blocks = sequence.num_registered_blocks
            fork.arrival = next(self._arrivals)
            self._running[fork] = None
        sequence.forks = []

    def _hashes(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Hashes of the sequence's full blocks within its first `num_tokens` committed tokens, kept with it."""
        num_full = min(num_tokens, sequence.num_committed) // self.block_size
        if num_full > len(sequence.block_hashes):
            tokens = sequence.token_ids[: num_full * self.block_size]
            sequence.block_hashes = hash_blocks(tokens, self.block_size, sequence.root_hash, sequence.block_hashes)
        return sequence.block_hashes[:num_full]

    def _register_blocks(self, sequence: Sequence) -> None:
        hashes = self._hashes(sequence, sequence.num_computed_tokens)
        for i in range(sequence.num_registered_blocks, len(hashes)):
            self.pool.register(sequence.block_table[i], hashes[i])
        sequence.num_registered_blocks = len(hashes)

    def _drop_surplus_blocks(self, sequence: Sequence) -> None:
        """Frees blocks that only held rejected positions."""
        num_used = -(-max(len(sequence.token_ids), sequence.num_computed_tokens) // self.block_size)
        surplus = sequence.block_table[num_used:]
        if surplus:
            self.pool.release(surplus)
            del sequence.block_table[num_used:]


def _who_decode_on(sequence: Sequence) -> list[Sequence]:
    """Those that go on behind the prompt that it is of, without a word of their owner."""
    return [sequence, *sequence.forks] if sequence.num_steps > 1 else []
