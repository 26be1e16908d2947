"""An engine with a tiny random Llama, prompts for it, and its steps to their end."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any

import pytest
import torch
from torch import Tensor

from services.target.settings import TargetSettings
from shared.engine.draws import DrawAhead
from shared.engine.engine import Engine, StepOutcome
from shared.engine.model import CausalLM
from shared.engine.sequence import Sequence
from shared.prefix.block_hash import root_hash
from shared.sampling.params import SamplingParams
from shared.sampling.verifier import verify

VOCAB_SIZE = 257
NUM_TOKENS = 40
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100)


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(1, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def engine_for(model: CausalLM, draw_ahead: DrawAhead | None = None, **fields: Any) -> Engine:
    return Engine(model, TargetSettings(model="tiny", **{"num_blocks": 200, **fields}), verify, draw_ahead)


def greedy(engine: Engine, prompt: Tokens[int], *, num_steps: int = 1 << 20, max_tokens: int = NUM_TOKENS) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=engine.model.eos_token_ids)
    return Sequence(prompt, len(prompt), params, root_hash(engine.fingerprint, b""), num_steps=num_steps)


def drain(engine: Engine) -> list[StepOutcome]:
    """Steps until nothing is left to do; blocks are conserved all the way."""
    outcomes = []
    while (outcome := engine.step()) is not None:
        engine.scheduler.check()
        assert outcome.failed == []
        outcomes.append(outcome)
    return outcomes


def failing_if(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, fails: Callable[[list[int]], bool], error: Exception | None = None
) -> None:
    """From now on a forward pass over tokens of which `fails` is true raises the error."""
    forward = model.forward

    def failing(tokens: array[int], *args: Any) -> Tensor:
        if fails(tokens.tolist()):
            raise error or RuntimeError("a kernel is broken")
        return forward(tokens, *args)

    monkeypatch.setattr(model, "forward", failing)
