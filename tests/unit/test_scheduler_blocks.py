"""Whose blocks the scheduler finds again, who gives way when there are none, and who waits for room."""

from __future__ import annotations

import pytest

from shared.engine.sequence import Sequence
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from tests.support.machine import BLOCK_SIZE, VOCAB_SIZE, Machine, decoded, new_sequence, run, serve


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 30])
def test_a_prefix_hit_covers_all_full_blocks_before_the_last_token(length: int) -> None:
    machine = Machine(num_blocks=40)
    prompt = list(range(length))
    serve(machine, new_sequence(prompt))
    machine.num_computed = 0
    again = new_sequence(prompt, max_tokens=1)
    serve(machine, again)
    assert again.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert machine.num_computed == length - again.num_cached_tokens


def test_other_roots_share_nothing() -> None:
    machine = Machine(num_blocks=40)
    serve(machine, new_sequence(list(range(20))))
    other = Sequence(list(range(20)), 20, SamplingParams(temperature=0.0, max_tokens=2), b"1" * 32, num_steps=9)
    serve(machine, other)
    assert other.num_cached_tokens == 0


def test_rejected_positions_are_never_found_as_prefix() -> None:
    machine = Machine(num_blocks=40)
    sequence = new_sequence(list(range(6)), max_tokens=20, num_steps=1)
    machine.scheduler.add(sequence)
    machine.step()
    wrong = tuple((token + 1) % VOCAB_SIZE for token in decoded(list(range(6)), sequence.params)[7:15])
    sequence.proposal, sequence.num_steps = Proposal(wrong), 1
    num_blocks = len(sequence.block_table)
    machine.step()
    assert len(sequence.token_ids) == 8
    assert len(sequence.block_table) == num_blocks == 2  # what held rejected positions only went back
    assert len(machine.pool.findable()) == 1
    probe = new_sequence([*range(6), sequence.token_ids[6], *wrong, 0], max_tokens=1)
    machine.scheduler.add(probe)
    machine.step()
    assert probe.num_cached_tokens == BLOCK_SIZE


def test_out_of_blocks_the_youngest_gives_way_and_the_oldest_gets_on() -> None:
    machine = Machine(num_blocks=6)
    old, young = new_sequence([1] * 8, max_tokens=16), new_sequence([2] * 8, max_tokens=16)
    machine.scheduler.add(old)
    machine.scheduler.add(young)
    preempted = False
    while old.finish is None:
        before = len(old.token_ids)
        assert machine.step() is not None
        assert len(old.token_ids) > before
        preempted = preempted or (not young.block_table and machine.scheduler.num_waiting == 1)
    assert preempted
    run(machine, old, young)


def test_a_preempted_sequence_keeps_its_place_before_later_arrivals() -> None:
    machine = Machine(num_blocks=6)
    sequences = [new_sequence([i] * 8, max_tokens=16) for i in range(4)]
    for sequence in sequences:
        machine.scheduler.add(sequence)
    ends: list[Sequence] = []
    while machine.step() is not None:
        ends += [sequence for sequence in sequences if sequence.finish is not None and sequence not in ends]
    assert ends == sequences


def test_the_next_in_line_waits_for_room_and_is_not_overtaken() -> None:
    machine = Machine(num_blocks=8)
    running, large, small = new_sequence([1] * 12), new_sequence([2] * 20), new_sequence([3])
    machine.scheduler.add(running)
    machine.step()
    machine.scheduler.add(large)
    machine.scheduler.add(small)
    while running.finish is None:
        machine.step()
        assert large.block_table == small.block_table == []
    run(machine, running, large, small)


def test_cached_blocks_that_a_prefix_takes_are_not_counted_as_room() -> None:
    machine = Machine(num_blocks=6)
    serve(machine, new_sequence([2] * 13, max_tokens=1))
    running = new_sequence([1] * 9, max_tokens=3)
    machine.scheduler.add(running)
    machine.step()
    assert machine.pool.counts() == (0, 3, 3, 6)
    again, small = new_sequence([2] * 13), new_sequence([3])
    machine.scheduler.add(again)
    machine.scheduler.add(small)
    machine.step()
    assert again.block_table == small.block_table == []
    run(machine, running, again, small)
    assert again.num_cached_tokens == 12


def test_an_idle_sequence_that_lost_its_blocks_comes_back_when_asked() -> None:
    machine = Machine(num_blocks=6)
    old, idle = new_sequence([1] * 8, max_tokens=16), new_sequence([2] * 8, num_steps=1)
    machine.scheduler.add(old)
    machine.scheduler.add(idle)
    run(machine, old)
    assert idle in machine.sequences
    assert len(idle.token_ids) == 9
    idle.num_steps = 100
    run(machine, idle)
