"""Tells the Redis index which blocks a worker holds, and that the worker is alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from types import TracebackType
from typing import Self

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from shared.prefix.keys import join_hashes, prefix_link
from shared.redis.link import RedisUnavailable
from shared.redis.outage import Outage

logger = logging.getLogger(__name__)

# ARGV: instance, lease in ms.
_TAKE_LEASE = "return redis.call('SET', KEYS[2] .. ARGV[1], '1', 'PX', ARGV[2])"
# ARGV: instance.
_DROP_LEASE = "return redis.call('DEL', KEYS[2] .. ARGV[1])"
# Renews the lease and applies one batch; 0, and nothing done, if the lease is gone. Fields that dead
# instances left in a block go when anyone stores it, or a block many use would gather them for ever.
# ARGV: instance, tier, lease in ms, TTL of blocks in ms, evicted hashes joined, stored hashes joined.
_PUBLISH = """
local blocks, leases, instance = KEYS[1], KEYS[2], ARGV[1]
if redis.call('PEXPIRE', leases .. instance, ARGV[3]) == 0 then return 0 end
for at = 1, #ARGV[5], 32 do
  redis.call('HDEL', blocks .. string.sub(ARGV[5], at, at + 31), instance)
end
local alive = {[instance] = true}
for at = 1, #ARGV[6], 32 do
  local key = blocks .. string.sub(ARGV[6], at, at + 31)
  for _, other in ipairs(redis.call('HKEYS', key)) do
    if alive[other] == nil then alive[other] = redis.call('EXISTS', leases .. other) == 1 end
    if not alive[other] then redis.call('HDEL', key, other) end
  end
  redis.call('HSET', key, instance, ARGV[2])
  redis.call('PEXPIRE', key, ARGV[4])
end
return 1
"""

# Hashes in one script: about a millisecond of Redis's time, which others wait for.
_BATCH_HASHES = 1000
# Longest that one script, the connection it may need included, can take, in seconds.
_TIMEOUT_SECONDS = 2.0
# Heartbeats in one lease: two may fail before it is lost.
_HEARTBEATS_PER_LEASE = 3


class LeaseLost(Exception):
    """Redis no longer has our lease: it was flushed or restarted, or we were silent for too long."""


class PrefixPublisher:
    """Keeps the index in step with the prefix blocks of one worker process.

    `stored` and `evicted` may be called from any thread and only note what changed; a task sends it in
    batches, with the heartbeat that renews the lease. Whenever Redis may not hold what it should (start,
    an error, a lost lease, too many changes to note, half of the blocks' TTL gone by) the whole snapshot
    is sent again and what is no longer in it is removed, so no lost event leaves a lasting trace.

    Use as an async context manager, or `start` and `close`.
    """

    def __init__(
        self,
        url: str,
        fingerprint: str,
        instance: str,
        snapshot: Callable[[], Collection[bytes]],
        *,
        tier: str = "device",
        lease_seconds: float = 10.0,
        block_ttl_seconds: float = 3600.0,
        max_pending: int = 65536,
    ) -> None:
        """Publishes for worker `instance` (a name new at every process start) of model `fingerprint`.

        `snapshot` returns the hashes of all blocks held now; it is called on the event loop while the
        engine runs, so it must be thread-safe. `tier` says where the blocks lie. `max_pending` limits the
        noted changes. Raises ValueError for a URL that is not redis://, rediss:// or unix://, for a lease
        of less than 1 ms and for blocks that would not outlive it, and for max_pending below 1.
        """
        if lease_seconds < 0.001:
            raise ValueError(f"lease_seconds {lease_seconds:g} is below 0.001")
        if block_ttl_seconds < lease_seconds:
            raise ValueError(f"block_ttl_seconds {block_ttl_seconds:g} is below lease_seconds {lease_seconds:g}")
        if max_pending < 1:
            raise ValueError(f"max_pending {max_pending} is below 1")
        self._link = prefix_link(url, fingerprint, _TIMEOUT_SECONDS)
        self._instance = instance
        self._snapshot = snapshot
        self._tier = tier
        self._lease_ms = int(lease_seconds * 1000)
        self._block_ttl_ms = int(block_ttl_seconds * 1000)
        self._max_pending = max_pending
        self._heartbeat_seconds = lease_seconds / _HEARTBEATS_PER_LEASE
        self._refresh_at = 0.0
        self._outage = Outage(logger, "blocks are published again when it is back")
        # What Redis may hold of ours.
        self._published: set[bytes] = set()
        self._task: asyncio.Task[None] | None = None

        # Below: shared with the threads that call `stored` and `evicted`.
        self._lock = threading.Lock()
        # Changes not yet sent: hash -> whether it is held. Unused while a resync is due.
        self._pending: dict[bytes, bool] = {}
        self._resync = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Starts publishing on the running event loop, with the snapshot first. Once only."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="prefix-publisher")
        self._task.add_done_callback(_report_end)

    async def close(self) -> None:
        """Stops, drops the lease so that no entry of this instance matches any more, and disconnects.

        If Redis is away the lease ends by itself.
        """
        with self._lock:
            self._loop = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            with contextlib.suppress(RedisUnavailable):
                await self._link.run(_DROP_LEASE, self._instance)
        await self._link.close()

    def stored(self, hashes: Iterable[bytes]) -> None:
        """These blocks are held now. From any thread; returns at once."""
        self._note(hashes, held=True)

    def evicted(self, hashes: Iterable[bytes]) -> None:
        """These blocks are not held any more. From any thread; returns at once."""
        self._note(hashes, held=False)

    def _note(self, hashes: Iterable[bytes], *, held: bool) -> None:
        with self._lock:
            if self._resync:
                return
            idle = not self._pending
            self._pending.update(dict.fromkeys(hashes, held))
            if len(self._pending) > self._max_pending:
                self._pending = {}
                self._resync = True
            elif not self._pending:
                return
            # The first change wakes the task; it takes all that have come by then.
            if (idle or self._resync) and self._loop is not None:
                self._loop.call_soon_threadsafe(self._changed.set)

    async def _run(self) -> None:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((RedisUnavailable, LeaseLost)),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            before_sleep=self._on_failure,
        )
        while True:
            await retrying(self._publish)
            self._outage.end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._changed.wait()

    def _on_failure(self, state: RetryCallState) -> None:
        """Between two tries: what Redis holds now is unknown, so the next one sends everything."""
        with self._lock:
            self._resync = True
            self._pending = {}
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, LeaseLost):
            logger.info("%s", error)
        else:
            self._outage.begin(error)

    async def _publish(self) -> None:
        """Sends what changed, or after a resync was asked for everything; either way renews the lease.

        Raises RedisUnavailable, LeaseLost.
        """
        self._changed.clear()
        with self._lock:
            resync = self._resync or time.monotonic() >= self._refresh_at
            pending, self._pending = self._pending, {}
            # Before the snapshot is taken: what changes from here on is noted, and sent after it.
            self._resync = False
        if resync:
            stored = set(self._snapshot())
            evicted = self._published - stored
            await self._link.run(_TAKE_LEASE, self._instance, self._lease_ms)
        else:
            stored = {name for name, held in pending.items() if held}
            evicted = pending.keys() - stored
        self._published |= stored
        for evicted_batch, stored_batch in _batches(evicted, stored):
            renewed = await self._link.run(
                _PUBLISH,
                self._instance,
                self._tier,
                self._lease_ms,
                self._block_ttl_ms,
                join_hashes(evicted_batch),
                join_hashes(stored_batch),
            )
            if not renewed:
                raise LeaseLost(f"Redis has no lease of {self._instance}: publishing all its blocks again")
        self._published -= evicted
        if resync:
            self._refresh_at = time.monotonic() + self._block_ttl_ms / 2000


def _batches(evicted: Collection[bytes], stored: Collection[bytes]) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Splits evictions, then stores, into script-sized batches; at least one, which may be empty."""
    changes = [(name, False) for name in evicted] + [(name, True) for name in stored]
    for begin in range(0, max(len(changes), 1), _BATCH_HASHES):
        batch = changes[begin : begin + _BATCH_HASHES]
        yield [name for name, held in batch if not held], [name for name, held in batch if held]


def _report_end(task: asyncio.Task[None]) -> None:
    """The task only ends by being cancelled; anything else is a bug, and the lease then runs out."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("prefix publishing stopped: blocks of this worker leave the index", exc_info=error)
