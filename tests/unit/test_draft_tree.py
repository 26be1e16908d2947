"""Trees that a drafter grows: the likeliest tokens first, whatever it kept from the round before."""

from __future__ import annotations

import heapq
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.draft.drafter import Drafter
from services.draft.proposer import draw
from services.draft.settings import DraftSettings
from shared.engine.engine import Engine
from shared.engine.model import CausalLM
from shared.engine.sequence import Sequence
from shared.policy.foresight import Foresight
from shared.prefix.block_hash import root_hash
from shared.sampling.draft_tree import WIDTH, DraftTree
from shared.sampling.noise import gumbel_noise
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import Children
from tests.support.models import tiny_llama

VOCAB_SIZE = 257


def table(seed: int, vocab_size: int = 7) -> Tensor:
    """A language model: row t holds the log-probabilities of what follows token t."""
    return (torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2).log_softmax(1)


def grow(model: Tensor, last: int, num_nodes: int, num_steps: int, least: float = 0.0) -> tuple[Proposal, int]:
    """The tree behind `last`, and the steps that it took."""
    tree, rows, taken = DraftTree(num_nodes, num_steps, least=least), [last], 0
    while True:
        best = [model[row].topk(min(tree.num_children, model.shape[1])) for row in rows]
        tree.take([Children(each.indices.tolist(), each.values.tolist()) for each in best])
        taken += 1
        following = tree.advance()
        if following is None:
            return tree.proposal(), taken
        proposal, first_row = following
        rows = list(proposal.token_ids[first_row - 1 :])
        assert 1 <= len(rows) <= WIDTH


def lines(proposal: Proposal) -> set[tuple[int, ...]]:
    return {tuple(proposal.token_ids[i] for i in proposal.lineage(row)) for row in range(1, 1 + len(proposal))}


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 8, 12, 30])
@pytest.mark.parametrize("seed", range(4))
def test_with_steps_enough_a_tree_holds_the_likeliest_lines(seed: int, num_nodes: int) -> None:
    model = table(seed)
    found, taken = grow(model, 3, num_nodes, 100)
    # Best first, by a heap over all lines there are.
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    expected: list[tuple[int, ...]] = []
    while len(expected) < num_nodes:
        cost, line = heapq.heappop(heap)
        expected += [line] if line else []
        for token in range(len(model)):
            heapq.heappush(heap, (cost - float(model[line[-1] if line else 3, token]), (*line, token)))
    assert lines(found) == set(expected)
    assert taken < 40


@pytest.mark.parametrize("price", [0.0, 0.1, 0.4])
def test_what_verifying_takes_is_not_promised(price: float) -> None:
    tree = DraftTree(8, 2, price=price)
    tree.take([Children([3, 1, 4], [math.log(its) for its in (0.5, 0.3, 0.05)])])
    expected = pytest.approx(sum(max(0.0, its - price) for its in (0.5, 0.3, 0.05)))
    assert tree.num_wanted == 3
    assert tree.worth == tree.prospect == expected
    assert tree.advance() is not None
    assert tree.num_wanted == tree.prospect == 0, "as they are being computed"
    assert tree.worth == expected
    tree.take([Children([5], [math.log(0.8)]), Children([], []), Children([], [])])
    assert tree.worth == pytest.approx(sum(max(0.0, its - price) for its in (0.5, 0.4, 0.3, 0.05)))
    assert tree.num_wanted == 0, "two steps are all"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("least", [0.03, 0.1, 0.3])
def test_nobody_looks_behind_what_is_hardly_accepted(least: float, seed: int) -> None:
    model = table(seed)
    found, taken = grow(model, 3, 30, 100, least)

    def likelihood(line: tuple[int, ...]) -> float:
        return math.exp(sum(float(model[before, token]) for before, token in zip((3, *line), line, strict=False)))

    for line in lines(found):
        assert all(likelihood(line[:i]) > least for i in range(1, len(line)))
    # Behind all others it does, where there is something better than what it holds.
    behind, worst = {line[:-1] for line in lines(found)}, min(map(likelihood, lines(found)))
    for line in lines(found):
        best = likelihood((*line, int(model[line[-1]].argmax())))
        assert line in behind or likelihood(line) <= least or best <= worst * 1.0001
    assert taken <= grow(model, 3, 30, 100)[1]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_tree_is_no_deeper_than_its_steps(num_steps: int) -> None:
    for seed in range(5):
        proposal, taken = grow(table(seed), 2, 20, num_steps)
        assert max(proposal.depths) <= num_steps
        assert taken <= num_steps
        assert len(proposal) == (7 if num_steps == 1 else 20)


def test_what_the_drafter_likes_less_than_another_is_no_likelier() -> None:
    """Whatever experience of few tokens says."""
    tree = DraftTree(2, 1, likelihood=lambda guess, _: 1 - guess)
    tree.take([Children([5, 6, 7], [math.log(guess) for guess in (0.6, 0.3, 0.1)])])
    assert tree.advance() is None
    assert tree.proposal().token_ids == (5, 6)


def test_what_may_follow_is_what_the_noise_foresees() -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)) * 2
    seeded = SamplingParams(seed=5, temperature=0.7, top_k=4, sequence_index=2)
    tree = SampleRows(seeded, [3, 4], 2, Proposal((8, 9, 9), parents=(0, 1, 0)), first_row=2, num_children=6)
    greedy = SampleRows(SamplingParams(temperature=0.0), [3], 1, num_children=2)
    plain = SampleRows(SamplingParams(temperature=0.0), [3], 1)
    together = draw(torch.cat([logits[:2], logits[2:], logits[2:]]), [tree, greedy, plain])
    assert together[2].token_ids == (int(logits[2].argmax()),)
    best = logits[2].log_softmax(0).topk(2)
    assert together[1].children[0].token_ids == best.indices.tolist()
    assert together[1].children[0].logprobs == pytest.approx(best.values.tolist(), abs=1e-5)
    for row, depth in ((0, 2), (1, 1)):
        kept = logits[row].topk(4)
        scores = torch.full((11,), -math.inf)
        scores[kept.indices] = (kept.values / 0.7).log_softmax(0)
        scores += gumbel_noise([5], [2], [2 + depth], 11, logits.device)[0]
        order = scores.topk(4)
        children = together[0].children[row]
        assert children.token_ids == order.indices.tolist(), "what the filters leave, and no more"
        expected = (order.values - scores.logsumexp(0)).tolist()
        assert children.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder: Path = tiny_llama(tmp_path_factory.mktemp("models") / "llama")
    return CausalLM.load(str(folder), "cpu", "float32")


def engine_for(model: CausalLM, **fields: Any) -> Engine:
    return Engine(model, DraftSettings(model="tiny", **{"num_blocks": 100, "block_size": 8, **fields}), draw)


@pytest.fixture(autouse=True)
def time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is too slow to be followed by others."""
    monkeypatch.setattr(Engine, "clock", lambda self: 0.0)


class Untaught(Foresight):
    """Learns nothing from one round for the next."""

    def observe(self, guess: float, is_first: bool, accepted: bool) -> None: ...


def drafter(engine: Engine, tokens: list[int], num_prompt_tokens: int, params: SamplingParams) -> Drafter:
    sequence = Sequence(tokens, num_prompt_tokens, params, root_hash(engine.fingerprint, b""), drafting=True)
    engine.scheduler.add(sequence)
    return Drafter(sequence, Untaught())


def answers(engine: Engine, drafters: list[Drafter]) -> list[Proposal]:
    """Steps until all can be answered; blocks are conserved."""
    by_sequence = {each.sequence: each for each in drafters}
    while not all(each.answerable for each in drafters):
        outcome = engine.step()
        assert outcome is not None
        assert outcome.failed == []
        engine.scheduler.check()
        for gain in outcome.gains:
            by_sequence[gain.sequence].take(gain.sampled)
    return [each.answer() for each in drafters]


@pytest.mark.parametrize(
    "limits", [{}, {"num_blocks": 30}, {"max_batch_tokens": 21}], ids=["roomy", "preemption", "chunks"]
)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3),
        SamplingParams(seed=4, temperature=0.7, repetition_penalty=1.5, frequency_penalty=0.3),
    ],
    ids=["greedy", "seeded", "penalties"],
)
def test_what_is_kept_of_a_tree_changes_nothing(
    model: CausalLM, params: SamplingParams, limits: dict[str, int]
) -> None:
    """Committed along a line, aside of it and beyond it, with chains in between: the next tree is a new drafter's."""
    rng, engine, fresh = random.Random(0), engine_for(model, **limits), engine_for(model, num_blocks=200)
    texts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 8, 30, 61)]
    num_prompt_tokens = [len(text) for text in texts]
    kept = [drafter(engine, text, len(text), params) for text in texts]
    num_moved = 0
    for turn in range(12):
        for each in kept:
            if turn % 4 == 3:
                each.ask(3)
            else:
                each.ask_for_tree(rng.randint(2, 5), rng.randint(6, 14))
        asked = [(each.num_asked, each.sequence.tree._num_nodes if each.sequence.tree else 0) for each in kept]
        proposals = answers(engine, kept)
        for i, (text, each, proposal) in enumerate(zip(texts, kept, proposals, strict=True)):
            num_draft_tokens, num_nodes = asked[i]
            alone = drafter(fresh, text, num_prompt_tokens[i], params)
            if num_nodes:
                alone.ask_for_tree(num_draft_tokens, num_nodes)
            else:
                alone.ask(num_draft_tokens)
            # As lines: two that nearly tie may come in another order, where sums are taken in another.
            assert lines(proposal) == lines(answers(fresh, [alone])[0])
            fresh.scheduler.remove(alone.sequence)
            if proposal.parents:
                line = proposal.lineage(rng.randint(0, len(proposal)))
            else:
                line = list(range(rng.randint(0, len(proposal))))
            new = [proposal.token_ids[i] for i in line] + [rng.randrange(1, VOCAB_SIZE)]
            each.commit(len(text), new)
            num_moved += len(each.sequence.moves)
            text += new
    assert num_moved > 20
    for each in kept:
        engine.scheduler.remove(each.sequence)
    assert engine.blocks.counts().owned == 0


def test_a_tree_grows_in_one_go_where_nobody_else_may_be_asked(model: CausalLM) -> None:
    text, params = [5, 6, 7, 8, 9], SamplingParams(temperature=0.0)
    engine = engine_for(model)
    alone = drafter(engine, text, len(text), params)
    alone.ask_for_tree(4, 12)
    outcome = engine.step()
    assert outcome is not None
    assert alone.answerable
    assert len(outcome.following) == 3
    assert all(1 <= num_tokens <= WIDTH for num_tokens in outcome.following)
    assert len(alone.sequence.proposal) == sum(outcome.following), "what was computed of it"
    assert len(outcome.gains) == 4
    both = [drafter(engine, text, len(text), params) for _ in range(2)]
    both[0].ask_for_tree(4, 12)
    for _ in range(4):
        assert not both[0].answerable
        outcome = engine.step()
        assert outcome is not None
        assert not outcome.following, "the other may be asked meanwhile"
    assert lines(both[0].answer()) == lines(alone.answer())


@pytest.mark.parametrize(
    ("limits", "num_levels"), [({}, 3), ({"max_batch_tokens": 17}, 0), ({"num_blocks": 6}, 1), ({"num_blocks": 5}, 0)]
)
def test_trees_grow_in_one_go_as_far_as_a_step_and_the_pool_have_room(
    model: CausalLM, limits: dict[str, int], num_levels: int
) -> None:
    """Their second levels have 24 tokens, which take a block more each, and then more is to come."""
    found: list[list[set[tuple[int, ...]]]] = []
    for engine in (engine_for(model, **limits), engine_for(model)):
        them = [drafter(engine, [i, 6, 7, 8, 9], 5, SamplingParams(temperature=0.0)) for i in (5, 6, 7)]
        for each in them:
            each.ask_for_tree(4, 12)
        outcome = engine.step()
        assert outcome is not None
        assert not outcome.failed
        assert (outcome.following or [24])[0] == 24
        if not found:
            assert len(outcome.following) == num_levels
            assert engine.scheduler.num_preempted == 0
        found.append([lines(proposal) for proposal in answers(engine, them)])
    assert found[0] == found[1]


def test_a_tree_that_lost_its_blocks_comes_back_in_steps_of_whatever_size(model: CausalLM) -> None:
    """Preempted with more tokens of it computed than a step may have."""
    text, params = [5, 6, 7, 8, 9], SamplingParams(temperature=0.0)
    engine, fresh = engine_for(model, num_blocks=12, max_batch_tokens=17), engine_for(model)
    old = drafter(engine, [3] * 8, 8, params)
    old.prefill()
    young, alone = (drafter(each, text, len(text), params) for each in (engine, fresh))
    for each in (young, alone):
        each.ask_for_tree(10, 80)
    while len(young.sequence.proposal) < 17:
        assert engine.step() is not None
    assert not young.answerable
    old.commit(8, list(range(10, 62)))
    old.ask(3)
    answered = answers(engine, [old, young])
    assert engine.scheduler.num_preempted > 0
    assert lines(answered[1]) == lines(answers(fresh, [alone])[0])
    likelihoods = [each.sequence.tree.likelihoods() for each in (young, alone) if each.sequence.tree is not None]
    assert likelihoods[0] == pytest.approx(likelihoods[1], rel=1e-4)


@pytest.mark.parametrize("in_tree", [True, False])
def test_who_is_asked_again_with_nothing_new_answers_again(model: CausalLM, in_tree: bool) -> None:
    engine = engine_for(model)
    text = [5, 6, 7, 8, 9]
    asked = drafter(engine, text, len(text), SamplingParams(temperature=0.0))
    asked.ask_for_tree(3, 8)
    (first,) = answers(engine, [asked])
    asked.commit(len(text), [])
    if in_tree:
        asked.ask_for_tree(3, 8)
        assert lines(answers(engine, [asked])[0]) == lines(first)
    else:
        asked.ask(1)
        assert answers(engine, [asked])[0].token_ids == first.token_ids[:1]
