"""KV that one scheduler offers and another takes in: blocks conserved at both ends, tokens as of plain decoding."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from shared.engine.block_pool import OutOfBlocks
from shared.engine.kv_export import KVExport
from shared.engine.kv_import import KVImport
from shared.engine.sequence import Finish, Sequence
from shared.engine.step_plan import StepPlan
from shared.sampling.params import SamplingParams
from tests.support.machine import BLOCK_SIZE, ROOT, VOCAB_SIZE, Machine, decoded, new_sequence, run, serve


def ignore() -> None:
    pass


def copy_block(source: Machine, block: int, destination: Machine, into: int) -> None:
    """What a transfer engine does."""
    for i in range(BLOCK_SIZE):
        destination.kv.pop((into, i), None)
        if (block, i) in source.kv:
            destination.kv[into, i] = source.kv[block, i]


def pull(source: Machine, export: KVExport, destination: Machine, kv_import: KVImport) -> None:
    """Brings over all that is ready and not there yet."""
    blocks = export.blocks[kv_import.num_held :]
    into = destination.scheduler.imports.allocate(kv_import, len(blocks))
    for block, other in zip(blocks, into, strict=True):
        copy_block(source, block, destination, other)
    num_tokens = export.num_tokens if export.num_tokens is not None else len(export.block_hashes) * BLOCK_SIZE
    destination.scheduler.imports.arrived(kv_import, into, num_tokens)


def hand_over(source: Machine, destination: Machine, prompt: list[int], indices: list[int], max_tokens: int) -> int:
    """Prefills on one, goes on on the other; returns the tokens the other computed before its first draws."""
    family = [new_sequence(prompt, max_tokens, index, num_steps=1) for index in indices]
    family[0].forks = family[1:]
    source.scheduler.add(family[0])
    export = source.scheduler.exports.offer(family[0], ignore)
    kv_import = destination.scheduler.begin_import(prompt, ROOT)
    while any(len(each.token_ids) == len(prompt) for each in family):
        assert source.step() is not None
        if len(export.blocks) > kv_import.num_held and export.num_tokens is None:
            pull(source, export, destination, kv_import)
    if kv_import.num_tokens < (export.num_tokens or 0):
        pull(source, export, destination, kv_import)
    heirs = []
    for each in family:
        source.scheduler.remove(each)
        heir = Sequence(each.token_ids, len(prompt), each.params, ROOT, num_steps=1 << 20)
        heir.kv_import = kv_import
        destination.scheduler.add(heir)
        heirs.append(heir)
    assert destination.scheduler.schedule() is None, "KV on its way, and yet something runs"
    assert destination.scheduler.num_running == 0
    destination.scheduler.imports.end(kv_import)
    source.scheduler.exports.release(export)
    before = destination.num_computed
    destination.step()
    num_first = destination.num_computed - before
    destination.scheduler.imports.drop(kv_import)
    run(destination, *heirs)
    for machine in (source, destination):
        assert machine.pool.counts().owned == 0
        assert len(machine.scheduler.exports) == len(machine.scheduler.imports) == 0
        machine.scheduler.check()
    return num_first


@pytest.mark.parametrize("length", [1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, 4 * BLOCK_SIZE - 1, 37])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("indices", [[0], [0, 1, 2]])
def test_a_prompt_computed_elsewhere_is_not_computed_again(length: int, budget: int, indices: list[int]) -> None:
    prompt = [3 * i % VOCAB_SIZE for i in range(length)]
    num_first = hand_over(Machine(64, budget), Machine(64), prompt, indices, 9)
    # Each of them its first token; with forks, or where it is all there is, also the prompt's last.
    assert num_first == len(indices) * (2 if len(indices) > 1 or length == 1 else 1)


def test_only_what_is_missing_is_pulled() -> None:
    source, destination = Machine(64), Machine(64)
    shared = list(range(3 * BLOCK_SIZE))
    serve(destination, new_sequence([*shared, 7, 7], 2))
    kv_import = destination.scheduler.begin_import([*shared, *range(20, 30)], ROOT)
    assert kv_import.num_held == 3
    assert kv_import.num_tokens == 3 * BLOCK_SIZE
    sequence = new_sequence([*shared, *range(20, 30)], 2, num_steps=1)
    source.scheduler.add(sequence)
    export = source.scheduler.exports.offer(sequence, ignore)
    source.step()
    pull(source, export, destination, kv_import)
    assert destination.pool.counts().owned == len(export.blocks)


def test_an_export_tells_of_blocks_as_they_become_ready() -> None:
    machine = Machine(64, max_batch_tokens=2 * BLOCK_SIZE)
    told: list[int] = []
    sequence = new_sequence(list(range(5 * BLOCK_SIZE + 1)), 4, num_steps=1)
    machine.scheduler.add(sequence)
    export = machine.scheduler.exports.offer(sequence, lambda: told.append(len(export.blocks)))
    while machine.step() is not None:
        pass
    assert told == [2, 4, 6]
    assert export.num_tokens == 5 * BLOCK_SIZE + 1
    assert export.block_hashes == sequence.block_hashes


def test_an_export_stays_when_its_sequence_ends_and_fails_when_it_ends_too_early() -> None:
    machine = Machine(64, max_batch_tokens=2 * BLOCK_SIZE)
    told: list[bool] = []
    sequence = new_sequence(list(range(18)), 1)
    machine.scheduler.add(sequence)
    export = machine.scheduler.exports.offer(sequence, ignore)
    run(machine, sequence)
    assert export.num_tokens == 18
    assert machine.pool.counts().owned == 5
    early = new_sequence(list(range(30, 48)), 1)
    machine.scheduler.add(early)
    failed = machine.scheduler.exports.offer(early, lambda: told.append(failed.failed))
    machine.step()
    machine.scheduler.remove(early)
    assert told == [False, True]
    machine.scheduler.exports.release(export)
    machine.scheduler.exports.release(failed)
    machine.scheduler.exports.release(failed)
    assert machine.pool.counts().owned == 0


def test_a_sequence_that_goes_on_does_not_write_into_what_it_offered() -> None:
    source, destination = Machine(64), Machine(64)
    sequence = new_sequence([1, 2, 3, 4, 5, 6], 8)
    source.scheduler.add(sequence)
    source.step()
    export = source.scheduler.exports.offer(sequence, ignore)
    assert export.num_tokens == 6
    before = {
        slot: source.kv[slot] for block in export.blocks for i in range(BLOCK_SIZE) if (slot := (block, i)) in source.kv
    }
    run(source, sequence)
    assert {slot: source.kv.get(slot) for slot in before} == before
    kv_import = destination.scheduler.begin_import([1, 2, 3, 4, 5, 6], ROOT)
    pull(source, export, destination, kv_import)
    destination.scheduler.imports.end(kv_import)
    heir = new_sequence([1, 2, 3, 4, 5, 6], 8)
    heir.kv_import = kv_import
    # The last token's logits are wanted: it is computed, whatever came.
    serve(destination, heir)
    assert kv_import.num_waiting == 0


def test_cached_blocks_are_held_for_who_asks_for_them() -> None:
    machine = Machine(8)
    sequence = new_sequence(list(range(3 * BLOCK_SIZE)), 1)
    serve(machine, sequence)
    hashes = list(sequence.block_hashes)
    export = machine.scheduler.exports.offer_cached([*hashes, bytes(32)])
    assert export.block_hashes == hashes
    assert export.num_tokens == 3 * BLOCK_SIZE
    with pytest.raises(OutOfBlocks):
        machine.pool.allocate(6)
    machine.scheduler.exports.release(export)
    assert machine.pool.counts().owned == 0


def test_blocks_in_flight_are_nobodys_until_the_transfer_is_over() -> None:
    machine = Machine(8)
    kv_import = machine.scheduler.begin_import(list(range(4 * BLOCK_SIZE)), ROOT)
    blocks = machine.scheduler.imports.allocate(kv_import, 4)
    machine.scheduler.imports.drop(kv_import)
    assert machine.pool.counts().owned == 4
    machine.scheduler.check()
    machine.scheduler.imports.missed(kv_import, blocks)
    assert machine.pool.counts().owned == len(machine.scheduler.imports) == 0


def test_the_older_of_two_that_want_all_the_blocks_gets_on() -> None:
    """Each import holds half the pool, and neither sequence fits beside the other's."""
    source, destination = Machine(64), Machine(8)
    prompts = [[10 + i for i in range(4 * BLOCK_SIZE)], [30 + i for i in range(4 * BLOCK_SIZE)]]
    imports, heirs = [], []
    for prompt in prompts:
        sequence = new_sequence(prompt, 6, num_steps=1)
        source.scheduler.add(sequence)
        export = source.scheduler.exports.offer(sequence, ignore)
        source.step()
        kv_import = destination.scheduler.begin_import(prompt, ROOT)
        pull(source, export, destination, kv_import)
        imports.append(kv_import)
        heirs.append(Sequence(sequence.token_ids, len(prompt), sequence.params, ROOT, num_steps=1 << 20))
    for heir, kv_import in zip(heirs, imports, strict=True):
        heir.kv_import = kv_import
        destination.scheduler.add(heir)
        destination.scheduler.imports.end(kv_import)
        destination.scheduler.imports.drop(kv_import)
    run(destination, *heirs)
    assert destination.pool.counts().owned == 0


def test_one_that_came_later_does_not_stand_before_one_whose_kv_was_sent_for() -> None:
    machine = Machine(6)
    kv_import = machine.scheduler.begin_import(list(range(4 * BLOCK_SIZE)), ROOT)
    blocks = machine.scheduler.imports.allocate(kv_import, 4)
    large = new_sequence([7] * (4 * BLOCK_SIZE), 2)
    machine.scheduler.add(large)
    assert machine.step() is None
    for number, block in enumerate(blocks):
        for i in range(BLOCK_SIZE):
            machine.kv[block, i] = tuple(range(number * BLOCK_SIZE + i + 1))
    machine.scheduler.imports.arrived(kv_import, blocks, 4 * BLOCK_SIZE)
    heir = new_sequence([*range(4 * BLOCK_SIZE), 9], 2)
    heir.kv_import = kv_import
    machine.scheduler.add(heir)
    machine.scheduler.imports.end(kv_import)
    machine.scheduler.imports.drop(kv_import)
    run(machine, heir, large)


@dataclass(eq=False)
class HandOver:
    """One prompt on its way from P to D in random traffic."""

    prompt: list[int]
    family: list[Sequence]
    export: KVExport
    kv_import: KVImport
    heirs: list[Sequence] = field(default_factory=list)
    flights: list[tuple[list[int], list[int], int]] = field(default_factory=list)
    num_asked: int = 0
    dropped: bool = False


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_p", "num_d"), [(14, 14), (14, 200), (200, 12), (200, 200)])
def test_random_hand_overs_lose_no_block_and_no_token(seed: int, num_p: int, num_d: int) -> None:
    """Transfers that stall, fail, are dropped or cut off at any point; sequences released at any point."""
    rng = random.Random(f"{seed} {num_p} {num_d}")
    p, d = Machine(num_p, 9), Machine(num_d, 9, max_sequences=3)
    under_way: list[HandOver] = []
    ended: list[Sequence] = []
    num_whole = 0
    beginnings = [[rng.randrange(VOCAB_SIZE) for _ in range(16)] for _ in range(2)]
    for turn in range(20_000):
        if turn < 400 and len(under_way) < 6 and rng.random() < 0.3:
            prompt = beginnings[rng.randrange(2)][: rng.randrange(17)]
            prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0 if prompt else 1, 12))]
            params = [
                SamplingParams(temperature=0.0, max_tokens=rng.randint(2, 12), sequence_index=i)
                for i in range(rng.choice([1, 1, 3]))
            ]
            family = [Sequence(prompt, len(prompt), each, ROOT, num_steps=1) for each in params]
            family[0].forks = family[1:]
            p.scheduler.add(family[0])
            export = p.scheduler.exports.offer(family[0], ignore)
            under_way.append(HandOver(prompt, family, export, d.scheduler.begin_import(prompt, ROOT)))
        for each in list(under_way):
            imports = d.scheduler.imports
            # The transfer: asks for room for what is ready, takes a while, arrives or fails.
            if not each.kv_import.ended:
                ready = len(each.export.blocks)
                each.num_asked = max(each.num_asked, each.kv_import.num_held)
                if ready > each.num_asked and rng.random() < 0.5 and not each.flights:
                    sources = each.export.blocks[each.num_asked :]
                    total = each.export.num_tokens
                    num_tokens = total if total is not None else len(each.export.block_hashes) * BLOCK_SIZE
                    try:
                        each.flights.append((sources, imports.allocate(each.kv_import, len(sources)), num_tokens))
                        each.num_asked = ready
                    except OutOfBlocks:
                        imports.end(each.kv_import)
            if each.flights and rng.random() < 0.5:
                sources, into, num_tokens = each.flights.pop()
                if rng.random() < 0.9 and each.export.blocks:
                    for source, destination in zip(sources, into, strict=True):
                        copy_block(p, source, d, destination)
                    imports.arrived(each.kv_import, into, num_tokens)
                else:
                    imports.missed(each.kv_import, into)
                    imports.end(each.kv_import)
            whole = each.export.num_tokens is not None and each.num_asked >= len(each.export.blocks)
            if not each.flights and (whole or each.export.failed or rng.random() < 0.01):
                num_whole += whole
                imports.end(each.kv_import)
            # P draws the first tokens; D goes on.
            drawn = [one for one in each.family if len(one.token_ids) > len(each.prompt)]
            if not each.heirs and len(drawn) == len(each.family):
                for one in each.family:
                    p.scheduler.remove(one)
                    heir = Sequence(one.token_ids, len(each.prompt), one.params, ROOT, num_steps=1 << 20)
                    heir.kv_import = each.kv_import
                    d.scheduler.add(heir)
                    each.heirs.append(heir)
                imports.drop(each.kv_import)
                each.dropped = True
            if rng.random() < 0.004 and turn < 400:  # the client leaves, or P is gone
                for one in each.family:
                    p.scheduler.remove(one)
                for heir in each.heirs:
                    d.scheduler.remove(heir)
                imports.drop(each.kv_import)
                p.scheduler.exports.release(each.export)
                for _, into, _ in each.flights:
                    imports.missed(each.kv_import, into)
                under_way.remove(each)
            elif each.heirs and all(heir.finish is not None for heir in each.heirs):
                for _, into, _ in each.flights:
                    imports.missed(each.kv_import, into)
                p.scheduler.exports.release(each.export)
                ended += each.heirs
                under_way.remove(each)
            elif each.kv_import.ended and rng.random() < 0.5:
                p.scheduler.exports.release(each.export)  # acknowledged, or its lease is over
        p.step()
        d.step()
        if turn >= 400 and not under_way:
            break
    assert not under_way, "a hand-over never ends"
    assert len(ended) > 20
    assert num_whole > 10
    for heir in ended:
        assert heir.finish is Finish.LENGTH
        assert heir.token_ids == decoded(heir.token_ids[: heir.num_prompt_tokens], heir.params)
    for machine in (p, d):
        assert machine.pool.counts().owned == 0
        assert len(machine.scheduler.exports) == len(machine.scheduler.imports) == 0
        assert machine.scheduler.is_empty


def test_a_lack_of_places_takes_no_blocks_from_what_comes() -> None:
    machine = Machine(64, max_sequences=1)
    machine.scheduler.add(new_sequence([1, 2, 3], 20))
    machine.scheduler.add(new_sequence([4, 5, 6], 2))
    serve_prefix = new_sequence(list(range(20, 28)), 1)
    machine.step()
    kv_import = machine.scheduler.begin_import(serve_prefix.token_ids, ROOT)
    blocks = machine.scheduler.imports.allocate(kv_import, 2)
    for number, block in enumerate(blocks):
        for i in range(BLOCK_SIZE):
            machine.kv[block, i] = tuple(range(20, 20 + number * BLOCK_SIZE + i + 1))
    machine.scheduler.imports.arrived(kv_import, blocks, 2 * BLOCK_SIZE)
    machine.step()
    assert kv_import.num_held == 2
    assert not kv_import.ended


def test_what_gave_its_blocks_up_asks_for_no_more() -> None:
    machine = Machine(8)
    kv_import = machine.scheduler.begin_import(list(range(4 * BLOCK_SIZE)), ROOT)
    machine.scheduler.imports.arrived(kv_import, machine.scheduler.imports.allocate(kv_import, 1), BLOCK_SIZE)
    assert machine.scheduler.imports.surrender(-1)
    with pytest.raises(OutOfBlocks):
        machine.scheduler.imports.allocate(kv_import, 1)


def test_a_sequence_that_is_preempted_is_offered_no_more() -> None:
    """Its readers would hold the very blocks that it needs to begin again."""
    machine = Machine(10, max_batch_tokens=8)
    older = new_sequence([1, 2, 3, 4], 20)
    machine.scheduler.add(older)
    machine.step()
    younger = new_sequence(list(range(20, 48)), 2, num_steps=1)
    machine.scheduler.add(younger)
    told: list[bool] = []
    export = machine.scheduler.exports.offer(younger, lambda: told.append(export.failed))
    while younger in machine.sequences and not export.failed and export.num_tokens is None:
        machine.step()
        if export.blocks and not export.failed:
            machine.scheduler._preempt(younger, StepPlan())
    assert told[-1]
    machine.scheduler.exports.release(export)
    run(machine, older)
