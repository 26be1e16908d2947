"""Copies inside a target: long prompts in pieces, what ends is past, and nothing is kept for who is gone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shared.copying.suffix_source import SuffixSource
from shared.engine.sequence import Sequence
from shared.sampling.params import SamplingParams
from shared.self_drafting import copies as copies_module
from shared.self_drafting.copies import Copies

MOST = 1 << 16


def sequence(tokens: list[int], tenant: int = 0, seed: int | None = 1) -> Sequence:
    params = SamplingParams(temperature=1.0, seed=seed)
    return Sequence(tokens, len(tokens), params, bytes([tenant] * 32))


def test_a_long_prompt_is_taken_in_piece_by_piece() -> None:
    rng = random.Random(0)
    passage = [rng.randrange(1000) for _ in range(20)]
    piece = copies_module._MOST_AT_ONCE
    prompt = [*passage, *(rng.randrange(1000) for _ in range(2 * piece)), *passage[:10]]
    found, long = Copies(MOST), sequence(prompt)
    for _ in range(2):
        assert not found.draft(long, 8, 8, 0.0, False).copied.proposal
        found.sweep({long})
    assert found.draft(long, 8, 8, 0.0, False).proposal(8).token_ids == tuple(passage[10:18])


def test_what_is_no_longer_here_is_past_and_its_tenants_own() -> None:
    found = Copies(MOST)
    first = sequence([1, 2, 3])
    found.draft(first, 4, 4, 0.0, False)
    first.token_ids += list(range(100, 140))
    found.sweep({first})
    found.sweep(set())
    assert not found._manuscripts
    assert found._source.num_tokens == 40
    assert found.draft(sequence([*range(100, 110)]), 4, 4, 0.0, False).proposal(4).token_ids == (110, 111, 112, 113)
    assert not found.draft(sequence([*range(100, 110)], tenant=1), 4, 4, 0.0, False).likelihoods


def test_many_that_come_and_go_leave_no_more_than_is_remembered() -> None:
    rng, found = random.Random(1), Copies(2000)
    assert isinstance(found._source, SuffixSource)
    for _ in range(200):
        each = sequence([rng.randrange(50) for _ in range(40)])
        found.draft(each, 4, 4, 0.0, True)
        each.token_ids += [rng.randrange(50) for _ in range(30)]
        found.sweep({each})
        found.sweep(set())
        assert found._source.num_tokens <= 2000


def test_what_is_taken_in_before_a_step_is_bounded_whoever_comes_and_goes() -> None:
    rng, found, piece = random.Random(2), Copies(1 << 20), copies_module._MOST_AT_ONCE
    many = [sequence([rng.randrange(1000) for _ in range(3 * piece // 2)], tenant=i) for i in range(8)]
    before, num_steps = 0, 0
    while before < 8 * 3 * piece // 2:
        found.sweep(many)
        for each in many:
            found.draft(each, 4, 4, 0.5, False)
        assert 0 < found._source.num_tokens - before <= piece
        before, num_steps = found._source.num_tokens, num_steps + 1
    assert num_steps == 12
    for each in many:
        each.token_ids += [rng.randrange(1000) for _ in range(piece)]
    found.sweep(set())
    # One after another is past; meanwhile it is there as it was.
    num_gone = [len(found._gone)]
    while found._gone:
        found.sweep(set())
        num_gone.append(len(found._gone))
    assert num_gone == list(range(7, -1, -1))
    assert found._source.num_tokens == 8 * piece


def test_each_looks_at_its_own_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.25
        return now

    found = Copies(MOST, clock)
    several = [sequence([1, 2, 3, 1, 2]), sequence([4, 5, 4])]
    for each in several:
        found.draft(each, 4, 4, 0.0, False)
    told: dict[Sequence, float] = {}

    def worth(each: Sequence, seconds: float) -> tuple[float, float]:
        told[each] = seconds
        return 0.0, 0.0

    found.settle(worth)
    assert told == dict.fromkeys(several, 0.25)
    commit = found._source.commit

    def slowly(*args: Any) -> None:
        nonlocal now
        now += 1.0
        commit(*args)

    monkeypatch.setattr(found._source, "commit", slowly)
    for each in several:
        each.token_ids.append(9)
        found.draft(each, 4, 4, 0.0, False)
    found.settle(worth)
    assert told == dict.fromkeys(several, 1.25), "what was written since is taken in so that it can be looked at"


def test_where_nothing_is_found_and_looking_does_not_pay_it_is_looked_for_in_one_step_of_several() -> None:
    rng, found = random.Random(3), Copies(MOST)
    passage = [rng.randrange(1000, 2000) for _ in range(60)]
    each = sequence([*passage, *range(100)])
    looked = 0
    for step in range(320):
        each.token_ids.append(10_000 + step if step < 300 else passage[step - 300])
        found.sweep({each})
        if not found.rests(each):
            looked += step < 300
            draft = found.draft(each, 8, 8, 0.5, False, always=False)
            if draft.likelihoods:
                break
        found.settle(lambda _, seconds: (0.0, 1.0))
    # At first in each; and what begins to repeat itself is found, if some tokens later.
    assert 300 / copies_module._TOKENS_APART <= looked <= 300 / copies_module._TOKENS_APART + 20
    assert 300 < step <= 300 + 2 * copies_module._TOKENS_APART
    known = each.token_ids[len(passage) + 100 + 300 :]
    assert draft.proposal(4).token_ids == tuple(passage[len(known) : len(known) + 4])


@pytest.mark.parametrize("num_before", range(600, 840, 48))
def test_what_is_found_by_short_matches_alone_is_found_as_soon_where_it_is_looked_for_in_one_step_of_several(
    num_before: int,
) -> None:
    def num_steps_to_find(rests: bool) -> int:
        found, each = Copies(MOST), sequence(list(range(100)))
        for step in range(num_before + 500):
            # Five tokens that come again and again, and one between them that never does.
            place = step - num_before
            each.token_ids.append(200 + place % 6 if place >= 0 and place % 6 < 5 else 10_000 + step)
            found.sweep({each})
            if not (rests and found.rests(each)):
                draft = found.draft(each, 8, 8, 0.5, False, always=False)
                if draft.likelihoods:
                    return place
            found.settle(lambda _, seconds: (0.0, 1.0))
        raise AssertionError("nothing was found")

    assert num_steps_to_find(True) <= num_steps_to_find(False) + 4 * copies_module._TOKENS_APART


@pytest.mark.parametrize("verified", [True, False])
def test_where_what_is_found_is_not_worth_verifying_it_is_looked_for_as_where_there_is_nothing(verified: bool) -> None:
    found, each, looked = Copies(MOST), sequence(list(range(20)) * 2), 0
    for step in range(400):
        each.token_ids.append(step % 20)
        found.sweep({each} if step == 0 else None)
        if not found.rests(each):
            looked += 1
            assert found.draft(each, 8, 8, 0.5, False, always=False).likelihoods
            if not verified:
                found.pass_over(each)
        found.settle(lambda _, seconds: (0.0, 1.0))
    if verified:
        assert looked == 400
    else:
        assert 400 / copies_module._TOKENS_APART <= looked <= 400 / copies_module._TOKENS_APART + 20
