"""Engines that draft for themselves: exact on every attention path, in small pools, and whatever the drafter does."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.engine.engine import Engine
from shared.engine.sequence import Sequence as EngineSequence
from shared.policy.self_drafting import SelfDraftingPolicy
from shared.policy.step_costs import StepCosts
from shared.sampling.params import SelfDraft
from shared.sampling.proposal import Proposal
from shared.self_drafting.drafter import Growing
from shared.self_drafting.eagle import Eagle
from shared.self_drafting.rounds import SelfDrafting, _Round
from shared.settings import StartupError
from tests.support.distribution import Filters, exact, least_p_value
from tests.support.drafting_engine import NUM_TOKENS, drafting_of, engine_of, random_prompts, sequence, steps_to, write
from tests.support.families import tiny_checkpoint
from tests.support.greedy import references
from tests.support.heads import (
    config_of,
    eagle3_weights,
    eagle_weights,
    layer_config,
    medusa_weights,
    write_head,
    write_medusa,
)
from tests.support.models import perturbed, tiny_llama

SHAPES = [SelfDraft(1), SelfDraft(4), SelfDraft(3, 9), SelfDraft()]
KINDS = ["early exit", "medusa", "eagle", "eagle3", "model", "copies", "copies and eagle3"]
# Windows, soft caps and sinks are in two of them.
FAMILIES = ["gemma2", "gpt_oss", *(pytest.param(each, marks=pytest.mark.long) for each in ("mistral", "qwen3", "gpt2"))]


@pytest.fixture(autouse=True)
def nothing_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A source that is left out would make every text right."""
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


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


class Failing:
    """Drafts twice, then fails."""

    source, most_steps, uses_kv = "failing", 4, True

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at
        self._num_left = 2

    def observe(self, *_: object) -> None:
        self._fail("observe")

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


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"early_exit": 2}, "early_exit is 2: it must be below the 2 layers"),
        ({"early_exit": 1, "head": "anywhere"}, "head and early_exit are both set"),
        ({"draft": "anywhere", "head": "anywhere"}, "draft and head are both set"),
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


def test_what_fixed_shapes_bring_says_nothing_of_whether_drafting_pays(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path, num_layers=3), early_exit=2, num_blocks=200)
    prompts = random_prompts(8)
    fixed = sequence(next(prompts), max_tokens=300, self_draft=SelfDraft(2))
    free = sequence(next(prompts), max_tokens=300, self_draft=SelfDraft())
    policy, told = drafting_of(engine)[0]._policy, 0

    def note(load: int, drafted: bool, num_tokens: int, seconds: float) -> None:
        nonlocal told
        told += num_tokens

    policy.observe = note  # type: ignore[method-assign]
    write(engine, [fixed, free])
    # But for the first of each, whose prompt is in its step.
    assert 290 <= told <= 305
    told = 0
    write(engine, [sequence(next(prompts), max_tokens=50, self_draft=SelfDraft(2))])
    assert told == 0


class Picky(SelfDraftingPolicy):
    """Drafts for every other step, and verifies what is likely: a matter of the noise."""

    def __init__(self) -> None:
        super().__init__(StepCosts([(1, 0.001)]))
        self._turn = False

    def drafts(self, load: int, may_try: bool = True) -> bool:
        self._turn = not self._turn
        return self._turn

    def goes_on(self, num_growing: int, load: int, prospect: float) -> bool:
        return True

    def num_rows(self, load: int, likelihoods: Iterable[float], spent: float) -> int:
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


@pytest.mark.parametrize("follows", [True, False])
def test_a_head_takes_in_nothing_for_sequences_that_begin_while_it_does_not_pay(follows: bool, tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    plain, engine = engine_of(target), engine_of(target, **drafts_with("eagle3", target, tmp_path / "head"))
    proposer, growth = drafting_of(engine)
    policy, head = proposer._policy, cast(Eagle, growth.drafter)
    policy.drafts = policy.follows = lambda *_: follows  # type: ignore[assignment]
    taken_in: list[int] = []
    run = head._run

    def note(tokens: Sequence[int], *rest: Any) -> Tensor:
        taken_in.append(len(tokens))
        return run(tokens, *rest)

    head._run = note  # type: ignore[assignment,method-assign]
    prompts = random_prompts(50)
    asked = [next(prompts) for _ in range(2)]
    assert write(engine, [sequence(each, self_draft=SelfDraft()) for each in asked]) == write(
        plain, [sequence(each) for each in asked]
    )
    # The prompts are, which others may find in the cache, but for what is left over of them.
    assert 80 <= sum(taken_in) <= 100 if not follows else sum(taken_in) > 100
    # A fixed shape has its head, whatever pays.
    fixed = sequence(next(prompts), self_draft=SelfDraft(3))
    engine.scheduler.add(fixed)
    num_drafted = 0
    while (outcome := engine.step()) is not None:
        num_drafted += sum(len(gain.self_drafted) for gain in outcome.gains)
    assert num_drafted > 0


def test_what_has_begun_with_a_head_goes_on_without_once_that_does_not_pay(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    engine = engine_of(target, **drafts_with("eagle3", target, tmp_path / "head"), num_blocks=80)
    proposer, growth = drafting_of(engine)
    policy, drafts = proposer._policy, True
    policy.drafts = policy.follows = lambda *_: drafts  # type: ignore[assignment]
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
    for calibration in growth._calibrations:
        for guess in range(10):
            for _ in range(200):
                calibration.observe(guess / 10 + 0.05, False)
    asked = sequence(prompt, max_tokens=200, self_draft=SelfDraft())
    engine.scheduler.add(asked)
    drafted = []
    while (outcome := engine.step()) is not None:
        drafted += [len(gain.self_drafted) for gain in outcome.gains]
    assert asked.token_ids == [*prompt, *text]
    assert not any(drafted[:10])
    assert sum(drafted) > 20


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
    assert proposer._worth(many[0], share)[1] == pytest.approx(1 + 0.05, rel=0.01)
