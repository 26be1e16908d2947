"""All the workers a router knows: their links, who serves what, and the γ controller of each pair."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from outrider.v1 import worker_pb2

from services.router.workers.connection import WORKER_STATES, WorkerConnection, WorkerRefused, step_costs
from services.router.workers.draft_link import DraftLink
from services.router.workers.placer import Placer
from services.router.workers.target_link import TargetLink
from shared.policy.gamma import GammaController
from shared.registry.directory import Directory
from shared.registry.keys import DEFAULT_DEPLOYMENT
from shared.rpc.errors import Unavailable
from shared.security.identity import PLAIN, Identity
from shared.settings import StartupError

logger = logging.getLogger(__name__)

# Until so long after the first target worker, one that does not fit is a mistake in how all of this was set up.
_STARTING_SECONDS = 60.0
# How often the directory is read.
_FOLLOW_SECONDS = 1.0
# Most workers of a kind that a reading of it adds: to connect takes time, which streams would stand still for.
_MOST_NEW = 64
# How often it is looked whether a target worker hangs.
_WATCH_SECONDS = 0.5

Link = TypeVar("Link", TargetLink, DraftLink)


class Fleet:
    """Links to the target workers and the drafters, held to one model and one tokenizer.

    `changed` is notified when any is connected, drains or is lost; `failed` gets a StartupError when workers do not fit
    together. One that comes up for the first time when the others have long been in service is refused until it fits.
    """

    def __init__(
        self,
        targets: Sequence[str],
        drafts: Sequence[str],
        tokenizer_fingerprint: str,
        max_num_draft_tokens: int,
        max_num_nodes: int,
        redis_url: str | None,
        deployment: str = DEFAULT_DEPLOYMENT,
        prefix_store: str | None = None,
        identity: Identity = PLAIN,
    ) -> None:
        """With `redis_url`, placement asks the prefix index there which workers hold a prompt's blocks; with no
        `targets` as well, all workers are those that register there for this deployment, as they come and go.
        `prefix_store`: the Redis that keeps the blocks themselves. `identity`: who the router is to the workers."""
        self._identity = identity
        self.changed = asyncio.Condition()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.placer = Placer(lambda: self.targets, redis_url, prefix_store)
        self._directory = Directory(redis_url, deployment) if redis_url is not None and not targets else None
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._max_num_draft_tokens = max_num_draft_tokens
        self._max_num_nodes = max_num_nodes
        self._info: worker_pb2.WorkerInfo | None = None
        self._first_target_at: float | None = None
        self._controllers: dict[tuple[TargetLink, DraftLink], tuple[tuple[int, int], GammaController]] = {}
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self.targets = [self._target(address) for address in targets]
        self.drafts = [self._draft(address) for address in drafts]

    def start(self) -> None:
        """Connects to every worker, and keeps connected until `close`."""
        for target in self.targets:
            self._run(target, target.run())
        for draft in self.drafts:
            self._run(draft, draft.run())
        self._run("watch", self._watch())
        if self._directory is not None:
            self._run("directory", self._follow(self._directory))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, StartupError):
                await task
        await self.placer.close()
        if self._directory is not None:
            await self._directory.close()

    @property
    def may_draft(self) -> bool:
        """Whether there are drafters, or may be some day."""
        return bool(self.drafts) or self._directory is not None

    @property
    def targets_draft_with(self) -> str:
        """What target workers draft with themselves, of those that do the first; empty if none does."""
        return next((link.info.drafts_with for link in self.targets if link.info and link.info.drafts_with), "")

    def choose_draft(self) -> DraftLink | None:
        """The drafter for one more sequence: of those connected the one with the fewest; None if there is none."""
        connected = [link for link in self.drafts if link.connected]
        return min(connected, key=lambda link: link.num_sequences, default=None)

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

    def states(self) -> Mapping[tuple[str, str], int]:
        """How many workers, by what they are for and how they are; from any thread."""
        links: tuple[WorkerConnection[Any, Any, Any], ...] = (*self.targets, *self.drafts)
        counts = Counter((link.service, link.state) for link in links)
        return {(kind, state): counts[kind, state] for kind in ("target", "draft") for state in WORKER_STATES}

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

    def gamma(self, target: TargetLink, draft: DraftLink | None) -> GammaController | None:
        """The controller of this target worker and this drafter; None while either is away."""
        if draft is None or draft.info is None or target.info is None:
            return None
        epochs = (target.epoch, draft.epoch)
        known = self._controllers.get((target, draft))
        if known is None or known[0] != epochs:
            costs = step_costs(target.info), step_costs(draft.info)
            # A tree and the token that it follows are computed in one step.
            most_nodes = min(self._max_num_nodes, target.info.max_batch_tokens - 1)
            controller = GammaController(*costs, self._max_num_draft_tokens, max_num_nodes=most_nodes)
            known = self._controllers[target, draft] = (epochs, controller)
        return known[1]

    def _check_target(self, info: worker_pb2.WorkerInfo) -> None:
        with self._refusing_latecomers():
            self._check_model(info)
        if self._first_target_at is None:
            self._first_target_at = time.monotonic()

    def _check_draft(self, info: worker_pb2.WorkerInfo) -> None:
        with self._refusing_latecomers():
            if info.tokenizer_fingerprint:  # one without a model takes the target's tokens as they are
                self._check_tokenizer(info, "draft")

    @contextmanager
    def _refusing_latecomers(self) -> Iterator[None]:
        """Raises WorkerRefused instead of StartupError once this fleet is in service."""
        try:
            yield
        except StartupError as error:
            first = self._first_target_at
            late = first is not None and time.monotonic() - first > _STARTING_SECONDS
            # What registers is not this router's set-up to blame.
            if late or self._directory is not None:
                raise WorkerRefused(str(error)) from error
            raise

    def _check_model(self, info: worker_pb2.WorkerInfo) -> None:
        self._check_tokenizer(info, "target")
        if self._info is None:
            self.placer.open(info)
        elif info.fingerprint != self._info.fingerprint:
            raise StartupError(
                "target workers must serve one model in one dtype, block size and quantize setting, that of the "
                f"first: {_named(info)} differs from {_named(self._info)}"
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

    async def _follow(self, directory: Directory) -> None:
        """Keeps the links at what the directory lists. While Redis is away, those known stay."""
        while True:
            listings = await directory.list()
            if listings is not None:
                self._take_in(self.targets, [each.address for each in listings if each.kind == "target"], self._target)
                self._take_in(self.drafts, [each.address for each in listings if each.kind == "draft"], self._draft)
            await asyncio.sleep(_FOLLOW_SECONDS)

    def _take_in(self, links: list[Link], addresses: Sequence[str], make: Callable[[str], Link]) -> None:
        """Connects to those newly listed, and forgets those neither listed nor connected.

        One that is connected stays whatever the list says: a Redis that was restarted knows nobody for a while.
        """
        listed, known = dict.fromkeys(addresses), {link.address for link in links}
        new = [address for address in listed if address not in known]
        for address in new[:_MOST_NEW]:
            link = make(address)
            links.append(link)
            self._run(link, link.run())
        gone = {link for link in links if link.address not in listed and not link.connected}
        if not gone:
            return
        links[:] = [link for link in links if link not in gone]
        for link in gone:
            self._tasks.pop(link).cancel()
            if isinstance(link, TargetLink):
                self.placer.forget(link)
        self._controllers = {pair: found for pair, found in self._controllers.items() if gone.isdisjoint(pair)}

    def _target(self, address: str) -> TargetLink:
        return TargetLink(address, self._check_target, self.changed, self._identity)

    def _draft(self, address: str) -> DraftLink:
        return DraftLink(address, self._check_draft, self.changed, self._identity)

    def _run(self, key: object, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[key] = asyncio.create_task(work)
        task.add_done_callback(self._report)

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)


def _named(info: worker_pb2.WorkerInfo) -> str:
    """A model as an operator knows it, and what tells it from another of that name."""
    return f"{info.model} in {info.dtype} (blocks of {info.block_size}, fingerprint {info.fingerprint[:12]})"
