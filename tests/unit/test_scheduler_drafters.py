"""The scheduler of a drafter: draws in one go, what is committed of them, and drafts that nobody waits for."""

from __future__ import annotations

import random

import pytest

from shared.engine.sequence import Sequence
from shared.sampling.params import SamplingParams
from tests.support.machine import BLOCK_SIZE, ROOT, VOCAB_SIZE, Machine, decoded


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_blocks", "max_sequences"), [(14, 64), (200, 2)])
def test_drafters_follow_what_is_committed(seed: int, num_blocks: int, max_sequences: int) -> None:
    """A drafter draws on, is told what really came, and its KV is never anything but its own tokens'."""
    rng = random.Random(seed)
    machine = Machine(num_blocks, max_batch_tokens=9, max_sequences=max_sequences)
    truth = {
        new: decoded(new.token_ids, SamplingParams(max_tokens=40, sequence_index=1 + i % 2))
        for i, new in enumerate(
            Sequence(
                [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 10))], 1, SamplingParams(), ROOT, drafting=True
            )
            for i in range(5)
        )
    }
    for new in truth:
        machine.scheduler.add(new)
    num_preempted = 0
    for _ in range(600):
        for new, text in truth.items():
            if new not in machine.sequences or new.num_pending_tokens or rng.random() < 0.3:
                continue
            committed = new.num_committed
            # Of what it drew some is taken, then the truth goes on.
            agreed = rng.randint(0, new.num_drawn)
            following = [
                *new.token_ids[committed : committed + agreed],
                *text[committed + agreed :][: rng.randint(1, 2)],
            ]
            following = following[: len(text) - committed]
            new.commit(committed, following)
            text[committed : committed + len(following)] = following
            if new.num_committed >= len(text):
                machine.scheduler.remove(new)
            elif rng.random() < 0.2:
                new.num_steps, new.num_wanted_tokens = 0, len(new.token_ids) - 1
            else:
                new.num_steps = max(0, min(rng.randint(1, 5), len(text) - new.num_committed) - new.num_drawn)
                new.draws_on = rng.random() < 0.7
        held = [new for new in machine.sequences if new.block_table]
        machine.step()
        num_preempted += sum(not new.block_table for new in held)
    assert all(new not in machine.sequences for new in truth), "a drafter starves"
    assert num_preempted > 0
    assert machine.num_following > 0
    machine.scheduler.check()
    assert machine.pool.counts().owned == 0


def test_a_drafter_that_does_not_draw_on_for_anothers_sake_holds_no_block_for_it() -> None:
    """At the edge of a block, beside one that is to draw once only."""
    machine = Machine(20)
    two, one = (Sequence([1] * BLOCK_SIZE, 1, SamplingParams(max_tokens=9), ROOT, drafting=True) for _ in range(2))
    for each, num_steps in ((two, 2), (one, 1)):
        each.num_steps, each.draws_on = num_steps, True
        machine.scheduler.add(each)
    machine.step()
    assert [each.num_drawn for each in (two, one)] == [1, 1]
    assert [len(each.block_table) for each in (two, one)] == [1, 1]
    machine.step()
    assert [each.num_drawn for each in (two, one)] == [2, 1]


def test_a_drafters_own_draws_are_never_found_as_prefix() -> None:
    machine = Machine(num_blocks=40)
    drafter = Sequence(list(range(6)), 6, SamplingParams(), ROOT, drafting=True, num_steps=10)
    machine.scheduler.add(drafter)
    while machine.step() is not None:
        pass
    assert (drafter.num_drawn, len(machine.pool.findable())) == (10, 1)
    drafter.commit(6, drafter.token_ids[6:12])
    drafter.num_steps = 1
    machine.step()
    assert len(machine.pool.findable()) == 3


def drafting(prompt: list[int], num_steps: int = 1) -> Sequence:
    return Sequence(prompt, len(prompt), SamplingParams(), ROOT, drafting=True, num_steps=num_steps)


def idle_drafts(machine: Machine, count: int) -> list[Sequence]:
    """Drafting sequences of two blocks each that nobody waits for, the first idle for longest."""
    drafts = [drafting([i] * 6) for i in range(count)]
    for draft in drafts:
        machine.scheduler.add(draft)
    while machine.step() is not None:
        pass
    for draft in drafts:
        draft.commit(6, draft.token_ids[6:])
        draft.num_steps = 1
        machine.step()
        assert draft.num_pending_tokens == 0
    return drafts


def test_a_new_draft_takes_the_place_of_the_one_idle_for_longest() -> None:
    machine = Machine(num_blocks=100, max_sequences=4)
    drafts = idle_drafts(machine, 4)
    drafts[0].num_steps = 1
    machine.step()
    newcomers = [drafting([7] * 6), drafting([8] * 6)]
    for newcomer in newcomers:
        machine.scheduler.add(newcomer)
    assert machine.step() is not None
    assert [newcomer.num_drawn for newcomer in newcomers] == [1, 1]
    assert [bool(draft.block_table) for draft in drafts] == [True, False, False, True]
    drafts[1].num_steps = 1
    assert machine.step() is not None, "and comes back when asked"
    assert [bool(draft.block_table) for draft in drafts] == [True, True, False, False]


def test_idle_drafts_give_up_no_more_blocks_than_are_needed() -> None:
    machine = Machine(num_blocks=10)
    drafts = idle_drafts(machine, 5)
    machine.scheduler.add(newcomer := drafting([7] * 10))
    assert machine.step() is not None
    assert newcomer.num_drawn == 1
    assert [bool(draft.block_table) for draft in drafts] == [False, False, True, True, True]


def test_a_running_draft_takes_blocks_from_idle_ones_not_from_the_youngest() -> None:
    machine = Machine(num_blocks=8)
    drafts = idle_drafts(machine, 2)
    running = [drafting([i] * 6, num_steps=10) for i in (7, 8)]
    for draft in running:
        machine.scheduler.add(draft)
    for step in range(1, 9):
        plan = machine.step()
        assert plan is not None
        assert plan.num_tokens == (12 if step == 1 else 2), "nothing is computed again"
        assert [draft.num_drawn for draft in running] == [step, step]
    assert [bool(draft.block_table) for draft in drafts] == [False, False]


def test_draws_that_nobody_could_have_a_say_in_are_made_in_one_go() -> None:
    machine = Machine(num_blocks=20)
    drafts = [drafting([i] * 6, num_steps=num_steps) for i, num_steps in enumerate((5, 3))]
    for draft in drafts:
        draft.draws_on = True
        machine.scheduler.add(draft)
    machine.step()
    assert [draft.num_drawn for draft in drafts] == [3, 3], "until one of them is to be answered"
    machine.step()
    assert [draft.num_drawn for draft in drafts] == [4, 3], "and then step by step: the other may be asked again"
    machine.scheduler.remove(drafts[1])
    drafts[0].num_steps = 4
    machine.step()
    assert drafts[0].num_drawn == 8
    drafts[0].draws_on, drafts[0].num_steps = False, 2
    machine.step()
    assert drafts[0].num_drawn == 9
    machine.scheduler.add(drafting([7] * 6, num_steps=0))
    drafts[0].draws_on = True
    machine.step()
    assert drafts[0].num_drawn == 10, "another may be asked meanwhile"


def test_draws_in_one_go_take_no_blocks_from_anybody() -> None:
    machine = Machine(num_blocks=3)
    machine.scheduler.add(draft := drafting([1] * 6, num_steps=9))
    draft.draws_on = True
    machine.step()
    assert draft.num_drawn == 7, "as far as there are any"
    assert machine.scheduler.num_preempted == 0
