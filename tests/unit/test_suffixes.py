"""Copying what followed before: against a search through all of the text, and within bounds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shared.copying.copied import Copied, copy
from shared.copying.past_outputs import PastOutputs
from shared.copying.suffix_index import LONGEST_MATCH, SuffixIndex
from shared.copying.suffix_source import SuffixSource
from shared.policy.calibration import Calibration
from shared.sampling.proposal import Proposal

SHORTEST = 2


def num_places(index: SuffixIndex) -> int:
    """What an index remembers of its texts, in entries."""
    return sum(map(len, index._places.values()))


def longest_match(text: Sequence[int]) -> int:
    """Of the end of a text with what came before it, by looking everywhere; 0 below what counts."""
    best = 0
    for end in range(1, len(text)):
        length = 0
        while length < min(end, LONGEST_MATCH) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= SHORTEST else 0


@pytest.mark.parametrize("seed", range(4))
def test_matches_are_those_of_a_search_through_all_of_the_text(seed: int) -> None:
    """With so many different tokens that no n-gram stands in more places than are kept."""
    rng = random.Random(seed)
    index = SuffixIndex()
    text: list[int] = []
    for _ in range(150):
        if len(text) > 20 and rng.random() < 0.3:
            start = rng.randrange(len(text) - 10)
            piece = text[start : start + rng.randrange(2, 10)]
        else:
            piece = [rng.randrange(300) for _ in range(rng.randrange(1, 5))]
        text = list(index.extend(7, piece))
        found = index.matches(index.extend(7, []))
        assert max((match.length for match in found), default=0) == longest_match(text)
        assert [match.length for match in found] == sorted((match.length for match in found), reverse=True)
        for match in found:
            assert text[match.end - match.length : match.end] == text[-match.length :]
            assert match.next(0) == text[match.end]


def test_what_repeats_goes_on_repeating() -> None:
    index = SuffixIndex()
    tail = index.extend(0, [9, *[1, 2, 3] * 5])
    for match in index.matches(tail):
        assert [match.next(i) for i in range(8)] == [1, 2, 3, 1, 2, 3, 1, 2]


def test_another_text_ends_where_it_ends() -> None:
    index = SuffixIndex()
    index.extend(0, [1, 2, 3, 4])
    [match] = index.matches([8, 2, 3])
    assert [match.next(i) for i in range(3)] == [4, None, None]


def test_one_token_said_a_hundred_thousand_times_leaves_little() -> None:
    index = SuffixIndex()
    tail = index.extend(0, [5] * 100_000)
    assert num_places(index) < 100
    assert len(index.matches(tail)) < 20
    index.drop(0)
    assert (len(index), num_places(index)) == (0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_of_what_was_dropped(seed: int) -> None:
    rng = random.Random(seed)
    index = SuffixIndex()
    texts = [[rng.randrange(40) for _ in range(60)] for _ in range(3)]
    for text_id, text in enumerate(texts):
        index.extend(text_id, text)
    for text_id in (0, 2):
        index.drop(text_id)
    assert all(match.text_id == 1 for end in range(2, 60) for match in index.matches(texts[1][:end]))
    index.drop(1)
    assert (len(index), num_places(index)) == (0, 0)


def index_of(*texts: Sequence[int]) -> SuffixIndex:
    index = SuffixIndex()
    for text_id, text in enumerate(texts):
        index.extend(text_id, text)
    return index


def test_lines_that_are_shared_add_up_and_the_likeliest_come_first() -> None:
    matches = index_of([1, 2, 7, 8], [1, 2, 7, 9], [1, 2, 5, 6]).matches([1, 2])
    tree = copy(matches, 16, 0.0, Calibration(), branching=True)
    assert tree.proposal.token_ids[0] == 7, "said by two of three"
    rows: dict[int, tuple[int, ...]] = {0: ()}
    for i, (token, parent) in enumerate(zip(tree.proposal.token_ids, tree.proposal.parents, strict=True), 1):
        rows[i] = (*rows[parent], token)
    assert set(rows.values()) == {(), (7,), (5,), (7, 8), (7, 9), (5, 6)}
    chain = copy(matches, 16, 0.0, Calibration(), branching=False)
    assert chain.proposal.token_ids[0] == 7
    assert (len(chain.proposal), chain.proposal.parents) == (2, ())


def test_a_longer_match_proposes_more() -> None:
    text = list(range(100, 180))
    num_proposed = []
    for length in (2, 4, 8, 32):
        matches = index_of(text).matches(text[:40][-length:])
        num_proposed.append(len(copy(matches, 64, 0.4, Calibration(), branching=False).proposal))
    assert num_proposed == sorted(set(num_proposed)), num_proposed


def test_no_more_than_wanted_and_nothing_that_does_not_pay() -> None:
    text = list(range(100, 180))
    matches = index_of(text).matches(text[:40])
    assert copy(matches, 3, 0.0, Calibration(), branching=False).proposal.token_ids == (140, 141, 142)
    assert copy(matches, 3, 1.0, Calibration(), branching=False) == Copied()
    assert copy([], 3, 0.0, Calibration(), branching=True) == Copied()


def test_it_learns_how_likely_its_tokens_are() -> None:
    everybody = Calibration()
    rng = random.Random(0)
    for _ in range(2000):
        one = Calibration(everybody)
        one.observe(0.85, rng.random() < 0.3)
        one.observe(0.15, rng.random() < 0.6)
    assert everybody.likelihood(0.85) == pytest.approx(0.3, abs=0.12)
    assert everybody.likelihood(0.15) == pytest.approx(0.6, abs=0.12)
    assert Calibration(everybody).likelihood(0.85) == pytest.approx(everybody.likelihood(0.85)), "where it begins"
    assert everybody.likelihood(0.5) == 0.5, "of which it knows nothing"


def test_only_tokens_whose_turn_came_teach_anything() -> None:
    seen: list[tuple[float, bool]] = []

    class Noted(Calibration):
        def observe(self, guess: float, accepted: bool) -> None:
            seen.append((guess, accepted))

    assert Copied(Proposal((7, 5, 8), parents=(0, 0, 1)), (0.5, 0.3, 0.4), (0.5, 0.3, 0.2)).first(1) == Copied(
        Proposal((7,)), (0.5,), (0.5,)
    )
    tree = Copied(Proposal((7, 5, 8, 9, 6), parents=(0, 0, 1, 1, 2)), (0.5, 0.3, 0.4, 0.2, 0.1))
    tree.observe([7, 9, 3], Noted())
    assert seen == [(0.5, True), (0.3, False), (0.4, False), (0.2, True)]
    seen.clear()
    Copied(Proposal((7, 8, 9)), (0.9, 0.8, 0.7)).observe([7, 3], Noted())
    assert seen == [(0.9, True), (0.8, False)]


def test_past_outputs_are_the_tenants_own_and_those_used_last() -> None:
    past = PastOutputs()
    past.add(b"a", [1, 2, 3])
    past.add(b"a", [4, 5, 6])
    past.add(b"b", [1, 2, 9])
    past.add(b"b", [])
    assert past.num_tokens == 9
    assert [match.next(0) for match in past.matches(b"a", [0, 1, 2])] == [3]
    assert [match.next(0) for match in past.matches(b"b", [0, 1, 2])] == [9]
    assert past.matches(b"c", [0, 1, 2]) == []
    past.trim(6)  # the one that matched nothing
    assert past.matches(b"a", [4, 5]) == []
    assert len(past.matches(b"a", [1, 2])) == 1
    past.trim(0)
    assert (past.num_tokens, past.matches(b"a", [1, 2]), past.matches(b"b", [1, 2])) == (0, [], [])


def test_what_is_remembered_is_bounded() -> None:
    """Running sequences come first; one for which there is no room has nothing copied, and takes none."""
    source = SuffixSource(200)
    long = source.begin(list(range(60)), 60, b"a")
    source.commit(long, [1, 2, 3] * 5)
    assert source.num_tokens == 75
    assert source.propose(long, 3).proposal.token_ids == (1, 2, 3)
    late = source.begin([1, 2] * 15, 30, b"a")
    assert source.num_tokens == 75, "of one tenant there are half of them at most"
    source.commit(late, [1, 2])
    assert source.propose(late, 3) == Copied()
    other = source.begin([7, 8] * 45, 90, b"b")
    assert source.num_tokens == 165, "the other half is for others"
    source.end(late)
    source.end(long)
    assert source.num_tokens == 90 + 15, "the output of the one that was remembered"
    again = source.begin([*range(200, 297), 2, 3], 99, b"a")
    assert source.num_tokens == 90 + 99, "and for one that runs it goes"
    source.commit(again, [2] * 10)
    assert source.num_tokens == 90, "which is no longer copied from when it has become too long"
    source.end(again)
    source.end(other)
    assert source.num_tokens == 0


def test_a_new_request_copies_what_the_tenants_last_one_gave() -> None:
    source = SuffixSource(1000)
    first = source.begin([1, 2, 3], 3, b"a")
    source.commit(first, [10, 11, 12, 13])
    source.end(first)
    for tenant, copied in ((b"a", (12, 13)), (b"b", ())):
        second = source.begin([5], 1, tenant)
        source.commit(second, [10, 11])
        assert source.propose(second, 4).proposal.token_ids == copied
        source.end(second)


def test_what_turns_out_wrong_is_soon_not_proposed() -> None:
    source = SuffixSource(100_000)
    manuscript = source.begin([1, 2, 3], 3, b"")
    num_proposed = []
    for i in range(60):
        source.commit(manuscript, [1, 2])
        num_proposed.append(len(source.propose(manuscript, 4, 0.3).proposal))
        source.commit(manuscript, [1000 + i])
    assert num_proposed[0] > 0
    assert num_proposed[-1] == 0


def test_what_was_held_to_be_worthless_is_tried_again() -> None:
    """A tenant's nonsense has taught everybody that nothing comes true; then a text repeats itself."""
    source = SuffixSource(100_000)
    for guess in range(10):
        for _ in range(200):
            source._experience[True][0].observe(guess / 10 + 0.05, False)
    passage = list(range(500, 540))
    manuscript = source.begin(passage * 2, 80, b"")
    proposed = []
    for i in range(400):
        proposed.append(len(source.propose(manuscript, 4, 0.3).proposal))
        source.commit(manuscript, [passage[i % 40]])
    assert proposed[0] == 0
    assert all(proposed[-200:])


def test_what_is_not_verified_teaches_too() -> None:
    """It is committed or not, whoever looked at it."""
    source = SuffixSource(1000)
    manuscript = source.begin([1, 2, 3, 1, 2], 5, b"")
    before = manuscript.calibration.likelihood(2 / 3)
    assert source.propose(manuscript, 1).proposal.token_ids == (3,)
    source.commit(manuscript, [3])
    assert manuscript.calibration.likelihood(2 / 3) > before


def test_sampled_sequences_begin_with_what_such_had_copied() -> None:
    """Which is accepted less often than what greedy ones had."""
    source = SuffixSource(100_000)
    for is_greedy in (True, False) * 40:
        told = source.begin([], 0, b"a", is_greedy)
        told.calibration.observe(0.85, is_greedy)
        told.looking.observe(float(is_greedy), 0.1)
    greedy, sampled = source.begin([], 0, b"a", True), source.begin([], 0, b"a", False)
    assert greedy.calibration.likelihood(0.85) > 0.9
    assert sampled.calibration.likelihood(0.85) < 0.2
    assert greedy.looking._worth > 2 * sampled.looking._worth
