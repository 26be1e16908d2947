"""Models whose weights were packed for oneDNN, or as layers for kernels of our own, compute what they did before."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.engine.kv_pool import KVPool
from shared.engine.linear import can_pack
from shared.engine.model import CausalLM
from shared.engine.packed_llama import PackedLlama
from shared.engine.runner import ModelRunner
from shared.engine.self_test import self_test
from shared.settings import StartupError
from tests.support.families import tiny_checkpoint
from tests.support.kernels import kernels
from tests.support.models import DEMO_TARGET

# Not on CPUs without AVX-512.
ONEDNN_HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
LENGTH = 100  # a first chunk of more rows than count as few, then small ones
CHUNKS = (70, 1, 9, 20)


def runner(model: CausalLM) -> ModelRunner:
    return ModelRunner(model, KVPool(model.kv_shape, 16, 16, model.dtype, model.device))


def chunked_logits(model: CausalLM, tokens: Tensor) -> Tensor:
    """Logits at every position, computed in CHUNKS over paged KV."""
    run, start, parts = runner(model), 0, []
    for size in CHUNKS:
        chunk = tokens[start : start + size].tolist()
        parts.append(run.run_packed(chunk, [start], [size], [list(range(15, -1, -1))], range(size)))
        start += size
    return torch.cat(parts).float()


@pytest.fixture(params=["llama", "qwen3", "gpt_oss by kernels"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> CausalLM:
    """A Llama (tied embeddings) takes the forward of its own; any other keeps its own, over packed layers."""
    if request.param == "gpt_oss by kernels":
        kernels("avx2")
        tiny_checkpoint("gpt_oss", tmp_path, seed=1)
        return CausalLM.load(str(tmp_path), "cpu", "bfloat16")
    if request.param == "llama":
        return CausalLM.load(str(DEMO_TARGET), "cpu", "bfloat16", "off")
    tiny_checkpoint("qwen3", tmp_path, seed=1)
    return CausalLM.load(str(tmp_path), "cpu", "bfloat16", "off")


def test_packed_logits_are_the_models_own(model: CausalLM) -> None:
    tokens = torch.randint(model.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    exact = model.reference_logits(tokens).float()
    plain = chunked_logits(model, tokens)
    model.pack()
    packed = chunked_logits(model, tokens)
    # Rounding to bf16 in another order: packed is no farther from the model's own forward than plain paged
    # attention is, but for a little luck.
    rounding = (plain - exact).abs().max()
    assert rounding > 0
    assert (packed - exact).abs().max() < 2 * rounding
    assert (packed.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells of memory in another way")
@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_weights_are_held_once(family: str, tmp_path: Path) -> None:
    kernels("avx2")
    tiny_checkpoint(family, tmp_path / "float32", seed=1)
    CausalLM.load(str(tmp_path / "float32"), "cpu", "bfloat16")._model.save_pretrained(tmp_path)

    def is_mapped() -> bool:
        gc.collect()
        return str(tmp_path / "model.safetensors") in Path("/proc/self/maps").read_text()

    model = CausalLM.load(str(tmp_path), "cpu", "bfloat16")
    assert is_mapped()
    model.pack()
    assert not is_mapped()


def test_only_exact_llamas_in_bf16_take_the_llama_forward(tmp_path: Path) -> None:
    def fits(model: CausalLM) -> bool:
        return PackedLlama.fits(model._model)

    assert fits(CausalLM.load(str(DEMO_TARGET), "cpu", "bfloat16")) == ONEDNN_HAS_BF16
    assert not fits(CausalLM.load(str(DEMO_TARGET), "cpu", "float32"))
    tiny_checkpoint("mistral", tmp_path, seed=1)
    assert not fits(CausalLM.load(str(tmp_path), "cpu", "bfloat16"))


def test_float32_is_left_as_it_is() -> None:
    assert not can_pack(torch.zeros(2, 2))
    assert can_pack(torch.zeros(2, 2, dtype=torch.bfloat16)) == ONEDNN_HAS_BF16


def test_what_has_nothing_to_pack_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To see which layers share their input; on a GPU there is nothing to pack."""
    tiny_checkpoint("qwen3", tmp_path)
    model = CausalLM.load(str(tmp_path), "cpu", "float32", "off")
    monkeypatch.setattr(model, "reference_logits", lambda _: pytest.fail("it was run"))
    model.pack()


def test_the_self_test_sees_packing_that_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ONEDNN_HAS_BF16:
        pytest.skip("oneDNN has no kernels in bf16 for this CPU")
    model = CausalLM.load(str(DEMO_TARGET), "cpu", "bfloat16", "off")
    pack = model.pack

    def pack_wrongly() -> None:
        pack()
        assert isinstance(model._packed, PackedLlama)
        model._packed._scale *= 2

    monkeypatch.setattr(model, "pack", pack_wrongly)
    with pytest.raises(StartupError, match="differ"):
        self_test(model, runner(model))


@pytest.mark.parametrize("lengths", [[2], [1, 3]])
def test_a_step_that_has_not_as_many_tokens_as_it_says_does_not_run(lengths: list[int]) -> None:
    model = CausalLM.load(str(DEMO_TARGET), "cpu", "float32", "off")
    tables = [[i] for i in range(len(lengths))]
    with pytest.raises(ValueError, match=f"a step of {sum(lengths)} tokens has 3"):
        runner(model).run_packed([1, 2, 3], [0] * len(lengths), lengths, tables, [0])
