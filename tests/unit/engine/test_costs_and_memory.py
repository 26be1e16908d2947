"""What an engine finds out at start: what its steps cost, and how large a cache fits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.target.settings import TargetSettings
from shared.engine import engine as engine_module
from shared.engine.engine import Engine
from shared.engine.kv_pool import KVPool, KVShape
from shared.engine.memory import DeviceMemory
from shared.engine.model import CausalLM
from shared.engine.runner import ModelRunner
from shared.sampling.verifier import verify
from shared.settings import StartupError
from shared.worker.service import load_engine
from tests.support.models import tiny_llama
from tests.support.tiny_engine import PROMPTS, drain, engine_for, greedy


def test_a_warmed_up_engine_generates_the_same_and_knows_its_costs(
    folder: Path, generated: dict[tuple[int, ...], list[int]]
) -> None:
    engine = engine_for(CausalLM.load(str(folder), "cpu", "float32"), num_blocks=40)
    engine.warm_up()
    sizes, seconds = zip(*engine.step_costs, strict=True)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert min(seconds) > 0
    assert engine.blocks.counts() == (40, 0, 0, 40)
    sequence = greedy(engine, PROMPTS[3])
    engine.scheduler.add(sequence)
    drain(engine)
    assert sequence.token_ids == generated[PROMPTS[3]]


def test_of_a_steps_tokens_those_of_prompts_are_told_apart(model: CausalLM) -> None:
    engine = engine_for(model)
    one, other = greedy(engine, PROMPTS[3]), greedy(engine, PROMPTS[2])
    engine.scheduler.add(one)
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.num_tokens, outcome.num_prefill_tokens) == (len(PROMPTS[3]), len(PROMPTS[3]) - 1)
    engine.scheduler.add(other)
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.num_tokens, outcome.num_prefill_tokens) == (len(PROMPTS[2]) + 1, len(PROMPTS[2]) - 1)
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.num_tokens, outcome.num_prefill_tokens) == (2, 0)


@pytest.mark.parametrize(("turn_seconds", "turns"), [(0.1, 6), (4.0, 2)])
def test_step_costs_are_the_fastest_of_several_turns_within_a_time(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, turn_seconds: float, turns: int
) -> None:
    engine = engine_for(model)
    now, measured = [0.0], []

    def measure(size: int) -> float:
        measured.append(size)
        now[0] += turn_seconds / 3
        return 10.0 - len(measured)

    monkeypatch.setattr("shared.engine.runner._MEASURED_TURNS", 6)
    monkeypatch.setattr(engine._runner, "_measure", measure)
    monkeypatch.setattr("shared.engine.runner.time.perf_counter", lambda: now[0])
    costs = engine._runner.measure((1, 2, 8))
    assert measured == [1, 2, 8] * turns
    assert costs == [(1, 10.0 - (3 * turns - 2)), (2, 10.0 - (3 * turns - 1)), (8, 10.0 - 3 * turns)]


def test_the_context_is_the_least_of_model_setting_and_pool(model: CausalLM) -> None:
    assert engine_for(model).max_context == model.max_context == 512
    assert engine_for(model, max_context=100).max_context == 100
    assert engine_for(model, num_blocks=3).max_context == 48


def test_blocks_are_counted_from_memory(model: CausalLM) -> None:
    # 2 layers, key and value, 16 positions, 2 heads of 16, 4 bytes: 8 KiB a block.
    settings = TargetSettings(model="tiny", kv_cache_gib=1 / 1024)
    assert Engine(model, settings, verify).blocks.counts().total == 128
    with pytest.raises(StartupError, match=r"kv_cache_gib is 1e-06: a KV block alone takes"):
        Engine(model, settings.model_copy(update={"kv_cache_gib": 1e-6}), verify)


@pytest.mark.parametrize(
    ("available", "limits", "num_blocks"),
    [
        (1 << 20, {}, 57),  # 0.45 of 1 MiB
        (1 << 20, {"memory_share": 0.3}, 19),
        (1 << 40, {}, 256 * 512 // 16),  # all that all sequences could ever hold
        (1 << 40, {"max_sequences": 3, "max_context": 100}, 3 * 7),
        (1 << 20, {"kv_cache_gib": 1 / 1024}, 128),
        (1 << 20, {"num_blocks": 5}, 5),
    ],
)
def test_without_a_setting_the_cache_is_a_share_of_free_memory(
    model: CausalLM, available: int, limits: dict[str, Any], num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "available_memory", lambda: available)
    engine = Engine(model, TargetSettings(model="tiny", **limits), verify)
    assert engine.blocks.counts().total == num_blocks


def test_too_little_free_memory_is_named(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "available_memory", lambda: 20_000)
    with pytest.raises(
        StartupError, match=r"free memory of cpu leaves 0\.000 GiB for the KV cache, .* set kv_cache_gib"
    ):
        Engine(model, TargetSettings(model="tiny"), verify)


@pytest.mark.parametrize("setting", [{"num_blocks": 4}, {"kv_cache_gib": 4 * 8 / 2**20}])
def test_what_a_setting_asks_for_is_taken_at_start_or_refused(
    model: CausalLM, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = []
    monkeypatch.setattr(KVPool, "commit", lambda pool: committed.append(pool.num_blocks))
    Engine(model, TargetSettings(model="tiny"), verify)
    assert not committed
    settings = TargetSettings(model="tiny", **setting)
    monkeypatch.setattr(engine_module, "available_memory", lambda: 4 * 8 * 1024)
    Engine(model, settings, verify)
    assert committed == [4]
    monkeypatch.setattr(engine_module, "available_memory", lambda: 4 * 8 * 1024 - 1)
    with pytest.raises(StartupError, match=r"4 KV blocks take 0\.000 GiB, and 0\.000 are free: lower num_blocks"):
        Engine(model, settings, verify)


def on_cuda(model: CausalLM) -> CausalLM:
    """The model as it would look on a CUDA device."""
    there = copy.copy(model)
    there.device = torch.device("cuda")
    return there


def test_on_cuda_the_cache_is_what_weights_and_the_largest_step_leave(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[int]] = []
    run_packed = ModelRunner.run_packed

    def on_cpu(runner: ModelRunner, tokens: Tokens[int], starts: Tokens[int], *rest: Any) -> Tensor:
        ran.append([len(tokens), *starts])
        runner.model = model
        return run_packed(runner, tokens, starts, *rest)

    def host_pool(shape: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> KVPool:
        assert device.type == "cuda"
        return KVPool(shape, num_blocks, block_size, dtype, torch.device("cpu"))

    def measure(device: torch.device, run_largest_step: Callable[[], object]) -> DeviceMemory:
        with monkeypatch.context() as patched:
            patched.setattr(ModelRunner, "run_packed", on_cpu)
            patched.setattr(engine_module, "KVPool", host_pool)
            run_largest_step()
        return DeviceMemory(total=10 << 20, free=8 << 20, own=1 << 20, step=1 << 20)

    monkeypatch.setattr(engine_module, "measure_device", measure)
    settings = TargetSettings(model="tiny", max_batch_tokens=100)
    # 0.9 of 10 MiB, less 2 in use and 1 for a step, in blocks of 8 KiB.
    assert engine_module._blocks_that_fit(on_cuda(model), settings, verify) == 6 * 128
    assert ran == [[100, 512 - 100]]


def test_a_largest_step_that_fails_is_named(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no room\nat all")

    monkeypatch.setattr(ModelRunner, "run_packed", failing)
    with pytest.raises(StartupError, match=r"a step of max_batch_tokens, 512, fails on cpu \(.*: no room at all\)"):
        engine_module._run_largest_step(model, TargetSettings(model="tiny"), verify, 512)


def test_start_up_says_how_many_tokens_fit(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        load_engine(TargetSettings(model=str(folder), device="cpu", block_size=8, num_blocks=30), verify)
    (ready,) = [record.__dict__ for record in caplog.records if record.message == "model ready"]
    assert (ready["blocks"], ready["kv_tokens"]) == (30, 240)


def test_a_pool_too_large_for_the_machine_is_named(model: CausalLM) -> None:
    with pytest.raises(StartupError, match=r"10000000000000 KV blocks cannot be had on cpu: lower num_blocks"):
        engine_for(model, num_blocks=10**13)


def test_a_pool_too_small_for_the_self_test_is_named(model: CausalLM) -> None:
    with pytest.raises(StartupError, match="num_blocks is 5: at least 6 are needed"):
        engine_for(model, num_blocks=5).warm_up()


@pytest.mark.parametrize("limits", [(1, 64), (1, 32), (2, 16)], ids=str)
def test_few_sequences_of_few_tokens_have_blocks_enough_to_start(folder: Path, limits: tuple[int, int]) -> None:
    max_sequences, max_context = limits
    settings = TargetSettings(model=str(folder), device="cpu", max_sequences=max_sequences, max_context=max_context)
    assert load_engine(settings, verify).max_context == max_context


def test_the_fingerprint_tells_weights_block_sizes_and_nothing_else_apart(folder: Path, tmp_path: Path) -> None:
    def fingerprint(source: Path, block_size: int = 16) -> str:
        return CausalLM.load(str(source), "cpu", "float32").fingerprint(block_size)

    same = fingerprint(folder)
    assert fingerprint(tiny_llama(tmp_path / "a copy elsewhere")) == same
    assert fingerprint(folder, 32) != same
    assert fingerprint(tiny_llama(tmp_path / "other", seed=1)) != same
    assert CausalLM.load(str(folder), "cpu", "bfloat16").fingerprint(16) != same
