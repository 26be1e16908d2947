from __future__ import annotations

import pytest

from shared.policy.account import Account
from shared.policy.drafting import Situation
from tests.support.gamma import situation

PLAIN = 0.1
START = situation(2)._replace(received=10.0, prefill_seconds=3.0)


def begun() -> Account:
    account = Account()
    account.begin(START)
    account.note(None, START, 1, PLAIN)
    return account


def later(seconds: float, num_tokens: int, prefill_seconds: float = 0.0) -> Situation:
    return START._replace(received=10.0 + seconds, num_output=64 + num_tokens, prefill_seconds=3.0 + prefill_seconds)


def test_all_that_came_in_a_step_took_as_long_as_that() -> None:
    account = begun()
    account.note(START, later(0.5, 3), 2, PLAIN)
    account.note(START, later(0.5, 2), 2, PLAIN)
    account.note(later(0.5, 3), later(1.0, 6), 2, PLAIN)
    assert account.close() == (1.0, 4.0, 8)
    assert account.close() == (0.0, 0.0, 0)


def test_what_came_with_prompts_is_left_out_and_so_is_its_time() -> None:
    account = begun()
    beside = later(0.5, 1, 0.2)
    for _ in range(2):
        account.note(START, beside, 2, PLAIN)
    for _ in range(2):
        account.note(beside, later(1.0, 3, 0.2), 2, PLAIN)
    assert account.close() == (0.5, 2.0, 4)


def test_the_time_with_nobody_is_none_of_it() -> None:
    account = begun()
    account.begin(later(1.0, 0))
    account.note(None, later(1.0, 0), 1, PLAIN)
    account.note(later(1.0, 0), later(1.25, 1), 1, PLAIN)
    assert account.close() == (0.25, 1.0, 1)


def test_what_was_held_up_is_left_out_and_so_are_its_tokens() -> None:
    account = begun()
    account.note(START, later(2.0, 5), 1, PLAIN)
    account.note(later(2.0, 5), later(2.5, 6), 1, PLAIN)
    assert account.close() == (0.5, 1.0, 1)


def test_tokens_of_a_time_in_which_one_was_not_asked_are_left_out() -> None:
    account = begun()
    for i in range(1, 11):
        account.note(later(i - 1, i - 1), later(i, i), 2, PLAIN)
    account.note(START, later(10, 10), 2, PLAIN)
    assert account.close().num_tokens == 10


def test_the_last_tokens_of_a_sequence_count_as_well() -> None:
    account = begun()
    account.note_tokens(9, 2)
    account.note(START, later(0.5, 3), 2, PLAIN)
    account.note_tokens(2, 2)
    assert account.close() == pytest.approx((0.5, 2.5, 5))
