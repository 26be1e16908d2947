"""A tiny random Llama in the engine against transformers' own greedy generation."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from services.draft.draws import draw_ahead
from services.draft.proposer import draw
from services.target.settings import TargetSettings
from shared.engine import engine as engine_module
from shared.engine.attention.grouping import Indices
from shared.engine.draws import DrawAhead
from shared.engine.engine import Engine, StepOutcome
from shared.engine.failure import EngineBroken, is_device_error
from shared.engine.kv_pool import KVPool, KVShape
from shared.engine.memory import DeviceMemory
from shared.engine.model import CausalLM
from shared.engine.runner import ModelRunner
from shared.engine.sequence import Finish, Sequence
from shared.prefix.block_hash import root_hash
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens
from shared.sampling.token_counts import TokenCounts
from shared.sampling.verifier import verify
from shared.settings import StartupError
from shared.worker.service import load_engine
from tests.support.models import tiny_llama

VOCAB_SIZE = 257
NUM_TOKENS = 40
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return CausalLM.load(str(folder), "cpu", "float32")


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(1, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def generated(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """What transformers generates greedily for each prompt: prompt and output, 40 tokens or up to the end of text."""
    oracle: Any = LlamaForCausalLM.from_pretrained(folder)
    texts = {}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
        )
        texts[prompt] = out[0].tolist()
    return texts


def engine_for(model: CausalLM, draw_ahead: DrawAhead | None = None, **fields: Any) -> Engine:
    return Engine(model, TargetSettings(model="tiny", **{"num_blocks": 200, **fields}), verify, draw_ahead)


def greedy(engine: Engine, prompt: Tokens[int], *, num_steps: int = 1 << 20, max_tokens: int = NUM_TOKENS) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=engine.model.eos_token_ids)
    return Sequence(prompt, len(prompt), params, root_hash(engine.fingerprint, b""), num_steps=num_steps)


def drain(engine: Engine) -> list[StepOutcome]:
    """Steps until nothing is left to do; blocks are conserved all the way."""
    outcomes = []
    while (outcome := engine.step()) is not None:
        engine.scheduler.check()
        assert outcome.failed == []
        outcomes.append(outcome)
    return outcomes


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
    assert outcome.num_following == 19
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
    assert [outcome.num_following for outcome in drain(engine)] == num_following
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
        assert sum(outcome.num_following for outcome in outcomes) > 0
    assert seen[0] == seen[1]
    assert [len(text) for text, _ in seen[0]] == [11, 14, 11, 14]
    assert all(each is not None for _, some in seen[0][2:] for each in some)


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
    assert outcome.num_following == 0
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
        assert outcome.num_following == 11
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


def failing_if(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, fails: Callable[[list[int]], bool], error: Exception | None = None
) -> None:
    """From now on a forward pass over tokens of which `fails` is true raises the error."""
    forward = model.forward

    def failing(tokens: Indices, *args: Any) -> Tensor:
        if fails(tokens.tolist()):
            raise error or RuntimeError("a kernel is broken")
        return forward(tokens, *args)

    monkeypatch.setattr(model, "forward", failing)


class Once:
    """True in the call after `arm`."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, *_: object) -> bool:
        armed, self.armed = self.armed, False
        return armed


@pytest.mark.parametrize("where", ["forward", "sampler"])
def test_a_step_that_fails_once_costs_nobody_a_token(
    model: CausalLM,
    generated: dict[tuple[int, ...], list[int]],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault = Once()

    def sample(logits: Tensor, rows: Tokens[SampleRows]) -> list[SampledTokens]:
        if where == "sampler" and fault():
            raise RuntimeError("a kernel is broken")
        return verify(logits, rows)

    if where == "forward":
        failing_if(model, monkeypatch, fault)
    engine = Engine(model, TargetSettings(model="tiny", num_blocks=40), sample)
    idle = greedy(engine, PROMPTS[4], num_steps=3)
    engine.scheduler.add(idle)
    drain(engine)
    running = [greedy(engine, PROMPTS[5]), greedy(engine, PROMPTS[4])]  # one of them shares a block with the idle one
    for sequence in running:
        engine.scheduler.add(sequence)
    assert engine.step() is not None
    fault.armed = True
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.failed, [gain.sequence for gain in outcome.gains]) == ([], running)
    assert "a step failed" in caplog.text
    idle.num_steps = 1 << 20
    drain(engine)
    assert [sequence.token_ids for sequence in (idle, *running)] == [generated[PROMPTS[index]] for index in (4, 5, 4)]
    assert engine.blocks.counts().owned == 0


def test_a_sequence_that_fails_every_step_harms_nobody_else(
    model: CausalLM, generated: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = VOCAB_SIZE - 1
    healthy = [prompt for prompt in PROMPTS if poison not in generated[prompt]][:3]
    failing_if(model, monkeypatch, lambda tokens: poison in tokens)
    engine = engine_for(model)
    sequences = [greedy(engine, prompt) for prompt in healthy]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    for _ in range(10):
        broken = greedy(engine, [5, poison, 7])
        engine.scheduler.add(broken)
        outcome = engine.step()
        assert outcome is not None
        assert outcome.failed == [broken]
        assert len(outcome.gains) == len(sequences)
        engine.scheduler.check()
    drain(engine)
    assert [sequence.token_ids for sequence in sequences] == [generated[prompt] for prompt in healthy]
    # Sent again and again to an idle worker, it still takes nothing down.
    for _ in range(10):
        engine.scheduler.add(greedy(engine, [5, poison, 7]))
        outcome = engine.step()
        assert outcome is not None
        assert len(outcome.failed) == 1
        engine.scheduler.check()
    engine.scheduler.add(again := greedy(engine, healthy[0]))
    drain(engine)
    assert again.token_ids == generated[healthy[0]]


def test_a_step_too_large_for_memory_goes_through_in_smaller_ones(
    model: CausalLM, generated: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_if(model, monkeypatch, lambda tokens: len(tokens) > 100, torch.OutOfMemoryError("CUDA out of memory"))
    engine = engine_for(model)
    sequences = [greedy(engine, prompt) for prompt in PROMPTS]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    drain(engine)
    assert [sequence.token_ids for sequence in sequences] == [generated[prompt] for prompt in PROMPTS]


def test_a_sequence_whose_blocks_were_being_copied_is_lost_rather_than_copied_again(
    model: CausalLM, generated: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Once()
    failing_if(model, monkeypatch, fault)
    engine = engine_for(model)
    parent, fork = greedy(engine, PROMPTS[6]), greedy(engine, PROMPTS[6])
    parent.forks = [fork]
    engine.scheduler.add(parent)
    assert engine.step() is not None  # splits within the last block
    fault.armed = True
    outcome = engine.step()
    assert outcome is not None
    assert len(outcome.failed) == len(outcome.gains) == 1
    drain(engine)
    assert [outcome.gains[0].sequence.token_ids] == [generated[PROMPTS[6]]]
    assert engine.blocks.counts().owned == 0


def test_an_engine_that_computes_nothing_is_broken_after_three_steps(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_if(model, monkeypatch, lambda tokens: True)
    engine = engine_for(model)
    for _ in range(2):
        engine.scheduler.add(greedy(engine, PROMPTS[3]))
        outcome = engine.step()
        assert outcome is not None
        assert len(outcome.failed) == 1
        engine.scheduler.check()
        assert engine.blocks.counts().owned == 0
    engine.scheduler.add(greedy(engine, PROMPTS[3]))
    with pytest.raises(EngineBroken, match="3 steps in a row"):
        engine.step()


def test_failed_steps_with_good_ones_between_them_do_not_add_up(
    model: CausalLM, generated: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = False
    failing_if(model, monkeypatch, lambda tokens: broken)
    engine = engine_for(model)
    for _ in range(5):
        broken = True
        engine.scheduler.add(greedy(engine, PROMPTS[3]))
        outcome = engine.step()
        assert outcome is not None
        assert len(outcome.failed) == 1
        broken = False
        engine.scheduler.add(sequence := greedy(engine, PROMPTS[3]))
        drain(engine)
        assert sequence.token_ids == generated[PROMPTS[3]]


def test_an_error_of_the_device_breaks_the_engine_at_once(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    failing_if(model, monkeypatch, lambda tokens: True, error)
    engine = engine_for(model)
    engine.scheduler.add(greedy(engine, PROMPTS[3]))
    with pytest.raises(EngineBroken, match="the device failed"):
        engine.step()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("HIP error: the launch timed out"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (KeyError("CUDA"), False),
    ],
)
def test_which_errors_are_the_devices(error: Exception, expected: bool) -> None:
    assert is_device_error(error) is expected


def test_a_sampler_that_answers_too_little_fails_its_step(model: CausalLM) -> None:
    engine = Engine(model, TargetSettings(model="tiny", num_blocks=40), lambda logits, rows: verify(logits, rows)[:-1])
    sequences = [greedy(engine, prompt) for prompt in PROMPTS[:2]]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    outcome = engine.step()
    assert outcome is not None
    assert outcome.failed == sequences
    engine.scheduler.check()
    assert engine.blocks.counts().owned == 0


def test_a_failed_parents_forks_go_on(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Once()
    failing_if(model, monkeypatch, fault)
    engine = engine_for(model)
    parent, fork = greedy(engine, PROMPTS[5]), greedy(engine, PROMPTS[5])
    parent.forks = [fork]
    engine.scheduler.add(parent)
    fault.armed = True
    outcome = engine.step()
    assert outcome is not None
    assert outcome.failed == [parent]
    drain(engine)
    assert fork.finish is not None


def test_a_sequence_that_computes_no_numbers_harms_itself_only(
    folder: Path, generated: dict[tuple[int, ...], list[int]]
) -> None:
    """Its KV stands next to that of others (padded tables), and is left behind in blocks that they get."""
    broken_token = 256
    healthy = [prompt for prompt in PROMPTS if broken_token not in generated[prompt]][:3]
    model = CausalLM.load(str(folder), "cpu", "float32")
    with torch.no_grad():
        next(model._model.get_input_embeddings().parameters())[broken_token] = torch.nan
    engine = engine_for(model, num_blocks=8)
    for batch in (healthy, healthy[::-1]):
        broken = greedy(engine, [5, broken_token, *range(1, 20)], max_tokens=3)
        sequences = [greedy(engine, prompt) for prompt in batch]
        for sequence in (broken, *sequences):
            engine.scheduler.add(sequence)
        drain(engine)
        assert broken.finish is not None
        assert [sequence.token_ids for sequence in sequences] == [generated[prompt] for prompt in batch]


def test_draft_tokens_beyond_the_vocabulary_are_rejected(
    model: CausalLM, generated: dict[tuple[int, ...], list[int]]
) -> None:
    """A drafter's vocabulary may be padded wider than the target's."""
    engine = engine_for(model)
    prompt = PROMPTS[3]
    text = generated[prompt]
    sequence = greedy(engine, prompt, num_steps=1)
    engine.scheduler.add(sequence)
    drain(engine)
    first = len(prompt) + 1
    sequence.proposal, sequence.num_steps = Proposal((*text[first : first + 2], VOCAB_SIZE + 3, 5)), 1
    (outcome,) = drain(engine)
    assert outcome.gains[0].sampled.num_accepted == 2
    assert sequence.token_ids == text[: first + 3]


def test_a_warmed_up_engine_generates_the_same_and_knows_its_costs(
    folder: Path, generated: dict[tuple[int, ...], list[int]]
) -> None:
    engine = engine_for(CausalLM.load(str(folder), "cpu", "float32"), num_blocks=40)
    engine.warm_up()
    sizes, seconds = zip(*engine.step_costs, strict=True)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert min(seconds) > 0
    assert engine.blocks.counts() == (40, 0, 0, 40)
    sequence = greedy(engine, PROMPTS[3])
    engine.scheduler.add(sequence)
    drain(engine)
    assert sequence.token_ids == generated[PROMPTS[3]]


def test_of_a_steps_tokens_those_of_prompts_are_told_apart(model: CausalLM) -> None:
    engine = engine_for(model)
    one, other = greedy(engine, PROMPTS[3]), greedy(engine, PROMPTS[2])
    engine.scheduler.add(one)
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.num_tokens, outcome.num_prefill_tokens) == (len(PROMPTS[3]), len(PROMPTS[3]) - 1)
    engine.scheduler.add(other)
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.num_tokens, outcome.num_prefill_tokens) == (len(PROMPTS[2]) + 1, len(PROMPTS[2]) - 1)
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.num_tokens, outcome.num_prefill_tokens) == (2, 0)


@pytest.mark.parametrize(("turn_seconds", "turns"), [(0.1, 6), (4.0, 2)])
def test_step_costs_are_the_fastest_of_several_turns_within_a_time(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, turn_seconds: float, turns: int
) -> None:
    engine = engine_for(model)
    now, measured = [0.0], []

    def measure(size: int) -> float:
        measured.append(size)
        now[0] += turn_seconds / 3
        return 10.0 - len(measured)

    monkeypatch.setattr("shared.engine.runner._MEASURED_TURNS", 6)
    monkeypatch.setattr(engine._runner, "_measure", measure)
    monkeypatch.setattr("shared.engine.runner.time.perf_counter", lambda: now[0])
    costs = engine._runner.measure((1, 2, 8))
    assert measured == [1, 2, 8] * turns
    assert costs == [(1, 10.0 - (3 * turns - 2)), (2, 10.0 - (3 * turns - 1)), (8, 10.0 - 3 * turns)]


def test_the_context_is_the_least_of_model_setting_and_pool(model: CausalLM) -> None:
    assert engine_for(model).max_context == model.max_context == 512
    assert engine_for(model, max_context=100).max_context == 100
    assert engine_for(model, num_blocks=3).max_context == 48


def test_blocks_are_counted_from_memory(model: CausalLM) -> None:
    # 2 layers, key and value, 16 positions, 2 heads of 16, 4 bytes: 8 KiB a block.
    settings = TargetSettings(model="tiny", kv_cache_gib=1 / 1024)
    assert Engine(model, settings, verify).blocks.counts().total == 128
    with pytest.raises(StartupError, match=r"kv_cache_gib is 1e-06: a KV block alone takes"):
        Engine(model, settings.model_copy(update={"kv_cache_gib": 1e-6}), verify)


@pytest.mark.parametrize(
    ("available", "limits", "num_blocks"),
    [
        (1 << 20, {}, 57),  # 0.45 of 1 MiB
        (1 << 20, {"memory_share": 0.3}, 19),
        (1 << 40, {}, 256 * 512 // 16),  # all that all sequences could ever hold
        (1 << 40, {"max_sequences": 3, "max_context": 100}, 3 * 7),
        (1 << 20, {"kv_cache_gib": 1 / 1024}, 128),
        (1 << 20, {"num_blocks": 5}, 5),
    ],
)
def test_without_a_setting_the_cache_is_a_share_of_free_memory(
    model: CausalLM, available: int, limits: dict[str, Any], num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "available_memory", lambda: available)
    engine = Engine(model, TargetSettings(model="tiny", **limits), verify)
    assert engine.blocks.counts().total == num_blocks


def test_too_little_free_memory_is_named(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "available_memory", lambda: 20_000)
    with pytest.raises(
        StartupError, match=r"free memory of cpu leaves 0\.000 GiB for the KV cache, .* set kv_cache_gib"
    ):
        Engine(model, TargetSettings(model="tiny"), verify)


@pytest.mark.parametrize("setting", [{"num_blocks": 4}, {"kv_cache_gib": 4 * 8 / 2**20}])
def test_what_a_setting_asks_for_is_taken_at_start_or_refused(
    model: CausalLM, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = []
    monkeypatch.setattr(KVPool, "commit", lambda pool: committed.append(pool.num_blocks))
    Engine(model, TargetSettings(model="tiny"), verify)
    assert not committed
    settings = TargetSettings(model="tiny", **setting)
    monkeypatch.setattr(engine_module, "available_memory", lambda: 4 * 8 * 1024)
    Engine(model, settings, verify)
    assert committed == [4]
    monkeypatch.setattr(engine_module, "available_memory", lambda: 4 * 8 * 1024 - 1)
    with pytest.raises(StartupError, match=r"4 KV blocks take 0\.000 GiB, and 0\.000 are free: lower num_blocks"):
        Engine(model, settings, verify)


def on_cuda(model: CausalLM) -> CausalLM:
    """The model as it would look on a CUDA device."""
    there = copy.copy(model)
    there.device = torch.device("cuda")
    return there


def test_on_cuda_the_cache_is_what_weights_and_the_largest_step_leave(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[int]] = []
    run_packed = ModelRunner.run_packed

    def on_cpu(runner: ModelRunner, tokens: Tokens[int], starts: Tokens[int], *rest: Any) -> Tensor:
        ran.append([len(tokens), *starts])
        runner.model = model
        return run_packed(runner, tokens, starts, *rest)

    def host_pool(shape: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> KVPool:
        assert device.type == "cuda"
        return KVPool(shape, num_blocks, block_size, dtype, torch.device("cpu"))

    def measure(device: torch.device, run_largest_step: Callable[[], object]) -> DeviceMemory:
        with monkeypatch.context() as patched:
            patched.setattr(ModelRunner, "run_packed", on_cpu)
            patched.setattr(engine_module, "KVPool", host_pool)
            run_largest_step()
        return DeviceMemory(total=10 << 20, free=8 << 20, own=1 << 20, step=1 << 20)

    monkeypatch.setattr(engine_module, "measure_device", measure)
    settings = TargetSettings(model="tiny", max_batch_tokens=100)
    # 0.9 of 10 MiB, less 2 in use and 1 for a step, in blocks of 8 KiB.
    assert engine_module._blocks_that_fit(on_cuda(model), settings, verify) == 6 * 128
    assert ran == [[100, 512 - 100]]


def test_a_largest_step_that_fails_is_named(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no room\nat all")

    monkeypatch.setattr(ModelRunner, "run_packed", failing)
    with pytest.raises(StartupError, match=r"a step of max_batch_tokens, 512, fails on cpu \(.*: no room at all\)"):
        engine_module._run_largest_step(model, TargetSettings(model="tiny"), verify, 512)


def test_start_up_says_how_many_tokens_fit(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        load_engine(TargetSettings(model=str(folder), device="cpu", block_size=8, num_blocks=30), verify)
    (ready,) = [record.__dict__ for record in caplog.records if record.message == "model ready"]
    assert (ready["blocks"], ready["kv_tokens"]) == (30, 240)


def test_a_pool_too_large_for_the_machine_is_named(model: CausalLM) -> None:
    with pytest.raises(StartupError, match=r"10000000000000 KV blocks cannot be had on cpu: lower num_blocks"):
        engine_for(model, num_blocks=10**13)


def test_a_pool_too_small_for_the_self_test_is_named(model: CausalLM) -> None:
    with pytest.raises(StartupError, match="num_blocks is 5: at least 6 are needed"):
        engine_for(model, num_blocks=5).warm_up()


def test_the_fingerprint_tells_weights_block_sizes_and_nothing_else_apart(folder: Path, tmp_path: Path) -> None:
    def fingerprint(source: Path, block_size: int = 16) -> str:
        return CausalLM.load(str(source), "cpu", "float32").fingerprint(block_size)

    same = fingerprint(folder)
    assert fingerprint(tiny_llama(tmp_path / "a copy elsewhere")) == same
    assert fingerprint(folder, 32) != same
    assert fingerprint(tiny_llama(tmp_path / "other", seed=1)) != same
    assert CausalLM.load(str(folder), "cpu", "bfloat16").fingerprint(16) != same
