"""The bytes of KV blocks in Redis, by block hash: a prefix outlives the workers that computed it.

Keys of a model, all of one slot by the braces:

- `outrider:{<fingerprint>}:payload:<hash, 32 raw bytes>`: a block as `shared.prefix.payload` frames it, with a TTL
- `outrider:{<fingerprint>}:payloads`: the account of them, a sorted set of hashes by when they expire (Unix time in ms)

The account is what holds all workers together to one size: whoever writes makes room first, those that expire next,
which are the longest unused, going first. A hash whose value has expired or was lost therefore is the first to leave
the account too. It needs Redis 5 or later.

Unlike the prefix index this is no mere hint: what lies here becomes the KV that tokens are computed from, so only the
workers of one owner should be able to write to that Redis.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from shared.prefix.keys import join_hashes
from shared.prefix.payload import HEADER_BYTES, CorruptPayload, pack, unpack
from shared.prefix.payload_index import PayloadIndex, within
from shared.redis.link import RedisUnavailable
from shared.redis.outage import Outage

logger = logging.getLogger(__name__)

T = TypeVar("T")

# `expires`, and `keep_account`: the account must not end before the last value in it, whoever gave that its TTL.
_EXPIRY = """
local now, ttl = redis.call('TIME'), tonumber(ARGV[1])
local expires = now[1] * 1000 + math.floor(now[2] / 1000) + ttl
local function keep_account()
  if redis.call('PTTL', KEYS[2]) < ttl then redis.call('PEXPIRE', KEYS[2], ttl) end
end
"""
# Renews those that are there and returns the positions of the others, which it takes off the account.
# ARGV: TTL in ms, joined hashes.
_RENEW = f"""{_EXPIRY}
local missing = {{}}
for at = 1, #ARGV[2], 32 do
  local hash = string.sub(ARGV[2], at, at + 31)
  if redis.call('PEXPIRE', KEYS[1] .. hash, ttl) == 1 then
    redis.call('ZADD', KEYS[2], expires, hash)
  else
    redis.call('ZREM', KEYS[2], hash)
    missing[#missing + 1] = (at - 1) / 32
  end
end
keep_account()
return missing
"""
# Makes room for values that the same transaction then sets; returns how many of them, the first ones, there is room
# for. Work is bounded by their number: after the limit was lowered, each batch removes more than it adds until the
# limit is met. What was written or found within the last ARGV[4] ms stays, or the end of a long prefix would push out
# its beginning, without which it is of no use. Those that another worker has entered since we asked leave the account
# first: they must not be counted twice.
# ARGV: TTL in ms, how many the account may hold, joined hashes, see above.
_ENTER = f"""{_EXPIRY}
local new = {{}}
for at = 1, #ARGV[3], 32 do new[#new + 1] = string.sub(ARGV[3], at, at + 31) end
redis.call('ZREM', KEYS[2], unpack(new))
local num_new = #new
local num_entered = num_new
local excess = redis.call('ZCARD', KEYS[2]) + num_new - ARGV[2]
if excess > 0 then
  local most = math.min(excess, 4 * num_new)
  local oldest = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', expires - ARGV[4], 'LIMIT', 0, most)
  for i = 1, #oldest do redis.call('UNLINK', KEYS[1] .. oldest[i]) end
  if #oldest > 0 then redis.call('ZREM', KEYS[2], unpack(oldest)) end
  if #oldest < most then num_entered = num_new - math.min(excess - #oldest, num_new) end
end
for i = 1, num_entered do redis.call('ZADD', KEYS[2], expires, new[i]) end
keep_account()
return num_entered
"""
# Takes the values back that did not enter. ARGV: joined hashes.
_LEAVE = """
for at = 1, #ARGV[1], 32 do
  local hash = string.sub(ARGV[1], at, at + 31)
  if not redis.call('ZSCORE', KEYS[2], hash) then redis.call('UNLINK', KEYS[1] .. hash) end
end
"""

# Hashes in one script that also writes: about a millisecond of Redis's time, which others wait for.
_BATCH_BLOCKS = 256
# Bytes in one transaction and in one answer: both hold Redis, and a worker's event loop, for some milliseconds.
_WRITE_BYTES = 4 << 20
_READ_BYTES = 8 << 20
# Besides the value itself, in Redis: key, expiry, an entry in the account, and the tables they stand in.
_ENTRY_BYTES = 512
# Before and behind it, in the same allocation: the string's header, and what its end in the protocol leaves.
_STRING_BYTES = 32
# Longest that one batch may take to be written, in seconds, and how long the next one waits after a failure.
_WRITE_SECONDS = 10.0
_PAUSE_SECONDS = 1.0
# What was written or found so lately does not go for newer ones.
_FRESH_SECONDS = 60.0
# How long we take a block to be in Redis still, after it was: it may have been removed for newer ones, or flushed.
_KNOWN_SECONDS = 60.0
_MAX_KNOWN = 16384


class PrefixStore(PayloadIndex):
    """A worker's end of the store: offers the blocks it computes, and fetches those that others did.

    Writing is behind: `wants` and `put` only note blocks, a task sends them in batches. It never tries twice: a
    block that could not be written is a lost cache entry, nothing more.

    The counters only grow, and any thread may read them: `num_stored` blocks written; `num_dropped` blocks put
    but not kept, for lack of room or of Redis; `num_hits` blocks that `get` returned; `num_corrupt` values that
    it refused.

    Use as an async context manager, or `start` and `close`.
    """

    def __init__(
        self,
        url: str,
        fingerprint: str,
        block_bytes: int,
        *,
        max_bytes: int,
        ttl_seconds: float,
        max_pending_bytes: int,
    ) -> None:
        """Blocks of the model and layout named by `fingerprint`, of `block_bytes` each.

        `max_bytes` limits what all blocks under this fingerprint take in Redis, whichever worker wrote them; every
        worker should say the same. Unused for `ttl_seconds`, a block goes. `max_pending_bytes` limits the blocks
        waiting here to be written; while a batch is on its way, copies of it take a few times 4 MiB, or a few
        blocks, more. Raises ValueError for a URL that is not redis://, rediss:// or unix://, for a TTL below 1 ms,
        and for limits too low for a single block.
        """
        entry_bytes = _allocated(HEADER_BYTES + block_bytes + _STRING_BYTES) + _ENTRY_BYTES
        if block_bytes < 1:
            raise ValueError(f"block_bytes {block_bytes} is below 1")
        if max_bytes < entry_bytes:
            raise ValueError(f"max_bytes {max_bytes} is below the {entry_bytes} that one block takes")
        if ttl_seconds < 0.001:
            raise ValueError(f"ttl_seconds {ttl_seconds:g} is below 0.001")
        if max_pending_bytes < block_bytes:
            raise ValueError(f"max_pending_bytes {max_pending_bytes} is below the {block_bytes} of one block")
        super().__init__(url, fingerprint)
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._max_blocks = max_bytes // entry_bytes
        self._ttl_ms = int(ttl_seconds * 1000)
        self._fresh_ms = int(min(_FRESH_SECONDS, ttl_seconds / 2) * 1000)
        self._known_seconds = min(_KNOWN_SECONDS, ttl_seconds / 2)
        self._max_pending = max_pending_bytes // block_bytes
        self._blocks_a_write = max(1, min(_WRITE_BYTES // block_bytes, _BATCH_BLOCKS, self._max_blocks))
        self._blocks_a_read = max(1, _READ_BYTES // block_bytes)
        self._writing = Outage(logger, "computed prefixes are not stored until it is back")
        self._task: asyncio.Task[None] | None = None
        self.num_stored = 0
        self.num_dropped = 0
        self.num_hits = 0
        self.num_corrupt = 0

        # Below: shared with the threads that call `wants` and `put`.
        self._lock = threading.Condition()
        # Blocks not yet written, those on their way included, oldest first.
        self._pending: dict[bytes, bytes] = {}
        # Blocks lately seen in Redis, in the order they first were: hash -> until when we take them to be there.
        self._known: dict[bytes, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._offered = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Starts writing on the running event loop. Once only."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._write_behind(), name="prefix-store")
        self._task.add_done_callback(_report_end)

    async def close(self) -> None:
        """Stops writing, drops what still waits for it, and disconnects."""
        with self._lock:
            self._loop = None
            self._lock.notify_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        with self._lock:
            self.num_dropped += len(self._pending)
            self._pending = {}
        await super().close()

    def wants(self, block_hash: bytes) -> bool:
        """Whether this block is worth keeping: neither stored lately, nor about to be.

        From any thread; returns at once.
        """
        with self._lock:
            return self._loop is not None and not self._has(block_hash)

    def wait_for_room(self, timeout_seconds: float) -> bool:
        """Waits until `put` has room for one more block; whether it has. From any thread but the event loop's."""
        with self._lock:
            self._lock.wait_for(lambda: self._loop is None or self._has_room(), timeout_seconds)
            return self._has_room()

    @property
    def num_pending(self) -> int:
        """Blocks that wait to be written, those on their way included; from any thread."""
        return len(self._pending)

    def put(self, block_hash: bytes, payload: bytes) -> None:
        """Stores the block some time later, if there is room to keep it until then.

        From any thread; returns at once. Raises ValueError for a hash that is not of 32 bytes, or a payload that is
        not of `block_bytes`.
        """
        join_hashes([block_hash])
        if len(payload) != self._block_bytes:
            raise ValueError(f"payload has {len(payload)} bytes, not {self._block_bytes}")
        with self._lock:
            if self._has(block_hash):
                return
            if not self._has_room():
                self.num_dropped += 1
                return
            self._pending[block_hash] = payload
            # The first block wakes the task; it takes all that have come by then.
            if len(self._pending) == 1 and self._loop is not None:
                self._loop.call_soon_threadsafe(self._offered.set)

    async def get(self, hashes: Sequence[bytes], timeout_seconds: float) -> list[bytes]:
        """Payloads of the leading blocks of the chain `hashes`, up to the first that is not there or not sound.

        What was fetched before the timeout, or before Redis failed, is returned all the same. Blocks that are found
        live for another TTL; a value that is not sound is deleted. Raises ValueError for hashes that are not of 32
        bytes each.
        """
        found: list[bytes] = []
        try:
            await within(timeout_seconds, self._fetch(hashes, found))
        except RedisUnavailable as error:
            # With something in hand, Redis was not away, but slower than the caller could wait.
            if not found:
                self._reading.begin(error)
        else:
            self._reading.end()
        self.num_hits += len(found)
        return found

    async def _fetch(self, hashes: Sequence[bytes], found: list[bytes]) -> None:
        """Appends to `found`, piece by piece."""
        for part in _slices(hashes, _BATCH_BLOCKS):
            missing = await self._renew(part)
            for piece in _slices(part[: missing[0]] if missing else part, self._blocks_a_read):
                values: list[Any] = await self._redis.mget([self._prefix + block for block in piece])
                # Checksums take long enough to be felt by others on the event loop.
                payloads, error = await asyncio.to_thread(self._unpack, piece, values)
                found += payloads
                if len(payloads) < len(piece):
                    next_block = piece[len(payloads)]
                    error = error or await self._strange_type(next_block)
                    if error is not None:
                        await self._delete(next_block, error)
                    return
            if missing:
                return

    def _unpack(self, hashes: Sequence[bytes], values: Sequence[bytes | None]) -> tuple[list[bytes], str | None]:
        """The leading sound payloads, and what is wrong with the next one, None if it is just not there."""
        payloads: list[bytes] = []
        for block_hash, value in zip(hashes, values, strict=True):
            if value is None:
                break
            try:
                payloads.append(unpack(self._fingerprint, block_hash, self._block_bytes, value))
            except CorruptPayload as error:
                return payloads, str(error)
        return payloads, None

    async def _strange_type(self, block_hash: bytes) -> str | None:
        """What is wrong with a value that MGET says is not there: it says so of everything that is no string."""
        kind: Any = await self._redis.type(self._prefix + block_hash)
        return None if kind in (b"none", b"string") else f"it is a {kind.decode()}, not a string"

    async def _delete(self, block_hash: bytes, error: str) -> None:
        self.num_corrupt += 1
        logger.warning("stored block %s is deleted: %s", block_hash.hex(), error)
        with self._lock:
            self._known.pop(block_hash, None)
        async with self._redis.pipeline(transaction=True) as transaction:
            transaction.unlink(self._prefix + block_hash)
            transaction.zrem(self._keys[1], block_hash)
            await transaction.execute()

    async def _write_behind(self) -> None:
        while True:
            # Cleared before it looks: a block that is put from here on wakes it again.
            self._offered.clear()
            if not self._next_batch():
                await self._offered.wait()
            elif await self._write_batch():
                self._writing.end()
            else:
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _write_batch(self) -> bool:
        """Stores the next blocks; False, and they are dropped, if Redis failed."""
        batch = self._next_batch()
        hashes = list(batch)
        stored: list[bytes] | None = None
        num_refused = 0
        try:
            # The question also finds out whether Redis answers at all: bytes sent to one that hangs would stay in
            # the connection's buffer long after we gave up on it.
            missing = [hashes[index] for index in await within(_WRITE_SECONDS, self._renew(hashes))]
            if missing:
                values = await asyncio.to_thread(
                    lambda: [pack(self._fingerprint, block_hash, batch[block_hash]) for block_hash in missing]
                )
                num_entered = await within(_WRITE_SECONDS, self._set(missing, values))
                missing, num_refused = missing[:num_entered], len(missing) - num_entered
            stored = missing
        except RedisUnavailable as error:
            # Its text alone: whoever keeps the log's record would keep with the error this frame, and the batch.
            self._writing.begin(str(error))
        with self._lock:
            for block_hash in hashes:
                del self._pending[block_hash]
            self._lock.notify_all()
            if stored is None:
                self.num_dropped += len(hashes)
                # It may come back empty.
                self._known = {}
            else:
                self.num_stored += len(stored)
                self.num_dropped += num_refused
                self._note_known(stored)
        return stored is not None

    def _next_batch(self) -> dict[bytes, bytes]:
        """They stay among the pending until they are written, and so does the room they take."""
        with self._lock:
            return dict(itertools.islice(self._pending.items(), self._blocks_a_write))

    async def _set(self, hashes: Sequence[bytes], values: Sequence[bytes]) -> int:
        """How many of them, the first ones, there was room for. All or nothing else: neither a value without its place
        in the account, nor one that is over the limit."""
        async with self._redis.pipeline(transaction=True) as transaction:
            args = (self._ttl_ms, self._max_blocks, join_hashes(hashes), self._fresh_ms)
            transaction.eval(_ENTER, len(self._keys), *self._keys, *args)
            for block_hash, value in zip(hashes, values, strict=True):
                transaction.set(self._prefix + block_hash, value, px=self._ttl_ms)
            transaction.eval(_LEAVE, len(self._keys), *self._keys, join_hashes(hashes))
            [num_entered, *_] = await transaction.execute()
        return int(num_entered)

    async def _renew(self, hashes: Sequence[bytes]) -> list[int]:
        """Gives those that are there another TTL; the positions of the others."""
        missing: list[int] = await self._run(_RENEW, self._ttl_ms, join_hashes(hashes))
        gaps = set(missing)
        with self._lock:
            for index in missing:
                self._known.pop(hashes[index], None)
            self._note_known(block_hash for index, block_hash in enumerate(hashes) if index not in gaps)
        return missing

    def _has_room(self) -> bool:
        """Under the lock."""
        return self._loop is not None and len(self._pending) < self._max_pending

    def _has(self, block_hash: bytes) -> bool:
        """Under the lock. Whether the block waits to be written, or is taken to be in Redis."""
        return block_hash in self._pending or self._known.get(block_hash, 0.0) > time.monotonic()

    def _note_known(self, hashes: Iterable[bytes]) -> None:
        """Under the lock. These blocks are in Redis now."""
        until = time.monotonic() + self._known_seconds
        for block_hash in hashes:
            self._known[block_hash] = until
        while len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]


def _slices(hashes: Sequence[bytes], length: int) -> Iterable[Sequence[bytes]]:
    return (hashes[begin : begin + length] for begin in range(0, len(hashes), length))


def _allocated(num_bytes: int) -> int:
    """What jemalloc, Redis's allocator, takes for so many bytes: from each power of 2 to the next it has four sizes."""
    step = 1 << max(4, (num_bytes - 1).bit_length() - 3)
    return -(-num_bytes // step) * step


def _report_end(task: asyncio.Task[None]) -> None:
    """The task only ends by being cancelled; anything else is a bug, and the blocks then wait in vain."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("storing prefixes stopped", exc_info=error)
