"""What each API key has under way, and how many tokens it has left, on this router."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shared.rpc.errors import ResourceExhausted
from shared.security.api_keys import ApiKey

# Told to who has too much under way.
_RETRY_SECONDS = 1.0

Spend = Callable[[int], None]
"""Takes the number of tokens that a request has used."""


@dataclass(slots=True)
class _Account:
    """`tokens`: left at `at`, in seconds of the clock; a running request may use more than there are."""

    tokens: float
    at: float
    num_requests: int = 0


class Quotas:
    """Each key's requests at once, and a bucket of tokens a minute (full at first, filled all the time).

    A request is let in while there is a token left, since nobody knows how many it will use; what it uses too many
    are waited for by the next. Every router counts for itself. One event loop's own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By digest: a key whose limits change keeps what it has.
        self._accounts: dict[bytes, _Account] = {}

    @contextmanager
    def request(self, key: ApiKey) -> Iterator[Spend]:
        """Counts a request of this key while it lasts; tokens are spent by what it yields.

        Raises ResourceExhausted if the key's limits allow no more now.
        """
        account = self._accounts.setdefault(key.digest, _Account(float(key.tokens_per_minute or 0), self._clock()))
        self._check(key, account)
        account.num_requests += 1

        def spend(num_tokens: int) -> None:
            # Where nobody counts, nothing is owed when somebody begins to.
            if key.tokens_per_minute is not None:
                account.tokens -= num_tokens

        try:
            yield spend
        finally:
            account.num_requests -= 1
            self._forget_idle(key, account)

    def _check(self, key: ApiKey, account: _Account) -> None:
        if key.max_requests is not None and account.num_requests >= key.max_requests:
            raise ResourceExhausted(
                f"this API key has {account.num_requests} of {key.max_requests} requests under way", _RETRY_SECONDS
            )
        if key.tokens_per_minute is None:
            return
        self._fill(key.tokens_per_minute, account)
        if account.tokens < 1:
            missing_seconds = (1 - account.tokens) * 60 / key.tokens_per_minute
            raise ResourceExhausted(
                f"this API key has used its {key.tokens_per_minute} tokens a minute", missing_seconds
            )

    def _fill(self, tokens_per_minute: int, account: _Account) -> None:
        now = self._clock()
        earned = (now - account.at) * tokens_per_minute / 60
        account.tokens, account.at = min(account.tokens + earned, float(tokens_per_minute)), now

    def _forget_idle(self, key: ApiKey, account: _Account) -> None:
        """Not kept: an account that says no more than a new one."""
        if account.num_requests == 0 and (
            key.tokens_per_minute is None or self._is_full(key.tokens_per_minute, account)
        ):
            self._accounts.pop(key.digest, None)

    def _is_full(self, tokens_per_minute: int, account: _Account) -> bool:
        self._fill(tokens_per_minute, account)
        return account.tokens >= tokens_per_minute
