"""Layers computed in few launches are those of transformers, as Triton's interpreter computes them."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shared.engine import attention_check
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.runner import ModelRunner
from shared.engine.self_test import self_test
from tests.support.interpreted import interpreted
from tests.unit.test_native_decoder import FAMILIES, checkpoint

from shared.engine.cuda import layers  # isort: skip


# Two roundings, of which each may go another way: the interpreter's go towards zero in bf16.
_ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention has tests of its own, and an interpreter its time."""
    monkeypatch.setattr(attention_check, "_CONTEXT", 100)
    monkeypatch.setattr(attention_check, "_NUM_QUERIES", 8)


def norm_of(hidden: int, dtype: torch.dtype) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(hidden, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(hidden).to(dtype)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [1, 48, 257])
def test_norms_are_transformers_own(hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = norm_of(hidden, dtype)
    x, added = (torch.randn(5, hidden).to(dtype) * 3 for _ in range(2))
    close = partial(torch.testing.assert_close, rtol=_ROUNDING[dtype], atol=1e-6)
    close(layers.normalise(norm, x), norm(x))
    total, normal = layers.add_and_norm(norm, x, added)
    close(total, x + added)
    close(normal, norm(total))


def test_a_norm_is_ahead_of_what_was_added_up_alone() -> None:
    torch.manual_seed(0)
    norm = norm_of(48, torch.float32)
    ahead = layers.NormAhead(norm)
    x, added, other = (torch.randn(5, 48) for _ in range(3))
    added_up = ahead.add(x, added)
    torch.testing.assert_close(added_up, (x + added).unsqueeze(0))
    norm.weight.data *= 2  # shows when it was applied
    torch.testing.assert_close(2 * ahead(added_up), norm(added_up), rtol=1e-5, atol=1e-6)
    assert ahead.found(added_up) is None  # it was taken
    ahead.add(x, added)
    torch.testing.assert_close(ahead(other.unsqueeze(0)), norm(other.unsqueeze(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mlp", [3, 1024, 1500])
def test_gates_are_torchs(mlp: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    both = (torch.randn(4, 2 * mlp) * 4).to(dtype)
    expected = functional.silu(both[:, :mlp]) * both[:, mlp:]
    torch.testing.assert_close(layers.gated(both), expected, rtol=_ROUNDING[dtype], atol=1e-6)


def model_of(family: str, folder: Path) -> tuple[CausalLM, ModelRunner]:
    """With kernels that attend; its layers are transformers' as yet."""
    model = CausalLM.load(checkpoint(FAMILIES[family], folder), "cpu", "float32", native="off")
    model._triton = interpreted()
    return model, ModelRunner(model, KVPool(model.kv_shape, 24, 8, model.dtype, model.device))


def logits_of(runner: ModelRunner, tokens: list[int]) -> Tensor:
    """In chunks, over blocks in any order."""
    table, rows = [5, 3, 9, 1, 7, 2, 8], []
    for start in range(0, len(tokens), 13):
        chunk = tokens[start : start + 13]
        rows.append(runner.run_packed(chunk, [start], [len(chunk)], [table], range(len(chunk))))
    return torch.cat(rows)


@pytest.mark.parametrize(
    "family",
    [
        "qwen 3",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("llama with biases, tied", "mistral", "qwen 2")),
    ],
)
def test_models_compute_what_they_are(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, runner = model_of(family, tmp_path)
    tokens = torch.randint(1, model.vocab_size, (50,), generator=torch.Generator().manual_seed(1))
    expected = model.reference_logits(tokens)
    with caplog.at_level(logging.INFO):
        self_test(model, runner)
    fused = [record for record in caplog.records if record.getMessage() == "layers fused"]
    assert [record.layers for record in fused] == [model.num_layers]  # type: ignore[attr-defined]
    got = logits_of(runner, tokens.tolist())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    # Whoever calls it without blocks has the model as it was.
    torch.testing.assert_close(model.reference_logits(tokens), expected, rtol=1e-5, atol=1e-5)
    weights = dict(model._model.named_parameters())
    assert not any(weight.isnan().any() for weight in weights.values())


def test_other_families_attend_by_kernels_and_are_else_their_own(tmp_path: Path) -> None:
    model, runner = model_of("gemma 2", tmp_path)
    tokens = torch.randint(1, model.vocab_size, (50,), generator=torch.Generator().manual_seed(1))
    expected = model.reference_logits(tokens)
    self_test(model, runner)
    assert model.fuse() == 0
    got = logits_of(runner, tokens.tolist())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def wrong(*_: Any) -> Tensor:
    raise RuntimeError("no such instruction")


def test_layers_that_compute_otherwise_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, runner = model_of("llama", tmp_path)
    gated = layers.gated
    monkeypatch.setattr(layers, "gated", lambda both: gated(both) * 1.5)
    with caplog.at_level(logging.WARNING):
        self_test(model, runner)
    assert "layers compute as ever" in caplog.text
    tokens = torch.randint(1, model.vocab_size, (30,), generator=torch.Generator().manual_seed(1))
    expected = model.reference_logits(tokens)
    torch.testing.assert_close(logits_of(runner, tokens.tolist()), expected, rtol=1e-4, atol=1e-3)


def test_attention_that_does_not_run_is_pytorchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, runner = model_of("llama", tmp_path)
    monkeypatch.setattr("shared.engine.cuda.step.CudaStep._look", wrong)
    with caplog.at_level(logging.WARNING):
        self_test(model, runner)
    assert "PyTorch attends" in caplog.text
    assert model.attention_kernels is None
    tokens = torch.randint(1, model.vocab_size, (30,), generator=torch.Generator().manual_seed(1))
    expected = model.reference_logits(tokens)
    torch.testing.assert_close(logits_of(runner, tokens.tolist()), expected, rtol=1e-4, atol=1e-3)
