"""Host memory behind real KV pools: blocks come back byte for byte, and no more is taken than there is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from services.target.settings import TargetSettings
from shared.engine import host_pool as host_pool_module
from shared.engine.engine import Engine
from shared.engine.host_pool import HostPool, make_host_tier
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.sequence import Sequence
from shared.prefix.block_hash import hash_blocks, root_hash
from shared.sampling.params import SamplingParams
from shared.sampling.verifier import verify
from shared.settings import StartupError
from tests.support.eviction import forget, prompt_of
from tests.support.kv_engine import SHAPE, KVEngine, kv_of, kv_worker
from tests.support.machine import BLOCK_SIZE, ROOT, decoded, new_sequence
from tests.support.models import tiny_llama

KV_BLOCK_BYTES = KVPool.block_bytes(SHAPE, BLOCK_SIZE, torch.float32)


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


def test_what_is_promised_to_the_kv_cache_is_not_the_host_caches(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(num_blocks: int | None) -> TargetSettings:
        return TargetSettings(model="tiny", num_blocks=num_blocks, block_size=8, max_context=64, host_cache_gib=0.01)

    monkeypatch.setattr(host_pool_module, "available_memory", lambda: 16 << 20)
    Engine(model, settings(8), verify)
    # One that nobody sized is taken bit by bit, and takes 2,048 blocks of 4 KiB in the end.
    with pytest.raises(StartupError, match=r"host_cache_gib is 0.01: 0.008 GiB of RAM are free beside the KV cache"):
        Engine(model, settings(None), verify)


def kv_pool() -> KVPool:
    return KVPool(SHAPE, 2, BLOCK_SIZE, torch.float32, torch.device("cpu"))


def test_the_setting_says_how_many_blocks_fit() -> None:
    assert make_host_tier(kv_pool(), 3.5 * KV_BLOCK_BYTES / 2**30).num_slots == 3


def test_memory_that_is_not_there_is_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"host_cache_gib is 1e-07: a KV block alone takes"):
        make_host_tier(kv_pool(), 1e-7)
    with pytest.raises(StartupError, match=r"host_cache_gib is 1000000.0: \d+\.\d+ GiB of RAM are free"):
        make_host_tier(kv_pool(), 1e6)
    with pytest.raises(StartupError, match=r"host_cache_gib is 0.001: 0.000 GiB of RAM are free"):
        make_host_tier(kv_pool(), 0.001, num_promised_bytes=10**15)

    def no_memory(pool: KVPool, num_slots: int) -> HostPool:
        raise MemoryError

    monkeypatch.setattr(host_pool_module, "HostPool", no_memory)
    with pytest.raises(StartupError, match=r"host_cache_gib is 0.5: so much RAM cannot be had"):
        make_host_tier(kv_pool(), 0.5)
