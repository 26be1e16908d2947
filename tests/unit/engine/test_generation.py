"""A tiny random Llama in the engine against transformers' own greedy generation."""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from services.draft.draws import draw_ahead
from services.draft.proposer import draw
from services.target.settings import TargetSettings
from shared.engine.draws import DrawAhead
from shared.engine.engine import Engine
from shared.engine.model import CausalLM
from shared.engine.sequence import Finish, Sequence
from shared.prefix.block_hash import root_hash
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens
from shared.sampling.token_counts import TokenCounts
from shared.sampling.verifier import verify
from tests.support.tiny_engine import LENGTHS, NUM_TOKENS, PROMPTS, VOCAB_SIZE, drain, engine_for, failing_if, greedy


@pytest.fixture(autouse=True)
def time_hardly_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is too slow to be followed by others."""
    looks = count(1)
    monkeypatch.setattr(Engine, "clock", lambda self: next(looks) * 1e-6)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_batch_tokens": 17},
        {"block_size": 8, "num_blocks": 19},
        {"block_size": 64, "num_blocks": 4, "max_batch_tokens": 30},
        {"max_sequences": 2},
    ],
    ids=["roomy", "small chunks", "preemption", "large blocks", "few at once"],
)
def test_a_batch_generates_what_transformers_does(
    model: CausalLM, generated: dict[tuple[int, ...], list[int]], limits: dict[str, Any]
) -> None:
    engine = engine_for(model, **limits)
    sequences = [greedy(engine, prompt) for prompt in PROMPTS]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    drain(engine)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.token_ids == generated[prompt]
        assert sequence.finish is not None
    assert engine.blocks.counts().owned == 0


def drafting(engine: Engine, prompt: Tokens[int], num_steps: int) -> Sequence:
    params = SamplingParams(temperature=0.0)
    sequence = Sequence(
        prompt, len(prompt), params, root_hash(engine.fingerprint, b""), drafting=True, num_steps=num_steps
    )
    sequence.draws_on = True
    return sequence


@pytest.mark.parametrize("ahead", [None, draw_ahead])
def test_draws_in_one_go_are_those_of_steps(
    model: CausalLM, generated: dict[tuple[int, ...], list[int]], ahead: DrawAhead | None
) -> None:
    engine = engine_for(model, ahead)
    prompts = [prompt for prompt in PROMPTS if len(generated[prompt]) >= len(prompt) + 20]
    assert len(prompts) > 2
    sequences = [drafting(engine, prompt, 20) for prompt in prompts]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    [outcome] = drain(engine)
    assert len(outcome.following) == 19
    assert len(outcome.gains) == 20 * len(prompts)
    assert outcome.num_tokens == sum(map(len, prompts))
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.token_ids == generated[prompt][: len(prompt) + 20]


@pytest.mark.parametrize(
    ("ahead", "fails", "num_following"),
    [
        (None, [False, False, True], [1, 5]),
        (draw_ahead, [False, False, True], [7]),
        (draw_ahead, [False, False, True, True], [0, 6]),
        (draw_ahead, [False, False, True, False, True, True], [1, 5]),
    ],
)
def test_a_draw_that_fails_is_made_again_by_a_step_of_its_own(
    model: CausalLM,
    generated: dict[tuple[int, ...], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    ahead: DrawAhead | None,
    fails: list[bool],
    num_following: list[int],
) -> None:
    engine, prompt = engine_for(model, ahead), PROMPTS[-1]
    engine.scheduler.add(sequence := drafting(engine, prompt, 8))
    steps = iter(fails)
    failing_if(model, monkeypatch, lambda tokens: next(steps, False))
    assert [len(outcome.following) for outcome in drain(engine)] == num_following
    assert sequence.token_ids == generated[prompt][: len(prompt) + 8]


@pytest.mark.parametrize("num_blocks", [10, 12, 60])
def test_whatever_is_drawn_in_one_go_is_what_steps_draw(model: CausalLM, num_blocks: int) -> None:
    """Sequences of all kinds, some done before others, with blocks for a few steps at a time and for all."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=7, top_k=20),
        SamplingParams(temperature=0.8),
        SamplingParams(top_p=0.9),
    ]
    seen = []
    for ahead in (False, True):
        generator = torch.Generator().manual_seed(3)
        how: dict[str, Any] = {"mass": 0.9, "max_entries": 30, "generator": generator}
        settings = TargetSettings(model="tiny", num_blocks=num_blocks, block_size=8)
        engine = Engine(model, settings, partial(draw, **how), partial(draw_ahead, **how) if ahead else None)
        sequences = []
        for i, params in enumerate(kinds):
            sequences.append(drafting(engine, [i + 1] * 5, 6 + 3 * (i % 2)))
            sequences[-1].params = params
            engine.scheduler.add(sequences[-1])
        outcomes = drain(engine)
        candidates: dict[Sequence, list[tuple[int, bytes] | None]] = {sequence: [] for sequence in sequences}
        for gain in (gain for outcome in outcomes for gain in outcome.gains):
            found = gain.sampled.candidates
            candidates[gain.sequence].append(None if found is None else (found.num_entries, found.ids))
        seen.append([(sequence.token_ids, candidates[sequence]) for sequence in sequences])
        assert engine.scheduler.num_preempted == 0
        assert sum(len(outcome.following) for outcome in outcomes) > 0
    assert seen[0] == seen[1]
    assert [len(text) for text, _ in seen[0]] == [11, 14, 11, 14]
    assert all(each is not None for _, some in seen[0][2:] for each in some)


@pytest.mark.parametrize("ahead", [None, draw_ahead])
def test_slow_steps_are_looked_in_between_of(
    model: CausalLM,
    generated: dict[tuple[int, ...], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    ahead: DrawAhead | None,
) -> None:
    """Of 0.2 seconds each two follow in half a second, and of one second none."""
    for seconds, num_following in ((0.2, [2, 2, 1]), (1.0, [0] * 8)):
        engine, prompt, now = engine_for(model, ahead), PROMPTS[-1], [0.0]
        forward = model.forward

        def slow(*args: Any, seconds: float = seconds, forward: Any = forward, now: list[float] = now) -> Any:
            now[0] += seconds
            return forward(*args)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "clock", lambda now=now: now[0])
            patch.setattr(model, "forward", slow)
            engine.scheduler.add(sequence := drafting(engine, prompt, 8))
            assert [len(outcome.following) for outcome in drain(engine)] == num_following
        assert sequence.token_ids == generated[prompt][: len(prompt) + 8]


def test_a_step_that_had_to_be_taken_apart_is_followed_by_none(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was too large once would be again."""
    engine = engine_for(model, draw_ahead)
    for prompt in PROMPTS[-2:]:
        engine.scheduler.add(drafting(engine, prompt, 3))
    sizes: list[int] = []

    def too_many(tokens: list[int]) -> bool:
        sizes.append(len(tokens))
        return len(tokens) > max(map(len, PROMPTS[-2:]))

    failing_if(model, monkeypatch, too_many)
    outcome = engine.step()
    assert outcome is not None
    assert not outcome.failed
    assert len(outcome.following) == 0
    assert len(sizes) == 3


def test_penalties_are_not_drawn_ahead_and_change_nothing(model: CausalLM) -> None:
    texts = []
    for ahead in (None, draw_ahead):
        engine = engine_for(model, ahead)
        sequence = drafting(engine, PROMPTS[-1], 12)
        sequence.params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
        sequence.token_counts = TokenCounts(sequence.token_ids, sequence.num_prompt_tokens)
        engine.scheduler.add(sequence)
        [outcome] = drain(engine)
        assert len(outcome.following) == 11
        texts.append(sequence.token_ids)
    assert texts[0] == texts[1]


def test_one_by_one_is_as_good_as_together(model: CausalLM, generated: dict[tuple[int, ...], list[int]]) -> None:
    engine = engine_for(model)
    for prompt in PROMPTS:
        sequence = greedy(engine, prompt)
        engine.scheduler.add(sequence)
        gains = [gain for outcome in drain(engine) for gain in outcome.gains]
        assert [*prompt, *(token for gain in gains for token in gain.sampled.token_ids)] == generated[prompt]


@pytest.mark.parametrize("num_blocks", [200, 19], ids=["roomy", "preemption"])
@pytest.mark.parametrize("right", [1.0, 0.6, 0.0])
def test_whatever_is_proposed_the_tokens_are_the_same(
    model: CausalLM, generated: dict[tuple[int, ...], list[int]], right: float, num_blocks: int
) -> None:
    rng = random.Random(1)
    engine = engine_for(model, num_blocks=num_blocks, block_size=8)
    sequences = {greedy(engine, prompt, num_steps=1): generated[prompt] for prompt in PROMPTS}
    for sequence in sequences:
        engine.scheduler.add(sequence)
    num_drafted = num_accepted = 0
    while any(sequence.finish is None for sequence in sequences):
        for sequence, text in sequences.items():
            if sequence.num_steps == 0 and sequence.finish is None:
                guess = text[len(sequence.token_ids) :][: rng.randint(0, 6)]
                guess = [t if rng.random() < right else rng.randrange(VOCAB_SIZE) for t in guess]
                sequence.proposal, sequence.num_steps = Proposal(tuple(guess)), 1
        outcome = engine.step()
        engine.scheduler.check()
        assert outcome is not None
        assert outcome.failed == []
        num_drafted += sum(gain.num_draft_tokens for gain in outcome.gains)
        num_accepted += sum(gain.sampled.num_accepted for gain in outcome.gains)
    assert [sequence.token_ids for sequence in sequences] == list(sequences.values())
    assert engine.blocks.counts().owned == 0
    assert num_drafted > 100
    if right == 1.0:
        assert num_accepted == num_drafted
    else:
        assert num_accepted < num_drafted


def test_penalties_count_what_transformers_does_whatever_is_proposed(folder: Path, model: CausalLM) -> None:
    prompt, rng = PROMPTS[4], random.Random(2)
    oracle: Any = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "pad_token_id": 0, "repetition_penalty": 3.0}
    text = oracle.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
    counted: list[TokenCounts | None] = []

    def sample(logits: Tensor, rows: Tokens[SampleRows]) -> list[SampledTokens]:
        counted.extend(row.token_counts for row in rows)
        return verify(logits, rows)

    engine = Engine(model, TargetSettings(model="tiny", num_blocks=40), sample)
    params = SamplingParams(
        temperature=0.0, repetition_penalty=3.0, max_tokens=NUM_TOKENS, stop_token_ids=model.eos_token_ids
    )
    sequence = Sequence(prompt, len(prompt), params, root_hash(engine.fingerprint, b""))
    engine.scheduler.add(sequence)
    while sequence.finish is None:
        guess = text[len(sequence.token_ids) :][: rng.randint(0, 6)]
        guess = [token if rng.random() < 0.7 else rng.choice(sequence.token_ids) for token in guess]
        sequence.proposal, sequence.num_steps = Proposal(tuple(guess)), 1
        drain(engine)
    assert sequence.token_ids == text
    # Its own counts go to every sampling: nothing is counted anew.
    assert all(counts is sequence.token_counts is not None for counts in counted)


@pytest.mark.parametrize("prompt", PROMPTS, ids=LENGTHS)
def test_a_prefix_hit_changes_nothing_but_the_work(
    model: CausalLM, generated: dict[tuple[int, ...], list[int]], prompt: tuple[int, ...]
) -> None:
    engine = engine_for(model)
    for _ in range(2):
        sequence = greedy(engine, prompt)
        engine.scheduler.add(sequence)
        outcomes = drain(engine)
        assert sequence.token_ids == generated[prompt]
    assert sequence.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert outcomes[0].num_tokens == len(prompt) - sequence.num_cached_tokens


def test_other_roots_hit_nothing(model: CausalLM, generated: dict[tuple[int, ...], list[int]]) -> None:
    engine = engine_for(model)
    prompt = PROMPTS[-1]
    for salt in (b"", b"another tenant"):
        sequence = greedy(engine, prompt)
        sequence.root_hash = root_hash(engine.fingerprint, salt)
        engine.scheduler.add(sequence)
        drain(engine)
        assert sequence.num_cached_tokens == 0


@pytest.mark.parametrize("primed", [False, True], ids=["cold", "prefix in cache"])
@pytest.mark.parametrize("prompt", [PROMPTS[i] for i in (0, 2, 4, 7)], ids=["1", "15", "17", "100"])
def test_forks_draw_apart_over_a_shared_prompt(model: CausalLM, prompt: tuple[int, ...], primed: bool) -> None:
    """Seeded samples: a fork's tokens are those of the same request made alone."""
    params = [SamplingParams(seed=5, sequence_index=i, max_tokens=20) for i in range(4)]

    def sample(engine: Engine, index: int) -> Sequence:
        root = root_hash(engine.fingerprint, b"")
        return Sequence(prompt, len(prompt), params[index], root, num_steps=1 << 20)

    alone = []
    for i in range(4):
        engine = engine_for(model)
        sequence = sample(engine, i)
        engine.scheduler.add(sequence)
        drain(engine)
        alone.append(sequence.token_ids)
    engine = engine_for(model)
    if primed:
        engine.scheduler.add(greedy(engine, prompt, max_tokens=1))
        drain(engine)
    family = [sample(engine, i) for i in range(4)]
    family[0].forks = family[1:]
    engine.scheduler.add(family[0])
    drain(engine)
    assert [member.token_ids for member in family] == alone
    assert len({tuple(tokens) for tokens in alone}) == 4
    assert engine.blocks.counts().owned == 0


def test_a_step_tells_what_it_did(model: CausalLM) -> None:
    engine = engine_for(model)
    for prompt in PROMPTS[:3]:
        engine.scheduler.add(greedy(engine, prompt, num_steps=1))
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.num_sequences, outcome.num_tokens) == (3, 1 + 2 + 15)
    assert outcome.seconds > 0
    assert [len(gain.sampled.token_ids) for gain in outcome.gains] == [1, 1, 1]
    assert engine.step() is None


def test_a_stop_token_ends_a_sequence(model: CausalLM, generated: dict[tuple[int, ...], list[int]]) -> None:
    engine = engine_for(model)
    prompt = PROMPTS[2]
    output = generated[prompt][len(prompt) :]
    stop = output[7]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop_token_ids=frozenset({stop}))
    sequence = Sequence(prompt, len(prompt), params, root_hash(engine.fingerprint, b""), num_steps=1 << 20)
    engine.scheduler.add(sequence)
    drain(engine)
    assert sequence.token_ids == [*prompt, *output[: output.index(stop) + 1]]
    assert sequence.finish is Finish.STOPPED
