"""Tiny random models of many architectures against transformers' own generation, and those refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    StableLmConfig,
)

from services.target.settings import TargetSettings
from shared.engine.attention import batch, paged
from shared.engine.engine import Engine
from shared.engine.model import CausalLM
from shared.engine.sequence import Sequence
from shared.prefix.block_hash import root_hash
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from shared.sampling.verifier import verify
from shared.settings import StartupError
from tests.support.threads import threads

VOCAB_SIZE = 200
NUM_TOKENS = 40
WINDOW = 9
LENGTHS = (3, 21, 50, 150)
SPECIAL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    **SPECIAL,
}

SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=8, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=5,
        # So low that they bend the scores.
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=3, n_head=4, n_positions=256, initializer_range=0.2, **SPECIAL
    ),
}
# Why each cannot be served: no attention, attention in some layers only, attention that is not told the step,
# and attention in all layers beside recurrent state, which nothing but the comparison of logits can tell.
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "mamba": (
        lambda: MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, state_size=4, num_hidden_layers=2, **SPECIAL),
        "0 of its 2 layers use attention",
    ),
    "minimax": (
        lambda: MiniMaxConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, block_size=16),
        "layers use attention",
    ),
    "stablelm": (lambda: StableLmConfig(**SIZES), "does not run packed over paged KV"),
    "falcon_h1": (lambda: FalconH1Config(**SIZES), "its logits at positions 0 to 10 differ from its own forward.s by"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def write(config: PreTrainedConfig, path: Path) -> Path:
    """A random checkpoint whose greedy choices have no near ties."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_(1, 1)  # large enough to matter
    model.save_pretrained(path)
    return path


def settings(**fields: Any) -> TargetSettings:
    return TargetSettings(model="tiny", **{"num_blocks": 60, **fields})


def generate(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The oracle: transformers' greedy generation, each prompt alone."""
    # Of some versions the fused attention passes over what bends scores.
    oracle: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
        texts.append(out[0].tolist())
    return texts


def speculate(engine: Engine, prompts: list[list[int]], texts: list[list[int]]) -> list[list[int]]:
    """Greedy rounds of all prompts at once, with proposals of which two in three tokens are right."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop_token_ids=engine.model.eos_token_ids)
    root = root_hash(engine.fingerprint, b"")
    sequences = [Sequence(prompt, len(prompt), params, root, num_steps=1) for prompt in prompts]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    num_accepted = 0
    while any(sequence.finish is None for sequence in sequences):
        outcome = engine.step()
        assert outcome is not None
        assert outcome.failed == []
        num_accepted += sum(gain.sampled.num_accepted for gain in outcome.gains)
        for sequence, text in zip(sequences, texts, strict=True):
            if sequence.num_steps == 0 and sequence.finish is None:
                guess = text[len(sequence.token_ids) :][: rng.randint(0, 5)]
                guess = [token if rng.random() < 0.67 else rng.randrange(VOCAB_SIZE) for token in guess]
                sequence.proposal, sequence.num_steps = Proposal(tuple(guess)), 1
    assert num_accepted > NUM_TOKENS // 2
    engine.scheduler.check()
    assert engine.blocks.counts().owned == 0
    return [sequence.token_ids for sequence in sequences]


@pytest.mark.parametrize("config", SERVED.values(), ids=SERVED.keys())
def test_generates_what_transformers_does(
    config: Callable[[], PreTrainedConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(config(), tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    texts = generate(folder, prompts)
    assert len({token for text in texts for token in text[-NUM_TOKENS:]}) > 10  # more than one word said over and over
    for limits in ({}, {"max_batch_tokens": 17, "block_size": 8, "num_blocks": 26}, {"max_batch_tokens": 60}):
        if "max_batch_tokens" in limits:  # attention in many groups and pieces
            monkeypatch.setattr(batch, "_CPU_LIMITS", batch._Limits(launch=0, gathered=1 << 14))
            monkeypatch.setattr(paged, "_MAX_SCORE_BYTES", 1 << 12)
        engine = Engine(CausalLM.load(str(folder), "cpu", "auto"), settings(**limits), verify)
        engine.warm_up()
        assert speculate(engine, prompts, texts) == texts


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_cannot_be_served_is_refused(
    config: Callable[[], PreTrainedConfig], reason: str, tmp_path: Path
) -> None:
    folder = write(config(), tmp_path / "unfit")
    with pytest.raises(StartupError, match=rf"^model unfit cannot be served: .*{reason}") as refusal:
        Engine(CausalLM.load(str(folder), "cpu", "auto"), settings(), verify).warm_up()
    assert len(str(refusal.value).splitlines()) == 1


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def with_unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no_such_model"}')


def with_truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_a_weight_missing(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_a_weight_of_another_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_config, r"model folder .* has no config\.json"),
        (with_broken_config, r"model .* cannot be loaded: "),
        (with_unknown_architecture, r"model .* cannot be loaded: .*no_such_model"),
        (with_truncated_weights, r"model .* cannot be loaded: "),
        (without_weights, r"model .* cannot be loaded: .*model\.safetensors"),
        (with_a_weight_missing, r"model .* cannot be loaded: .*up_proj"),
        (with_a_weight_of_another_shape, r"model .* cannot be loaded: "),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = write(LlamaConfig(**SIZES), tmp_path / "model")
    damage(folder)
    with pytest.raises(StartupError, match=message) as refusal:
        CausalLM.load(str(folder), "cpu", "auto")
    assert len(str(refusal.value).splitlines()) == 1
    assert str(folder) in str(refusal.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"there is no model folder .*nothing here"):
        CausalLM.load(str(tmp_path / "nothing here"), "cpu", "auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(StartupError, match="device 'cuda' was asked for, but this machine has no CUDA device"):
        CausalLM.load("any", "cuda", "auto")
