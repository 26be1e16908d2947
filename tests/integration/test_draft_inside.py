"""A small model inside a target's engine: its KV is right wherever a sequence's blocks come from.

Where the draft is the target itself, whatever it drafts is accepted: of KV that is not right it would not be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from outrider.v1 import inference_pb2
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from shared.engine.engine import Engine
from shared.engine.kv_pool import KVPool, KVShape
from shared.models import DEMO_DRAFT, DEMO_TARGET
from shared.policy.ways import Way
from shared.sampling.params import SelfDraft
from shared.self_drafting.draft_model import DraftModel
from shared.settings import StartupError
from tests.support.drafting_engine import (
    NUM_TOKENS,
    drafting_of,
    engine_of,
    random_prompts,
    sequence,
    shares_accepted,
    steps_to,
    write,
)
from tests.support.greedy import python_prompts, references
from tests.support.models import byte_tokenizer, perturbed, tiny_llama
from tests.support.pools import SMALL, running_pools
from tests.support.service import COPYING_NOTHING, generate, inference, refused_start, running_stack, wait_until_idle

FIXED = SelfDraft(3, sources=("target",))
TREE = SelfDraft(3, 9, sources=("target",))


def inside(target: Path, **fields: Any) -> Engine:
    """A target that drafts with itself."""
    return engine_of(target, draft=str(target), **fields)


def draft_model_of(engine: Engine) -> DraftModel:
    return cast(DraftModel, drafting_of(engine)[1].drafter)


def positions_computed(engine: Engine) -> list[list[int]]:
    """By the draft, of each of its steps from now on."""
    computed: list[list[int]] = []
    runner = draft_model_of(engine)._runner
    run = runner.run_packed

    def note(tokens: Sequence[int], starts: Sequence[int], lengths: Sequence[int], *rest: Any) -> Tensor:
        spans = zip(starts, lengths, strict=True)
        computed.append([position for start, length in spans for position in range(start, start + length)])
        return run(tokens, starts, lengths, *rest)

    runner.run_packed = note  # type: ignore[method-assign,assignment]
    return computed


class Runner:
    """Notes what it is to run: from where on, and how many tokens."""

    def __init__(self) -> None:
        self.pool = KVPool(KVShape(1, 1, 4, 4), 10, 16, torch.float32, torch.device("cpu"))
        self.ran: list[tuple[int, int]] = []

    def run_packed(self, tokens: Sequence[int], starts: Sequence[int], lengths: Sequence[int], *_: object) -> None:
        self.ran += zip(starts, lengths, strict=True)


@pytest.mark.parametrize("wanted", [FIXED, TREE], ids=["chain", "tree"])
def test_of_the_same_model_all_is_accepted(wanted: SelfDraft, tmp_path: Path) -> None:
    target = tiny_llama(tmp_path)
    prompts = random_prompts(37)
    asked = [next(prompts) for _ in range(4)]
    engine = inside(target)
    assert shares_accepted(engine, asked, wanted, max_tokens=31) == [1.0] * 4
    # The same again, of blocks that are found.
    assert shares_accepted(engine, [[*each, 5] for each in asked], wanted, max_tokens=31) == [1.0] * 4
    # And where the pool is too small for all of them.
    small = inside(target, num_blocks=12)
    assert shares_accepted(small, asked, wanted, max_tokens=31) == [1.0] * 4
    assert small.scheduler.num_preempted > 0


def test_forks_draft_from_what_they_share(tmp_path: Path) -> None:
    engine = inside(tiny_llama(tmp_path))
    prompt = next(random_prompts(43))
    first, *forks = (
        sequence(prompt, temperature=0.8, seed=3, sequence_index=i, self_draft=FIXED, max_tokens=17) for i in range(3)
    )
    first.forks = list(forks)
    engine.scheduler.add(first)
    accepted = []
    while (outcome := engine.step()) is not None:
        accepted += [gain.sampled.num_accepted == len(gain.self_drafted) for gain in outcome.gains if gain.self_drafted]
    # Draws that are seeded are foreseen.
    assert all(accepted)
    assert len(accepted) > 9
    assert len({tuple(each.token_ids) for each in (first, *forks)}) == 3


def test_long_prompts_are_taken_in_by_and_by(tmp_path: Path) -> None:
    """No step waits for more than some of it, and until all is there the sequence decodes plainly."""
    engine = inside(tiny_llama(tmp_path, max_context=2048), num_blocks=200, max_batch_tokens=512)
    asked = sequence(next(random_prompts(1300)), self_draft=FIXED, max_tokens=40)
    computed = positions_computed(engine)
    engine.scheduler.add(asked)
    drafted = []
    while (outcome := engine.step()) is not None:
        drafted += [(len(gain.self_drafted), gain.sampled.num_accepted) for gain in outcome.gains]
    assert max(map(len, computed)) <= 512
    assert [count for count, _ in drafted[:2]] == [0, 0]
    assert all(count == accepted for count, accepted in drafted)
    assert sum(count for count, _ in drafted) > 20


def test_what_is_there_is_not_computed_again(tmp_path: Path) -> None:
    engine = inside(tiny_llama(tmp_path))
    first = sequence(next(random_prompts(31)), self_draft=FIXED, max_tokens=40)
    engine.scheduler.add(first)
    # Blocks become full where a round ends, and in the midst of others.
    while engine.step() is not None:
        pass
    computed = positions_computed(engine)
    write(engine, [sequence(first.token_ids[:60], self_draft=FIXED, max_tokens=4)])
    # With the token that followed.
    assert computed[0] == list(range(48, 61))


def test_what_others_wrote_over_is_computed_again() -> None:
    runner = Runner()
    draft = DraftModel(runner)  # type: ignore[arg-type]
    one, other, third = sequence([1] * 17), sequence([2] * 9), sequence([1] * 17)
    one.block_table, one.block_hashes = [7, 8], [b"ones"]
    draft.begin([one])
    # It got the block when the first one was gone, and leaves it with half of its own.
    other.block_table = [7]
    draft.begin([other])
    third.block_table, third.block_hashes = [7, 9], [b"ones"]
    draft.begin([third])
    assert runner.ran == [(0, 17), (0, 9), (0, 17)]
    fourth = sequence([1] * 17)
    fourth.block_table, fourth.block_hashes = [7, 3], [b"ones"]
    draft.begin([fourth])
    assert runner.ran[3:] == [(16, 1)]
    # So is what was copied over.
    runner.pool.copy_blocks([(5, 7)])
    fifth = sequence([1] * 17)
    fifth.block_table, fifth.block_hashes = [7, 4], [b"ones"]
    draft.begin([fifth])
    assert runner.ran[4:] == [(0, 17)]


def test_what_was_decoded_plainly_is_taken_in_once_drafts_are_to_come(tmp_path: Path) -> None:
    engine = inside(tiny_llama(tmp_path), num_blocks=80)
    policy, drafts = drafting_of(engine)[0]._policy, False
    policy.follows = lambda *_: drafts  # type: ignore[method-assign]
    policy.way = lambda *_: Way.TREE if drafts else Way.PLAIN  # type: ignore[method-assign]
    policy.num_rows = lambda load, likelihoods, spent: len(list(likelihoods))  # type: ignore[method-assign]
    asked = sequence(next(random_prompts(20)), max_tokens=300, self_draft=SelfDraft())
    engine.scheduler.add(asked)
    steps_to(engine, lambda: len(asked.token_ids) > 120)
    assert not draft_model_of(engine).ready(asked)
    drafts = True
    assert engine.step() is not None
    accepted = []
    for _ in range(20):
        outcome = engine.step()
        assert outcome is not None
        accepted += [(len(gain.self_drafted) > 0, gain.sampled.num_accepted > 0) for gain in outcome.gains]
    assert accepted == [(True, True)] * 20


def test_a_context_that_is_longer_than_the_drafts(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", max_context=256)
    draft = tiny_llama(tmp_path / "draft", max_context=64)
    prompt = next(random_prompts(30))
    plain = engine_of(target)
    engine = engine_of(target, draft=str(draft))
    computed = positions_computed(engine)
    asked = sequence(prompt, max_tokens=150, self_draft=FIXED)
    engine.scheduler.add(asked)
    drafted_at = []
    while (outcome := engine.step()) is not None:
        drafted_at += [len(asked.token_ids) for gain in outcome.gains if gain.self_drafted]
    assert asked.token_ids[30:] == write(plain, [sequence(prompt, max_tokens=150)])[0]
    assert 50 < max(drafted_at) <= 64
    assert max(map(max, computed)) < 64


def test_a_draft_of_another_shape(tmp_path: Path) -> None:
    """Of other heads and layers, and with ids that the target does not have."""
    target = tiny_llama(tmp_path / "target")
    draft = tiny_llama(tmp_path / "draft", vocab_size=300, hidden_size=32, num_layers=1)
    prompts = random_prompts(37)
    asked = [next(prompts) for _ in range(4)]
    expected = write(engine_of(target), [sequence(each) for each in asked])
    engine = engine_of(target, draft=str(draft), num_blocks=14)
    for wanted in (FIXED, TREE, SelfDraft()):
        assert write(engine, [sequence(each, self_draft=wanted) for each in asked]) == expected


def test_ids_that_the_draft_does_not_have(tmp_path: Path) -> None:
    target, draft = tiny_llama(tmp_path / "target", vocab_size=300), tiny_llama(tmp_path / "draft", hidden_size=32)
    fields: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "logit_bias": {280: 4.0, 290: -3.0}}
    prompts = [[290, 299, *next(random_prompts(20))], next(random_prompts(33))]
    expected = write(engine_of(target), [sequence(each, **fields) for each in prompts])
    assert any(token > 256 for text in expected for token in text)
    engine = engine_of(target, draft=str(draft))
    for wanted in (FIXED, TREE, SelfDraft()):
        assert write(engine, [sequence(each, self_draft=wanted, **fields) for each in prompts]) == expected
    assert engine.drafts_with == "model"


def test_memory_for_kv_is_that_of_both(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    draft = tiny_llama(tmp_path / "draft", hidden_size=32, num_layers=1)
    engine = engine_of(target, draft=str(draft), num_blocks=None, kv_cache_gib=1 / 1024)
    beside = engine.pool.beside
    assert isinstance(beside, KVPool)
    assert beside.num_blocks == engine.pool.num_blocks
    both = engine.pool.block_num_bytes + beside.block_num_bytes
    assert engine.pool.num_blocks == 2**20 // both


def test_one_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, draft = tiny_llama(tmp_path / "target"), tiny_llama(tmp_path / "draft")
    other: PreTrainedTokenizerFast = byte_tokenizer(200)
    other.save_pretrained(draft)
    with pytest.raises(StartupError, match="has another tokenizer than"):
        engine_of(target, draft=str(draft))


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path)
    with pytest.raises(StartupError, match="cannot be served with quantize int8: that needs dtype bfloat16"):
        inside(target, draft_quantize="int8")


def test_one_that_prefills_alone_loads_none(tmp_path: Path) -> None:
    engine = engine_of(tiny_llama(tmp_path), draft="./nowhere", role="prefill")
    assert engine.drafts_with == ""


@pytest.mark.asyncio
async def test_the_stack_without_draft_workers_drafts_inside() -> None:
    expected = references(DEMO_TARGET, python_prompts(60), 3, NUM_TOKENS)
    async with running_stack({"target-0": COPYING_NOTHING}, num_drafts=0) as stack, inference(stack) as stub:
        assert set(stack.processes) == {"target-0", "router"}
        info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        assert info.target_drafts_with == "model"
        answers = await asyncio.gather(
            *(
                generate(stub, each.prompt, gamma=3, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
                for each in expected
            )
        )
        await wait_until_idle(stack)
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
    assert sum(each.usage.accepted_tokens for each in answers) > 0.5 * sum(each.usage.rounds for each in answers)


@pytest.mark.asyncio
async def test_from_pool_to_pool_it_takes_prompts_in_itself(tmp_path: Path) -> None:
    draft = perturbed(DEMO_TARGET, tmp_path / "draft", noise=0.0)
    expected = references(DEMO_TARGET, python_prompts(150), 3, NUM_TOKENS)
    async with running_pools(SMALL, "grpc", draft=str(draft), num_drafts=0) as pools, inference(pools) as stub:
        answers = await asyncio.gather(
            *(
                generate(
                    stub, each.prompt, gamma=3, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True,
                    sources=[inference_pb2.DRAFT_SOURCE_TARGET],
                )
                for each in expected
            )
        )  # fmt: skip
        await wait_until_idle(pools)
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
    for answer in answers:
        [its] = answer.usage.by_source
        assert its.accepted_tokens == its.draft_tokens > 0


@pytest.mark.asyncio
async def test_a_draft_that_is_not_there_ends_the_start_in_one_line() -> None:
    lines = await refused_start("target", f"--model={DEMO_TARGET}", f"--draft={DEMO_DRAFT}/nowhere")
    assert any("no model folder" in line for line in lines)
    assert not any("Traceback" in line for line in lines)
