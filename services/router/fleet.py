"""All the workers a router knows: their links, who serves what, and the γ controller of each pair."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from outrider.v1 import worker_pb2

from services.router.connection import step_costs
from services.router.draft_link import DraftLink
from services.router.placement import choose
from services.router.target_link import TargetLink
from shared.policy.gamma import GammaController
from shared.prefix.block_hash import hash_blocks, root_hash
from shared.prefix.index import PrefixIndex
from shared.rpc.errors import Unavailable
from shared.settings import StartupError

logger = logging.getLogger(__name__)


class Fleet:
    """Links to the target workers and the drafter, held to one model and one tokenizer.

    `changed` is notified when any is connected or lost; `failed` gets a StartupError when workers do not fit
    together: no request could be served rightly.
    """

    def __init__(
        self,
        targets: Sequence[str],
        draft: str | None,
        tokenizer_fingerprint: str,
        max_num_draft_tokens: int,
        redis_url: str | None,
    ) -> None:
        """With `redis_url`, placement asks the prefix index there which workers hold a prompt's blocks."""
        self.changed = asyncio.Condition()
        self.targets = [TargetLink(address, self._check_target, self.changed) for address in targets]
        self.draft = DraftLink(draft, self._check_draft, self.changed) if draft is not None else None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._redis_url = redis_url
        self._index: PrefixIndex | None = None
        self._max_num_draft_tokens = max_num_draft_tokens
        self._info: worker_pb2.WorkerInfo | None = None
        self._controllers: dict[TargetLink, tuple[tuple[int, int], GammaController]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Connects to every worker, and keeps connected until `close`."""
        links: list[TargetLink | DraftLink] = [*self.targets]
        if self.draft is not None:
            links.append(self.draft)
        for link in links:
            task = asyncio.create_task(link.run(), name=f"worker {link.address}")
            task.add_done_callback(self._report)
            self._tasks.append(task)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError, StartupError):
                await task
        if self._index is not None:
            await self._index.close()

    @property
    def model(self) -> worker_pb2.WorkerInfo:
        """What the target workers said of themselves. Raises Unavailable before the first has."""
        if self._info is None:
            raise Unavailable("no target worker is connected yet")
        return self._info

    @property
    def usable(self) -> bool:
        """Whether any target worker takes sequences."""
        return any(link.usable for link in self.targets)

    async def wait_until_usable(self, seconds: float) -> None:
        """Returns when a target worker takes sequences. Raises Unavailable if none does within that time."""
        try:
            async with asyncio.timeout(seconds), self.changed:
                await self.changed.wait_for(lambda: self.usable)
        except TimeoutError as error:
            raise Unavailable("no target worker came back in time") from error

    async def place(self, token_ids: Sequence[int], cache_salt: bytes) -> tuple[TargetLink, int]:
        """The worker to prefill these tokens on, and the leading blocks the index says it holds.

        Raises Unavailable if none is usable.
        """
        usable = [link for link in self.targets if link.usable]
        model = self.model
        hits: dict[str, int] = {}
        num_blocks = (len(token_ids) - 1) // model.block_size
        if len(usable) > 1 and self._index is not None and num_blocks > 0:
            root = root_hash(model.fingerprint, cache_salt)
            hashes = hash_blocks(token_ids[: num_blocks * model.block_size], model.block_size, root)
            hits = await self._index.lookup(hashes, [link.info.instance_id for link in usable if link.info is not None])
        # Looked at again: workers may have come and gone during the lookup.
        loads = {link: link.load() for link in self.targets if link.usable}
        chosen = choose(list(loads.values()), num_blocks, hits)
        return next((link, hits.get(chosen, 0)) for link, load in loads.items() if load.instance_id == chosen)

    def gamma(self, target: TargetLink) -> GammaController | None:
        """The controller of this target worker and the drafter; None while there is no drafter."""
        if self.draft is None or self.draft.info is None or target.info is None:
            return None
        epochs = (target.epoch, self.draft.epoch)
        known = self._controllers.get(target)
        if known is None or known[0] != epochs:
            costs = step_costs(target.info), step_costs(self.draft.info)
            controller = GammaController(*costs, self._max_num_draft_tokens)
            known = self._controllers[target] = (epochs, controller)
        return known[1]

    def _check_target(self, info: worker_pb2.WorkerInfo) -> None:
        self._check_tokenizer(info, "target")
        if self._info is None:
            self._info = info
            if self._redis_url is not None:
                self._index = PrefixIndex(self._redis_url, info.fingerprint)
        elif info.fingerprint != self._info.fingerprint:
            raise StartupError(
                f"target workers must serve one model in one dtype and block size: {info.model} in {info.dtype} "
                f"(blocks of {info.block_size}) differs from {self._info.model} in {self._info.dtype} "
                f"(blocks of {self._info.block_size})"
            )
        elif info.max_context < self._info.max_context:
            self._info = info

    def _check_draft(self, info: worker_pb2.WorkerInfo) -> None:
        self._check_tokenizer(info, "draft")

    def _check_tokenizer(self, info: worker_pb2.WorkerInfo, role: str) -> None:
        if info.tokenizer_fingerprint != self._tokenizer_fingerprint:
            raise StartupError(
                f"the {role} worker's model {info.model} has another tokenizer than the router's: "
                "draft and target must share one vocabulary"
            )

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)
