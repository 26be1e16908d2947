"""What is drafted and verified where the policy decides, and what it learns of that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.engine.sequence import Sequence as EngineSequence
from shared.policy.self_drafting import SelfDraftingPolicy
from shared.policy.step_costs import StepCosts
from shared.policy.ways import Way
from shared.sampling.params import SelfDraft
from shared.sampling.proposal import Proposal
from shared.self_drafting.crowd import Crowd
from shared.self_drafting.drafter import Growing
from shared.self_drafting.eagle import Eagle
from shared.self_drafting.rounds import SelfDrafting, _Round
from tests.support.distribution import Filters, exact, least_p_value
from tests.support.drafting_engine import drafting_of, drafts_with, engine_of, random_prompts, sequence, steps_to, write
from tests.support.models import tiny_llama


def test_what_fixed_shapes_bring_says_nothing_of_whether_drafting_pays(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path, num_layers=3), early_exit=2, num_blocks=200)
    prompts = random_prompts(8)
    fixed = sequence(next(prompts), max_tokens=300, self_draft=SelfDraft(2))
    free = sequence(next(prompts), max_tokens=300, self_draft=SelfDraft())
    policy, told = drafting_of(engine)[0]._policy, 0
    by_how_many: list[int | None] = []

    def note(
        load: int, way: Way, num_tokens: int, seconds: float, waited: float = 0.0, num_sequences: int | None = None
    ) -> None:
        nonlocal told
        told += num_tokens
        by_how_many.append(num_sequences)

    policy.observe = note  # type: ignore[method-assign]
    write(engine, [fixed, free])
    # But for the first of each, whose prompt is in its step.
    assert 290 <= told <= 305
    assert set(by_how_many) <= {1, 2}, "as many as the tokens are of"
    assert by_how_many[3:].count(2) <= 2, "the last tokens of a fixed one have no draft"
    told = 0
    write(engine, [sequence(next(prompts), max_tokens=50, self_draft=SelfDraft(2))])
    assert told == 0


def test_steps_in_which_all_have_copies_say_nothing_of_a_drafter(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path, num_layers=3), early_exit=2, copied_tokens=5000, num_blocks=200)
    proposer, told = drafting_of(engine)[0], 0

    def note(
        load: int, way: Way, num_tokens: int, seconds: float, waited: float = 0.0, num_sequences: int | None = None
    ) -> None:
        nonlocal told
        told += 1

    proposer._policy.observe = note  # type: ignore[method-assign]
    asked = sequence([5, 6, 7, 8] * 4, max_tokens=200, self_draft=SelfDraft())
    engine.scheduler.add(asked)
    engine.step()
    num_steps = num_copied = 0
    while (outcome := engine.step()) is not None:
        num_steps += 1
        [gain] = outcome.gains
        alone = bool(gain.self_drafted.sources) and set(gain.self_drafted.sources) == {"suffix"}
        num_copied += alone and asked not in proposer._grown
    assert told < num_steps
    assert num_steps - told <= num_copied


def test_what_sequences_wait_for_their_owners_is_told(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path, num_layers=3), early_exit=2, num_blocks=200)
    proposer, now = drafting_of(engine)[0], 0.0
    proposer._clock = lambda: now
    told: list[float] = []

    def note(
        load: int, way: Way, num_tokens: int, seconds: float, waited: float = 0.0, num_sequences: int | None = None
    ) -> None:
        told.append(waited)

    proposer._policy.observe = note  # type: ignore[method-assign]
    prompts = random_prompts(8)
    asked = [sequence(next(prompts), max_tokens=300, self_draft=SelfDraft()) for _ in range(2)]
    engine.scheduler.add(asked[0])
    engine.step()
    now += 1.0
    engine.step()  # behind its prompt
    now += 0.5
    engine.step()
    engine.step()
    now += 0.25
    engine.scheduler.add(asked[1])
    engine.step()  # in which a prompt is
    now += 0.125
    engine.step()
    now += 0.0625
    engine.step()
    engine.scheduler.remove(asked[0])
    now += 0.03125
    engine.step()  # of one that was there before
    engine.scheduler.remove(asked[1])
    now += 100.0
    engine.scheduler.add(third := sequence(next(prompts), max_tokens=300, self_draft=SelfDraft()))
    engine.step()
    engine.step()
    assert third.num_committed > 8
    assert told == [0.0, 0.5, 0.0, 0.0, 0.0625, 0.03125, 0.0]


class Picky(SelfDraftingPolicy):
    """Goes each way in turns, and verifies what is likely: a matter of the noise."""

    def __init__(self) -> None:
        super().__init__(StepCosts([(1, 0.001)]))
        self._ways = itertools.cycle(Way)

    def way(self, load: int, may_try: bool = True) -> Way:
        return next(self._ways)

    def goes_on(self, num_rows: int, load: int, prospect: float) -> bool:
        return True

    def num_rows(self, load: int, likelihoods: Sequence[float], spent: float) -> int:
        return sum(its > 0.3 for its in likelihoods)


def test_unseeded_samples_follow_the_target_whatever_is_verified(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path, vocab_size=12, num_layers=3)
    engine = engine_of(target, early_exit=2, num_blocks=400, max_batch_tokens=512)
    proposer, growth = drafting_of(engine)
    proposer._policy = growth._policy = Picky()
    prompt, filters = (5, 3, 11, 7), Filters(1.0, top_k=8)
    samples: list[list[int]] = []
    for _ in range(40):
        asked = [
            sequence(prompt, max_tokens=5, stop_token_ids=frozenset(), self_draft=SelfDraft(), **filters.fields())
            for _ in range(64)
        ]
        samples += write(engine, asked)
    assert least_p_value(np.array(samples), exact(target, prompt, 5, filters)) > 1e-6


@pytest.mark.parametrize(
    ("follows", "wanted"), [(True, SelfDraft()), (False, SelfDraft()), (True, SelfDraft(sources=("suffix",)))]
)
def test_a_head_takes_in_nothing_for_sequences_that_begin_while_it_does_not_pay_or_that_may_not_have_it(
    follows: bool, wanted: SelfDraft, tmp_path: Path
) -> None:
    target = tiny_llama(tmp_path / "target")
    plain, engine = engine_of(target), engine_of(target, **drafts_with("eagle3", target, tmp_path / "head"))
    proposer, growth = drafting_of(engine)
    policy, head = proposer._policy, cast(Eagle, growth.drafter)
    policy.follows = lambda *_: follows  # type: ignore[method-assign]
    policy.way = lambda *_: Way.TREE if follows else Way.PLAIN  # type: ignore[method-assign]
    taken_in: list[int] = []
    run = head._run

    def note(tokens: Sequence[int], *rest: Any) -> Tensor:
        taken_in.append(len(tokens))
        return run(tokens, *rest)

    head._run = note  # type: ignore[assignment,method-assign]
    prompts = random_prompts(50)
    asked = [next(prompts) for _ in range(2)]
    assert write(engine, [sequence(each, self_draft=wanted) for each in asked]) == write(
        plain, [sequence(each) for each in asked]
    )
    # The prompts are, which others may find in the cache, but for what is left over of them.
    assert (sum(taken_in) > 100) == (follows and not wanted.sources)
    assert sum(taken_in) >= 80
    # A fixed shape has its head, whatever pays.
    fixed = sequence(next(prompts), self_draft=SelfDraft(3))
    engine.scheduler.add(fixed)
    num_drafted = 0
    while (outcome := engine.step()) is not None:
        num_drafted += sum(len(gain.self_drafted) for gain in outcome.gains)
    assert num_drafted > 0


def test_nothing_is_decided_before_what_all_steps_brought_is_told(tmp_path: Path) -> None:
    """Plain steps are told of together as long as no drafts are to be expected."""
    engine = engine_of(tiny_llama(tmp_path, num_layers=3), early_exit=2)
    proposer, _ = drafting_of(engine)
    policy, expects, told = proposer._policy, False, 0

    def observe(*_: Any) -> None:
        nonlocal told
        told += 1

    policy.follows = lambda *_: expects  # type: ignore[method-assign]

    def observe_rest(load: int, size: int, steps: Sequence[object]) -> None:
        nonlocal told
        assert load == size == 1
        told += len(steps)

    policy.observe = observe  # type: ignore[assignment,method-assign]
    policy.observe_rest = observe_rest  # type: ignore[method-assign]
    told_when_asked: list[int] = []

    def way(*_: Any) -> Way:
        told_when_asked.append(told)
        return Way.PLAIN

    policy.way = way  # type: ignore[assignment,method-assign]
    engine.scheduler.add(sequence(next(random_prompts(10)), max_tokens=60, self_draft=SelfDraft()))
    engine.step()  # its prompt
    for _ in range(35):
        engine.step()
    assert told == 32
    expects = True
    for _ in range(4):
        engine.step()
    assert told_when_asked == [35, 36, 37, 38]


def test_who_comes_and_goes_parts_what_is_told_together(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path, num_layers=3), early_exit=2, num_blocks=80)
    proposer, prompts, told = drafting_of(engine)[0], random_prompts(10), list[tuple[int, int, int]]()
    policy = proposer._policy
    policy.follows = lambda *_: False  # type: ignore[method-assign]
    policy.observe_rest = lambda load, size, steps: told.append((load, size, len(steps)))  # type: ignore[method-assign]
    asked = [sequence(next(prompts), max_tokens=10, self_draft=SelfDraft()) for _ in range(2)]
    for each in (*asked, sequence(next(prompts), max_tokens=20), sequence(next(prompts), max_tokens=20)):
        engine.scheduler.add(each)
        engine.step()
    while engine.step() is not None:
        pass
    # Of steps with prompts, and of those where nobody may draft, nothing.
    assert [(load, size) for load, size, _ in told] == [(4, 4), (3, 3)]
    assert sum(count for *_, count in told) == 9 - 2  # of the second of them, less those with others' prompts


def test_what_has_begun_with_a_head_goes_on_without_once_that_does_not_pay(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    engine = engine_of(target, **drafts_with("eagle3", target, tmp_path / "head"), num_blocks=80)
    proposer, growth = drafting_of(engine)
    policy, drafts = proposer._policy, True
    policy.follows = lambda *_: drafts  # type: ignore[method-assign]
    policy.way = lambda *_: Way.TREE if drafts else Way.PLAIN  # type: ignore[method-assign]
    asked = sequence(next(random_prompts(20)), max_tokens=200, self_draft=SelfDraft())
    engine.scheduler.add(asked)
    steps_to(engine, lambda: len(asked.token_ids) > 40)
    assert growth.drafter.ready(asked)
    drafts = False
    steps_to(engine, lambda: len(asked.token_ids) > 120)
    assert not growth.drafter.ready(asked)
    drafts = True
    while (outcome := engine.step()) is not None:
        assert not any(gain.self_drafted for gain in outcome.gains)
    assert len(asked.token_ids) == 220


class Prophet:
    """Knows what comes, and is sure of it."""

    source, most_steps, uses_kv = "prophet", 4, False

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self._text = text
        self._vocab_size = vocab_size

    def observe(self, *_: object) -> None:
        pass

    def keeps_up(self, _: EngineSequence) -> bool:
        return False

    def num_lacking(self, _: EngineSequence) -> int:
        return 0

    def follow(self, _: Sequence[EngineSequence]) -> None:
        """Ready at once."""

    def ready(self, _: EngineSequence) -> bool:
        return True

    def begin(self, sequences: Sequence[EngineSequence]) -> Tensor:
        return self._logits([len(each.token_ids) for each in sequences])

    def extend(self, growing: Sequence[Growing]) -> Tensor:
        return self._logits(
            [
                len(each.sequence.token_ids) + depth
                for each in growing
                for depth in each.proposal.depths[each.first_row :]
            ]
        )

    def _logits(self, positions: Sequence[int]) -> Tensor:
        logits = torch.zeros(len(positions), self._vocab_size)
        for row, position in enumerate(positions):
            logits[row, self._text[min(position, len(self._text) - 1)]] = 20.0
        return logits


def test_a_drafter_that_was_wrong_for_long_is_found_out_to_be_right(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path)
    prompt = next(random_prompts(20))
    [text] = write(engine_of(target, num_blocks=60), [sequence(prompt, max_tokens=200)])
    engine = engine_of(target, num_blocks=60)
    engine.draft_by(SelfDrafting.of(engine, Prophet([*prompt, *text], 257)))
    proposer, growth = drafting_of(engine)
    proposer._policy = growth._policy = Picky()
    for guess in range(10):
        for _ in range(200):
            growth._foresight.observe(guess / 10 + 0.05, True, False)
    asked = sequence(prompt, max_tokens=200, self_draft=SelfDraft())
    engine.scheduler.add(asked)
    drafted = []
    while (outcome := engine.step()) is not None:
        drafted += [len(gain.self_drafted) for gain in outcome.gains]
    assert asked.token_ids == [*prompt, *text]
    assert not any(drafted[:4])
    assert sum(drafted) > 20


def test_how_much_is_written_is_told_once_of_each(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path, num_layers=3), early_exit=2, num_blocks=14)
    proposer, told = drafting_of(engine)[0], list[int]()
    proposer._policy.observe_ended = told.append  # type: ignore[method-assign,assignment]
    prompts = random_prompts(20)
    asked = [sequence(next(prompts), max_tokens=60, self_draft=SelfDraft()) for _ in range(4)]
    fixed = sequence(next(prompts), max_tokens=60, self_draft=SelfDraft(2))
    for each in (*asked, fixed, sequence(next(prompts), max_tokens=60)):
        engine.scheduler.add(each)
    steps_to(engine, lambda: len(asked[0].token_ids) > 30)
    engine.scheduler.remove(asked[0])
    while engine.step() is not None:
        pass
    assert engine.scheduler.num_preempted > 0
    assert told == [len(asked[0].token_ids) - 20, 60, 60, 60]


def test_what_a_drafter_begins_with_says_nothing_of_what_further_steps_take(tmp_path: Path) -> None:
    """Where it catches up with what its sequence committed."""
    target = tiny_llama(tmp_path)
    engine = engine_of(target, num_blocks=60)
    prophet, now = Prophet([5] * 300, 257), 0.0
    engine.draft_by(SelfDrafting.of(engine, prophet))
    proposer, growth = drafting_of(engine)
    policy = proposer._policy = growth._policy = SelfDraftingPolicy(StepCosts([(1, 0.01), (64, 0.01)]))
    policy.observe_step = lambda *_: None  # type: ignore[method-assign]
    growth._clock = proposer._clock = lambda: now
    begin, extend = prophet.begin, prophet.extend
    told: list[tuple[int, float]] = []

    def slow(sequences: Sequence[EngineSequence]) -> Tensor:
        nonlocal now
        now += 1.0
        return begin(sequences)

    def fast(growing: Sequence[Growing]) -> Tensor:
        nonlocal now
        now += 0.25
        return extend(growing)

    prophet.begin, prophet.extend = slow, fast  # type: ignore[method-assign]
    policy.observe_drafting = lambda *what: told.append(what)  # type: ignore[method-assign]
    policy.way = lambda *_: Way.TREE  # type: ignore[method-assign]
    asked = sequence(next(random_prompts(20)), max_tokens=20, self_draft=SelfDraft())
    write(engine, [asked])
    assert told
    assert {seconds for _, seconds in told} == {0.25}
    assert all(1 <= num_rows <= 8 for num_rows, _ in told)


@pytest.mark.parametrize(("gone", "seconds"), [(Way.PLAIN, 0.0), (Way.TREE, 1.0)])
def test_what_it_takes_to_decide_is_only_what_drafts_take(tmp_path: Path, gone: Way, seconds: float) -> None:
    """While plain steps are but tried: nobody decides anything where they are gone."""
    engine = engine_of(tiny_llama(tmp_path), num_blocks=60)
    prophet, now = Prophet([5] * 300, 257), 0.0
    engine.draft_by(SelfDrafting.of(engine, prophet))
    proposer, growth = drafting_of(engine)
    policy = proposer._policy = growth._policy = SelfDraftingPolicy(StepCosts([(1, 0.01), (64, 0.01)]))
    growth._clock = proposer._clock = lambda: now
    told: list[float] = []

    def slow(load: int, may_try: bool = True) -> Way:
        nonlocal now
        now += 1.0
        return gone

    def note(
        load: int, way: Way, num_tokens: int, seconds: float, waited: float = 0.0, num_sequences: int | None = None
    ) -> None:
        assert way is gone
        told.append(seconds)

    policy.way = slow  # type: ignore[method-assign]
    policy.observe = note  # type: ignore[method-assign]
    write(engine, [sequence(next(random_prompts(20)), max_tokens=20, self_draft=SelfDraft())])
    assert told
    assert all(seconds <= took < seconds + 0.9 for took in told)


def test_what_verifying_takes_is_shared_by_those_whose_tokens_are_verified(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path), copied_tokens=5000)
    proposer = engine._proposer
    assert isinstance(proposer, SelfDrafting)
    policy = proposer._policy = SelfDraftingPolicy(StepCosts([(1, 0.01), (64, 0.01)]))
    for _ in range(100):
        policy.observe_step(16, 0, 0.01)
        policy.observe_step(16, 16, 0.0105)  # half a millisecond for whatever is verified
    many = [sequence([1, 2, 3]) for _ in range(16)]
    proposer._load = 16
    proposer._rounds = {each: _Round(Proposal((5,), sources=("suffix",)), 3) for each in many}
    share = 0.01 / 16
    assert sum(proposer._worth(each, 0.0)[1] for each in many) * share == pytest.approx(0.0005, rel=0.03)
    assert proposer._worth(many[0], share)[1] == pytest.approx(1.5 + 0.05, rel=0.01), "looking costs more than it takes"


def test_what_comes_behind_verifying_is_a_part_of_what_it_takes(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path), copied_tokens=5000)
    proposer = engine._proposer
    assert isinstance(proposer, SelfDrafting)
    policy = proposer._policy = SelfDraftingPolicy(StepCosts([(1, 0.01), (64, 0.01)]))
    one = sequence([1, 2, 3])
    proposer._crowd = Crowd.of([one], [])
    for _ in range(200):
        for took in (0.01, 0.012, 0.01, 0.01, 0.01, 0.01):
            proposer._load, proposer._rounds = 1, {}
            if took == 0.01 and proposer._num_plain in (0, 5):
                proposer._rounds = {one: _Round(Proposal((5,), sources=("suffix",)), 3)}
            proposer.settle(1, took, has_prompts=False)
    proposer._rounds = {one: _Round(Proposal((5,), sources=("suffix",)), 3)}
    verifying = policy.step_seconds(1, 1) - policy.step_seconds(1, 0)
    assert proposer._worth(one, 0.003)[1] * policy.step_seconds(1, 0) == pytest.approx(
        0.0045 + verifying + 0.002, rel=0.1
    )


def test_what_is_decided_is_by_whom_most_of_are_and_those_count_that_begin(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path, num_layers=3), early_exit=2)
    proposer, _ = drafting_of(engine)
    policy, prompts = proposer._policy, random_prompts(10)

    def asked(temperature: float) -> EngineSequence:
        return sequence(next(prompts), max_tokens=50, temperature=temperature, self_draft=SelfDraft())

    engine.scheduler.add(asked(0.0))
    engine.step()
    assert not policy.sampled
    for _ in range(2):
        engine.scheduler.add(asked(1.0))
    engine.step()
    assert policy.sampled
    for _ in range(3):
        engine.scheduler.add(asked(0.0))
    engine.step()
    assert not policy.sampled
    engine.scheduler._max_sequences = 15
    for _ in range(9):  # who drafts nothing is not asked
        engine.scheduler.add(sequence(next(prompts), max_tokens=5, temperature=1.0))
    for _ in range(9):  # nor who waits for a place
        engine.scheduler.add(asked(1.0))
    for _ in range(3):
        engine.step()
        assert not policy.sampled
