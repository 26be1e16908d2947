"""Whether a field is within its limits: at the edge of every service, named as its message names it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shared.rpc.errors import InvalidArgument


def check_range(field: str, value: float, low: float, high: float, *, low_excluded: bool = False) -> None:
    """Raises InvalidArgument beyond [low, high], or (low, high]. NaN is in no range."""
    if not low <= value <= high or (low_excluded and value == low):
        raise InvalidArgument(field, value, f"in {'(' if low_excluded else '['}{low:g}, {high:g}]")


def check_count(field: str, entries: Collection[object], limit: int, noun: str) -> None:
    """Raises InvalidArgument for more than `limit`."""
    if len(entries) > limit:
        raise InvalidArgument(field, f"{len(entries)} {noun}", f"at most {limit} {noun}")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument for one that there is not, with its place."""
    if max(token_ids, default=0) < vocab_size:
        return
    for index, token_id in enumerate(token_ids):
        check_token_id(f"{field}[{index}]", token_id, vocab_size)


def check_token_id(field: str, token_id: int, vocab_size: int) -> None:
    """Raises InvalidArgument for one that there is not."""
    if not token_id < vocab_size:
        raise InvalidArgument(field, token_id, f"below the vocabulary size, {vocab_size}")
