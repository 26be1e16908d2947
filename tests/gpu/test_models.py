"""Models on a CUDA device generate what transformers does, by kernels of our own, fused and captured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from shared.engine.engine import Engine
from shared.engine.model import CausalLM
from shared.sampling.verifier import verify
from tests.integration.test_models import LENGTHS, SERVED, VOCAB_SIZE, generate, settings, speculate, write

pytestmark = pytest.mark.gpu

FUSED = ("llama", "qwen3", "mistral")


@pytest.mark.parametrize("limits", [{}, {"max_batch_tokens": 17, "block_size": 8, "num_blocks": 27}], ids=str)
@pytest.mark.parametrize("family", SERVED)
def test_generates_what_transformers_does(
    family: str, limits: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    make: Callable[[], PreTrainedConfig] = SERVED[family]
    folder = write(make(), tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    texts = generate(folder, prompts)
    engine = Engine(CausalLM.load(str(folder), "cuda", "float32"), settings(**limits), verify)
    with caplog.at_level(logging.INFO):
        engine.warm_up()
    said = [record.getMessage() for record in caplog.records]
    assert ("layers fused" in said) == (family in FUSED), said
    # A mixture of experts asks the device how many tokens each has.
    assert ("steps captured" in said) == (family != "gpt_oss"), said
    assert speculate(engine, prompts, texts) == texts
