"""Steps that fail, and numbers that are none: who is lost, who goes on, and when the engine is broken."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.target.settings import TargetSettings
from shared.engine.engine import Engine
from shared.engine.failure import EngineBroken, is_device_error
from shared.engine.model import CausalLM
from shared.sampling.proposal import Proposal
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens
from shared.sampling.verifier import verify
from tests.support.tiny_engine import PROMPTS, VOCAB_SIZE, drain, engine_for, failing_if, greedy


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
