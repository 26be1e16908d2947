"""The scheduler with host memory: what comes back is not computed again, and waits for room."""

from __future__ import annotations

import random

import pytest

from shared.engine.kv_export import KVExport
from shared.engine.kv_import import KVImport
from shared.engine.sequence import Sequence
from shared.prefix.block_hash import hash_blocks
from shared.sampling.params import SamplingParams
from tests.support.eviction import forget, prompt_of
from tests.support.machine import BLOCK_SIZE, ROOT, VOCAB_SIZE, Machine, decoded, new_sequence, run, serve


def test_others_are_shown_no_block_whose_copy_is_under_way() -> None:
    """Whoever reads or writes blocks past the engine's own order: a transfer, on a CUDA device."""
    machine = Machine(4, num_host_blocks=8)
    sequence = new_sequence(list(range(2 * BLOCK_SIZE)), 1)
    serve(machine, sequence)
    before = machine.mover.num_settled
    machine.scheduler.exports.release(machine.scheduler.exports.offer_cached(sequence.block_hashes))
    assert machine.mover.num_settled == before + 1
    kv_import = machine.scheduler.begin_import([7] * 4 * BLOCK_SIZE, ROOT)
    machine.scheduler.imports.missed(kv_import, machine.scheduler.imports.allocate(kv_import, 4))
    assert machine.mover.num_settled == before + 2


def test_a_prompt_that_was_driven_out_is_not_computed_again() -> None:
    machine = Machine(12, num_host_blocks=40)
    prompts = [prompt_of(number, 4 * BLOCK_SIZE + 1) for number in range(5)]
    for prompt in prompts:
        serve(machine, new_sequence(prompt, 2))
    for prompt in prompts:
        before = machine.num_computed
        again = new_sequence(prompt, 2)
        serve(machine, again)
        assert again.num_cached_tokens == 4 * BLOCK_SIZE
        assert machine.num_computed - before == 2
    assert machine.pool.num_restored >= 3 * 4


def test_a_preempted_sequence_comes_back_from_host_memory() -> None:
    machine = Machine(6, num_host_blocks=20)
    old, young = new_sequence([1] * 8, max_tokens=16), new_sequence([2] * 8, max_tokens=16)
    machine.scheduler.add(old)
    machine.scheduler.add(young)
    run(machine, old, young)
    # All of the old one, of the young one what was not yet a full block when it was preempted, and one token more.
    assert machine.num_computed <= 2 * 23 + 2 * BLOCK_SIZE
    assert machine.pool.num_restored > 0


def test_no_block_comes_back_into_one_that_is_to_be_copied() -> None:
    machine = Machine(5, max_batch_tokens=8, num_host_blocks=8)
    scheduler = machine.scheduler
    # One whose KV was sent for before all others came; it never comes, but is in host memory by now.
    early = new_sequence(prompt_of(3, BLOCK_SIZE + 1), 2)
    early.kv_import = scheduler.begin_import(early.token_ids, ROOT)
    scheduler.imports.end(early.kv_import)
    serve(machine, new_sequence(early.token_ids, 1))
    forget(machine.pool)
    # A prompt and its fork share a block that is partly filled; another prompt has its beginning.
    first, large = new_sequence(prompt_of(1, 6), 2), new_sequence(prompt_of(2, 11), 2)
    first.forks = [new_sequence(prompt_of(1, 6), 2, 1)]
    family = [first, *first.forks]
    scheduler.add(first)
    scheduler.add(large)
    machine.step()
    [source] = set(family[0].block_table) & set(family[1].block_table[1:])
    others = scheduler.begin_import(prompt_of(4, BLOCK_SIZE), ROOT)
    in_flight = scheduler.imports.allocate(others, 1)
    scheduler.add(early)
    # Now the first gets a copy of the shared block, and out of blocks the fork, then the large one gives way: the
    # shared one is free, and there is room for the early one.
    plan = machine.step()
    assert plan is not None
    assert [copy[0] for copy in plan.copies] == [source]
    assert not family[1].block_table
    assert not large.block_table
    scheduler.imports.missed(others, in_flight)
    scheduler.imports.end(others)
    scheduler.imports.drop(others)
    run(machine, *family, large, early)
    assert machine.pool.num_restored > 0


def test_a_drafter_waits_for_room_for_all_it_begins_with() -> None:
    machine = Machine(3, num_host_blocks=8)
    prompt = prompt_of(1, 3 * BLOCK_SIZE)
    serve(machine, new_sequence(prompt, 1))
    forget(machine.pool)
    others = machine.scheduler.begin_import(prompt_of(2, 2 * BLOCK_SIZE), ROOT)
    in_flight = machine.scheduler.imports.allocate(others, 2)
    drafter = Sequence([*prompt, 1], len(prompt), SamplingParams(), ROOT, drafting=True)
    drafter.num_wanted_tokens = 3
    machine.scheduler.add(drafter)
    assert machine.step() is None
    assert not drafter.block_table
    machine.scheduler.imports.missed(others, in_flight)
    machine.step()
    assert drafter.num_computed_tokens == 3 * BLOCK_SIZE
    assert len(drafter.block_table) == 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_blocks", "num_slots"), [(10, 3), (10, 12), (14, 60), (30, 60)])
@pytest.mark.parametrize("max_batch_tokens", [7, 64])
def test_random_traffic_gets_its_tokens_and_computes_less(
    seed: int, num_blocks: int, num_slots: int, max_batch_tokens: int
) -> None:
    """Prompts that begin alike, forks, preemption, imports and exports: every position holds its own past, or the
    machine says so; and the same traffic without a tier computes more."""
    tiered, plain = (
        random_traffic(random.Random(seed), Machine(num_blocks, max_batch_tokens, 6, num_host_blocks=count))
        for count in (num_slots, 0)
    )
    assert tiered.pool.num_restored > 0
    if num_slots >= 12:
        assert tiered.num_computed < plain.num_computed


def random_traffic(rng: random.Random, machine: Machine) -> Machine:
    scheduler = machine.scheduler
    beginnings = [prompt_of(number, 4 * BLOCK_SIZE) for number in range(4)]
    running: list[Sequence] = []
    exports: list[tuple[KVExport, list[tuple[int, ...] | None]]] = []
    imports: list[KVImport] = []
    num_ended = 0
    told: set[bytes] = set()

    def contents(export: KVExport) -> list[tuple[int, ...] | None]:
        return [machine.kv.get((block, i)) for block in export.blocks for i in range(BLOCK_SIZE)]

    for turn in range(3000):
        if turn < 500 and len(running) < 6 and rng.random() < 0.4:
            prompt = beginnings[rng.randrange(4)][: rng.randrange(4 * BLOCK_SIZE)]
            prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 4))]
            family = [new_sequence(prompt, rng.randint(1, 9), index) for index in range(rng.choice([1, 1, 3]))]
            family[0].forks = family[1:]
            scheduler.add(family[0])
            running += family
        elif turn < 500 and len(exports) < 1 and rng.random() < 0.1:
            wanted = beginnings[rng.randrange(4)]
            export = scheduler.exports.offer_cached(hash_blocks(wanted, BLOCK_SIZE, ROOT))
            exports.append((export, contents(export)))
            assert exports[-1][1] == [tuple(wanted[: i + 1]) for i in range(export.num_tokens or 0)]
        elif turn < 500 and len(imports) < 1 and rng.random() < 0.1:
            imports.append(scheduler.begin_import(beginnings[rng.randrange(4)], ROOT))
            scheduler.imports.end(imports[-1])
        elif exports and rng.random() < 0.3:
            export, held = exports.pop()
            assert contents(export) == held
            scheduler.exports.release(export)
        elif imports and rng.random() < 0.3:
            scheduler.imports.drop(imports.pop())
        machine.step()
        scheduler.check()
        events = machine.pool.take_events()
        told = (told - set(events.evicted)) | set(events.stored)
        assert told == set(machine.pool.findable())
        for sequence in [each for each in running if each.finish is not None]:
            running.remove(sequence)
            num_ended += 1
            assert sequence.token_ids == decoded(sequence.token_ids[: sequence.num_prompt_tokens], sequence.params)
        if turn >= 500 and not running and not exports and not imports:
            break
    assert not running, "a sequence starves"
    assert num_ended > 50
    assert machine.pool.counts().owned == 0
    return machine
