"""Targets on a CUDA device that draft themselves: text is transformers' own, and drafts are as good as they can be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.sampling.params import SelfDraft
from tests.support.drafting_engine import (
    KINDS,
    NUM_TOKENS,
    SHAPES,
    drafts_with,
    engine_of,
    random_prompts,
    sequence,
    shares_accepted,
    write,
)
from tests.support.families import tiny_checkpoint
from tests.support.greedy import references
from tests.support.models import tiny_llama, with_idle_last_layer

pytestmark = pytest.mark.gpu

# Fused and captured, or with windows and soft caps by layers of their own.
FAMILIES = ["qwen3", "gemma2"]
CUDA: dict[str, Any] = {"device": "cuda", "native": "auto"}


@pytest.fixture(autouse=True)
def nothing_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A source that is left out would make every text right, and so would kernels that are."""
    caplog.set_level(logging.INFO)
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_transformers_own(kind: str, family: str, tmp_path: Path) -> None:
    target = tiny_checkpoint(family, tmp_path / "target")
    expected = references(target, random_prompts(45), 4, NUM_TOKENS)
    engine = engine_of(target, **CUDA, **drafts_with(kind, target, tmp_path / "head"), num_blocks=14)
    for wanted in SHAPES:
        texts = write(engine, [sequence(each.prompt, self_draft=wanted) for each in expected])
        assert texts == [each.token_ids for each in expected]
    assert engine.scheduler.num_preempted > 0


@pytest.mark.parametrize("wanted", [SelfDraft(3), SelfDraft(3, 9)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["model", "early exit"])
def test_of_what_says_the_same_all_is_accepted(
    kind: str, wanted: SelfDraft, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = with_idle_last_layer(tiny_llama(tmp_path / "whole"), tmp_path / "target")
    drafter: dict[str, Any] = {"draft": str(target)} if kind == "model" else {"early_exit": 1}
    prompts = random_prompts(37)
    asked = [next(prompts) for _ in range(4)]
    roomy = engine_of(target, **CUDA, **drafter)
    # The target's and the drafter's.
    assert [record.getMessage() for record in caplog.records].count("steps captured") == 2
    assert shares_accepted(roomy, asked, wanted, max_tokens=31) == [1.0] * 4
    # The same again, of blocks that are found.
    assert shares_accepted(roomy, [[*each, 5] for each in asked], wanted, max_tokens=31) == [1.0] * 4
    small = engine_of(target, **CUDA, **drafter, num_blocks=12)
    assert shares_accepted(small, asked, wanted, max_tokens=31) == [1.0] * 4
    assert small.scheduler.num_preempted > 0
