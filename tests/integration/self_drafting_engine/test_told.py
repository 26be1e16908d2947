"""Of whose steps a drafter is told: of all but those that say nothing to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from shared.engine.engine import Engine
from shared.engine.sequence import Sequence as EngineSequence
from shared.engine.step_plan import StepPlan
from shared.sampling.params import SelfDraft
from shared.sampling.proposal import Proposal
from tests.support.drafting_engine import drafting_of, drafts_with, engine_of, random_prompts, sequence, steps_to, write
from tests.support.models import tiny_llama


def note_told(engine: Engine) -> list[EngineSequence]:
    """Of whose steps a drafter is told from now on."""
    _, growth = drafting_of(engine)
    observe, told = growth.drafter.observe, list[EngineSequence]()

    def note(plan: StepPlan, *others: Any) -> None:
        told.extend(item.sequence for item in plan.scheduled)
        observe(plan, *others)

    growth.drafter.observe = note  # type: ignore[method-assign,assignment]
    return told


def one_beside_another(kind: str, tmp_path: Path) -> tuple[Engine, EngineSequence, EngineSequence]:
    """An engine with a head, in which one that drafts nothing decodes beside one of a fixed shape: both of them."""
    target = tiny_llama(tmp_path / "target")
    engine = engine_of(target, **drafts_with(kind, target, tmp_path / "head"))
    other = sequence(range(20, 0, -1), max_tokens=200)
    asked = sequence(range(1, 21), max_tokens=200, self_draft=SelfDraft(2))
    engine.scheduler.add(other)
    engine.scheduler.add(asked)
    for _ in range(4):
        engine.step()
    return engine, other, asked


def test_a_head_is_not_told_of_steps_of_whom_it_left_out(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    engine = engine_of(target, **drafts_with("eagle3", target, tmp_path / "head"), num_blocks=80)
    proposer, _ = drafting_of(engine)
    proposer._policy.follows = lambda *_: False  # type: ignore[method-assign]
    told, prompts = note_told(engine), random_prompts(20)
    resting = sequence(next(prompts), max_tokens=60, self_draft=SelfDraft())
    engine.scheduler.add(resting)
    for _ in range(10):
        engine.step()
    assert told == [resting] * 2  # its prompt, and that it is left out
    fixed = sequence(next(prompts), max_tokens=10, self_draft=SelfDraft(3))
    engine.scheduler.add(fixed)
    steps_to(engine, lambda: fixed.finish is not None)
    assert told.count(fixed) > 2
    num_before = len(told)
    while engine.step() is not None:
        pass
    assert len(told) == num_before + 1


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_drafter_is_told_of_who_verifies_for_the_router_beside_others_that_rest(kind: str, tmp_path: Path) -> None:
    engine, _, asked = one_beside_another(kind, tmp_path)
    asked.num_steps = 0
    for _ in range(3):
        engine.step()
    told = note_told(engine)
    engine.step()
    assert not told
    for _ in range(3):
        asked.num_steps, asked.proposal = 1, Proposal((5, 6))
        engine.step()
    assert told.count(asked) == 3
    asked.num_steps = 100
    assert engine.step() is not None
    assert drafting_of(engine)[0]._rounds.keys() == {asked}


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_drafter_is_told_of_a_prompt_of_which_the_last_token_alone_is_new(kind: str, tmp_path: Path) -> None:
    target, prompt = tiny_llama(tmp_path / "target"), range(1, 18)
    engine = engine_of(target, **drafts_with(kind, target, tmp_path / "head"))
    write(engine, [sequence(prompt, max_tokens=1)])
    engine.scheduler.add(sequence(range(20, 0, -1), max_tokens=200))
    for _ in range(4):
        engine.step()
    asked = sequence(prompt, max_tokens=50, self_draft=SelfDraft(2))
    asked.num_steps = 1
    engine.scheduler.add(asked)
    engine.step()
    assert (asked.num_cached_tokens, len(asked.token_ids)) == (16, 18)
    assert drafting_of(engine)[1].drafter.ready(asked)


def test_a_drafter_is_told_of_the_parts_of_a_step_that_is_taken_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, other, asked = one_beside_another("medusa", tmp_path)
    run, told = engine._runner.run, note_told(engine)

    def alone(plan: StepPlan) -> Tensor:
        if len(plan.scheduled) > 1:
            raise RuntimeError("together")
        return run(plan)

    engine._runner.run = alone  # type: ignore[method-assign]
    engine.step()
    assert told == [other, asked]
    caplog.clear()  # that the step failed
