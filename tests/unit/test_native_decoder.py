"""Whole decoders by kernels of our own, of every family they describe, against transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from shared.engine import model as model_module
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.native.decoder import NativeDecoder
from shared.engine.runner import ModelRunner
from shared.engine.self_test import self_test
from shared.settings import StartupError
from tests.support.kernels import INSTRUCTION_SETS, kernels

WINDOW = 9
SIZES: dict[str, Any] = {
    "vocab_size": 203,  # no whole number of panels
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases, tied": LlamaConfig(
        **SIZES | {"tie_word_embeddings": True}, attention_bias=True, mlp_bias=True
    ),
    "llama 3's frequencies": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen 2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen 3": Qwen3Config(**SIZES),
    "gemma 2": Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=20, attn_logit_softcapping=3.0,
                            final_logit_softcapping=5.0),
    "gemma 3, tied": Gemma3TextConfig(**SIZES | {"tie_word_embeddings": True}, sliding_window=WINDOW,
                                      query_pre_attn_scalar=20,
                                      layer_types=["sliding_attention", "full_attention"] * 2),
    "phi 3": Phi3Config(**SIZES),
    "phi 3 that turns a part": Phi3Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                                                                    "partial_rotary_factor": 0.5}),
}  # fmt: skip
LENGTH = 90
CHUNKS = (37, 1, 2, 6, 13, 31)


def checkpoint(config: PreTrainedConfig, folder: Path) -> str:
    """A random model in bf16 whose norms and biases are no plain ones or zeros."""
    make: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = make(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(0 if name.endswith("bias") else 1, 0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def native(source: str, instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    library = kernels(instruction_set)
    monkeypatch.setattr(model_module, "load_library", lambda: library)
    return CausalLM.load(source, "cpu", "bfloat16")


def chunked_logits(model: CausalLM, tokens: Tensor) -> Tensor:
    runner = ModelRunner(model, KVPool(model.kv_shape, 16, 8, model.dtype, model.device))
    runner.pool.data.fill_(torch.nan)
    start, parts = 0, []
    for size in CHUNKS:
        chunk = tokens[start : start + size].tolist()
        parts.append(runner.run_packed(chunk, [start], [size], [list(range(15, -1, -1))], range(size)))
        start += size
    return torch.cat(parts)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_logits_are_nearer_to_float32_than_the_models_own(
    instruction_set: str, config: PreTrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(config, tmp_path)
    tokens = torch.randint(203, (LENGTH,), generator=torch.Generator().manual_seed(1))
    exact = CausalLM.load(source, "cpu", "float32", "off").reference_logits(tokens)
    model = native(source, instruction_set, monkeypatch)
    own = model.reference_logits(tokens).float()
    model.pack()
    assert isinstance(model._packed, NativeDecoder)
    got = chunked_logits(model, tokens)
    assert got.dtype == torch.float32
    rounding = (own - exact).square().mean().sqrt()
    assert (got - exact).square().mean().sqrt() < 0.7 * rounding
    # Where it has room: its own bf16 forward is no measure of where one position or layer goes wrong. With AVX-512
    # queries and attention's weights are rounded to bf16, as in the model's own, which is 0.12 off in one of these.
    assert (got - exact).abs().max() < 0.08 * exact.abs().max()


@pytest.mark.parametrize("name", ["llama", "gemma 3, tied"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_sequences_logits_are_the_same_to_the_bit_in_any_company(
    instruction_set: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its tokens are cut into steps, whatever else is in them, and on however many threads."""
    model = native(checkpoint(FAMILIES[name], tmp_path), instruction_set, monkeypatch)
    model.pack()
    rng = random.Random(0)
    tokens = [rng.randrange(203) for _ in range(600)]
    table = rng.sample(range(80), 80)

    def logits(cuts: list[int], others: int, num_threads: int) -> Tensor:
        runner = ModelRunner(model, KVPool(model.kv_shape, 80 + 8 * others, 8, model.dtype, model.device))
        torch.set_num_threads(num_threads)
        parts, start = [], 0
        for end in [*cuts, len(tokens)]:
            lengths = [rng.randrange(1, 30) for _ in range(others)]
            company = [rng.randrange(203) for _ in range(sum(lengths))]
            tables = [list(range(80 + 8 * i, 88 + 8 * i)) for i in range(others)]
            rows = range(len(company), len(company) + end - start)
            parts.append(
                runner.run_packed(
                    company + tokens[start:end], [0] * others + [start], [*lengths, end - start], [*tables, table], rows
                )
            )
            start = end
        return torch.cat(parts)

    threads = torch.get_num_threads()
    try:
        whole = logits([], 0, 1)
        assert torch.equal(logits([256, 300, *range(301, 340), 512], 0, 2), whole)
        assert torch.equal(logits([100, 107, 116, 520], 5, 3), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_value_that_rounds_to_infinity_spreads_to_no_token(
    instruction_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the largest number that bf16 has and the largest of float32: infinite only in the pool."""
    model = native(checkpoint(FAMILIES["llama with biases, tied"], tmp_path), instruction_set, monkeypatch)
    decoder: Any = model._model.model
    layer, token = decoder.layers[0], 7
    with torch.no_grad():
        decoder.embed_tokens.weight[:, 0] = 0.0
        decoder.embed_tokens.weight[token] = 0.0
        decoder.embed_tokens.weight[token, 0] = 1.0
        layer.input_layernorm.weight[0] = 1.0
        normalised = torch.tensor(SIZES["hidden_size"] ** 0.5).bfloat16().double()
        values = layer.self_attn.v_proj
        values.weight[0] = 0.0
        values.weight[0, 0] = 3.37e38 / normalised
        values.bias[0] = 3.4024e38 - values.weight[0, 0].double() * normalised
        layer.self_attn.o_proj.weight[:, [0, SIZES["head_dim"]]] = 0.0  # of the heads that see it
    model.pack()
    tokens = torch.randint(token + 1, 203, (LENGTH,), generator=torch.Generator().manual_seed(1))
    tokens[40] = token
    assert chunked_logits(model, tokens).isfinite().all()


def test_positions_beyond_those_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = native(checkpoint(FAMILIES["llama"], tmp_path), "avx2", monkeypatch)
    tokens = torch.randint(203, (2100,), generator=torch.Generator().manual_seed(2))
    expected = model.reference_logits(tokens)[-1].float()
    model.pack()
    runner = ModelRunner(model, KVPool(model.kv_shape, 132, 16, model.dtype, model.device))
    got = runner.run_packed(tokens.tolist(), [0], [2100], [list(range(132))], [2099])[0]
    assert (got - expected).abs().max() < 0.1 * expected.abs().max()


def test_weights_are_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = native(checkpoint(FAMILIES["gemma 3, tied"], tmp_path), "avx2", monkeypatch)
    model.pack()
    left = {name for name, weight in model._model.named_parameters() if weight.numel() and weight.dim() > 1}
    assert left == set()


UNUSUAL: dict[str, PreTrainedConfig] = {
    "frequencies that change with the length": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "another activation": LlamaConfig(**SIZES, hidden_act="relu"),
}


@pytest.mark.parametrize("config", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_what_cannot_be_described_runs_its_own_forward(
    config: PreTrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = native(checkpoint(config, tmp_path), "avx2", monkeypatch)
    tokens = torch.randint(203, (LENGTH,), generator=torch.Generator().manual_seed(1))
    expected = model.reference_logits(tokens).float()
    model.pack()
    assert model._packed is None
    assert (chunked_logits(model, tokens) - expected).abs().max() < 0.1 * expected.abs().max()


def test_the_self_test_sees_kernels_that_compute_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = native(checkpoint(FAMILIES["llama"], tmp_path), "avx2", monkeypatch)
    pack = model.pack

    def pack_wrongly() -> None:
        pack()
        assert isinstance(model._packed, NativeDecoder)
        model._packed._struct.layers[2].attention.scale *= 1.3

    monkeypatch.setattr(model, "pack", pack_wrongly)
    with pytest.raises(StartupError, match="differ"):
        self_test(model, ModelRunner(model, KVPool(model.kv_shape, 16, 16, model.dtype, model.device)))
