"""Which simulated worker holds how much of which prefix: what the index in Redis is to the router."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence


class Holders:
    """Workers by prefix and depth, in blocks. A change, and a look at the deepest few, do not grow with the pool."""

    def __init__(self) -> None:
        self._levels: dict[str, dict[int, _Bag]] = {}

    def change(self, prefix_id: str, worker_id: str, before: int, after: int) -> None:
        """The worker held `before` blocks of the prefix and holds `after` now; 0 is none."""
        levels = self._levels.setdefault(prefix_id, {})
        if before:
            bag = levels[before]
            bag.remove(worker_id)
            if not bag.members:
                del levels[before]
        if after:
            levels.setdefault(after, _Bag()).add(worker_id)
        if not levels:
            del self._levels[prefix_id]

    def deepest(self, prefix_id: str, num_levels: int) -> Iterator[Sequence[str]]:
        """Who holds most of it, then who comes next, so many depths at most."""
        levels = self._levels.get(prefix_id, {})
        return (levels[depth].members for depth in heapq.nlargest(num_levels, levels))


class _Bag:
    """A set whose members are in a list, to be drawn from."""

    __slots__ = ("_places", "members")

    def __init__(self) -> None:
        self.members: list[str] = []
        self._places: dict[str, int] = {}

    def add(self, member: str) -> None:
        self._places[member] = len(self.members)
        self.members.append(member)

    def remove(self, member: str) -> None:
        place, last = self._places.pop(member), self.members.pop()
        if last != member:
            self.members[place] = last
            self._places[last] = place
