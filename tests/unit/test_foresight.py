"""What a drafter's guesses are worth: first choices apart from others, and each sequence for itself."""

from __future__ import annotations

import math
import random

import pytest

from shared.drafting.tree_draft import TreeDraft
from shared.policy.foresight import Foresight
from shared.sampling.draft_tree import DraftTree
from shared.sampling.sampled import Children


class Noted(Foresight):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, bool, bool]] = []

    def observe(self, guess: float, is_first: bool, accepted: bool) -> None:
        self.seen.append((round(guess, 6), is_first, accepted))
        super().observe(guess, is_first, accepted)


def children(**guesses: float) -> Children:
    return Children([ord(name) for name in guesses], [math.log(guess) for guess in guesses.values()])


def grown(foresight: Foresight) -> DraftTree:
    """Behind the last token a or b or c, then d or e behind a, and f or g behind b."""
    tree = DraftTree(16, 2, likelihood=foresight.likelihood)
    tree.take([children(a=0.5, b=0.4, c=0.1)])
    assert tree.advance() is not None
    tree.take([children(d=0.6, e=0.2), children(f=0.5, g=0.3), children(h=0.9)])
    return tree


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("bg", [(0.5, True, False), (0.4, False, True), (0.1, False, False), (0.5, True, False), (0.3, False, True)]),
        ("ad", [(0.5, True, True), (0.4, False, False), (0.1, False, False), (0.6, True, True), (0.2, False, False)]),
        ("z", [(0.5, True, False), (0.4, False, False), (0.1, False, False)]),
    ],
)
def test_of_each_place_whose_turn_came_one_choice_was_the_first(
    text: str, seen: list[tuple[float, bool, bool]]
) -> None:
    noted = Noted()
    draft = TreeDraft(grown(noted), noted, "model")
    draft.settle([*map(ord, text)])
    assert sorted(noted.seen) == sorted(seen)


def test_first_choices_are_worth_what_they_turn_out_to_be_and_so_are_others() -> None:
    rng, foresight = random.Random(0), Foresight()
    for _ in range(1000):
        foresight.observe(0.35, True, rng.random() < 0.9)
        foresight.observe(0.35, False, rng.random() < 0.2)
    assert foresight.likelihood(0.35, True) == pytest.approx(0.9, abs=0.1)
    assert foresight.likelihood(0.35, False) == pytest.approx(0.2, abs=0.1)


def test_a_sequence_begins_with_what_all_know_and_goes_by_its_own_text() -> None:
    everybody = Foresight()
    hard, easy = Foresight(everybody), Foresight(everybody)
    for _ in range(100):
        hard.observe(0.55, True, False)
        easy.observe(0.55, True, True)
    assert Foresight(everybody).likelihood(0.55, True) == pytest.approx(0.5, abs=0.1)
    assert hard.likelihood(0.55, True) < 0.1 < 0.9 < easy.likelihood(0.55, True)
