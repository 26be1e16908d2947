"""Evicted blocks in host memory: they come back whole, in time, and as long as they are promised."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.target.settings import TargetSettings
from shared.engine import host_pool as host_pool_module
from shared.engine.block_pool import BlockPool
from shared.engine.engine import Engine
from shared.engine.host_pool import HostPool, make_host_tier
from shared.engine.host_tier import BlockMover, HostTier
from shared.engine.kv_export import KVExport
from shared.engine.kv_import import KVImport
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.sequence import Sequence
from shared.prefix.block_hash import hash_blocks, root_hash
from shared.sampling.params import SamplingParams
from shared.sampling.verifier import verify
from shared.settings import StartupError
from tests.support.kv_engine import SHAPE, KVEngine, kv_of, kv_worker
from tests.support.machine import BLOCK_SIZE, ROOT, VOCAB_SIZE, Machine, decoded, new_sequence, run, serve
from tests.support.models import tiny_llama

KV_BLOCK_BYTES = KVPool.block_bytes(SHAPE, BLOCK_SIZE, torch.float32)


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Contents(BlockMover):
    """What blocks and slots hold, a word each."""

    def __init__(self) -> None:
        self.blocks: dict[int, object] = {}
        self.slots: dict[int, object] = {}
        self.num_saved = self.num_settled = 0

    def save(self, block: int, slot: int) -> None:
        self.slots[slot] = self.blocks[block]
        self.num_saved += 1

    def load(self, slot: int, block: int) -> None:
        self.blocks[block] = self.slots[slot]

    def settle(self) -> None:
        self.num_settled += 1


def pool_of(num_blocks: int, num_slots: int) -> tuple[BlockPool, HostTier, Contents]:
    contents = Contents()
    tier = HostTier(num_slots, contents)
    return BlockPool(num_blocks, tier), tier, contents


def store(pool: BlockPool, contents: Contents, *numbers: int) -> None:
    """Computes blocks of these names, and gives them up: the first is the least recently used."""
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        contents.blocks[block] = name(number)
        pool.register(block, name(number))
    for block in blocks:
        pool.release([block])


def forget(pool: BlockPool) -> None:
    """Drives everything out of the pool that nobody owns."""
    pool.release(pool.allocate(pool.num_allocatable))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_slots", [1, 3, 8, 40])
def test_what_is_found_is_what_was_stored_under_random_use(seed: int, num_slots: int) -> None:
    rng = random.Random(f"{seed} {num_slots}")
    pool, tier, contents = pool_of(6, num_slots)
    tables: list[list[int]] = []
    told: set[bytes] = set()
    num_cut_short = num_mixed = 0
    for _ in range(3000):
        action = rng.random()
        if action < 0.2 and pool.num_allocatable:
            blocks = pool.allocate(rng.randint(1, min(3, pool.num_allocatable)))
            for block in blocks:
                contents.blocks[block] = None
            tables.append(blocks)
        elif action < 0.4 and tables:
            for block in rng.choice(tables):
                if contents.blocks[block] is None:
                    new = name(rng.randrange(12))
                    contents.blocks[block] = new
                    pool.register(block, new)
        elif action < 0.8 and len(tables) > 1:
            pool.release(tables.pop(rng.randrange(len(tables))))
        else:
            first = rng.randrange(12)
            wanted = [name(first + i) for i in range(rng.randint(1, 4))]
            where, before = pool.match(wanted), pool.num_restored
            assert len(where) == [*(key in told for key in wanted), False].index(False)
            found = pool.find(wanted)
            assert [contents.blocks[block] for block in found] == wanted[: len(found)]
            if len(found) < len(where):
                num_cut_short += 1
                assert pool.num_allocatable == 0
            assert pool.num_restored - before == where[: len(found)].count(None)
            num_mixed += None in where[: len(found)] and where[len(found) - 1] is not None
            if found:
                tables.append(found)
        events = pool.take_events()
        assert not set(events.stored) & set(events.evicted)
        assert set(events.evicted) <= told | set(events.stored)
        told = (told - set(events.evicted)) | set(events.stored)
        assert told == set(pool.findable())
        assert len(pool.findable()) == len(told)
        pool.check(tables)
        assert len(tier) == pool.num_host_blocks <= num_slots
    assert min(pool.num_restored, num_cut_short, num_mixed) > 0
    assert pool.num_restored > 20 or num_slots == 1


def test_what_was_saved_longest_ago_goes_first() -> None:
    pool, tier, contents = pool_of(3, 2)
    store(pool, contents, 1, 2, 3)
    assert pool.take_events().stored == [name(1), name(2), name(3)]
    forget(pool)
    assert tier.hashes() == [name(2), name(3)]
    # In host memory, it has not gone.
    assert pool.take_events() == ([], [name(1)])
    assert set(pool.findable()) == {name(2), name(3)}
    assert pool.match([name(2), name(3), name(1)]) == [None, None]
    assert pool.match([name(1), name(2)]) == []


def test_what_came_back_goes_first_and_is_not_copied_again_while_it_is_there() -> None:
    pool, tier, contents = pool_of(3, 4)
    store(pool, contents, 1, 2, 3)
    forget(pool)
    assert contents.num_saved == 3
    blocks = pool.find([name(2), name(3)])
    assert [contents.blocks[block] for block in blocks] == [name(2), name(3)]
    # The end of a prefix before its beginning.
    assert tier.hashes() == [name(3), name(2), name(1)]
    pool.release(blocks)
    forget(pool)
    assert contents.num_saved == 3
    assert tier.hashes() == [name(1), name(3), name(2)]
    pool.take_events()
    pool.release(pool.find([name(1)]))
    store(pool, contents, 4)
    store(pool, contents, 5, 6, 7)  # 4 takes the slot that was free, 1's goes to the next, for 1 itself is evicted, too
    assert name(1) in tier.hashes()
    assert pool.take_events().evicted == []


def test_a_hash_that_is_in_the_pool_has_not_gone_when_its_copy_goes() -> None:
    pool, tier, contents = pool_of(4, 2)
    store(pool, contents, 1, 2)
    forget(pool)
    held = pool.find([name(1)])
    pool.take_events()
    store(pool, contents, 3, 4, 5)
    forget(pool)
    assert name(1) not in tier.hashes()
    assert name(1) in pool.findable()
    assert name(1) not in pool.take_events().evicted
    pool.check([held])


def test_what_comes_back_is_not_pushed_out_by_what_makes_room_for_it() -> None:
    """All slots are those of what comes back: what goes for it is lost, and said to be."""
    pool, tier, contents = pool_of(2, 2)
    store(pool, contents, 1, 2)
    forget(pool)
    store(pool, contents, 3, 4)
    pool.take_events()
    blocks = pool.find([name(1), name(2)])
    assert [contents.blocks[block] for block in blocks] == [name(1), name(2)]
    assert pool.take_events() == ([name(1), name(2)], [name(3), name(4)])
    assert tier.hashes() == [name(2), name(1)]
    pool.check([blocks])


def test_what_makes_room_for_what_comes_back_is_saved_in_the_place_of_others() -> None:
    pool, tier, contents = pool_of(1, 2)
    for number in (1, 2, 3):
        store(pool, contents, number)
    assert tier.hashes() == [name(1), name(2)]
    pool.take_events()
    pool.release(pool.find([name(1)]))
    assert pool.take_events().evicted == [name(2)]
    assert tier.hashes() == [name(1), name(3)]


def test_only_as_much_comes_back_as_there_is_room_for() -> None:
    pool, _, contents = pool_of(3, 8)
    store(pool, contents, 1, 2, 3)
    forget(pool)
    owned = pool.allocate(1)
    found = pool.find([name(1), name(2), name(3)])
    assert [contents.blocks[block] for block in found] == [name(1), name(2)]
    assert pool.num_allocatable == 0
    pool.check([owned, found])


def lose_a_slot(tier: HostTier) -> None:
    tier._free.pop()


def list_a_slot_twice(tier: HostTier) -> None:
    tier._free.append(next(iter(tier._slots.values())))


def share_a_slot(tier: HostTier) -> None:
    first, second = list(tier._slots)[:2]
    tier._slots[first] = tier._slots[second]


@pytest.mark.parametrize("corrupt", [lose_a_slot, list_a_slot_twice, share_a_slot])
def test_check_notices_corruption(corrupt: Callable[[HostTier], None]) -> None:
    pool, tier, contents = pool_of(3, 4)
    store(pool, contents, 1, 2, 3)
    forget(pool)
    pool.check([])
    corrupt(tier)
    with pytest.raises(AssertionError, match="slot"):
        pool.check([])


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


def prompt_of(number: int, length: int) -> list[int]:
    return [(number * 11 + 7 * i) % VOCAB_SIZE for i in range(length)]


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


def test_blocks_come_back_byte_for_byte() -> None:
    engine = KVEngine(6, num_host_blocks=20)
    prompt = prompt_of(1, 3 * BLOCK_SIZE + 1)
    finish(engine, new_sequence(prompt, 1))
    hashes = hash_blocks(prompt, BLOCK_SIZE, ROOT)
    blocks = engine.blocks.find(hashes)
    before = [engine.pool.read_block(block) for block in blocks]
    engine.blocks.release(blocks)
    finish(engine, new_sequence(prompt_of(2, 6 * BLOCK_SIZE - 1), 1))
    forget(engine.blocks)
    engine.pool.data.fill_(-1.0)
    assert engine.blocks.match(hashes) == [None] * 3
    blocks = engine.blocks.find(hashes)
    assert [engine.pool.read_block(block) for block in blocks] == before
    assert torch.equal(engine.pool.data[blocks[2], :, :, 3], kv_of(prompt[: 3 * BLOCK_SIZE]))
    engine.blocks.release(blocks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_on_cuda_are_ordered_with_what_overwrites_and_reads_the_blocks() -> None:
    pool = KVPool(SHAPE._replace(num_layers=64), 4, 256, torch.float32, torch.device("cuda"))
    tier = HostPool(pool, 8)
    assert tier.data.is_pinned()
    for turn in range(50):
        pool.data[0].fill_(turn)
        tier.save(0, turn % 8)
        pool.data[0].fill_(-1.0)
        tier.load(turn % 8, 1)
        seen = pool.data[1].clone()
        assert bool((seen == turn).all())
    tier.settle()
    assert [float(slot.min()) for slot in tier.data] == [48, 49, 42, 43, 44, 45, 46, 47]


def finish(engine: KVEngine, sequence: Sequence) -> None:
    engine.scheduler.add(sequence)
    while engine.step() is not None:
        pass
    assert sequence.token_ids == decoded(sequence.token_ids[: sequence.num_prompt_tokens], sequence.params)


async def test_a_peer_gets_a_prefix_from_host_memory() -> None:
    prompt = prompt_of(1, 4 * BLOCK_SIZE)
    async with kv_worker(KVEngine(8, num_host_blocks=20)) as p, kv_worker(KVEngine(8, num_host_blocks=20)) as d:
        for worker, length in ((p, 4 * BLOCK_SIZE), (d, BLOCK_SIZE)):

            def prime(engine: KVEngine = worker.engine, length: int = length) -> None:
                finish(engine, new_sequence(prompt[:length], 1))
                forget(engine.blocks)

            await worker.loop.ask(prime)
        kv_import = await d.loop.ask(lambda: d.engine.scheduler.begin_import(prompt, ROOT))
        assert kv_import.num_held == 1
        fetched = await d.fetcher.fetch(kv_import, p.address, None)
        assert fetched.num_tokens == 4 * BLOCK_SIZE
        assert fetched.num_bytes == 3 * KV_BLOCK_BYTES
        assert (p.engine.blocks.num_restored, d.engine.blocks.num_restored) == (3, 1)
        heir = new_sequence([*prompt, 5], 1)
        heir.kv_import = kv_import
        before = d.engine.num_computed
        await d.loop.ask(lambda: finish(d.engine, heir))  # proves every position
        assert d.engine.num_computed - before == 1
        await d.loop.ask(lambda: d.engine.scheduler.imports.drop(kv_import))
        await p.until_idle()
        await d.until_idle()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder: Path = tiny_llama(tmp_path_factory.mktemp("models") / "llama")
    return CausalLM.load(str(folder), "cpu", "float32")


def generate(engine: Engine, prompt: list[int]) -> tuple[list[int], int, Sequence]:
    """Greedy output of 8 tokens, and how many were computed for it."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    sequence = Sequence(prompt, len(prompt), params, root_hash(engine.fingerprint, b""), num_steps=99)
    engine.scheduler.add(sequence)
    num_computed = 0
    while (outcome := engine.step()) is not None:
        num_computed += outcome.num_tokens
        engine.scheduler.check()
    return sequence.token_ids[len(prompt) :], num_computed, sequence


def test_a_real_model_goes_on_from_blocks_that_were_evicted(model: CausalLM) -> None:
    def settings(num_blocks: int, host_cache_gib: float | None) -> TargetSettings:
        return TargetSettings(
            model="tiny", num_blocks=num_blocks, block_size=8, max_context=64, host_cache_gib=host_cache_gib
        )

    rng = random.Random(1)
    prompts = [[rng.randrange(1, 257) for _ in range(41)] for _ in range(6)]
    roomy = Engine(model, settings(200, None), verify)
    undisturbed = [generate(roomy, prompt)[0] for prompt in prompts]
    engine = Engine(model, settings(8, 1 / 64), verify)
    for turn in range(3):
        for prompt, expected in zip(prompts, undisturbed, strict=True):
            output, num_computed, sequence = generate(engine, prompt)
            assert output == expected
            assert num_computed == (1 if turn else 41) + 7
            assert sequence.num_cached_tokens == (40 if turn else 0)
    assert engine.blocks.num_restored >= 12 * 5 - 8
    assert engine.blocks.num_host_blocks >= 6 * 5 - 8


def kv_pool() -> KVPool:
    return KVPool(SHAPE, 2, BLOCK_SIZE, torch.float32, torch.device("cpu"))


def test_the_setting_says_how_many_blocks_fit() -> None:
    assert make_host_tier(kv_pool(), 3.5 * KV_BLOCK_BYTES / 2**30).num_slots == 3


def test_memory_that_is_not_there_is_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"host_cache_gib is 1e-07: a KV block alone takes"):
        make_host_tier(kv_pool(), 1e-7)
    with pytest.raises(StartupError, match=r"host_cache_gib is 1000000.0: \d+\.\d+ GiB of RAM are free"):
        make_host_tier(kv_pool(), 1e6)

    def no_memory(pool: KVPool, num_slots: int) -> HostPool:
        raise MemoryError

    monkeypatch.setattr(host_pool_module, "HostPool", no_memory)
    with pytest.raises(StartupError, match=r"host_cache_gib is 0.5: so much RAM cannot be had"):
        make_host_tier(kv_pool(), 0.5)
