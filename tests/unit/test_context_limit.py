"""Models that would be others in a longer context, and the context that they are served with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig

from shared.engine.context_limit import context_limit
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.runner import ModelRunner
from shared.engine.self_test import self_test

LONGEST = 256
SHORT = 48

_SHAPE: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": SHORT,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
}
_HALF_SLIDING = {"use_sliding_window": True, "sliding_window": SHORT, "max_window_layers": 2}

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], int]] = {
    "llama": (LlamaConfig, {}, LONGEST),
    "llama, longrope": (LlamaConfig, {"rope_parameters": _LONGROPE | {"factor": 4.0}}, SHORT),
    "phi 3, longrope": (
        Phi3Config,
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": SHORT},
        SHORT,
    ),
    "llama, dynamic": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        LONGEST,
    ),
    "mistral": (MistralConfig, {"sliding_window": SHORT}, LONGEST),
    "mixtral": (MixtralConfig, {"sliding_window": SHORT, "num_local_experts": 4}, LONGEST),
    "qwen 2": (Qwen2Config, _HALF_SLIDING, LONGEST),
    "qwen 3": (Qwen3Config, _HALF_SLIDING, LONGEST),
    "qwen 2, unused": (Qwen2Config, {"use_sliding_window": False, "sliding_window": SHORT}, LONGEST),
    "qwen 2 moe": (Qwen2MoeConfig, _MOE | _HALF_SLIDING | {"shared_expert_intermediate_size": 48}, SHORT),
    "qwen 2 moe, unused": (Qwen2MoeConfig, _MOE | {"shared_expert_intermediate_size": 48}, LONGEST),
    "phi moe": (PhimoeConfig, {"num_local_experts": 4, "sliding_window": SHORT}, SHORT),
    "llama 4": (
        Llama4TextConfig,
        {
            "attention_chunk_size": SHORT,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "no_rope_layers": [1, 0, 1, 0],
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
        SHORT,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest) -> tuple[CausalLM, int]:
    kind, fields, expected = CONFIGS[request.param]
    make: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    model = make(kind(**_SHAPE | fields), dtype=torch.float32)
    return CausalLM(model, request.param), expected


def test_it_is_as_long_as_the_model_stays_the_same(case: tuple[CausalLM, int]) -> None:
    model, expected = case
    assert model.max_context == expected


def test_within_it_a_sequence_depends_on_neither_its_company_nor_how_it_was_cut(case: tuple[CausalLM, int]) -> None:
    model, _ = case
    generator = torch.Generator().manual_seed(1)
    long, short = (torch.randint(203, (n,), generator=generator) for n in (model.max_context, 40))
    expected = [model.reference_logits(text) for text in (long, short)]
    runner = ModelRunner(model, KVPool(model.kv_shape, 64, 16, model.dtype, model.device))
    self_test(model, runner)
    cut = len(long) - 7
    tables = [list(range(17)), list(range(20, 23))]
    first = runner.run_packed(long[:cut].tolist(), [0], [cut], tables[:1], range(cut))
    both = runner.run_packed([*long[cut:].tolist(), *short.tolist()], [cut, 0], [7, 40], tables, range(47))
    for found, wanted in ((torch.cat([first, both[:7]]), expected[0]), (both[7:], expected[1])):
        assert (found - wanted).abs().max() < 1e-3 * wanted.abs().max()


def test_a_model_that_names_no_limit_has_a_large_one() -> None:
    assert context_limit(PreTrainedConfig(), [None]) == (1 << 20, "")


def test_it_says_why() -> None:
    config = PhimoeConfig(max_position_embeddings=LONGEST, sliding_window=SHORT)
    assert context_limit(config, [None, None]) == (SHORT, "layers attend no further by their mask alone")
    assert context_limit(config, [SHORT, SHORT]) == (LONGEST, "")
