"""What an API key may do, by a clock that is set by hand."""

from __future__ import annotations

import pytest

from services.router.clients.quotas import Quotas
from shared.rpc.errors import ResourceExhausted
from shared.security.api_keys import ANYBODY, ApiKey


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


KEY = ApiKey("anna", b"1" * 32, tokens_per_minute=60)


def test_a_minute_of_tokens_is_there_at_first_and_a_token_comes_each_second() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    with quotas.request(KEY) as spend:
        spend(60)
    with pytest.raises(ResourceExhausted, match="60 tokens a minute") as caught, quotas.request(KEY):
        pass
    assert caught.value.retry_after_seconds == pytest.approx(1.0)
    clock.now += caught.value.retry_after_seconds
    with quotas.request(KEY) as spend:
        # Nobody could know how many.
        spend(31)
    with pytest.raises(ResourceExhausted) as caught, quotas.request(KEY):
        pass
    assert caught.value.retry_after_seconds == pytest.approx(31.0)
    clock.now += 31.0
    with quotas.request(KEY):
        pass


def test_no_more_than_a_minute_is_saved() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    with quotas.request(KEY) as spend:
        spend(1)
    clock.now += 3600.0
    with quotas.request(KEY) as spend:
        spend(60)
    with pytest.raises(ResourceExhausted), quotas.request(KEY):
        pass


def test_requests_end_however_they_end() -> None:
    key = ApiKey("anna", b"2" * 32, max_requests=1)
    quotas = Quotas(Clock())

    def fail() -> None:
        with quotas.request(key):
            with pytest.raises(ResourceExhausted, match="1 of 1 requests"), quotas.request(key):
                pass
            raise KeyError

    for _ in range(3):
        with pytest.raises(KeyError):
            fail()
    with quotas.request(key):
        pass


def test_nothing_is_kept_of_keys_that_owe_nothing() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    for key in (ANYBODY, ApiKey("anna", b"2" * 32, max_requests=1), KEY):
        with quotas.request(key) as spend:
            spend(5)
    assert set(quotas._accounts) == {KEY.digest}
    clock.now += 5
    with quotas.request(KEY):
        pass
    assert not quotas._accounts


def test_a_limit_that_is_new_begins_full_however_much_was_used_before() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    unlimited = ApiKey(KEY.tenant, KEY.digest)
    # Something is always under way, so the account is never forgotten.
    with quotas.request(unlimited) as spend:
        spend(1_000_000)
        clock.now += 3600.0
        with quotas.request(KEY):
            pass
