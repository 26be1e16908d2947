"""A simulated worker: the engine's scheduler by count, many steps at a time."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.simulator.blocks import Blocks
from services.simulator.coming import Coming
from services.simulator.decoding import Decoding
from services.simulator.machine import Machine
from services.simulator.stream import Hold, Stream
from shared.policy.placement import Role


class Chunk(NamedTuple):
    """Tokens of a prompt in a step, behind `start` others."""

    stream: Stream
    start: int
    num_tokens: int

    @property
    def num_attended(self) -> int:
        """Tokens that each of them attends to, all together."""
        return self.num_tokens * self.start + self.num_tokens * (self.num_tokens + 1) // 2


class Pull(NamedTuple):
    """A stream that is handed over from `source`: what it now holds here, and its tokens that were here before."""

    stream: Stream
    source: Worker
    hold: Hold
    num_cached: int


@dataclass(slots=True)
class Outcome:
    """What the steps that just ended brought: streams that ended, and those to be handed over."""

    ended: list[Stream] = field(default_factory=list)
    leaving: list[Stream] = field(default_factory=list)


class Worker:
    """Steps of a worker. Its owner keeps the time: `begin` at a step's beginning, `finish` at its end.

    A step takes the streams that decode first, then chunks of prompts in order of arrival within the token budget.
    As long as only the same streams decode, any number of steps is one event (a run): it ends with the first stream
    that does, when blocks that matter to others give way, or after the step under way if something comes in.
    Blocks for a prompt are taken when it is admitted, for output as it grows; when there are none the youngest stream
    is preempted and computed again. What it computed before is not found again.
    """

    def __init__(
        self,
        worker_id: str,
        role: Role,
        machine: Machine,
        changed: Callable[[str, str, int, int], None],
        seed: int = 0,
    ) -> None:
        """`changed`: told how deep a prefix is here, or is coming to be: prefix, worker, blocks before and after.
        `seed`: of where the variation of its steps begins."""
        self.worker_id, self.role, self.machine = worker_id, role, machine
        self.blocks = Blocks(machine.num_blocks, self._held_changed)
        self.coming = Coming()
        self._changed = changed
        rng = random.Random(f"{seed} {worker_id}")
        # Where the steps of each kind are in their variation.
        self._variation_at = [rng.randrange(len(factors)) for factors in machine.variation]
        self.running = False
        self._between_steps: list[Callable[[float], None]] = []
        # Another model on the same machine has its turn after each step: runs are of one step.
        self.in_turns = False
        # Events of runs that were cut short are recognised by it.
        self.version = 0
        self.link_free_at = 0.0
        # Known to the router: streams without a first token, their tokens to compute, and what is handed over to here.
        self.num_waiting = self.backlog_tokens = 0
        self.num_incoming = self.incoming_blocks = 0
        # Measured.
        self.busy_seconds = 0.0
        self.num_preemptions = 0
        # Tokens of output by the seconds since the one before.
        self.gaps: Counter[float] = Counter()
        self.prompt_tokens = self.cached_tokens = 0

        self._seconds = [machine.costs.seconds(size) for size in range(machine.max_batch_tokens + 1)]
        self._decoding = Decoding(machine.block_size)
        self._prefilling: deque[Stream] = deque()
        self._waiting: list[Stream] = []  # heap by arrival
        self._offered: deque[tuple[Stream, Worker]] = deque()  # to be handed over, without blocks here yet
        self._num_pulling = 0
        self._ready: list[Stream] = []  # handed over, in no step yet
        self._fresh: list[Stream] = []  # handed over, in the first step here
        # The steps under way.
        self._began = self._ended = 0.0
        self._step_seconds = 0.0
        self._num_run = 0
        self._num_settled = 0
        self._step_tokens = 0
        self._chunks: list[Chunk] = []

    # What the router sees

    @property
    def num_decoding(self) -> int:
        """Streams past their first token, those being handed over to here included."""
        return len(self._decoding) + self.num_incoming

    def depth(self, prefix_id: str | None) -> int:
        """Leading blocks of the prefix that are here, or will be when the streams that wait have their first token."""
        return max(self.blocks.depth(prefix_id), self.coming.depth(prefix_id))

    def kv_usage(self, now: float) -> float:
        """Share of the blocks owned, or promised to what is handed over."""
        self._settle(self._num_begun(now))
        return min(1.0, (self.blocks.num_owned + self.incoming_blocks) / self.blocks.total)

    def expect(self, stream: Stream, num_cached: int) -> None:
        """The stream is sent here to be prefilled; so many of its tokens are thought to be here by then."""
        stream.num_left = max(1, stream.num_context - num_cached)
        self.num_waiting += 1
        self._change_coming(stream, self.coming.add)
        self.backlog_tokens += stream.num_left

    def expect_hand_over(self, stream: Stream) -> None:
        """The stream will be handed over to here."""
        self.num_incoming += 1
        self.incoming_blocks += self._num_blocks(stream.num_context)

    def expect_no_more(self, stream: Stream) -> None:
        """It ended where it was prefilled."""
        self.num_incoming -= 1
        self.incoming_blocks -= self._num_blocks(stream.num_context)

    # What comes in: in the middle of steps after `interrupt`

    def submit(self, stream: Stream) -> None:
        """The stream, which was expected, is to be prefilled."""
        heapq.heappush(self._waiting, stream)

    def offer(self, stream: Stream, source: Worker) -> None:
        """The stream, prefilled there, is to be handed over as soon as there is room."""
        self._offered.append((stream, source))

    def receive(self, stream: Stream, hold: Hold) -> None:
        """The KV of a stream that `pull` admitted is here."""
        stream.hold = hold
        self._register(stream, stream.num_context)
        self._num_pulling -= 1
        self._ready.append(stream)

    def let_go(self, stream: Stream, hold: Hold) -> None:
        """What the stream held here is not needed any more."""
        self.blocks.release(hold.num_blocks)
        if hold.of_prefix:
            assert stream.request.prefix_id is not None
            self.blocks.disown(stream.request.prefix_id)

    def interrupt(self, now: float) -> float | None:
        """Has a run end after the step under way; when that is, if it is sooner than it was."""
        num_begun = self._num_begun(now)
        self._settle(num_begun)
        if num_begun >= self._num_run:
            return None
        self._num_run = num_begun
        self.version += 1
        return self._began + num_begun * self._step_seconds

    # Steps

    def do_between_steps(self, act: Callable[[float], None]) -> None:
        """To be done when the step under way has ended."""
        self._between_steps.append(act)

    def take_between_steps(self) -> list[Callable[[float], None]]:
        """What is to be done now that a step has ended."""
        acts, self._between_steps = self._between_steps, []
        return acts

    def pull(self) -> list[Pull]:
        """Between steps: streams to be handed over that there is room for now."""
        pulled = []
        while self._offered and (taken := self._take(self._offered[0][0])) is not None:
            stream, source = self._offered.popleft()
            self.incoming_blocks -= self._num_blocks(stream.num_context)
            self._num_pulling += 1
            pulled.append(Pull(stream, source, *taken))
        return pulled

    def begin(self, now: float, shared: bool) -> float | None:
        """Begins a step, or a run of them; when it ends, or None if there is nothing to do.

        `shared`: another worker of the machine is in a step.
        """
        for stream in self._ready:
            self.num_incoming -= 1
            self._decoding.join(stream)
        self._fresh, self._ready = self._ready, []
        made_room = self._make_room()
        num_decoding = len(self._decoding)
        budget = self.machine.max_batch_tokens - num_decoding
        for stream in self._prefilling:
            if budget <= 0:
                break
            budget -= self._add_chunk(stream, budget)
        while budget > 0 and self._waiting and self._admit():
            budget -= self._add_chunk(self._prefilling[-1], budget)
        self._step_tokens = self.machine.max_batch_tokens - budget
        if not self._step_tokens:
            self.running = False
            return None
        self.running = True
        self.version += 1
        self._began = now
        machine = self.machine
        foreseen = (
            self._seconds[self._step_tokens]
            + machine.attention_seconds * sum(chunk.num_attended for chunk in self._chunks)
            + machine.context_seconds * self._decoding.context_tokens
        )
        self._step_seconds = foreseen * self._factor(shared)
        self._num_settled = 1
        # Room made by a preemption may let something in before the next step.
        self._num_run = 1 if self._chunks or made_room or self.in_turns else self._run_length()
        return now + self._num_run * self._step_seconds

    def finish(self, now: float) -> Outcome:
        """The steps under way have ended."""
        num_run = self._num_run
        self._settle(num_run)
        self._num_run = self._num_settled = 0
        self.running = False
        self.busy_seconds += num_run * self._step_seconds
        self._variation_at[self._kind] += num_run
        # The first step's tokens come after what lay before it as well: steps of other models here, or, to those that
        # are fresh, the hand-over.
        self.gaps[self._step_seconds] += (num_run - 1) * len(self._decoding)
        if num_going_on := len(self._decoding) - len(self._fresh):
            self.gaps[self._began - self._ended + self._step_seconds] += num_going_on
        for stream in self._fresh:
            self.gaps[self._began + self._step_seconds - stream.last_token_at] += 1
        self._fresh.clear()
        self._ended = now
        outcome = Outcome(ended=self._decoding.advance(num_run))
        for stream in outcome.ended:
            self._leave(stream)
        for stream, _, num_tokens in self._chunks:
            stream.num_left -= num_tokens
            self.backlog_tokens -= num_tokens
            self._register(stream, stream.num_context - stream.num_left)
            if not stream.num_left:
                self._prefilling.popleft()
                self._first_token(stream, now, outcome)
        self._chunks.clear()
        return outcome

    def check_idle(self) -> None:
        """Proves that nothing is left here. Raises AssertionError."""
        assert not any((self._prefilling, self._waiting, self._offered, self._ready, self._num_pulling))
        assert not any((self.num_waiting, self.backlog_tokens, self.num_incoming, self.incoming_blocks))
        self._decoding.check_empty()
        self.coming.check_empty()
        assert not self.blocks.num_owned
        self.blocks.check()

    # Inside a step

    def _factor(self, shared: bool) -> float:
        """How many times what its costs say the step takes."""
        machine, kind = self.machine, self._kind
        factors = machine.variation[kind]
        factor = factors[self._variation_at[kind] % len(factors)]
        return factor * machine.beside_another[kind] if shared else factor

    @property
    def _kind(self) -> int:
        """Of the step under way: the place in a ByKind."""
        return 0 if self._chunks else 1

    def _first_token(self, stream: Stream, now: float, outcome: Outcome) -> None:
        """The stream's prompt, or after a preemption all that it had, is computed."""
        self.num_waiting -= 1
        self._change_coming(stream, self.coming.remove)
        if stream.num_generated:
            self.gaps[now - stream.last_token_at] += 1
        else:
            stream.first_token_at = now
        stream.num_generated += 1
        stream.last_token_at = now
        if stream.num_generated == stream.request.num_output_tokens:
            self.let_go(stream, stream.hold)
            outcome.ended.append(stream)
        elif stream.destination is not None:
            outcome.leaving.append(stream)
        else:
            self._decoding.join(stream)

    def _add_chunk(self, stream: Stream, budget: int) -> int:
        num_tokens = min(stream.num_left, budget)
        self._chunks.append(Chunk(stream, stream.num_context - stream.num_left, num_tokens))
        return num_tokens

    def _admit(self) -> bool:
        """Takes the one that waits for longest in, if there is room."""
        stream = self._waiting[0]
        taken = self._take(stream)
        if taken is None:
            return False
        heapq.heappop(self._waiting)
        stream.hold, num_cached = taken
        num_left = stream.num_context - num_cached
        self.backlog_tokens += num_left - stream.num_left
        stream.num_left = num_left
        if not stream.num_generated:
            self.prompt_tokens += stream.num_context
            self.cached_tokens += num_cached
        self._prefilling.append(stream)
        return True

    def _take(self, stream: Stream) -> tuple[Hold, int] | None:
        """Blocks for the stream's context, and how many of its tokens are in them already; None if there are too few
        blocks, or too many sequences."""
        num_here = len(self._decoding) + len(self._prefilling) + self._num_pulling + len(self._ready)
        if num_here >= self.machine.max_sequences:
            return None
        blocks, prefix_id = self.blocks, stream.request.prefix_id
        # The last token is always computed.
        num_found = min(blocks.depth(prefix_id), stream.prefix_blocks, (stream.num_context - 1) // self._block_size)
        num_blocks = self._num_blocks(stream.num_context) - num_found
        if num_blocks + (blocks.num_unowned(prefix_id) if num_found and prefix_id else 0) > blocks.num_allocatable:
            return None
        if num_found and prefix_id is not None:
            blocks.own(prefix_id)
        blocks.allocate(num_blocks)
        return Hold(num_blocks, num_found > 0), num_found * self._block_size

    def _register(self, stream: Stream, num_computed: int) -> None:
        """So much of the stream is computed here: what is of its prefix can be found by others."""
        prefix_id, depth = stream.request.prefix_id, min(stream.prefix_blocks, num_computed // self._block_size)
        if prefix_id is None or depth <= self.blocks.depth(prefix_id):
            return
        if not stream.hold.of_prefix:
            stream.hold.of_prefix = True
            self.blocks.own(prefix_id)
        stream.hold.num_blocks -= self.blocks.extend(prefix_id, depth)

    def _held_changed(self, prefix_id: str, before: int, after: int) -> None:
        self._tell(prefix_id, max(before, self.coming.depth(prefix_id)))

    def _change_coming(self, stream: Stream, change: Callable[[str, int], None]) -> None:
        prefix_id = stream.request.prefix_id
        if prefix_id is not None and stream.coming_blocks:
            before = self.depth(prefix_id)
            change(prefix_id, stream.coming_blocks)
            self._tell(prefix_id, before)

    def _tell(self, prefix_id: str, before: int) -> None:
        """The prefix was so deep here, or coming to be."""
        if (after := self.depth(prefix_id)) != before:
            self._changed(prefix_id, self.worker_id, before, after)

    def _make_room(self) -> bool:
        """Takes blocks for the next step's tokens of all that decode; whether the youngest had to go for that."""
        preempts = self._decoding.num_needed(1) > self.blocks.num_allocatable
        while self._decoding.num_needed(1) > self.blocks.num_allocatable:
            self._preempt()
        self.blocks.allocate(self._decoding.num_needed(1))
        return preempts

    def _preempt(self) -> None:
        """Takes all blocks from the stream that came last; it waits again, for its turn by arrival."""
        self.num_preemptions += 1
        youngest = self._decoding.youngest()
        if self._prefilling and (youngest is None or self._prefilling[-1].order > youngest.order):
            stream = self._prefilling.pop()
            self.let_go(stream, stream.hold)
            self.backlog_tokens += stream.num_context - stream.num_left
            stream.num_left = stream.num_context
            self.submit(stream)
            return
        assert youngest is not None
        num_generated = self._decoding.remove(youngest)
        self._leave(youngest)
        if num_generated:
            youngest.last_token_at = self._ended
        if youngest in self._fresh:
            self._fresh.remove(youngest)
        youngest.num_generated += num_generated
        youngest.num_context = youngest.request.num_prompt_tokens + youngest.num_generated
        self.expect(youngest, 0)
        self.submit(youngest)

    def _leave(self, stream: Stream) -> None:
        """The stream, which does not decode any more, gives its blocks up."""
        stream.hold.num_blocks += self._decoding.num_grown(stream)
        self.let_go(stream, stream.hold)

    # Runs

    def _run_length(self) -> int:
        """Steps until the first stream ends, or until an allocation that others would see."""
        decoding = self._decoding
        longest = min(decoding.num_steps_to_end, self.machine.longest_run)
        quiet = self.blocks.num_quiet + decoding.num_needed(1)
        if decoding.num_needed(longest) <= quiet:
            return longest
        # In as many steps as a block has tokens, each stream needs one.
        num_run = 1 + self.blocks.num_quiet // len(decoding) * self.machine.block_size
        while decoding.num_needed(num_run + 1) <= quiet:
            num_run += 1
        return num_run

    def _num_begun(self, now: float) -> int:
        """Steps of the run that have begun by now."""
        if self._num_run <= 1:
            return self._num_run
        return min(self._num_run, int((now - self._began) / self._step_seconds) + 1)

    def _settle(self, num_begun: int) -> None:
        """Takes the blocks of the steps that have begun: it is not done before somebody might see it."""
        if num_begun > self._num_settled:
            self.blocks.allocate(self._decoding.num_needed(num_begun) - self._decoding.num_needed(self._num_settled))
            self._num_settled = num_begun

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.machine.block_size)

    @property
    def _block_size(self) -> int:
        return self.machine.block_size
