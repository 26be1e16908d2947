"""What the scheduler tells of those that come, to who decides for them."""

from __future__ import annotations

from shared.engine.sequence import Sequence
from tests.support.machine import ROOT, Machine, new_sequence


def burst(machine: Machine, num: int, num_steps: int = 1 << 20) -> list[Sequence]:
    sequences = [new_sequence([i, *range(7)], max_tokens=40, num_steps=num_steps) for i in range(num)]
    for sequence in sequences:
        machine.scheduler.add(sequence)
    return sequences


def test_of_a_burst_all_are_counted_while_its_prompts_are_computed() -> None:
    machine = Machine(num_blocks=100, max_batch_tokens=11)
    burst(machine, 4)
    counts = []
    while len(machine.scheduler.decoding()) < 4:
        counts.append((len(machine.scheduler.decoding()), len(machine.scheduler.coming())))
        machine.step()
    assert counts[0] == (0, 4)
    assert all(decoding + coming == 4 for decoding, coming in counts)
    assert len({decoding for decoding, _ in counts}) > 2, "one after another"
    assert machine.scheduler.coming() == []


def test_who_waits_for_room_does_not_come_before_others_end() -> None:
    blocks = Machine(num_blocks=7, max_batch_tokens=64)  # each prompt takes two, and goes on into a third
    burst(blocks, 9)
    assert len(blocks.scheduler.coming()) == 3
    blocks.step()
    assert blocks.scheduler.num_running == 3
    assert len(blocks.scheduler.coming()) == 0
    places = Machine(num_blocks=100, max_batch_tokens=64, max_sequences=2)
    burst(places, 9)
    assert len(places.scheduler.coming()) == 2
    places.step()
    assert len(places.scheduler.coming()) == 0


def test_forks_come_with_their_first_and_who_waits_for_the_router_does_not() -> None:
    machine = Machine(num_blocks=100)
    [family] = burst(machine, 1)
    machine.scheduler.remove(family)
    family.forks = [new_sequence(family.token_ids, sequence_index=i) for i in (1, 2)]
    machine.scheduler.add(family)
    assert len(machine.scheduler.coming()) == 3
    burst(machine, 5, num_steps=1)
    assert len(machine.scheduler.coming()) == 3


def test_who_waits_for_kv_from_elsewhere_does_not_come_yet() -> None:
    machine = Machine(num_blocks=100)
    first, second = burst(machine, 2)
    machine.scheduler.remove(second)
    second.kv_import = machine.scheduler.begin_import(second.token_ids, ROOT)
    machine.scheduler.add(second)
    assert second.awaits_import
    assert len(machine.scheduler.coming()) == 1
    machine.step()
    assert (machine.scheduler.decoding(), machine.scheduler.coming()) == ([first], [])
