"""Prefixes that are being computed on a simulated worker."""

from __future__ import annotations

from collections import Counter


class Coming:
    """How deep each prefix will be, in blocks, when the streams that wait for their first token have it."""

    def __init__(self) -> None:
        # Of streams, by what they are deep.
        self._depths: dict[str, Counter[int]] = {}

    def depth(self, prefix_id: str | None) -> int:
        return max(self._depths.get(prefix_id, ()), default=0) if prefix_id is not None else 0

    def add(self, prefix_id: str, depth: int) -> None:
        """A stream waits that will have so many blocks of the prefix."""
        self._depths.setdefault(prefix_id, Counter())[depth] += 1

    def remove(self, prefix_id: str, depth: int) -> None:
        """It does not wait any more."""
        depths = self._depths[prefix_id]
        depths[depth] -= 1
        if not depths[depth]:
            del depths[depth]
            if not depths:
                del self._depths[prefix_id]

    def check_empty(self) -> None:
        """Proves that no stream waits. Raises AssertionError."""
        assert not self._depths
