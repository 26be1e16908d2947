"""A draft worker whose model has more ids than the target's, or fewer: the same tokenizer, padded differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.v1 import inference_pb2
from transformers import AutoModelForCausalLM

from tests.support.models import tiny_llama
from tests.support.service import (
    COPYING_NOTHING,
    MODEL_ALONE,
    generate,
    inference,
    running_stack,
    wait_until_idle,
)

MODEL = inference_pb2.DRAFT_SOURCE_MODEL
WAYS: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3}, {"temperature": 0.0, "repetition_penalty": 1.2}]


def with_likely_padding(folder: Path, first: int) -> str:
    """Has the model draw the ids from `first` on above all."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[first:] *= 4
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("targets", "drafts"), [(257, 300), (300, 257)])
async def test_ids_of_one_model_alone(targets: int, drafts: int, tmp_path: Path) -> None:
    """Those that the target lacks are rejected, and those that the drafter lacks come from a prompt and a target that
    likes them: nobody's stream ends of it, and text is that without drafts."""
    target = tiny_llama(tmp_path / "target", vocab_size=targets)
    draft = tiny_llama(tmp_path / "draft", vocab_size=drafts, hidden_size=32)
    with_likely_padding(target if targets > drafts else draft, 257)
    prompt = [5, 3, 11, 7, targets - 1]
    environment = {"draft": MODEL_ALONE, "target-0": COPYING_NOTHING}
    async with running_stack(environment, target=str(target), draft=str(draft)) as stack, inference(stack) as stub:
        for way in WAYS:
            expected = await generate(stub, prompt, gamma=0, max_tokens=30, ignore_eos=True, **way)
            assert targets < drafts or max(expected.token_ids) >= 257
            for shape in ({"gamma": 4}, {"gamma": 3, "num_nodes": 9}, {}):
                fields: dict[str, Any] = {**shape, "sources": [MODEL], "max_tokens": 30, "ignore_eos": True, **way}
                got = await generate(stub, prompt, **fields)
                assert got.token_ids == expected.token_ids
                assert got.usage.draft_tokens > 0 or not shape
        unseeded = await generate(stub, prompt, gamma=4, max_tokens=30, ignore_eos=True, sources=[MODEL])
        assert len(unseeded.token_ids) == 30
        assert max(unseeded.token_ids) < targets
        await wait_until_idle(stack)
        assert not [line for _, line in stack.lines if "lost" in line or "ERROR" in line]
