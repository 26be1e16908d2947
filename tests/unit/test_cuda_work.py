"""How a step's attention is taken apart: every row looks at each of its keys once, at a cost that follows contexts."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from shared.engine.cuda.work import Plan, StepShape, lengths_of_tiles, plan_work

NOWHERE = np.iinfo(np.int64).max


def step_of(contexts: list[tuple[int, int]]) -> StepShape:
    """Sequences of (context, new tokens)."""
    ends, lengths = np.array(contexts).T
    starts = ends - lengths
    return StepShape(
        starts, lengths, np.cumsum(lengths) - lengths, starts, np.zeros_like(starts), np.full(len(starts), NOWHERE)
    )


def seen_by_row(step: StepShape, plan: Plan, fold: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Of each sequence's first token and row, the keys from which to which its pieces look, none of them empty."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for work in plan.work:
        for token, _, num_rows, first_row, start, first, end, *_ in work.items.tolist():
            for row in range(first_row, min(first_row + work.num_rows, num_rows)):
                stop = min(end, start + row // fold + 1)
                found.setdefault((token, row), []).extend([(first, stop)] if first < stop else [])
    return found


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("seed", range(10))
def test_every_row_looks_at_each_of_its_keys_once(seed: int, window: int | None) -> None:
    rng = random.Random(seed)
    contexts = [int(2 ** rng.uniform(0, 13)) for _ in range(rng.randint(1, 20))]
    lengths = [min(context, rng.choice([1, 1, 5, 9, rng.randint(1, 300)])) for context in contexts]
    step, fold = step_of(list(zip(contexts, lengths, strict=True))), rng.choice([1, 3, 8])
    plan = plan_work(step, fold, rng.choice([1, 2, 8]), window)
    seen = seen_by_row(step, plan, fold)
    assert len(seen) == sum(lengths) * fold
    for token, start, length in zip(step.packed_starts, step.starts, step.lengths, strict=True):
        for row in range(length * fold):
            position = int(start) + row // fold
            ranges = sorted(seen[int(token), row])
            assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
            assert ranges[-1][1] == position + 1
            # What the window leaves out is left out by the mask at the latest.
            assert ranges[0][0] <= max(0, position + 1 - (window or position + 1))


@pytest.mark.parametrize("seed", range(10))
def test_each_part_of_a_token_has_a_place_of_its_own(seed: int) -> None:
    rng = random.Random(seed)
    contexts = [(int(2 ** rng.uniform(8, 14)), rng.choice([1, 4, 9])) for _ in range(rng.randint(1, 12))]
    step, fold = step_of(contexts), 2
    plan = plan_work(step, fold, 4, None)
    places = []
    for work in plan.work:
        for token, _, num_rows, first_row, *_, base, part, parts in work.items.tolist():
            if parts > 1:
                queries = {row // fold for row in range(first_row, min(first_row + work.num_rows, num_rows))}
                places += [base + query * parts + part for query in queries]
                for query in queries:
                    assert plan.first_parts[token + query] == base + query * parts
                    assert plan.first_parts[token + query + 1] == base + (query + 1) * parts
    assert sorted(places) == list(range(plan.num_parts))


def test_one_long_context_makes_nobody_else_dear() -> None:
    def num_keys(contexts: list[tuple[int, int]]) -> int:
        return sum(
            int((work.items[:, 6] - work.items[:, 5]).sum()) for work in plan_work(step_of(contexts), 4, 8, None).work
        )

    assert num_keys([(256, 1)] * 31 + [(131072, 1)]) == 31 * 256 + 131072
    # And several queries look at what one does.
    assert num_keys([(131072, 9)]) == num_keys([(131072, 1)])


@pytest.mark.parametrize("num_queries", [1, 2, 5, 9, 16, 64])
def test_a_long_context_is_split_whatever_looks_at_it(num_queries: int) -> None:
    plan = plan_work(step_of([(131072, num_queries)]), 4, 8, None)
    assert sum(len(work.items) for work in plan.work) * 8 >= 225


@pytest.mark.parametrize("num_sequences", [1, 8, 64, 256])
def test_partial_results_take_bounded_room(num_sequences: int) -> None:
    for context in (300, 4096, 131072):
        plan = plan_work(step_of([(context, 9)] * num_sequences), 4, 8, None)
        assert plan.num_parts <= 9 * (64 + 2 * num_sequences)


def test_a_window_leaves_out_what_it_does_not_reach() -> None:
    plan = plan_work(step_of([(100_000, 3)]), 4, 8, 512)
    assert sum(int((work.items[:, 6] - work.items[:, 5]).sum()) for work in plan.work) <= 512 + 3 + 128


@pytest.mark.parametrize("head_bytes", [128, 512])
@pytest.mark.parametrize("fold", [1, 2, 3, 4, 6, 7, 8, 16, 24, 71])
def test_lengths_of_tiles_bring_about_every_piece_that_a_step_may_have(fold: int, head_bytes: int) -> None:
    rng = random.Random(fold)

    def sizes(lengths: list[int]) -> set[int]:
        plan = plan_work(step_of([(length + 50, length) for length in lengths]), fold, 2, None, head_bytes)
        return {work.num_rows for work in plan.work}

    tried = {size for length in lengths_of_tiles(fold, head_bytes) for size in sizes([length])}
    for _ in range(300):
        assert sizes([rng.choice([1, 1, 2, 3, 5, 9, 17, 300]) for _ in range(rng.randint(1, 4))]) <= tried
