"""Engines that draft for themselves: exact on every attention path, in small pools, and when a drafter fails."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.engine import Engine
from shared.engine.sequence import Sequence as EngineSequence
from shared.sampling.params import SelfDraft
from shared.self_drafting.copies import Copies
from shared.self_drafting.drafter import Growing
from shared.self_drafting.rounds import SelfDrafting
from tests.support.drafting_engine import (
    KINDS,
    NUM_TOKENS,
    SHAPES,
    drafts_with,
    engine_of,
    random_prompts,
    sequence,
    write,
)
from tests.support.families import tiny_checkpoint
from tests.support.greedy import references
from tests.support.models import tiny_llama

# Windows, soft caps and sinks are in two of them.
FAMILIES = ["gemma2", "gpt_oss", *(pytest.param(each, marks=pytest.mark.long) for each in ("mistral", "qwen3", "gpt2"))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_transformers_own(kind: str, family: str, tmp_path: Path) -> None:
    if family == "gpt2" and "eagle" in kind:
        pytest.skip("GPT-2's layers are no Llama's, so nobody has such a head")
    target = tiny_checkpoint(family, tmp_path / "target")
    expected = references(target, random_prompts(45), 4, NUM_TOKENS)
    # Less than all of them need at once: some are preempted.
    engine = engine_of(target, **drafts_with(kind, target, tmp_path / "head"), num_blocks=14)
    for wanted in SHAPES:
        texts = write(engine, [sequence(each.prompt, self_draft=wanted) for each in expected])
        assert texts == [each.token_ids for each in expected]
    assert engine.scheduler.num_preempted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_text_is_that_of_plain_decoding(kind: str, tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    plain, drafting = engine_of(target), engine_of(target, **drafts_with(kind, target, tmp_path / "head"))
    prompts = random_prompts(37)
    fields: list[dict[str, Any]] = [
        {"temperature": 0.7, "seed": 11},
        {"temperature": 1.0, "seed": 12, "top_p": 0.8, "frequency_penalty": 0.3, "min_tokens": 5},
        {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}, "logprobs": 2},
        {"temperature": 1.0, "seed": 13, "stop_token_ids": frozenset(range(1, 60))},
    ]
    asked = [(next(prompts), each) for each in fields]
    expected = write(plain, [sequence(prompt, **each) for prompt, each in asked])
    for wanted in SHAPES:
        texts = write(drafting, [sequence(prompt, self_draft=wanted, **each) for prompt, each in asked])
        assert texts == expected


@pytest.mark.parametrize("kind", ["early exit", "eagle3", "copies", "copies and eagle3"])
def test_forks_and_found_prefixes_change_no_token(kind: str, tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    plain, drafting = engine_of(target), engine_of(target, **drafts_with(kind, target, tmp_path / "head"))
    prompt = next(random_prompts(50))

    def three(engine: Engine, wanted: SelfDraft | None) -> list[list[int]]:
        first, *forks = (
            sequence(prompt, temperature=0.8, seed=3, sequence_index=i, self_draft=wanted) for i in range(3)
        )
        first.forks = list(forks)
        write(engine, [first])
        return [each.token_ids for each in (first, *forks)]

    expected = three(plain, None)
    for wanted in (*SHAPES, *SHAPES):
        assert three(drafting, wanted) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_forks_of_a_prompt_of_one_token(kind: str, tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    engine = engine_of(target, **drafts_with(kind, target, tmp_path / "head"))
    first, *forks = (
        sequence([7], temperature=0.8, seed=3, sequence_index=i, self_draft=SelfDraft(3)) for i in range(3)
    )
    first.forks = list(forks)
    before = engine.drafts_with
    write(engine, [first])
    assert engine.drafts_with == before


def test_copies_and_a_head_draft_one_tree(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    plain, engine = engine_of(target), engine_of(target, **drafts_with("copies and eagle3", target, tmp_path / "head"))
    # More than of any copies is accepted of what the head finds, as far as that is known.
    engine._proposer._usual = 100.0  # type: ignore[union-attr]
    prompt = 3 * next(random_prompts(12))
    asked = sequence(prompt, self_draft=SelfDraft(3, 9))
    engine.scheduler.add(asked)
    by_round = []
    while (outcome := engine.step()) is not None:
        by_round += [set(gain.self_drafted.sources) for gain in outcome.gains if gain.self_drafted]
    assert {"target", "suffix"} in by_round
    assert asked.token_ids[len(prompt) :] == write(plain, [sequence(prompt)])[0]


class Failing:
    """Drafts twice, then fails."""

    source, most_steps, uses_kv = "failing", 4, True

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at
        self._num_left = 2

    def observe(self, *_: object) -> None:
        self._fail("observe")

    def keeps_up(self, _: EngineSequence) -> bool:
        return False

    def num_lacking(self, _: EngineSequence) -> int:
        self._fail("num_lacking")
        return 20

    def follow(self, _: Sequence[EngineSequence]) -> None:
        self._fail("follow")

    def ready(self, _: EngineSequence) -> bool:
        return True

    def begin(self, sequences: Sequence[EngineSequence]) -> Tensor:
        self._fail("begin")
        return torch.randn(len(sequences), 257)

    def extend(self, growing: Sequence[Growing]) -> Tensor:
        self._fail("extend")
        return torch.full((sum(each.num_new for each in growing), 257), torch.nan if self._num_left == 1 else 0.0)

    def _fail(self, at: str) -> None:
        if at == self._fails_at:
            self._num_left -= 1
            if self._num_left < 0:
                raise RuntimeError("out of ideas")


@pytest.mark.parametrize("fails_at", ["observe", "num_lacking", "follow", "begin", "extend"])
def test_a_drafter_that_fails_is_left_out(fails_at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_llama(tmp_path / "target")
    plain, engine = engine_of(target), engine_of(target)
    engine.draft_by(SelfDrafting.of(engine, Failing(fails_at)))
    prompts = random_prompts(20)
    asked = [next(prompts) for _ in range(3)]
    with caplog.at_level(logging.ERROR):
        texts = write(engine, [sequence(each, self_draft=SelfDraft(3, 8)) for each in asked])
    assert texts == write(plain, [sequence(each) for each in asked])
    assert [record for record in caplog.records if "failing is left out from now on" in record.getMessage()]
    caplog.clear()
    again = write(engine, [sequence(each, self_draft=SelfDraft(3, 8)) for each in asked])
    assert again == texts


@pytest.mark.parametrize("fails_at", ["sweep", "rests", "draft"])
def test_copies_that_fail_are_left_out(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_llama(tmp_path / "target")
    plain, engine = engine_of(target), engine_of(target, copied_tokens=5000)
    prompts = random_prompts(21)
    asked = [next(prompts) for _ in range(3)]
    calls = itertools.count()
    original: Any = getattr(Copies, fails_at)

    def failing(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("out of ideas")
        return original(*arguments)

    monkeypatch.setattr(Copies, fails_at, failing)
    with caplog.at_level(logging.ERROR):
        texts = write(engine, [sequence(each, self_draft=SelfDraft()) for each in asked])
    assert texts == write(plain, [sequence(each) for each in asked])
    assert [record for record in caplog.records if "suffix is left out from now on" in record.getMessage()]
    caplog.clear()
