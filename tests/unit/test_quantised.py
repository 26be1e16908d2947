"""Quantised weights: what they stand for, and whole models with them against transformers with just that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, PreTrainedConfig

from shared.engine import model as model_module
from shared.engine.model import CausalLM
from shared.engine.native.decoder import NativeDecoder
from shared.engine.quantised_weight import GROUP, QuantisedWeight
from shared.engine.settings import Quantize
from shared.settings import StartupError
from tests.support.kernels import INSTRUCTION_SETS, kernels
from tests.unit.test_native_decoder import FAMILIES, LENGTH, SIZES, checkpoint, chunked_logits

BITS: dict[Quantize, int] = {"int8": 8, "int4": 4}
GPT2 = GPT2Config(vocab_size=203, n_embd=48, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)
NEOX = GPTNeoXConfig(**{name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")})
MODELS: dict[str, PreTrainedConfig] = {
    name: FAMILIES[name] for name in ("llama with biases, tied", "qwen 3", "gemma 3, tied", "phi 3")
} | {"one that runs its own forward": NEOX}


def load(
    source: str, quantize: Quantize, instruction_set: str, monkeypatch: pytest.MonkeyPatch, dtype: str = "bfloat16"
) -> CausalLM:
    library = kernels(instruction_set)
    monkeypatch.setattr(model_module, "load_library", lambda: library)
    return CausalLM.load(source, "cpu", dtype, "auto", quantize)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """As the settings say it, number by number's group."""
    most = 2 ** (bits - 1) - 1
    groups = [weight] if bits == 8 else list(torch.split(weight, GROUP, dim=1))
    parts = []
    for group in groups:
        scale = group.abs().max(dim=1, keepdim=True).values / most
        parts.append((group / scale).round() * scale)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize("shape", [(5, 300), (3, 64), (1, 1), (4, 65)], ids=str)
def test_weights_are_rounded_to_the_nearest_of_their_scale(shape: tuple[int, int], bits: int) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    quantised = QuantisedWeight.of(weight, bits)
    assert quantised.values.abs().max() == 2 ** (bits - 1) - 1
    torch.testing.assert_close(quantised.dequantised(), rounded(weight, bits))
    # The largest of a group is as it was.
    torch.testing.assert_close(quantised.dequantised().abs().amax(), weight.abs().amax())


@pytest.mark.parametrize("bits", BITS.values())
def test_rounded_again_in_bf16_they_are_the_same(bits: int) -> None:
    for scale in (1e-30, 1e-3, 1.0, 1e30):
        once = QuantisedWeight.of((torch.randn(200, 500) * scale).bfloat16(), bits)
        again = QuantisedWeight.of(once.dequantised().bfloat16(), bits)
        assert torch.equal(again.values, once.values)
        torch.testing.assert_close(again.scales, once.scales, rtol=1e-6, atol=0)


def test_nothing_but_zeros_stays_so_and_what_is_not_finite_is_refused() -> None:
    weight = torch.zeros(2, 100)
    assert not QuantisedWeight.of(weight, 4).dequantised().any()
    for value in (torch.nan, torch.inf):
        weight[1, 70] = value
        with pytest.raises(ValueError, match="not finite"):
            QuantisedWeight.of(weight, 8)


@pytest.mark.parametrize("quantize", BITS)
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_model_is_that_with_the_weights_that_its_numbers_stand_for(
    instruction_set: str, config: PreTrainedConfig, quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(config, tmp_path)
    tokens = torch.randint(203, (LENGTH,), generator=torch.Generator().manual_seed(1))
    oracle: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        unrounded = oracle(input_ids=tokens.unsqueeze(0)).logits[0]
        for name, module in oracle.named_modules():
            if isinstance(module, nn.Linear) and name not in ("lm_head", "embed_out"):
                module.weight.copy_(rounded(module.weight, BITS[quantize]))
        exact = oracle(input_ids=tokens.unsqueeze(0)).logits[0]

    model = load(source, quantize, instruction_set, monkeypatch)
    own = model.reference_logits(tokens).float()
    model.pack()
    assert isinstance(model._packed, NativeDecoder) == (config is not NEOX)
    got = chunked_logits(model, tokens).float()
    error = (got - exact).square().mean().sqrt()
    # Not the model's own weights, and nearer than its own forward with the rounded ones in bf16.
    assert error < 0.5 * (got - unrounded).square().mean().sqrt()
    if config is not NEOX:
        assert error < 0.8 * (own - exact).square().mean().sqrt()
    assert (got - exact).abs().max() < 0.12 * exact.abs().max()
    left = sum(weight.numel() for module in model._model.modules() if type(module) is nn.Linear
               for weight in [module.weight])  # fmt: skip
    assert left <= 203 * 48, "plain weights of other layers than the head are still held"
    assert not model._quantised


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_the_same_weights_rounded_otherwise_are_another_model(
    instruction_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(FAMILIES["llama"], tmp_path)
    prints = {
        load(source, quantize, instruction_set, monkeypatch).fingerprint(16)
        for quantize in get_args(Quantize)
        for _ in range(2)
    }
    assert len(prints) == 3


def test_what_cannot_be_served_quantised_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(LlamaConfig(**SIZES), tmp_path)
    for dtype, native in (("float32", "auto"), ("bfloat16", "off")):
        with pytest.raises(
            StartupError, match=r"quantize int8: that needs dtype bfloat16 and kernels .*, not "
        ) as refusal:
            CausalLM.load(source, "cpu", dtype, native, "int8")  # type: ignore[arg-type]
        assert len(str(refusal.value).splitlines()) == 1
    with pytest.raises(StartupError, match="no linear layers but its head"):
        load(checkpoint(GPT2, tmp_path / "gpt2"), "int4", "avx2", monkeypatch)
    broken = tmp_path / "broken"
    weights = load_file(Path(source) / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.inf
    shutil.copytree(source, broken, ignore=shutil.ignore_patterns("gpt2", "broken"))
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        StartupError, match=r"quantize int8: model\.layers\.1\.mlp\.up_proj: its weights are not finite"
    ):
        load(str(broken), "int8", "avx2", monkeypatch)
    monkeypatch.setattr(model_module, "load_library", lambda: None)
    with pytest.raises(StartupError, match="without them"):
        CausalLM.load(source, "cpu", "bfloat16", "auto", "int4")


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_checkpoint_that_is_quantised_and_needs_what_is_not_there_is_refused_in_one_line(
    method: str, tmp_path: Path
) -> None:
    source = checkpoint(LlamaConfig(**SIZES), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="cannot be loaded") as refusal:
        CausalLM.load(source, "cpu", "bfloat16")
    assert len(str(refusal.value).splitlines()) == 1


def test_what_layers_of_a_quantised_checkpoint_hold_is_left_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(checkpoint(LlamaConfig(**SIZES), tmp_path), "none", "avx2", monkeypatch)
    model._model.config.quantization_config = {"quant_method": "any"}
    with pytest.raises(StartupError, match="quantised already"):
        model._quantise("int8")
    tokens = torch.randint(203, (LENGTH,), generator=torch.Generator().manual_seed(1))
    expected = model.reference_logits(tokens).float()
    model.pack()
    assert all(isinstance(layer.mlp.up_proj, nn.Linear) for layer in model._model.model.layers)
    assert (chunked_logits(model, tokens) - expected).abs().max() < 0.1 * expected.abs().max()
