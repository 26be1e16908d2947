"""KV blocks of a simulated worker, by count: owned, cached by age, free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class Blocks:
    """Accounts for `total` blocks as the engine's pool does: allocation takes free ones, then the oldest cached.

    Only blocks of a prefix are ever found again, so only these have a name. The others that sequences leave behind are
    cached as well, without one: they age, and give way in their turn.
    """

    def __init__(self, total: int, changed: Callable[[str, int, int], None]) -> None:
        """`changed`: told of each prefix whose depth changes: before and after, in blocks."""
        self.total = total
        self.num_owned = 0
        self._num_cached = 0
        self._changed = changed
        # Oldest first; nameless ones under a number.
        self._cached: OrderedDict[str | int, int] = OrderedDict()
        self._num_nameless = 0
        self._depths: dict[str, int] = {}
        self._num_owners: dict[str, int] = {}

    @property
    def num_allocatable(self) -> int:
        return self.total - self.num_owned

    @property
    def num_quiet(self) -> int:
        """Blocks that can be allocated before a prefix gives way, or the nameless ones that are oldest are used up."""
        free = self.total - self.num_owned - self._num_cached
        if not self._cached:
            return free
        oldest = next(iter(self._cached))
        return free + (self._cached[oldest] if isinstance(oldest, int) else 0)

    def depth(self, prefix_id: str | None) -> int:
        """Leading blocks of the prefix that are here."""
        return self._depths.get(prefix_id, 0) if prefix_id is not None else 0

    def num_unowned(self, prefix_id: str) -> int:
        """Blocks that `own` would take from what can be allocated."""
        return 0 if prefix_id in self._num_owners else self._depths.get(prefix_id, 0)

    def allocate(self, count: int) -> None:
        """Takes that many, nameless. There must be as many to be had."""
        self._make_room(count)
        self.num_owned += count

    def release(self, count: int) -> None:
        """Gives nameless ones back: cached, as the youngest."""
        if count:
            self.num_owned -= count
            self._num_nameless += 1
            self._cache(self._num_nameless, count)

    def own(self, prefix_id: str) -> None:
        """One more sequence uses the prefix."""
        owners = self._num_owners.get(prefix_id, 0)
        self._num_owners[prefix_id] = owners + 1
        if not owners and prefix_id in self._cached:
            count = self._cached.pop(prefix_id)
            self._num_cached -= count
            self.num_owned += count

    def disown(self, prefix_id: str) -> None:
        """One sequence less uses it; after the last it is cached."""
        self._num_owners[prefix_id] -= 1
        if not self._num_owners[prefix_id]:
            del self._num_owners[prefix_id]
            count = self.depth(prefix_id)
            self.num_owned -= count
            self._cache(prefix_id, count)

    def extend(self, prefix_id: str, depth: int) -> int:
        """A sequence that owns the prefix has computed it so far: nameless blocks of its become the prefix's.

        Returns how many; 0 if it was as deep before.
        """
        before = self._depths.get(prefix_id, 0)
        if depth <= before:
            return 0
        self._set_depth(prefix_id, depth)
        return depth - before

    def receive(self, prefix_id: str, depth: int) -> None:
        """So much of the prefix came from elsewhere. What there is no room for is dropped."""
        self.own(prefix_id)
        before = self._depths.get(prefix_id, 0)
        count = min(depth - before, self.num_allocatable)
        if count > 0:
            self.allocate(count)
            self._set_depth(prefix_id, before + count)
        self.disown(prefix_id)

    def check(self) -> None:
        """Proves that the counts agree. Raises AssertionError."""
        assert self._num_cached == sum(self._cached.values())
        assert 0 <= self.num_owned <= self.total - self._num_cached
        assert sum(map(self.depth, self._num_owners)) <= self.num_owned
        assert all(count == self._depths[name] for name, count in self._cached.items() if isinstance(name, str))

    def _make_room(self, count: int) -> None:
        evict = count - (self.total - self.num_owned - self._num_cached)
        while evict > 0:
            oldest, held = next(iter(self._cached.items()))
            taken = min(held, evict)
            evict -= taken
            self._num_cached -= taken
            if taken == held:
                del self._cached[oldest]
            else:
                self._cached[oldest] = held - taken
            if isinstance(oldest, str):
                self._set_depth(oldest, held - taken)

    def _cache(self, name: str | int, count: int) -> None:
        if count:
            self._cached[name] = count
            self._num_cached += count

    def _set_depth(self, prefix_id: str, depth: int) -> None:
        before = self._depths.pop(prefix_id, 0)
        if depth:
            self._depths[prefix_id] = depth
        self._changed(prefix_id, before, depth)
