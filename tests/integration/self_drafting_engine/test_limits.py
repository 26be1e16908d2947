"""For whom an engine drafts, how much of it is verified, and that nobody starves or loses room for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.sampling.params import SelfDraft
from shared.sampling.proposal import Proposal
from shared.settings import StartupError
from tests.support.drafting_engine import drafts_with, engine_of, random_prompts, sequence, steps_to, write
from tests.support.families import tiny_checkpoint
from tests.support.models import tiny_llama


def test_who_may_not_is_left_alone(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    engine = engine_of(target, early_exit=1)
    prompts = random_prompts(20)
    without = sequence(next(prompts))
    unseeded = sequence(next(prompts), temperature=1.0, self_draft=SelfDraft(3))
    with_drafts = sequence(next(prompts), self_draft=SelfDraft(3))
    drafted = set()
    for each in (without, unseeded, with_drafts):
        engine.scheduler.add(each)
    while (outcome := engine.step()) is not None:
        drafted |= {gain.sequence for gain in outcome.gains if gain.self_drafted}
        assert all(gain.num_draft_tokens == len(gain.self_drafted) for gain in outcome.gains)
    assert drafted == {unseeded, with_drafts}


def test_no_more_is_drafted_than_may_be_committed_or_verified(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    engine = engine_of(target, early_exit=1, max_batch_tokens=17)
    prompts = random_prompts(9)
    sequences = [sequence(next(prompts), max_tokens=5, self_draft=SelfDraft(8, 60)) for _ in range(6)]
    for each in sequences:
        engine.scheduler.add(each)
    while (outcome := engine.step()) is not None:
        assert outcome.num_tokens <= 17
        for gain in outcome.gains:
            assert not gain.self_drafted or max(gain.self_drafted.depths) < 5
    assert all(len(each.token_ids) == 9 + 5 for each in sequences)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"early_exit": 2}, "early_exit is 2: it must be below the 2 layers"),
        ({"draft": "./nowhere"}, "no model folder ./nowhere"),
        ({"head": "./nowhere"}, "no model folder ./nowhere"),
    ],
)
def test_what_cannot_draft_ends_the_start_in_one_line(fields: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=match):
        engine_of(tiny_llama(tmp_path), **fields)


@pytest.mark.parametrize("kind", ["copies", "medusa", "early exit"])
@pytest.mark.parametrize("wanted", [SelfDraft(), SelfDraft(3, 40)], ids=str)
def test_what_is_drafted_fits_the_pool(kind: str, wanted: SelfDraft, tmp_path: Path) -> None:
    """A sequence that fills the pool to its last position: nothing waits, and nobody is preempted for drafts."""
    target = tiny_llama(tmp_path / "target")
    engine = engine_of(target, **drafts_with(kind, target, tmp_path / "head"), num_blocks=6)
    alone = sequence([9] * 60, max_tokens=36, self_draft=wanted, logit_bias={9: 100.0})
    assert write(engine, [alone]) == [[9] * 36]
    assert engine.scheduler.num_preempted == 0
    two = [sequence([9] * 30, max_tokens=17, self_draft=wanted, logit_bias={9: 100.0}) for _ in range(2)]
    assert write(engine, two) == [[9] * 17] * 2
    assert engine.scheduler.num_preempted == 0


def test_copies_end_where_the_output_does(tmp_path: Path) -> None:
    """Where positions are learnt, nothing can be computed beyond the last."""
    engine = engine_of(tiny_checkpoint("gpt2", tmp_path), copied_tokens=5000)
    last = sequence([9] * 200, max_tokens=56, self_draft=SelfDraft(), logit_bias={9: 100.0})
    assert write(engine, [last]) == [[9] * 56]


@pytest.mark.parametrize(("budget", "load", "wanted"), [(17, 1, SelfDraft(8, 16)), (512, 32, SelfDraft(4, 16))])
def test_prompts_do_not_starve_behind_drafts(budget: int, load: int, wanted: SelfDraft, tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path), early_exit=1, max_batch_tokens=budget, num_blocks=400)
    prompts = random_prompts(8)
    running = [sequence(next(prompts), max_tokens=200, self_draft=wanted) for _ in range(load)]
    for each in running:
        engine.scheduler.add(each)
    steps_to(engine, lambda: all(len(each.token_ids) > 10 for each in running))
    new = sequence(next(random_prompts(20)), max_tokens=4)
    engine.scheduler.add(new)
    assert steps_to(engine, lambda: len(new.token_ids) > 20) <= 4


def test_a_sequence_does_not_starve_behind_proposals_of_the_router(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path), early_exit=1, max_batch_tokens=17)
    prompts = random_prompts(8)
    one, other = sequence(next(prompts), max_tokens=300), sequence(next(prompts), self_draft=SelfDraft(8))
    one.num_steps = 1
    for each in (one, other):
        engine.scheduler.add(each)
    for _ in range(60):
        if other.finish:
            break
        engine.step()
        if one.num_steps == 0:
            one.proposal, one.num_steps = Proposal((5,) * 12), 1
    assert other.finish
