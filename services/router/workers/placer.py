"""Where a prompt goes: what is known of the workers, put before the placement policy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from outrider.v1 import target_pb2, worker_pb2

from services.router.workers.target_link import TargetLink
from shared.policy.placement import (
    STORE,
    NoWorker,
    Plan,
    Request,
    TransferRates,
    WorkerView,
    by_depth,
    candidates,
    choose,
)
from shared.prefix.block_hash import hash_blocks, root_hash
from shared.prefix.index import PrefixIndex
from shared.prefix.payload_index import PayloadIndex
from shared.rpc.errors import Unavailable

# Before anything was measured: what a transfer takes beside its bytes, and bytes a second.
_TRANSFER_SECONDS = 0.02
_TRANSFER_RATE = 500e6
# Output tokens expected of a request before any has ended, and how much each counts that did.
_OUTPUT_TOKENS = 128.0
_OUTPUT_WEIGHT = 0.05
# Tokens that take milliseconds to hash: not on the event loop, which every stream waits for.
_LONG_PROMPT = 16_384


class Placement(NamedTuple):
    """Where a request begins (`first`), where it goes on behind its first token (`decode`: the same worker or another),
    and whose cached prefix is fetched to begin with (`source`; None with a `plan` to fetch: the prefix store's).

    `prefix_tokens`: leading tokens that `first` has or will have by its turn, fetched ones included; `block_hashes`: of
    the full blocks that it will have for who comes next, as far as they are known.
    """

    first: TargetLink
    decode: TargetLink
    source: TargetLink | None
    prefix_tokens: int
    block_hashes: Sequence[bytes]
    plan: Plan

    @property
    def remote_prefill(self) -> bool:
        return self.first is not self.decode


class Placer:
    """Chooses among a router's target workers."""

    def __init__(
        self, targets: Callable[[], Collection[TargetLink]], redis_url: str | None, prefix_store: str | None
    ) -> None:
        """`targets`: all there are now. With `redis_url`, the prefix index there tells who holds a prompt's blocks;
        `prefix_store` is the Redis that keeps them itself, if any does."""
        self._targets = targets
        self._redis_url = redis_url
        self._prefix_store = prefix_store
        self._index: PrefixIndex | None = None
        self._payloads: PayloadIndex | None = None
        # As whom each worker has been part of a transfer.
        self._instances: dict[TargetLink, str] = {}
        self._rates: TransferRates | None = None
        self._random = random.Random()
        self._num_output_tokens = _OUTPUT_TOKENS

    def open(self, info: worker_pb2.WorkerInfo) -> None:
        """Now it is known which model's blocks there are."""
        if self._redis_url is not None and self._index is None:
            self._index = PrefixIndex(self._redis_url, info.fingerprint)
        if self._prefix_store is not None and self._payloads is None:
            self._payloads = PayloadIndex(self._prefix_store, info.fingerprint)
        self._rates = TransferRates(info.block_bytes / info.block_size, _TRANSFER_SECONDS, _TRANSFER_RATE)

    async def close(self) -> None:
        if self._index is not None:
            await self._index.close()
        if self._payloads is not None:
            await self._payloads.close()

    async def place(
        self, token_ids: Sequence[int], cache_salt: bytes, num_tokens: int, avoided: Collection[TargetLink]
    ) -> Placement:
        """The workers for a sequence with these tokens.

        `num_tokens`: what it may grow to, prompt and output together. Workers in `avoided` get it only if there is no
        other. Raises Unavailable if none is usable and has room.
        """
        links = self._candidates(num_tokens, avoided)
        block_size, hashes = await self._block_hashes(links, token_ids, cache_salt)
        hits, store_tokens = await self._held(links, block_size, hashes)
        # Looked at again: workers may have come and gone during the lookup.
        links = self._candidates(num_tokens, avoided)
        if not any(link.decodes for link in links):
            if any(link.usable and link.decodes for link in self._targets()):
                raise Unavailable(f"no target worker has room for {num_tokens} tokens, prompt and output together, now")
            raise Unavailable("no target worker is alive")
        assert self._rates is not None
        by_id = {link.info.instance_id: link for link in links if link.info is not None}
        pools = [
            [id for id, link in by_id.items() if link.decodes],
            [id for id, link in by_id.items() if not link.decodes],
        ]
        # Those that are computing it for others count as holders: who follows them finds it there.
        coming = {instance: link.backlog.depth(hashes) * block_size for instance, link in by_id.items()}
        held = {instance: max(hits.get(instance, 0), tokens) for instance, tokens in coming.items()}
        chosen = candidates(by_depth(held), pools, self._random)
        num_output = min(num_tokens - len(token_ids), self._num_output_tokens)
        try:
            plan = choose(
                Request(len(token_ids), max(1.0, num_output), store_tokens),
                [_view(id, by_id[id], hits.get(id, 0), coming[id]) for id in chosen],
                self._rates,
                self._random,
            )
        except NoWorker as error:
            raise Unavailable("no target worker is alive") from error
        first = plan.prefill or plan.decode
        source = by_id[plan.fetch] if plan.fetch not in (None, STORE) else None
        prefix_tokens = held[first] + plan.fetch_tokens
        # A fetch keeps no order: who comes next may be computed before it ends.
        coming_hashes = hashes if plan.fetch is None else []
        return Placement(by_id[first], by_id[plan.decode], source, prefix_tokens, coming_hashes, plan)

    def observe_transfer(
        self, source: TargetLink | None, destination: TargetLink, result: target_pb2.PullResult
    ) -> None:
        """A transfer took that long, or failed; `source` None: from the prefix store."""
        whence = STORE if source is None else self._instance(source)
        whither = self._instance(destination)
        if self._rates is None or whence is None or whither is None:
            return
        if result.error:
            self._rates.failed(whence, whither)
        else:
            self._rates.observe(whence, whither, result.num_bytes, result.seconds)

    def forget(self, link: TargetLink) -> None:
        """The worker is gone for good."""
        instance = self._instances.pop(link, None)
        if instance is not None and self._rates is not None:
            self._rates.forget(instance)

    def _instance(self, link: TargetLink) -> str | None:
        """Who it is now; what was measured of who it was is forgotten. None: it is away."""
        if link.info is None:
            return None
        instance = link.info.instance_id
        if self._instances.get(link) != instance:
            self.forget(link)
            self._instances[link] = instance
        return instance

    def observe_output(self, num_tokens: int) -> None:
        """A sequence ended with so many tokens of output."""
        self._num_output_tokens += _OUTPUT_WEIGHT * (num_tokens - self._num_output_tokens)

    async def _block_hashes(
        self, links: Sequence[TargetLink], token_ids: Sequence[int], cache_salt: bytes
    ) -> tuple[int, Sequence[bytes]]:
        """Tokens of a block, and hashes of the full blocks before the last token; none if nobody can be asked for
        them."""
        infos = [link.info for link in links if link.info is not None]
        # With one worker there is nothing to choose, but whether to fetch.
        choice = self._payloads is not None or (self._index is not None and len(infos) > 1)
        if not infos or not choice:
            return 0, []
        block_size = infos[0].block_size
        root = root_hash(infos[0].fingerprint, cache_salt)
        tokens = token_ids[: (len(token_ids) - 1) // block_size * block_size]
        if len(tokens) < _LONG_PROMPT:
            return block_size, hash_blocks(tokens, block_size, root)
        return block_size, await asyncio.to_thread(hash_blocks, tokens, block_size, root)

    async def _held(
        self, links: Sequence[TargetLink], block_size: int, hashes: Sequence[bytes]
    ) -> tuple[Mapping[str, int], int]:
        """Leading tokens that each instance holds of these blocks, and that the store does."""
        instances = [link.info.instance_id for link in links if link.info is not None]
        depths, stored = await asyncio.gather(self._ask_index(hashes, instances), self._ask_store(hashes))
        return {instance: depth * block_size for instance, depth in depths.items()}, stored * block_size

    async def _ask_index(self, hashes: Sequence[bytes], instances: Sequence[str]) -> Mapping[str, int]:
        return {} if self._index is None else await self._index.lookup(hashes, instances)

    async def _ask_store(self, hashes: Sequence[bytes]) -> int:
        return 0 if self._payloads is None else await self._payloads.depth(hashes)

    def _candidates(self, num_tokens: int, avoided: Collection[TargetLink]) -> list[TargetLink]:
        """The workers that could take a sequence, without those better left alone if that leaves one to decode."""
        found = [link for link in self._targets() if link.usable and link.fits(num_tokens)]
        left_alone: list[Callable[[TargetLink], bool]] = [
            lambda link: link.overdue,
            lambda link: link in avoided,
            lambda link: not link.breaker.allows,
        ]
        for worse in left_alone:
            better = [link for link in found if not worse(link)]
            if any(link.decodes for link in better):
                found = better
            else:
                found = [link for link in found if link.decodes or not worse(link)]
        return found


def _view(instance: str, link: TargetLink, prefix_tokens: int, coming_tokens: int) -> WorkerView:
    info = link.info
    assert info is not None
    return WorkerView(
        worker_id=instance,
        role=link.role,
        costs=link.costs,
        max_batch_tokens=info.max_batch_tokens,
        kv_tokens=info.num_blocks * info.block_size,
        num_decoding=link.num_decoding + link.num_incoming,
        num_waiting=link.num_waiting,
        backlog_tokens=link.backlog_tokens,
        kv_usage=link.kv_usage,
        prefix_tokens=prefix_tokens,
        coming_tokens=coming_tokens,
    )
