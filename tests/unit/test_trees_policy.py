"""What trees bring is learnt from their rounds, and they are drafted where that is more than chains do."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shared.policy.acceptance import Acceptance, expected_tokens
from shared.policy.drafting import Drafting
from shared.policy.gamma import GammaController
from shared.policy.pace import Pace
from shared.policy.shape import PLAIN, TREE_WIDTH, Shape
from shared.policy.step_costs import StepCosts
from shared.policy.trees import Trees
from shared.sampling import draft_tree
from tests.support.gamma import situation
from tests.support.speculation_simulator import Machine, Simulation, Workload

# Twelve rows cost little more than one, as where a step waits for its weights.
FLAT = StepCosts([(1, 0.010), (12, 0.012), (24, 0.030), (512, 0.6)])


def test_trees_are_as_large_as_costs_little() -> None:
    shapes = Trees(16).shapes(FLAT, 1, 8)
    assert {shape.num_nodes for shape in shapes} == {5, 8, 11}, "sixteen rows cost half a step more"
    assert {shape.num_draft_tokens for shape in shapes} == {1, 2, 3, 4, 6}
    assert all(1.5 <= shape.branching <= 8 for shape in shapes)
    assert {shape.num_nodes for shape in Trees(8).shapes(FLAT, 1, 2)} == {5, 8}, "no more than may be"
    assert not Trees(16).shapes(FLAT, 12, 8), "each row of so many sequences costs what it computes"
    assert not Trees(0).shapes(FLAT, 1, 8)
    free = StepCosts([(1, 0.010), (512, 0.010)])
    assert max(shape.num_nodes for shape in Trees(64).shapes(free, 16, 8)) == 15, "prompts have room beside them"
    assert max(shape.num_nodes for shape in Trees(64).shapes(free, 1, 8)) == 47, "nor are there more at one place"
    assert [shape.num_draft_tokens for shape in Trees(16).shapes(FLAT, 1, 3)] == [1, 1, 2, 2, 2, 3, 3, 3], "nor deeper"


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.5])
def test_what_the_most_likely_tokens_miss_together_is_learnt_and_holds_for_other_shapes(exponent: float) -> None:
    dice, trees = random.Random(1), Trees(16)
    for _ in range(4000):
        alpha, shape = dice.uniform(0.3, 0.9), dice.choice([Shape(3, 12), Shape(6, 12)])
        hit = 1 - shape.branching**-exponent * (1 - alpha)
        drawn = [dice.random() < hit for _ in range(shape.num_draft_tokens)]
        trees.observe(alpha, shape, (*drawn, False).index(False))
    for shape in (Shape(2, 4), Shape(2, 10), Shape(3, 12)):
        rate = 1 - shape.branching**-exponent * 0.4
        assert trees.tokens(0.6, shape) == pytest.approx(expected_tokens(rate, shape.num_draft_tokens), rel=0.1)
    assert trees.tokens(1.0, Shape(2, 4)) == 3.0


def test_what_a_shape_brings_beside_that_is_learnt_of_itself() -> None:
    """As trees that hold copied lines, deeper than they were asked to be: 15 tokens in every seventh round."""
    trees = Trees(16)
    for round_number in range(2000):
        trees.observe(0.5, Shape(2, 15), 1 if round_number % 7 else 15)
    assert trees.tokens(0.5, Shape(2, 15)) == pytest.approx((6 * 2 + 16) / 7, rel=0.15)
    for _ in range(200):
        trees.observe(0.1, Shape(2, 15), 0)
    assert trees.tokens(0.1, Shape(2, 15)) < 1.6, "nor is it held to that for long"


def test_what_all_shapes_bring_beside_that_is_expected_of_one_that_was_not_tried() -> None:
    """Every tenth round of the one that was goes on behind its depth: what it brings beyond its misses."""
    trees, as_deep_as_asked = Trees(16), Trees(16)
    tried, other = Shape(3, 11), Shape(4, 15)
    total = 0
    for round_number in range(1000):
        num_accepted = 7 if round_number % 10 == 0 else round_number % 4
        total += num_accepted + 1
        trees.observe(0.5, tried, num_accepted)
        as_deep_as_asked.observe(0.5, tried, min(num_accepted, 3))
    more = total / 1000 / as_deep_as_asked.tokens(0.5, tried)
    assert more > 1.1
    assert trees.tokens(0.5, other) == pytest.approx(more * as_deep_as_asked.tokens(0.5, other), rel=0.05)
    assert trees.tokens(1.0, other) == 5.0, "but not more than it is deep"


@pytest.mark.parametrize(
    ("alpha", "num_accepted"), [(0.0, 0), (0.98, 0), (1.0, 0), (1.4, 3), (0.02, 3), (1.0, 3), (0.5, 60)]
)
def test_whatever_is_seen_for_however_long_more_tokens_than_can_be_are_not_expected(
    alpha: float, num_accepted: int
) -> None:
    trees = Trees(16)
    for _ in range(20_000):
        trees.observe(alpha, Shape(3, 11), num_accepted)
    for rate in (0.0, 0.02, 0.5, 1.0):
        for shape in (Shape(1, 5), Shape(3, 11), Shape(6, 15)):
            assert 0 < trees.tokens(rate, shape) <= shape.num_nodes + 1


def test_of_a_trees_rounds_is_learnt_what_a_chain_would_have_had() -> None:
    """Nodes 0 and 1 follow the text, 2 and 3 node 0, 4 and 5 node 1, and the first of each pair is the likelier."""
    rows = [0, 0, 1, 1, 2, 2]
    found = {}
    for path in ([], [0], [1], [0, 2], [1, 5]):
        sequence = Drafting(Acceptance())
        sequence.observe_tree(rows, path, Shape(2, 6), False, None)
        found[tuple(path)] = sequence.acceptance._num_accepted, sequence.acceptance._num_examined
    # Behind a leaf nothing was looked for.
    assert found == {(): (0, 1), (0,): (1, 2), (1,): (0, 2), (0, 2): (2, 2), (1, 5): (0, 2)}


def learnt(followed_rows: list[int], path: list[int], asked: Shape, ended: bool = False) -> tuple[float, float, float]:
    """What is learnt of one proposal: draft tokens kept and examined, as in chains, and how much the trees' chance."""
    sequence, trees = Drafting(Acceptance()), Trees(16)
    before = trees.tokens(0.5, asked)
    sequence.observe_tree(followed_rows, path, asked, ended, trees)
    return sequence.acceptance._num_accepted, sequence.acceptance._num_examined, trees.tokens(0.5, asked) - before


def test_what_a_drafter_leaves_out_would_not_have_been_accepted() -> None:
    """Two tokens where a tree of sixteen was asked for: in a chain of four they would be two kept of three."""
    assert learnt([0, 1], [0, 1], Shape(4, 16))[:2] == (2, 3)
    assert learnt([0, 0, 0, 1, 1, 1], [0, 3], Shape(4, 16))[:2] == (2, 3)
    assert learnt([0, 0, 1, 1], [0, 2], Shape(2, 4))[:2] == (2, 2), "nothing was left out"
    kept, examined, better = learnt([], [], Shape(4, 16))
    assert (kept, examined) == (0, 1)
    assert better < 0, "who asks such a drafter for trees gets none"


def test_behind_a_token_that_ends_the_sequence_nothing_is_missed() -> None:
    rows = [0, 0, 1, 1, 2, 2, 3, 3]
    kept, examined, better = learnt(rows, [0], Shape(3, 8), ended=True)
    assert (kept, examined) == (1, 1)
    assert better > 0
    kept, examined, worse = learnt(rows, [0], Shape(3, 8))
    assert (kept, examined) == (1, 2)
    assert worse < better


def test_a_step_of_the_policys_trees_is_as_wide_as_one_of_the_drafters() -> None:
    assert draft_tree.WIDTH == TREE_WIDTH


@pytest.mark.parametrize("others_coupled", [True, False])
def test_trees_are_for_where_all_may_have_some(others_coupled: bool) -> None:
    controller = GammaController(FLAT, StepCosts([(1, 0.001), (512, 0.05)]), 8, lambda: 0.0, max_num_nodes=16)
    first, second = Drafting(controller.acceptance, coupled=True), Drafting(controller.acceptance, others_coupled)
    where = situation()._replace(num_output=10, num_remaining=500)
    controller._members[second], second.situation = None, where
    assert controller.choose(first, where) > 0
    assert controller.shape.is_tree == others_coupled
    assert first.num_nodes == (controller.shape.num_nodes if others_coupled else 0)
    assert controller.choose(second, where) == controller.gamma
    beside_prompts = where._replace(num_prefill_tokens=10_000)
    controller.choose(first, beside_prompts)
    assert first.num_nodes == 0, "prompts need the rows"


def test_who_does_not_join_the_others_trees_decodes_plainly() -> None:
    """It has as much to catch up with as it has hardly anything to follow."""
    draft = StepCosts([(1, 0.001), (16, 0.001), (512, 0.5)])
    controller = GammaController(FLAT, draft, 8, lambda: 0.0, max_num_nodes=16)
    paces = [Pace(controller.acceptance, None, coupled=True) for _ in range(2)]
    where = situation()._replace(num_output=10, num_remaining=500)
    assert paces[0].next(controller, where, 0, 8).shape.is_tree
    short = where._replace(num_unseen=400, num_output=1, num_remaining=3)
    for _ in range(3):
        assert paces[1].next(controller, short, 0, 8).shape == PLAIN


def test_a_shape_that_is_cut_is_a_chain_where_it_has_one_token_a_step() -> None:
    assert [Shape(3, 5).cut_to(n) for n in (5, 3, 2, 1, 0, -1)] == [
        *[Shape(3, 5)] * 2,
        Shape(2, 3),
        Shape(1),
        PLAIN,
        PLAIN,
    ]
    assert Shape(0, 11).cut_to(4) == PLAIN
    assert Shape(4).cut_to(2) == Shape(2)


def tokens_per_second(machine: Machine, workload: Workload, fixed: Shape | None) -> float:
    return Simulation(machine, workload, 3, fixed).run()


CHAINS = [Shape(gamma) for gamma in (0, 1, 2, 3, 4, 6, 8)]
TREES = [Shape(2, 11), Shape(3, 11), Shape(3, 15), Shape(4, 15), Shape(6, 15)]


@pytest.mark.parametrize(
    ("streams", "misses", "draft_ratio"), [(1, 0.4, 0.15), (1, 1.0, 0.15), (8, 0.4, 0.15), (1, 0.4, 0.02)]
)
def test_the_policy_drafts_trees_where_they_bring_more(streams: int, misses: float, draft_ratio: float) -> None:
    machine = Machine(draft_ratio)
    workload = Workload(lambda _: streams, lambda _: 0.6, 100, tree_misses=misses)
    chains = max(tokens_per_second(machine, workload, shape) for shape in CHAINS)
    best = max(chains, *(tokens_per_second(machine, workload, shape) for shape in TREES))
    chosen = tokens_per_second(machine, workload, None)
    assert chosen >= 0.95 * best
    if streams == 1 and misses < 0.5:
        assert chosen > 1.05 * chains


SMALL = Shape(3, 11)


def rounds_of(
    target: StepCosts,
    num_rounds: int,
    seconds: Callable[[Shape], float],
    rate: float,
    exponent: float | Callable[[Shape], float],
    draft: float = 0.001,
    most: Shape = SMALL,
) -> list[Shape]:
    """Shapes that one sequence is given, `most` at most: plain steps take 10 ms, rounds these seconds, a chain holds
    the next token with the chance `rate`, and trees miss it the less the more they branch."""
    now = [0.0]
    costs = StepCosts([(1, draft), (512, draft)])
    controller = GammaController(target, costs, most.num_draft_tokens, lambda: now[0], max_num_nodes=most.num_nodes)
    sequence, dice, shapes = Drafting(controller.acceptance, coupled=True), random.Random(4), list[Shape]()
    for _ in range(num_rounds):
        shape = Shape(controller.choose(sequence, situation()), sequence.num_nodes)
        if shape == PLAIN:
            now[0] += 0.010
            controller.observe_plain(1, 0.010, now[0])
        else:
            now[0] += seconds(shape)
            controller.observe_round(1, shape, 1, seconds(shape))
        power = exponent(shape) if callable(exponent) else exponent
        hit = 1 - (1 - rate) * max(shape.branching, 1.0) ** -power if shape != PLAIN else 0.0
        drawn = [dice.random() < hit for _ in range(shape.num_draft_tokens)]
        num_accepted = (*drawn, False).index(False)
        if shape.is_tree:
            controller.trees.observe(rate, shape, num_accepted)
            likeliest = [dice.random() < rate / hit for _ in range(num_accepted)]
            num_accepted = (*likeliest, False).index(False)
        if shape != PLAIN:
            sequence.acceptance.observe(shape.num_draft_tokens, num_accepted)
        shapes.append(shape)
    return shapes


def test_a_larger_tree_that_met_a_bad_moment_is_tried_again() -> None:
    num_larger = 0

    def seconds(shape: Shape) -> float:
        nonlocal num_larger
        num_larger += shape.num_nodes == 11
        bad = shape.num_nodes == 11 and num_larger <= 16  # asked for twice each
        return 0.012 + shape.num_draft_tokens * 0.001 + 0.004 * bad

    late = rounds_of(FLAT, 3000, seconds, 0.6, 1.0)[1500:]
    assert sum(each.num_nodes == 11 for each in late) > 0.8 * len(late)


@pytest.mark.parametrize(
    ("better", "of_step", "exponent", "longer"),
    [(Shape(4, 15), 0.0012, 0.95, 0.004), (Shape(6, 15), 0.0003, 0.75, 0.0015)],
)
def test_a_shallower_or_deeper_tree_that_met_a_bad_moment_is_tried_again(
    better: Shape, of_step: float, exponent: float, longer: float
) -> None:
    num_better = 0

    def seconds(shape: Shape) -> float:
        nonlocal num_better
        num_better += shape == better
        bad = shape == better and num_better <= 80  # asked for twice each
        return 0.0155 + shape.num_draft_tokens * of_step + longer * bad

    flat = StepCosts([(1, 0.010), (16, 0.011), (24, 0.030), (512, 0.6)])
    exponents = {better: exponent}
    late = rounds_of(flat, 5000, seconds, 0.65, lambda shape: exponents.get(shape, 0.61), of_step, Shape(6, 15))[2500:]
    assert sum(each == better for each in late) > 0.8 * len(late)


# As if everything had taken a third longer just when those sizes were measured.
DISTURBED = StepCosts([(1, 0.010), (4, 0.0105), (6, 0.0145), (12, 0.0148), (24, 0.030), (512, 0.6)])


def test_trees_whose_rows_were_measured_in_a_bad_moment_are_tried_beside_chains() -> None:
    def seconds(shape: Shape) -> float:
        return FLAT.seconds(shape.num_verified + 1) + shape.num_draft_tokens * 0.001

    shapes = rounds_of(DISTURBED, 3000, seconds, 0.8, 0.63)
    assert not any(each.is_tree for each in shapes[:10]), "they seem to be dear"
    late = shapes[1500:]
    assert sum(each.is_tree for each in late) > 0.9 * len(late)


def test_trees_that_are_dear_are_rarely_tried_beside_chains() -> None:
    def seconds(shape: Shape) -> float:
        return DISTURBED.seconds(shape.num_verified + 1) + shape.num_draft_tokens * 0.001

    shapes = rounds_of(DISTURBED, 6000, seconds, 0.8, 0.63)
    assert sum(each.is_tree for each in shapes) < 0.05 * len(shapes)
