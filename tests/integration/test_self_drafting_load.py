"""For how many a target that drafts itself decides, while some of them have no token yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.policy.ways import Way
from shared.sampling.params import SelfDraft
from tests.support.drafting_engine import drafting_of, engine_of, random_prompts, sequence
from tests.support.models import tiny_llama


@pytest.mark.parametrize(("num", "budget"), [(1, 40), (4, 40), (6, 90)])
def test_the_first_of_a_burst_are_not_taken_for_all_of_it(num: int, budget: int, tmp_path: Path) -> None:
    """Where drafting does not pay for so many, it is not paid for those that are there before the others."""
    engine = engine_of(tiny_llama(tmp_path), early_exit=1, max_batch_tokens=budget)
    proposer, _ = drafting_of(engine)
    policy, choose, observe = proposer._policy, proposer._policy.way, proposer._policy.observe
    asked: list[int] = []
    learnt: list[int] = []

    def noting(load: int, may_try: bool = True) -> Way:
        asked.append(load)
        return choose(load, may_try)

    def learning(load: int, *what: Any) -> None:
        learnt.append(load)
        observe(load, *what)

    policy.way = noting  # type: ignore[method-assign]
    policy.observe = learning  # type: ignore[method-assign,assignment]
    prompts = random_prompts(30)
    for _ in range(num):
        engine.scheduler.add(sequence(next(prompts), self_draft=SelfDraft(), max_tokens=200))
    while len(engine.scheduler.decoding()) < num:
        assert engine.step() is not None
    engine.step()
    assert set(asked) == {num}
    assert set(learnt) == {num}, "of what was decided"
