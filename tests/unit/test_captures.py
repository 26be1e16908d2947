"""What a model's layers are given, and its first layers alone, against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.native.decoder import NativeDecoder
from shared.engine.runner import ModelRunner
from shared.engine.self_test import self_test
from shared.settings import StartupError
from tests.support.families import tiny_checkpoint
from tests.support.models import tiny_llama
from tests.unit.test_native_decoder import FAMILIES as DECODERS
from tests.unit.test_native_decoder import checkpoint

LENGTH = 40
SERVED = ["gemma2", "gpt2", "gpt_oss", "mistral", "qwen3"]


def served(path: str, dtype: str, native: Any, layers: list[int]) -> tuple[CausalLM, ModelRunner]:
    model = CausalLM.load(path, device="cpu", dtype=dtype, native=native)
    model.capture(layers)
    runner = ModelRunner(model, KVPool(model.kv_shape, 32, 16, model.dtype, model.device))
    self_test(model, runner)
    return model, runner


def states(path: str, tokens: list[int]) -> list[Tensor]:
    """Before each layer, and behind the last one and its norm."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [each[0] for each in model(torch.tensor([tokens]), output_hidden_states=True).hidden_states]


def run(runner: ModelRunner, tokens: list[int], chunk: int) -> tuple[Tensor, Tensor]:
    """All logits, and what was captured, computed in chunks."""
    logits, captured = [], []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        logits.append(runner.run_packed(part, [start], [len(part)], [list(range(8))], range(len(part))))
        assert runner.model.captured is not None
        captured.append(runner.model.captured)
    return torch.cat(logits), torch.cat(captured)


def tokens_of(vocab_size: int) -> list[int]:
    return torch.randint(vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("name", SERVED)
def test_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(name, tmp_path)
    model, runner = served(str(path), "float32", "off", [2, 0, 1])
    tokens = tokens_of(model.vocab_size)
    expected = states(str(path), tokens)
    assert model.num_layers == 2
    _, captured = run(runner, tokens, 11)
    for place, layer in enumerate([2, 0, 1]):
        torch.testing.assert_close(captured[:, place], expected[layer], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_kernels_capture_the_same(name: str, tmp_path: Path) -> None:
    path = checkpoint(DECODERS[name], tmp_path)
    model, runner = served(path, "bfloat16", "auto", [4, 0, 2])
    assert isinstance(model._packed, NativeDecoder)
    tokens = tokens_of(model.vocab_size)
    expected = states(path, tokens)
    _, captured = run(runner, tokens, 11)
    for place, layer in enumerate([4, 0, 2]):
        scale = expected[layer].abs().max()
        assert (captured[:, place] - expected[layer]).abs().max() < 0.05 * scale


@pytest.mark.parametrize(("dtype", "native"), [("float32", "off"), ("float32", "auto"), ("bfloat16", "auto")])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_first_layers_are_a_model_of_their_own(dtype: str, native: str, num_layers: int, tmp_path: Path) -> None:
    config: PreTrainedConfig = DECODERS["llama"]
    path = checkpoint(config, tmp_path)
    model, runner = served(path, dtype, native, [0])
    part = ModelRunner(model.first_layers(num_layers), runner.pool)
    tokens = tokens_of(model.vocab_size)
    reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        whole = reference(torch.tensor([tokens])).logits[0]
        reference.model.layers = reference.model.layers[:num_layers]
        expected = reference(torch.tensor([tokens])).logits[0]
    tolerance = 1e-3 if dtype == "float32" else 0.05 * float(expected.abs().max())
    chunks = [tokens[:13], tokens[13:]]
    logits = [
        part.run_packed(chunk, [start], [len(chunk)], [list(range(8))], range(len(chunk)))
        for start, chunk in zip((0, 13), chunks, strict=True)
    ]
    assert (torch.cat(logits).float() - expected).abs().max() < tolerance
    # The model itself has all its layers still, and a long context reaches both.
    long = [*tokens, *tokens_of(model.vocab_size)]
    again, _ = run(runner, long, 50)
    assert (again[:LENGTH].float() - whole).abs().max() < tolerance * 2


@pytest.mark.parametrize("name", ["llama", "llama with biases, tied", "gemma 3, tied"])
@pytest.mark.parametrize(("dtype", "native"), [("float32", "off"), ("bfloat16", "auto")])
def test_embedding_and_head_can_be_asked_alone(name: str, dtype: str, native: str, tmp_path: Path) -> None:
    path = checkpoint(DECODERS[name], tmp_path)
    model, runner = served(path, dtype, native, [4, 0])
    tokens = tokens_of(model.vocab_size)
    logits, captured = run(runner, tokens, 64)
    embedded = model.embed(torch.from_numpy(np.array(tokens)))
    torch.testing.assert_close(embedded.float(), captured[:, 1].float(), rtol=1e-2, atol=1e-2)
    projected = model.project(captured[:, 0].to(model.dtype)).float()
    assert (projected - logits.float()).abs().max() < 0.02 * float(logits.abs().max())


def test_a_model_without_a_row_of_layers_is_refused(tmp_path: Path) -> None:
    model = CausalLM.load(str(tiny_llama(tmp_path)), device="cpu", native="off")
    model._model.config.num_hidden_layers = 7
    with pytest.raises(StartupError, match="no row of layers"):
        model.capture([0])
