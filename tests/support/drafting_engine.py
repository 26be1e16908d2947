"""Engines of targets that draft themselves, without a service around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from services.target.self_drafting import self_drafting
from services.target.settings import TargetSettings
from shared.engine.engine import Engine
from shared.engine.sequence import Sequence as EngineSequence
from shared.sampling.params import SamplingParams, SelfDraft
from shared.sampling.proposal import Proposal
from shared.sampling.verifier import verify
from shared.self_drafting.growth import Growth
from shared.self_drafting.rounds import SelfDrafting
from shared.worker.service import load_engine
from tests.support.heads import (
    config_of,
    eagle3_weights,
    eagle_weights,
    layer_config,
    medusa_weights,
    write_head,
    write_medusa,
)
from tests.support.models import perturbed

NUM_TOKENS = 24
SHAPES = [SelfDraft(1), SelfDraft(4), SelfDraft(3, 9), SelfDraft()]
KINDS = ["early exit", "medusa", "eagle", "eagle3", "model", "copies", "copies and eagle3"]


def engine_of(target: Path, **fields: Any) -> Engine:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "native": "off",
        "num_blocks": 40,
        "max_batch_tokens": 40,
        "copied_tokens": 0,
    }
    settings = TargetSettings(model=str(target), **(defaults | fields))
    return load_engine(settings, verify, lambda model: self_drafting(settings, model))


def drafts_with(kind: str, target: Path, folder: Path) -> dict[str, Any]:
    """Settings of a target that drafts so; heads are random ones."""
    torch.manual_seed(2)
    config = config_of(target)
    match kind:
        case "medusa":
            return {"head": str(write_medusa(folder, medusa_weights(config, 4)))}
        case "eagle":
            return {"head": str(write_head(folder, eagle_weights(config), layer_config(config)))}
        case "eagle3":
            said = layer_config(config) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
            return {"head": str(write_head(folder, eagle3_weights(config, 64), said))}
        case "model":
            return {"draft": str(perturbed(target, folder, noise=0.1))}
        case "copies":
            return {"copied_tokens": 5000}
        case "copies and eagle3":
            return {"copied_tokens": 5000} | drafts_with("eagle3", target, folder)
    return {"early_exit": 1}


def write(engine: Engine, sequences: Sequence[EngineSequence]) -> list[list[int]]:
    """Their output, all begun together."""
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while (outcome := engine.step()) is not None:
        # Whatever is verified is known to be its own.
        assert all(gain.num_draft_tokens == len(gain.self_drafted) for gain in outcome.gains)
    engine.scheduler.check()
    assert engine.scheduler.is_empty
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def sequence(prompt: Sequence[int], **fields: Any) -> EngineSequence:
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
    return EngineSequence(prompt, len(prompt), SamplingParams(**(defaults | fields)), bytes(32), num_steps=1000)


def random_prompts(length: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(1, 257, (length,), generator=generator).tolist()


def steps_to(engine: Engine, done: Callable[[], object], most: int = 400) -> int:
    """Steps until that holds."""
    for count in range(most):
        if done():
            return count
        assert engine.step() is not None
    raise AssertionError(f"not within {most} steps")


def drafting_of(engine: Engine) -> tuple[SelfDrafting, Growth]:
    proposer = engine._proposer
    assert isinstance(proposer, SelfDrafting)
    assert proposer._growth is not None
    return proposer, proposer._growth


def length_of_likeliest(proposal: Proposal) -> int:
    """Of the line that goes on with each token's likeliest child."""
    row = length = 0
    parents = list(proposal.followed_rows())
    while row in parents:
        row = parents.index(row) + 1
        length += 1
    return length


def shares_accepted(engine: Engine, prompts: Sequence[Sequence[int]], wanted: SelfDraft, **fields: Any) -> list[float]:
    """Of each sequence's rounds, all begun together, those whose likeliest draft tokens were all accepted."""
    asked = [sequence(prompt, self_draft=wanted, **fields) for prompt in prompts]
    for each in asked:
        engine.scheduler.add(each)
    rounds, whole = dict.fromkeys(asked, 0), dict.fromkeys(asked, 0)
    while (outcome := engine.step()) is not None:
        for gain in outcome.gains:
            if gain.self_drafted:
                rounds[gain.sequence] += 1
                whole[gain.sequence] += gain.sampled.num_accepted >= length_of_likeliest(gain.self_drafted)
    engine.scheduler.check()
    return [whole[each] / rounds[each] for each in asked]
