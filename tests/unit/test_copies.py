"""Copies inside a target: long prompts in pieces, what ends is past, and nothing is kept for who is gone."""

from __future__ import annotations

import random

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
    assert not found.draft(long, 8, 8, 0.0, False).copied.proposal
    assert not found.draft(long, 8, 8, 0.0, False).copied.proposal
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
