"""All the workers a router knows: their links, who serves what, and the γ controller of each pair."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from outrider.v1 import worker_pb2

from services.router.workers.connection import WorkerRefused, step_costs
from services.router.workers.draft_link import DraftLink
from services.router.workers.placer import Placer
from services.router.workers.target_link import TargetLink
from shared.policy.gamma import GammaController
from shared.rpc.errors import Unavailable
from shared.settings import StartupError

logger = logging.getLogger(__name__)

# Until so long after the first target worker, one that does not fit is a mistake in how all of this was set up.
_STARTING_SECONDS = 60.0
# How often it is looked whether a target worker hangs.
_WATCH_SECONDS = 0.5


class Fleet:
    """Links to the target workers and the drafter, held to one model and one tokenizer.

    `changed` is notified when any is connected, drains or is lost; `failed` gets a StartupError when workers do not fit
    together. One that comes up for the first time when the others have long been in service is refused until it fits.
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
        self.placer = Placer(lambda: self.targets, redis_url)
        self._max_num_draft_tokens = max_num_draft_tokens
        self._info: worker_pb2.WorkerInfo | None = None
        self._first_target_at: float | None = None
        self._controllers: dict[TargetLink, tuple[tuple[int, int], GammaController]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Connects to every worker, and keeps connected until `close`."""
        links: list[TargetLink | DraftLink] = [*self.targets]
        if self.draft is not None:
            links.append(self.draft)
        for link in links:
            task = asyncio.create_task(link.run(), name=f"worker {link.address}")
            self._tasks.append(task)
        self._tasks.append(asyncio.create_task(self._watch(), name="watch"))
        for task in self._tasks:
            task.add_done_callback(self._report)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError, StartupError):
                await task
        await self.placer.close()

    @property
    def model(self) -> worker_pb2.WorkerInfo:
        """What the connected target worker with the shortest context says of itself; with none connected, the latest.

        Raises Unavailable before the first has been.
        """
        present = [link.info for link in self.targets if link.info is not None]
        if present:
            return min(present, key=lambda info: info.max_context)
        if self._info is None:
            raise Unavailable("no target worker is connected yet")
        return self._info

    @property
    def usable(self) -> bool:
        """Whether any target worker takes sequences to their end."""
        return any(link.usable and link.decodes for link in self.targets)

    async def wait_until_usable(self, seconds: float, num_tokens: int) -> None:
        """Returns when a target worker takes sequences of that many tokens, prompt and output together.

        Raises Unavailable if none does within that time.
        """
        try:
            async with asyncio.timeout(seconds), self.changed:
                await self.changed.wait_for(
                    lambda: any(link.usable and link.decodes and link.fits(num_tokens) for link in self.targets)
                )
        except TimeoutError as error:
            what = f"that has room for {num_tokens} tokens " if self.usable else ""
            raise Unavailable(f"no target worker {what}came back in time") from error

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
        with self._refusing_latecomers():
            self._check_model(info)
        if self._first_target_at is None:
            self._first_target_at = time.monotonic()

    def _check_draft(self, info: worker_pb2.WorkerInfo) -> None:
        with self._refusing_latecomers():
            self._check_tokenizer(info, "draft")

    @contextmanager
    def _refusing_latecomers(self) -> Iterator[None]:
        """Raises WorkerRefused instead of StartupError once this fleet is in service."""
        try:
            yield
        except StartupError as error:
            first = self._first_target_at
            if first is not None and time.monotonic() - first > _STARTING_SECONDS:
                raise WorkerRefused(str(error)) from error
            raise

    def _check_model(self, info: worker_pb2.WorkerInfo) -> None:
        self._check_tokenizer(info, "target")
        if self._info is None:
            self.placer.open(info)
        elif info.fingerprint != self._info.fingerprint:
            raise StartupError(
                f"target workers must serve one model in one dtype and block size: {info.model} in {info.dtype} "
                f"(blocks of {info.block_size}) differs from {self._info.model} in {self._info.dtype} "
                f"(blocks of {self._info.block_size})"
            )
        self._info = info

    def _check_tokenizer(self, info: worker_pb2.WorkerInfo, role: str) -> None:
        if info.tokenizer_fingerprint != self._tokenizer_fingerprint:
            raise StartupError(
                f"the {role} worker's model {info.model} has another tokenizer than the router's: "
                "draft and target must share one vocabulary"
            )

    async def _watch(self) -> None:
        """Gives up workers that hang: at once where others can take their sequences over, else much later."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._tick()

    def _tick(self) -> None:
        for link in self.targets:
            link.tick(_WATCH_SECONDS)
        for link in self.targets:
            others = [other for other in self.targets if other is not link and other.usable and not other.overdue]
            others = [other for other in others if other.decodes]
            if link.connected and link.hung(sole=not any(other.breaker.allows for other in others)):
                link.give_up()

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)
