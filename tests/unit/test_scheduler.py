"""The scheduler: what is computed when, and for whom; on a machine that simulates KV."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from shared.engine.sequence import Sequence
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from tests.support.machine import BLOCK_SIZE, ROOT, VOCAB_SIZE, Machine, decoded, new_sequence, random_guess, run, serve


@pytest.mark.parametrize("max_batch_tokens", [5, 17, 64])
@pytest.mark.parametrize("num_blocks", [12, 24, 200])
@pytest.mark.parametrize("max_sequences", [2, 64])
def test_random_traffic_gets_the_tokens_of_plain_decoding(
    max_batch_tokens: int, num_blocks: int, max_sequences: int
) -> None:
    rng = random.Random(f"{max_batch_tokens} {num_blocks} {max_sequences}")
    machine = Machine(num_blocks, max_batch_tokens, max_sequences)
    beginnings = [[rng.randrange(VOCAB_SIZE) for _ in range(16)] for _ in range(2)]
    waiting_for: dict[Sequence, None] = {}
    ended: list[Sequence] = []
    num_released = num_preempted = 0
    for turn in range(20_000):
        if len(waiting_for) < 12 and turn < 400 and rng.random() < 0.3:
            prompt = beginnings[rng.randrange(2)][: rng.randrange(17)]
            prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0 if prompt else 1, 12))]
            stop = frozenset({rng.randrange(VOCAB_SIZE)})
            params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 18), stop_token_ids=stop)
            family = [
                Sequence(prompt, len(prompt), replace(params, sequence_index=i), ROOT, num_steps=rng.choice([1, 1, 40]))
                for i in range(rng.choice([1, 1, 1, 2, 4]))
            ]
            family[0].num_steps = max(1, family[0].num_steps)
            family[0].forks = family[1:]
            machine.scheduler.add(family[0])
            waiting_for.update(dict.fromkeys(family))
        for sequence in list(waiting_for):
            if sequence.finish is not None:
                del waiting_for[sequence]
                ended.append(sequence)
            elif rng.random() < 0.01 and turn < 400:
                machine.scheduler.remove(sequence)
                assert sequence not in machine.sequences
                assert not sequence.block_table
                del waiting_for[sequence]
                num_released += 1
            elif sequence.num_steps == 0 and rng.random() < 0.6:
                room = sequence.num_prompt_tokens + sequence.params.max_tokens - len(sequence.token_ids)
                length = min(rng.randrange(max_batch_tokens), 6, room)
                sequence.proposal = Proposal(random_guess(rng, sequence, length))
                sequence.num_steps = rng.choice([1, 1, 3])
        running = [sequence for sequence in machine.sequences if sequence.block_table]
        machine.step()
        num_preempted += any(not sequence.block_table and sequence.finish is None for sequence in running)
        if turn >= 400 and not waiting_for:
            break
    assert not waiting_for, "a sequence starves"
    assert len(ended) > 30
    assert num_released > 3
    assert num_preempted > 10 or num_blocks > 12 or max_sequences == 2
    for sequence in ended:
        assert sequence.token_ids == decoded(sequence.token_ids[: sequence.num_prompt_tokens], sequence.params)
    assert machine.pool.counts().owned == 0
    assert machine.scheduler.num_running == machine.scheduler.num_waiting == 0


@pytest.mark.parametrize("length", [1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1])
@pytest.mark.parametrize("primed", [False, True], ids=["cold", "prefix in cache"])
@pytest.mark.parametrize("max_sequences", [1, 3, 64])
def test_forks_share_the_prompt_and_then_part(length: int, primed: bool, max_sequences: int) -> None:
    machine = Machine(num_blocks=40, max_sequences=max_sequences)
    prompt = list(range(1, length + 1))
    if primed:
        serve(machine, new_sequence(prompt))
    machine.num_computed = 0
    first = new_sequence(prompt)
    first.forks = [new_sequence(prompt, sequence_index=i) for i in (1, 2, 3)]
    family = [first, *first.forks]
    machine.scheduler.add(first)
    run(machine, *family)
    assert len({tuple(member.token_ids) for member in family}) > 1
    if max_sequences > 3 and not primed:
        # The prompt once, then each its last token and its own output.
        assert machine.num_computed == length - 1 + 4 * 8


def test_forks_go_on_when_the_first_is_released_before_they_split() -> None:
    machine = Machine(num_blocks=40, max_batch_tokens=5)
    prompt = list(range(20))
    first = new_sequence(prompt)
    forks = [new_sequence(prompt, sequence_index=i) for i in (1, 2)]
    first.forks = list(forks)
    machine.scheduler.add(first)
    machine.step()
    machine.scheduler.remove(first)
    machine.scheduler.remove(forks[0])  # not split off yet either
    run(machine, forks[1])
    assert first.finish is forks[0].finish is None


def test_a_fork_released_before_it_split_off_never_runs() -> None:
    machine = Machine(num_blocks=40)
    first = new_sequence([1, 2, 3])
    gone, stays = new_sequence([1, 2, 3], sequence_index=1), new_sequence([1, 2, 3], sequence_index=2)
    first.forks = [gone, stays]
    machine.scheduler.add(first)
    machine.scheduler.remove(gone)
    run(machine, first, stays)
    assert gone.token_ids == [1, 2, 3]


def test_decodes_go_before_prefill_chunks_and_chunks_fill_the_budget() -> None:
    machine = Machine(num_blocks=100, max_batch_tokens=10)
    decoding = [new_sequence([i], max_tokens=30) for i in range(3)]
    for sequence in decoding:
        machine.scheduler.add(sequence)
    machine.step()
    long = new_sequence(list(range(30)))
    machine.scheduler.add(long)
    for start in (0, 7, 14, 21):
        plan = machine.step()
        assert plan is not None
        assert [item.sequence for item in plan.scheduled] == [*decoding, long]
        last = plan.scheduled[-1]
        assert (last.start, last.num_tokens, last.num_rows) == (start, 7, 0)
    plan = machine.step()
    assert plan is not None
    assert (plan.scheduled[-1].num_tokens, plan.scheduled[-1].num_rows) == (2, 1)
    run(machine, *decoding, long)


@pytest.mark.parametrize("budget", [7, 64])
def test_what_a_step_attends_to_is_counted(budget: int) -> None:
    machine = Machine(num_blocks=100, max_batch_tokens=budget)
    stream, long = new_sequence([1, 2, 3], max_tokens=30), new_sequence(list(range(30)), max_tokens=1)
    machine.scheduler.add(stream)
    counted = [plan.num_attended for plan in (machine.step(), machine.step()) if plan is not None]
    # Three tokens of a prompt attend to themselves and to those before; then the stream's fourth to four.
    assert counted == [(1 + 2 + 3, 0), (0, 4)]
    machine.scheduler.add(long)
    prompts, contexts = 0, []
    while long.finish is None:
        plan = machine.step()
        assert plan is not None
        prompts += plan.num_attended[0]
        contexts.append(plan.num_attended[1])
    # However it is cut.
    assert prompts == 30 * 31 // 2
    assert contexts == list(range(5, 5 + len(contexts)))
    run(machine, stream, long)


def test_rows_of_a_verification_are_never_split() -> None:
    machine = Machine(num_blocks=100, max_batch_tokens=6)
    sequences = [new_sequence([i, i, i], max_tokens=12, num_steps=1) for i in range(3)]
    for sequence in sequences:
        machine.scheduler.add(sequence)
    while machine.step() is not None:
        pass
    for sequence in sequences:
        sequence.proposal, sequence.num_steps = Proposal((1, 2, 3, 4)), 1
    for sequence in sequences:
        plan = machine.step()
        assert plan is not None
        assert [(item.sequence, item.num_tokens, item.num_rows) for item in plan.scheduled] == [(sequence, 5, 5)]


def test_no_more_sequences_hold_blocks_than_allowed() -> None:
    machine = Machine(num_blocks=100, max_sequences=2)  # Machine.step checks it
    sequences = [new_sequence([i, i]) for i in range(5)]
    for sequence in sequences:
        machine.scheduler.add(sequence)
    machine.step()
    assert (machine.scheduler.num_running, machine.scheduler.num_waiting) == (2, 3)
    run(machine, *sequences)


def test_removing_twice_or_a_stranger_changes_nothing() -> None:
    machine = Machine(num_blocks=10)
    sequence = new_sequence([1, 2, 3])
    machine.scheduler.remove(sequence)
    machine.scheduler.add(sequence)
    machine.step()
    machine.scheduler.remove(sequence)
    machine.scheduler.remove(sequence)
    machine.scheduler.check()
    assert machine.pool.counts().owned == 0
    assert machine.step() is None


def leak(machine: Machine, sequence: Sequence) -> None:
    sequence.block_table.pop()


def own_while_waiting(machine: Machine, sequence: Sequence) -> None:
    del machine.scheduler._running[sequence]
    machine.scheduler._waiting[sequence] = None


@pytest.mark.parametrize("corrupt", [leak, own_while_waiting])
def test_check_notices(corrupt: Callable[[Machine, Sequence], None]) -> None:
    machine = Machine(num_blocks=10)
    sequence = new_sequence([1, 2, 3, 4, 5])
    machine.scheduler.add(sequence)
    machine.step()
    corrupt(machine, sequence)
    with pytest.raises(AssertionError):
        machine.scheduler.check()
