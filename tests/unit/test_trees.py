"""Token trees: verified in one step as if each line of it had been proposed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.target.settings import TargetSettings
from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.paged import attend
from shared.engine.engine import Engine
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.runner import ModelRunner
from shared.engine.sequence import Sequence as EngineSequence
from shared.engine.settings import Native
from shared.prefix.block_hash import root_hash
from shared.sampling.filters import adjust_logits
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.rows import SampleRows
from shared.sampling.verifier import check_proposal, verify
from tests.support.families import tiny_checkpoint
from tests.support.kernels import INSTRUCTION_SETS, kernels
from tests.support.models import tiny_llama
from tests.support.trees import random_parents, tree_around
from tests.unit.test_attention import FEATURES, NUM_HEADS, NUM_KV_HEADS, SCALE, Case, make_case
from tests.unit.test_native_decoder import FAMILIES, checkpoint, native
from tests.unit.test_verifier import COUPLED, TARGET

VOCAB_SIZE = 257


def test_a_trees_rows_know_their_depths_and_lines() -> None:
    chain, tree = Proposal((7, 8, 9)), Proposal((7, 8, 9, 6, 5), parents=(0, 1, 0, 3, 2))
    assert list(chain.depths) == [0, 1, 2, 3]
    assert [chain.lineage(row) for row in range(4)] == [[], [0], [0, 1], [0, 1, 2]]
    assert list(tree.depths) == [0, 1, 2, 1, 2, 3]
    assert [tree.lineage(row) for row in range(6)] == [[], [0], [0, 1], [2], [2, 3], [0, 1, 4]]
    assert list(EMPTY_PROPOSAL.depths) == [0]


# Sequences with trees among others: (context, new tokens, of these in the tree). Some cross a tile or a chunk.
MIXED = [
    (40, 12, 11),
    (25, 25, 7),
    (900, 1, 0),
    (70, 9, 8),
    (18, 5, 0),
    (530, 40, 24),
    (2, 2, 1),
    (64, 3, 2),
    (300, 90, 12),
]


def line_attention(case: Case, parents: Sequence[Sequence[int]], features: dict[str, Any]) -> Tensor:
    """As the definition says, in float64: who stands where in the text of whom, and sees what."""
    rows, token = [], 0
    window, softcap, sinks = (features.get(name) for name in ("sliding_window", "softcap", "sinks"))
    for start, length, keys, values, tree in zip(
        case.starts, case.lengths, case.keys, case.values, parents, strict=True
    ):
        root = start + length - len(tree) - 1
        proposal = Proposal((0,) * len(tree), parents=tuple(tree))
        for slot in range(start, start + length):
            seen = list(range(min(slot, root) + 1))
            seen += [root + 1 + i for i in proposal.lineage(max(0, slot - root))]
            seen = seen[-window:] if window is not None else seen
            heads = []
            for head in range(NUM_HEADS):
                kv_head = head * NUM_KV_HEADS // NUM_HEADS
                scores = keys[seen, kv_head].double() @ case.query[token, head].double() * SCALE
                if softcap is not None:
                    scores = (scores / softcap).tanh() * softcap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                heads.append(scores.softmax(0)[: len(seen)] @ values[seen, kv_head].double())
            rows.append(torch.stack(heads))
            token += 1
    return torch.stack(rows)


@pytest.mark.parametrize("features", [*FEATURES.values(), {"sliding_window": 2}], ids=[*FEATURES, "tiny window"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("instruction_set", ["torch", *INSTRUCTION_SETS])
def test_each_token_attends_to_its_own_line(instruction_set: str, seed: int, features: dict[str, Any]) -> None:
    library = None if instruction_set == "torch" else kernels(instruction_set)
    case, rng = make_case([(context, length) for context, length, _ in MIXED]), random.Random(seed)
    parents = [random_parents(rng, size) for _, _, size in MIXED]
    batch = AttentionBatch.build(case.pool, case.starts, case.lengths, case.tables, library, parents)
    expected = line_attention(case, parents, features)
    for _ in range(2):  # another layer may use masks again
        got = attend(0, case.query, *case.newest(), batch, SCALE, **features)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def tree_logits(
    runner: ModelRunner, tokens: list[int], proposal: Proposal, table: list[int], sizes: tuple[int, ...] = ()
) -> Tensor:
    """All but the last of `tokens` computed before; then that and the tree, or so many of its tokens, and more behind
    them in steps of their own, as it is when it grows."""
    start = len(tokens) - 1
    if start:
        runner.run_packed(tokens[:start], [0], [start], [table], [])
    new, logits, first = [tokens[start], *proposal.token_ids], [], 0
    for size in (*sizes, len(proposal)):
        rows = new[first : size + 1]
        grown = [proposal.parents[:size]]
        logits.append(runner.run_packed(rows, [start + first], [len(rows)], [table], range(len(rows)), grown))
        first = size + 1
    return torch.cat(logits)


# Of 14 tokens: all at once, or level by level.
GROWN = [(), (3,), (2, 5, 9)]


@pytest.mark.parametrize("sizes", GROWN)
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_a_trees_logits_are_those_of_transformers_for_each_line(
    kernels: Native, family: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    tiny_checkpoint(family, tmp_path, seed=1)
    model, rng = CausalLM.load(str(tmp_path), "cpu", "float32", kernels), random.Random(1)
    for length in (1, 2, 15, 30, 61):
        tokens = [rng.randrange(1, model.vocab_size) for _ in range(length)]
        proposal = tree_around(rng, (), 14, model.vocab_size)
        pool = KVPool(model.kv_shape, 12, 8, model.dtype, model.device)
        got = tree_logits(ModelRunner(model, pool), tokens, proposal, list(range(11, -1, -1)), sizes)
        for row in range(len(got)):
            line = [proposal.token_ids[i] for i in proposal.lineage(row)]
            expected = model.reference_logits(torch.tensor([*tokens, *line]))[-1]
            torch.testing.assert_close(got[row], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("sizes", GROWN)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma 2", "gemma 3, tied"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_trees_logits_are_those_of_its_lines_to_the_bit(
    instruction_set: str, name: str, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rng = native(checkpoint(FAMILIES[name], tmp_path), instruction_set, monkeypatch), random.Random(2)
    model.pack()
    for length in (1, 20, 31, 32, 60, 509):
        tokens = [rng.randrange(203) for _ in range(length)]
        proposal, table = tree_around(rng, (), 12, 203), rng.sample(range(70), 70)
        runner = ModelRunner(model, KVPool(model.kv_shape, 70, 8, model.dtype, model.device))
        got = tree_logits(runner, tokens, proposal, table, sizes)
        for row in range(len(got)):
            line = [proposal.token_ids[i] for i in proposal.lineage(row)]
            alone = runner.run_packed([*tokens, *line], [0], [length + len(line)], [table], [length + len(line) - 1])
            assert torch.equal(got[row], alone[0]), (length, row)


@pytest.mark.parametrize("params", COUPLED.values(), ids=COUPLED.keys())
def test_coupled_tokens_are_the_same_whatever_tree_is_drafted(params: SamplingParams) -> None:
    length, rng = 80, random.Random(3)
    plain = [3, 4]
    while len(plain) < length + 8:
        (new,) = verify(TARGET[plain[-1:]], [SampleRows(params, plain, 2)])
        plain.extend(new.token_ids)
    tokens, num_accepted = [3, 4], 0
    while len(tokens) < length:
        proposal = tree_around(rng, plain[len(tokens) : len(tokens) + 8], rng.randint(1, 14), len(TARGET))
        rows = SampleRows(params, tokens, 2, proposal)
        (new,) = verify(TARGET[[tokens[-1], *proposal.token_ids]], [rows])
        assert new.token_ids[: new.num_accepted] == tuple(proposal.token_ids[row - 1] for row in new.path)
        assert [proposal.parents[row - 1] for row in new.path] == [0, *new.path][: len(new.path)]
        num_accepted += new.num_accepted
        tokens.extend(new.token_ids)
    assert tokens[:length] == plain[:length]
    assert num_accepted > length / 4


def test_of_siblings_with_one_id_the_first_stands_for_all() -> None:
    first = int(TARGET[3].argmax())
    own = first, int(TARGET[first].argmax())
    greedy = SamplingParams(temperature=0.0, logprobs=1)
    proposal = Proposal((9, own[0], own[0], own[1], own[1]), parents=(0, 0, 0, 3, 2))
    (out,) = verify(TARGET[[3, *proposal.token_ids]], [SampleRows(greedy, [3], 1, proposal)])
    assert out.path == (2, 5)
    assert out.token_ids[:2] == own
    assert out.logprobs is not None
    exact = [
        float(TARGET[before].double().log_softmax(0)[token])
        for before, token in zip((3, *own), out.token_ids, strict=False)
    ]
    assert [reported.logprob for reported in out.logprobs] == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize(
    ("params", "parents", "message"),
    [
        (SamplingParams(seed=1), (0,), r"parents has 1 entries for 2 draft tokens"),
        (SamplingParams(seed=1), (0, 2), r"parents\[1\] is 2: it must be at most 1"),
        (SamplingParams(temperature=0.0), (1, 0), r"parents\[0\] is 1: it must be at most 0"),
        (SamplingParams(), (0, 1), r"parents is set for a sequence that is verified by rejection sampling"),
    ],
)
def test_what_is_no_tree_is_named(params: SamplingParams, parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_proposal(Proposal((4, 5), (1, 1), bytes(8), bytes(8), parents), params)


def test_every_row_of_a_tree_is_adjusted_as_if_its_line_had_come_alone() -> None:
    params = SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={9: 1.5}, min_tokens=6,
        stop_token_ids=frozenset({2}),
    )  # fmt: skip
    rng, tokens = random.Random(4), [5, 9, 9, 250, 17, 9, 40, 41, 40]
    proposal = Proposal(tuple(rng.choice([40, 7, 41, 250]) for _ in range(12)), parents=random_parents(rng, 12))
    logits = torch.randn(13, 300, generator=torch.Generator().manual_seed(0)) * 3
    together = adjust_logits(logits, [SampleRows(params, tokens, 5, proposal)])
    for row in range(13):
        line = [proposal.token_ids[i] for i in proposal.lineage(row)]
        alone = SampleRows(params, [*tokens, *line], 5)
        assert torch.equal(adjust_logits(logits[row : row + 1], [alone])[0], together[row])


PROMPTS = [tuple(random.Random(seed).randrange(1, VOCAB_SIZE) for _ in range(size)) for seed, size in
           enumerate((1, 2, 15, 16, 17, 33, 64, 100))]  # fmt: skip
NUM_TOKENS = 40


@pytest.mark.parametrize("sliding_window", [None, 12])
@pytest.mark.parametrize("num_blocks", [200, 24], ids=["roomy", "preemption"])
@pytest.mark.parametrize("sampling", ["greedy", "greedy with penalties", "seeded"])
def test_whatever_trees_are_proposed_the_tokens_are_the_same(
    sampling: str, num_blocks: int, sliding_window: int | None, tmp_path: Path
) -> None:
    folder = tiny_llama(tmp_path, sliding_window=sliding_window)
    model, rng = CausalLM.load(str(folder), "cpu", "float32"), random.Random(5)
    fields = {"max_tokens": NUM_TOKENS, "stop_token_ids": model.eos_token_ids}
    params = {
        "greedy": SamplingParams(temperature=0.0, **fields),  # type: ignore[arg-type]
        "greedy with penalties": SamplingParams(temperature=0.0, repetition_penalty=3.0, **fields),  # type: ignore[arg-type]
        "seeded": SamplingParams(seed=9, temperature=0.8, top_k=20, **fields),  # type: ignore[arg-type]
    }[sampling]
    texts = [oracle_text(folder, model, prompt, params) for prompt in PROMPTS]
    engine = Engine(model, TargetSettings(model="tiny", num_blocks=num_blocks, block_size=8), verify)

    def begin(prompt: Sequence[int]) -> EngineSequence:
        sequence = EngineSequence(prompt, len(prompt), params, root_hash(engine.fingerprint, b""), num_steps=1)
        engine.scheduler.add(sequence)
        return sequence

    sequences = {begin(prompt): text for prompt, text in zip(PROMPTS, texts, strict=True)}
    num_accepted = num_branching = 0
    while any(sequence.finish is None for sequence in sequences):
        for sequence, text in sequences.items():
            if sequence.num_steps == 0 and sequence.finish is None:
                guess = text[len(sequence.token_ids) :]
                sequence.proposal, sequence.num_steps = tree_around(rng, guess, rng.randint(1, 12), VOCAB_SIZE), 1
        outcome = engine.step()
        engine.scheduler.check()
        assert outcome is not None
        assert outcome.failed == []
        num_accepted += sum(gain.sampled.num_accepted for gain in outcome.gains)
        num_branching += sum(gain.sampled.path != tuple(range(1, len(gain.sampled.path) + 1)) for gain in outcome.gains)
    assert [sequence.token_ids for sequence in sequences] == texts
    assert engine.blocks.counts().owned == 0
    assert num_accepted > 50
    assert num_branching > 20


def oracle_text(folder: Path, model: CausalLM, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """By transformers where it is greedy; seeded, token by token over the logits of its own forward."""
    ids = torch.tensor([prompt])
    if params.greedy:
        oracle: Any = AutoModelForCausalLM.from_pretrained(folder)
        text: list[int] = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0,
            repetition_penalty=params.repetition_penalty,
        )[0].tolist()  # fmt: skip
        return text
    tokens = list(prompt)
    while len(tokens) - len(prompt) < NUM_TOKENS and (
        len(tokens) == len(prompt) or tokens[-1] not in params.stop_token_ids
    ):
        logits = model.reference_logits(torch.tensor(tokens))[-1:]
        (new,) = verify(logits, [SampleRows(params, tokens, len(prompt))])
        tokens.extend(new.token_ids)
    return tokens
