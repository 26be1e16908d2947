"""What a sequence does with the outcome of a step, and a drafter's with what was committed."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest
import torch

from shared.engine.sequence import Finish, Sequence
from shared.sampling.filters import adjust_logits
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens, TokenLogprobs

PROMPT = [10, 11, 12]


def sequence(max_tokens: int = 10, stop: frozenset[int] = frozenset(), **state: int | bool) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop)
    new = Sequence(PROMPT, len(PROMPT), params, bytes(32), num_steps=1)
    for key, value in state.items():
        setattr(new, key, value)
    return new


def drafter(draws: list[int], num_computed_tokens: int | None = None) -> Sequence:
    """A drafter behind PROMPT with these draws; the last one's KV is not computed."""
    new = Sequence(PROMPT, len(PROMPT), SamplingParams(), bytes(32), drafting=True, num_steps=len(draws))
    for draw in draws:
        new.num_computed_tokens = len(new.token_ids)
        new.advance(SampledTokens((draw,)))
    if num_computed_tokens is not None:
        new.num_computed_tokens = num_computed_tokens
    return new


def verified(new: Sequence, proposal: tuple[int, ...], outcome: SampledTokens) -> SampledTokens:
    """As the scheduler does it: proposal computed, outcome taken in."""
    new.proposal = Proposal(proposal)
    new.num_computed_tokens = len(new.token_ids) + len(proposal)
    return new.advance(outcome)


@pytest.mark.parametrize("num_accepted", range(4))
def test_accepted_tokens_stay_computed_and_rejected_ones_fall_out(num_accepted: int) -> None:
    new = sequence()
    outcome = SampledTokens((*(20, 21, 22)[:num_accepted], 30), num_accepted)
    assert verified(new, (20, 21, 22), outcome) is outcome
    assert new.token_ids == [*PROMPT, *(20, 21, 22)[:num_accepted], 30]
    assert new.num_computed_tokens == len(PROMPT) + num_accepted == len(new.token_ids) - 1
    assert new.num_committed == len(new.token_ids)
    assert (new.num_steps, len(new.proposal), new.finish) == (0, 0, None)


def test_a_stop_token_among_the_accepted_ends_there() -> None:
    new = sequence(stop=frozenset({21}))
    logprobs = tuple(TokenLogprobs(-float(i), ()) for i in range(4))
    cut = verified(new, (20, 21, 22), SampledTokens((20, 21, 22, 30), 3, logprobs))
    assert cut == SampledTokens((20, 21), 2, logprobs[:2])
    assert new.token_ids == [*PROMPT, 20, 21]
    assert new.finish is Finish.STOPPED
    assert new.num_computed_tokens == len(PROMPT) + 2


def test_a_stop_token_drawn_last_is_kept_whole() -> None:
    new = sequence(stop=frozenset({30}))
    outcome = SampledTokens((20, 30), 1)
    assert verified(new, (20, 21), outcome) is outcome
    assert new.finish is Finish.STOPPED


def test_a_stop_token_in_the_prompt_stops_nothing() -> None:
    new = sequence(stop=frozenset(PROMPT))
    verified(new, (), SampledTokens((20,)))
    assert new.finish is None


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "num_accepted", "finish"),
    [(1, 1, 1, Finish.LENGTH), (3, 3, 3, Finish.LENGTH), (4, 4, 3, Finish.LENGTH), (5, 4, 3, None)],
)
def test_max_tokens_cuts(max_tokens: int, tokens: int, num_accepted: int, finish: Finish | None) -> None:
    new = sequence(max_tokens=max_tokens)
    cut = verified(new, (20, 21, 22), SampledTokens((20, 21, 22, 30), 3))
    assert cut == SampledTokens((20, 21, 22, 30)[:tokens], num_accepted)
    assert new.finish is finish
    assert len(new.token_ids) == len(PROMPT) + tokens


def test_max_tokens_counts_output_known_from_before() -> None:
    """A sequence that another worker began: the prompt is shorter than what is known."""
    new = Sequence([*PROMPT, 20, 21], len(PROMPT), SamplingParams(max_tokens=3), bytes(32), num_steps=1)
    verified(new, (), SampledTokens((22,)))
    assert new.finish is Finish.LENGTH


def test_a_stop_token_at_max_tokens_counts_as_stop_and_one_behind_it_not() -> None:
    at = sequence(max_tokens=2, stop=frozenset({21}))
    verified(at, (20,), SampledTokens((20, 21), 1))
    assert at.finish is Finish.STOPPED
    behind = sequence(max_tokens=2, stop=frozenset({22}))
    verified(behind, (20, 21), SampledTokens((20, 21, 22), 2))
    assert behind.finish is Finish.LENGTH
    assert behind.token_ids == [*PROMPT, 20, 21]


def test_a_drafter_neither_stops_nor_commits_by_itself() -> None:
    params = SamplingParams(max_tokens=1, stop_token_ids=frozenset({20}))
    new = Sequence(PROMPT, len(PROMPT), params, bytes(32), drafting=True, num_steps=3)
    for draw in (20, 21, 22):
        new.num_computed_tokens = len(new.token_ids)
        new.advance(SampledTokens((draw,)))
    assert new.finish is None
    assert new.num_committed == len(PROMPT)
    assert new.num_drawn == 3
    assert new.num_computed_tokens == len(PROMPT) + 2


@pytest.mark.parametrize(
    ("committed", "tokens", "num_computed_tokens"),
    [
        ([20, 21], [20, 21, 22, 23], 6),  # all drawn already: later draws remain
        ([20, 21, 22, 23], [20, 21, 22, 23], 6),
        ([20, 21, 22, 23, 24], [20, 21, 22, 23, 24], 6),  # accepted whole, and a bonus token
        ([20, 30], [20, 30], 4),
        ([30], [30], 3),
        ([30, 21, 22, 23], [30, 21, 22, 23], 3),  # a token back in agreement has another past
        ([20, 21, 22, 30, 31], [20, 21, 22, 30, 31], 6),
        ([], [20, 21, 22, 23], 6),
    ],
)
def test_commit_keeps_what_agrees(committed: list[int], tokens: list[int], num_computed_tokens: int) -> None:
    new = drafter([20, 21, 22, 23])
    assert new.num_computed_tokens == len(PROMPT) + 3
    new.commit(len(PROMPT), committed)
    assert new.token_ids == [*PROMPT, *tokens]
    assert new.num_committed == len(PROMPT) + len(committed)
    assert new.num_drawn == len(tokens) - len(committed)
    assert new.num_computed_tokens == num_computed_tokens


def test_commit_does_not_claim_what_is_not_computed() -> None:
    new = drafter([20, 21], num_computed_tokens=0)  # preempted
    new.commit(len(PROMPT), [20, 30])
    assert new.num_computed_tokens == 0


def test_commits_follow_one_another() -> None:
    new = drafter([20, 21, 22, 23])
    new.commit(3, [20, 21])
    new.commit(5, [22, 30])
    assert new.token_ids == [*PROMPT, 20, 21, 22, 30]
    assert (new.num_committed, new.num_drawn, new.num_computed_tokens) == (7, 0, 6)


def test_pending_tokens() -> None:
    new = sequence()
    assert new.num_pending_tokens == 3
    new.num_computed_tokens = 2
    assert new.num_pending_tokens == 1
    new.proposal = Proposal((20, 21))
    assert (new.num_pending_tokens, new.num_rows) == (3, 3)
    new.num_computed_tokens = 5
    assert (new.advance(SampledTokens((20, 30), 1)).num_accepted, new.num_pending_tokens) == (1, 0)  # no steps left
    new.num_steps = 1
    assert new.num_pending_tokens == 1


def test_pending_tokens_without_steps_are_those_wanted() -> None:
    new = sequence(num_steps=0)
    assert new.num_pending_tokens == 0
    new.num_wanted_tokens = 2
    assert new.num_pending_tokens == 2
    new.num_computed_tokens = 2
    assert new.num_pending_tokens == 0
    new.num_computed_tokens = 3
    assert new.num_pending_tokens == 0


def test_tokens_between_runs_into_the_proposal() -> None:
    new = sequence()
    new.proposal = Proposal((20, 21))
    assert new.tokens_between(0, 2) == [10, 11]
    assert new.tokens_between(2, 5) == [12, 20, 21]
    assert new.tokens_between(4, 5) == [21]


PENALTIES = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=1 << 20)


def assert_counted(new: Sequence) -> None:
    counts = new.token_counts
    assert counts is not None
    output = Counter(new.token_ids[new.num_prompt_tokens :])
    expected = {token: output[token] for token in new.token_ids}
    assert dict(zip(counts.ids, counts.output_counts, strict=True)) == expected
    assert len(counts.ids) == len(expected)


def test_without_penalties_nothing_is_counted() -> None:
    assert sequence().token_counts is None


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_counted_as_they_are_committed(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(8) for _ in range(5)]
    new = Sequence([*prompt, 6, 3, 9], len(prompt), PENALTIES, bytes(32), num_steps=1)
    assert_counted(new)
    for _ in range(50):
        guess = tuple(rng.randrange(12) for _ in range(rng.randrange(5)))
        count = rng.randint(0, len(guess))
        verified(new, guess, SampledTokens((*guess[:count], rng.randrange(12)), count))
        assert_counted(new)


@pytest.mark.parametrize("seed", range(5))
def test_a_drafters_rejected_draws_are_counted_no_more(seed: int) -> None:
    rng = random.Random(seed)
    new = Sequence(PROMPT, len(PROMPT), PENALTIES, bytes(32), drafting=True, num_steps=1)
    for _ in range(60):
        for _ in range(rng.randrange(5)):
            new.advance(SampledTokens((rng.choice([*PROMPT, 20, 21, 22]),)))
        base = new.num_committed
        draws = new.token_ids[base:]
        committed = draws[: rng.randint(0, len(draws))] + [rng.choice([*PROMPT, 20, 30])] * rng.randrange(3)
        new.commit(base, committed)
        assert new.token_ids[: base + len(committed)][base:] == committed
        assert_counted(new)


def test_a_penalised_step_copies_nothing_of_the_history() -> None:
    """Bytes that Python takes for a step of a long history: those of a short one."""
    peaks = []
    for length in (1 << 10, 1 << 16):
        new = Sequence([i % 100 for i in range(length)], 10, PENALTIES, bytes(32), num_steps=1)
        logits = torch.zeros(5, 128)
        for i in range(6):
            if i == 5:  # lists and arrays have grown as far as they will for a while
                tracemalloc.start()
            new.proposal = Proposal((1, 2, 3, 4))
            known = len(new.token_ids)
            assert len(new.tokens_between(known - 1, known + 4)) == 5
            rows = SampleRows(PENALTIES, new.token_ids, 10, new.proposal, new.token_counts)
            adjust_logits(logits, [rows])
            new.advance(SampledTokens((1, 2, 3), 2))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    short, long = peaks
    assert long < short + 4096
