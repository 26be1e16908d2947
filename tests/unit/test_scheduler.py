"""The scheduler: what is computed when, in which blocks, for whom; on a machine that simulates KV."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from shared.engine.sequence import Sequence
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from tests.support.machine import (
    BLOCK_SIZE,
    ROOT,
    VOCAB_SIZE,
    Machine,
    decoded,
    new_sequence,
    random_guess,
    run,
    serve,
)


@pytest.mark.parametrize("max_batch_tokens", [5, 17, 64])
@pytest.mark.parametrize("num_blocks", [12, 24, 200])
@pytest.mark.parametrize("max_sequences", [2, 64])
def test_random_traffic_gets_the_tokens_of_plain_decoding(
    max_batch_tokens: int, num_blocks: int, max_sequences: int
) -> None:
    rng = random.Random(f"{max_batch_tokens} {num_blocks} {max_sequences}")
    machine = Machine(num_blocks, max_batch_tokens, max_sequences)
    beginnings = [[rng.randrange(VOCAB_SIZE) for _ in range(16)] for _ in range(2)]
    waiting_for: dict[Sequence, None] = {}
    ended: list[Sequence] = []
    num_released = num_preempted = 0
    for turn in range(20_000):
        if len(waiting_for) < 12 and turn < 400 and rng.random() < 0.3:
            prompt = beginnings[rng.randrange(2)][: rng.randrange(17)]
            prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0 if prompt else 1, 12))]
            stop = frozenset({rng.randrange(VOCAB_SIZE)})
            params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 18), stop_token_ids=stop)
            family = [
                Sequence(prompt, len(prompt), replace(params, sequence_index=i), ROOT, num_steps=rng.choice([1, 1, 40]))
                for i in range(rng.choice([1, 1, 1, 2, 4]))
            ]
            family[0].num_steps = max(1, family[0].num_steps)
            family[0].forks = family[1:]
            machine.scheduler.add(family[0])
            waiting_for.update(dict.fromkeys(family))
        for sequence in list(waiting_for):
            if sequence.finish is not None:
                del waiting_for[sequence]
                ended.append(sequence)
            elif rng.random() < 0.01 and turn < 400:
                machine.scheduler.remove(sequence)
                assert sequence not in machine.sequences
                assert not sequence.block_table
                del waiting_for[sequence]
                num_released += 1
            elif sequence.num_steps == 0 and rng.random() < 0.6:
                room = sequence.num_prompt_tokens + sequence.params.max_tokens - len(sequence.token_ids)
                length = min(rng.randrange(max_batch_tokens), 6, room)
                sequence.proposal = Proposal(random_guess(rng, sequence, length))
                sequence.num_steps = rng.choice([1, 1, 3])
        running = [sequence for sequence in machine.sequences if sequence.block_table]
        machine.step()
        num_preempted += any(not sequence.block_table and sequence.finish is None for sequence in running)
        if turn >= 400 and not waiting_for:
            break
    assert not waiting_for, "a sequence starves"
    assert len(ended) > 30
    assert num_released > 3
    assert num_preempted > 10 or num_blocks > 12 or max_sequences == 2
    for sequence in ended:
        assert sequence.token_ids == decoded(sequence.token_ids[: sequence.num_prompt_tokens], sequence.params)
    assert machine.pool.counts().owned == 0
    assert machine.scheduler.num_running == machine.scheduler.num_waiting == 0


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


@pytest.mark.parametrize("length", [1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1])
@pytest.mark.parametrize("primed", [False, True], ids=["cold", "prefix in cache"])
@pytest.mark.parametrize("max_sequences", [1, 3, 64])
def test_forks_share_the_prompt_and_then_part(length: int, primed: bool, max_sequences: int) -> None:
    machine = Machine(num_blocks=40, max_sequences=max_sequences)
    prompt = list(range(1, length + 1))
    if primed:
        serve(machine, new_sequence(prompt))
    machine.num_computed = 0
    first = new_sequence(prompt)
    first.forks = [new_sequence(prompt, sequence_index=i) for i in (1, 2, 3)]
    family = [first, *first.forks]
    machine.scheduler.add(first)
    run(machine, *family)
    assert len({tuple(member.token_ids) for member in family}) > 1
    if max_sequences > 3 and not primed:
        # The prompt once, then each its last token and its own output.
        assert machine.num_computed == length - 1 + 4 * 8


def test_forks_go_on_when_the_first_is_released_before_they_split() -> None:
    machine = Machine(num_blocks=40, max_batch_tokens=5)
    prompt = list(range(20))
    first = new_sequence(prompt)
    forks = [new_sequence(prompt, sequence_index=i) for i in (1, 2)]
    first.forks = list(forks)
    machine.scheduler.add(first)
    machine.step()
    machine.scheduler.remove(first)
    machine.scheduler.remove(forks[0])  # not split off yet either
    run(machine, forks[1])
    assert first.finish is forks[0].finish is None


def test_a_fork_released_before_it_split_off_never_runs() -> None:
    machine = Machine(num_blocks=40)
    first = new_sequence([1, 2, 3])
    gone, stays = new_sequence([1, 2, 3], sequence_index=1), new_sequence([1, 2, 3], sequence_index=2)
    first.forks = [gone, stays]
    machine.scheduler.add(first)
    machine.scheduler.remove(gone)
    run(machine, first, stays)
    assert gone.token_ids == [1, 2, 3]


def test_decodes_go_before_prefill_chunks_and_chunks_fill_the_budget() -> None:
    machine = Machine(num_blocks=100, max_batch_tokens=10)
    decoding = [new_sequence([i], max_tokens=30) for i in range(3)]
    for sequence in decoding:
        machine.scheduler.add(sequence)
    machine.step()
    long = new_sequence(list(range(30)))
    machine.scheduler.add(long)
    for start in (0, 7, 14, 21):
        plan = machine.step()
        assert plan is not None
        assert [item.sequence for item in plan.scheduled] == [*decoding, long]
        last = plan.scheduled[-1]
        assert (last.start, last.num_tokens, last.num_rows) == (start, 7, 0)
    plan = machine.step()
    assert plan is not None
    assert (plan.scheduled[-1].num_tokens, plan.scheduled[-1].num_rows) == (2, 1)
    run(machine, *decoding, long)


@pytest.mark.parametrize("budget", [7, 64])
def test_what_a_step_attends_to_is_counted(budget: int) -> None:
    machine = Machine(num_blocks=100, max_batch_tokens=budget)
    stream, long = new_sequence([1, 2, 3], max_tokens=30), new_sequence(list(range(30)), max_tokens=1)
    machine.scheduler.add(stream)
    counted = [plan.num_attended for plan in (machine.step(), machine.step()) if plan is not None]
    # Three tokens of a prompt attend to themselves and to those before; then the stream's fourth to four.
    assert counted == [(1 + 2 + 3, 0), (0, 4)]
    machine.scheduler.add(long)
    prompts, contexts = 0, []
    while long.finish is None:
        plan = machine.step()
        assert plan is not None
        prompts += plan.num_attended[0]
        contexts.append(plan.num_attended[1])
    # However it is cut.
    assert prompts == 30 * 31 // 2
    assert contexts == list(range(5, 5 + len(contexts)))
    run(machine, stream, long)


def test_rows_of_a_verification_are_never_split() -> None:
    machine = Machine(num_blocks=100, max_batch_tokens=6)
    sequences = [new_sequence([i, i, i], max_tokens=12, num_steps=1) for i in range(3)]
    for sequence in sequences:
        machine.scheduler.add(sequence)
    while machine.step() is not None:
        pass
    for sequence in sequences:
        sequence.proposal, sequence.num_steps = Proposal((1, 2, 3, 4)), 1
    for sequence in sequences:
        plan = machine.step()
        assert plan is not None
        assert [(item.sequence, item.num_tokens, item.num_rows) for item in plan.scheduled] == [(sequence, 5, 5)]


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 30])
def test_a_prefix_hit_covers_all_full_blocks_before_the_last_token(length: int) -> None:
    machine = Machine(num_blocks=40)
    prompt = list(range(length))
    serve(machine, new_sequence(prompt))
    machine.num_computed = 0
    again = new_sequence(prompt, max_tokens=1)
    serve(machine, again)
    assert again.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert machine.num_computed == length - again.num_cached_tokens


def test_other_roots_share_nothing() -> None:
    machine = Machine(num_blocks=40)
    serve(machine, new_sequence(list(range(20))))
    other = Sequence(list(range(20)), 20, SamplingParams(temperature=0.0, max_tokens=2), b"1" * 32, num_steps=9)
    serve(machine, other)
    assert other.num_cached_tokens == 0


def test_rejected_positions_are_never_found_as_prefix() -> None:
    machine = Machine(num_blocks=40)
    sequence = new_sequence(list(range(6)), max_tokens=20, num_steps=1)
    machine.scheduler.add(sequence)
    machine.step()
    wrong = tuple((token + 1) % VOCAB_SIZE for token in decoded(list(range(6)), sequence.params)[7:15])
    sequence.proposal, sequence.num_steps = Proposal(wrong), 1
    num_blocks = len(sequence.block_table)
    machine.step()
    assert len(sequence.token_ids) == 8
    assert len(sequence.block_table) == num_blocks == 2  # what held rejected positions only went back
    assert len(machine.pool.findable()) == 1
    probe = new_sequence([*range(6), sequence.token_ids[6], *wrong, 0], max_tokens=1)
    machine.scheduler.add(probe)
    machine.step()
    assert probe.num_cached_tokens == BLOCK_SIZE


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


def test_out_of_blocks_the_youngest_gives_way_and_the_oldest_gets_on() -> None:
    machine = Machine(num_blocks=6)
    old, young = new_sequence([1] * 8, max_tokens=16), new_sequence([2] * 8, max_tokens=16)
    machine.scheduler.add(old)
    machine.scheduler.add(young)
    preempted = False
    while old.finish is None:
        before = len(old.token_ids)
        assert machine.step() is not None
        assert len(old.token_ids) > before
        preempted = preempted or (not young.block_table and machine.scheduler.num_waiting == 1)
    assert preempted
    run(machine, old, young)


def test_a_preempted_sequence_keeps_its_place_before_later_arrivals() -> None:
    machine = Machine(num_blocks=6)
    sequences = [new_sequence([i] * 8, max_tokens=16) for i in range(4)]
    for sequence in sequences:
        machine.scheduler.add(sequence)
    ends: list[Sequence] = []
    while machine.step() is not None:
        ends += [sequence for sequence in sequences if sequence.finish is not None and sequence not in ends]
    assert ends == sequences


def test_the_next_in_line_waits_for_room_and_is_not_overtaken() -> None:
    machine = Machine(num_blocks=8)
    running, large, small = new_sequence([1] * 12), new_sequence([2] * 20), new_sequence([3])
    machine.scheduler.add(running)
    machine.step()
    machine.scheduler.add(large)
    machine.scheduler.add(small)
    while running.finish is None:
        machine.step()
        assert large.block_table == small.block_table == []
    run(machine, running, large, small)


def test_cached_blocks_that_a_prefix_takes_are_not_counted_as_room() -> None:
    machine = Machine(num_blocks=6)
    serve(machine, new_sequence([2] * 13, max_tokens=1))
    running = new_sequence([1] * 9, max_tokens=3)
    machine.scheduler.add(running)
    machine.step()
    assert machine.pool.counts() == (0, 3, 3, 6)
    again, small = new_sequence([2] * 13), new_sequence([3])
    machine.scheduler.add(again)
    machine.scheduler.add(small)
    machine.step()
    assert again.block_table == small.block_table == []
    run(machine, running, again, small)
    assert again.num_cached_tokens == 12


def test_an_idle_sequence_that_lost_its_blocks_comes_back_when_asked() -> None:
    machine = Machine(num_blocks=6)
    old, idle = new_sequence([1] * 8, max_tokens=16), new_sequence([2] * 8, num_steps=1)
    machine.scheduler.add(old)
    machine.scheduler.add(idle)
    run(machine, old)
    assert idle in machine.sequences
    assert len(idle.token_ids) == 9
    idle.num_steps = 100
    run(machine, idle)


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
    assert draft.num_drawn == 4, "until there may be none for the next"
    machine.step()
    assert draft.num_drawn == 5
    assert machine.scheduler.num_preempted == 0


def test_no_more_sequences_hold_blocks_than_allowed() -> None:
    machine = Machine(num_blocks=100, max_sequences=2)  # Machine.step checks it
    sequences = [new_sequence([i, i]) for i in range(5)]
    for sequence in sequences:
        machine.scheduler.add(sequence)
    machine.step()
    assert (machine.scheduler.num_running, machine.scheduler.num_waiting) == (2, 3)
    run(machine, *sequences)


def test_removing_twice_or_a_stranger_changes_nothing() -> None:
    machine = Machine(num_blocks=10)
    sequence = new_sequence([1, 2, 3])
    machine.scheduler.remove(sequence)
    machine.scheduler.add(sequence)
    machine.step()
    machine.scheduler.remove(sequence)
    machine.scheduler.remove(sequence)
    machine.scheduler.check()
    assert machine.pool.counts().owned == 0
    assert machine.step() is None


def leak(machine: Machine, sequence: Sequence) -> None:
    sequence.block_table.pop()


def own_while_waiting(machine: Machine, sequence: Sequence) -> None:
    del machine.scheduler._running[sequence]
    machine.scheduler._waiting[sequence] = None


@pytest.mark.parametrize("corrupt", [leak, own_while_waiting])
def test_check_notices(corrupt: Callable[[Machine, Sequence], None]) -> None:
    machine = Machine(num_blocks=10)
    sequence = new_sequence([1, 2, 3, 4, 5])
    machine.scheduler.add(sequence)
    machine.step()
    corrupt(machine, sequence)
    with pytest.raises(AssertionError):
        machine.scheduler.check()
