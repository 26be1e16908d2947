from __future__ import annotations

from shared.policy.account import Account
from tests.support.gamma import situation

START = situation(2)._replace(received=10.0, prefill_seconds=3.0)


def test_all_that_came_in_a_step_took_as_long_as_that() -> None:
    account = Account()
    account.begin(START)
    for received in (10.5, 11.0):
        now = START._replace(received=received)
        account.note(now, now._replace(num_output=67), 9.0)
        account.note(now, now._replace(num_output=66), 9.0)
    assert account.close() == (1.0, 10)
    assert account.close() == (0.0, 0)


def test_what_came_with_prompts_is_left_out_and_so_is_its_time() -> None:
    account = Account()
    account.begin(START)
    beside = START._replace(received=10.5, prefill_seconds=3.2, num_output=65)
    after = beside._replace(received=11.0, num_output=67)
    for _ in range(2):
        account.note(START, beside, 9.0)
    for _ in range(2):
        account.note(beside, after, 9.0)
    assert account.close() == (0.5, 4)


def test_the_time_with_nobody_is_none_of_it() -> None:
    account = Account()
    account.begin(START)
    later = START._replace(received=50.0)
    account.begin(later)
    account.note(later, later, 9.0)
    account.note(later, later._replace(received=50.25, num_output=65), 9.0)
    assert account.close() == (0.25, 1)


def test_a_long_time_from_step_to_step_counts_as_a_shorter_one() -> None:
    account = Account()
    account.begin(START)
    account.note(START, START._replace(received=50.0, num_output=65), 0.5)
    assert account.close() == (0.5, 1)
