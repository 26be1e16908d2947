"""The life of a worker process: listen, load, warm up, serve, drain; or end by itself when it cannot serve."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias

import torch
import transformers

from shared.engine.draws import DrawAhead
from shared.engine.engine import Engine, Sampler
from shared.engine.memory import return_free_memory
from shared.engine.model import CausalLM
from shared.engine.settings import EngineSettings
from shared.engine.threads import num_threads_for
from shared.heap import keep_for_good
from shared.registry.listing import Listing
from shared.registry.member import Member
from shared.rpc.server import RpcServer
from shared.worker.failure import WorkerFailed
from shared.worker.servicer import WorkerServicer
from shared.worker.settings import WorkerSettings
from shared.worker.watchdog import StepWatchdog, step_limit

logger = logging.getLogger(__name__)

Role: TypeAlias = Literal["both", "prefill", "decode", ""]
FinishEngine: TypeAlias = Callable[[Engine], None]

# What a worker that ends itself gets to do so in order; then it is gone, whatever holds it up.
_END_SECONDS = 20.0


def load_engine(
    settings: EngineSettings,
    sample: Sampler,
    prepare: Callable[[CausalLM], FinishEngine | None] | None = None,
    draw_ahead: DrawAhead | None = None,
) -> Engine:
    """Loads, admits and warms up the model. Takes its time: call it off the event loop.

    `sample` and `draw_ahead` are the engine's. `prepare` looks at the model as it was loaded, and may say what is to be
    done with the engine once it is warmed up.
    Raises StartupError if the model cannot be loaded or served.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    model = CausalLM.load(settings.model, settings.device, settings.dtype, settings.native, settings.quantize)
    if settings.num_threads is None:
        torch.set_num_threads(num_threads_for(model.weight_bytes, torch.get_num_threads()))
    finish = None if prepare is None else prepare(model)
    # A CPU computes nothing while its host goes on: there it would only be more to do.
    engine = Engine(model, settings, sample, None if model.device.type == "cpu" else draw_ahead)
    engine.warm_up()
    if finish is not None:
        finish(engine)
    return_free_memory()
    logger.info(
        "model ready",
        extra={
            "model": engine.model.name,
            "device": str(engine.model.device),
            "dtype": str(engine.model.dtype),
            "blocks": engine.blocks.counts().total,
            "kv_tokens": engine.blocks.counts().total * engine.block_size,
            "threads": torch.get_num_threads(),
            "one_token_step_ms": round(engine.step_costs[0][1] * 1000, 2),
        },
    )
    return engine


async def run_worker(
    server: RpcServer,
    servicer: WorkerServicer[Any, Any],
    settings: WorkerSettings,
    load: Callable[[], Engine],
    serving: Callable[[Engine], Awaitable[None]] | None = None,
    role: Role = "",
) -> None:
    """Runs a worker whose servicer is added to `server`, until it is drained.

    `load` brings its engine, and takes its time: off the event loop. Health is NOT_SERVING until that is there and
    `serving` has returned. With a Redis, routers find it there from then on, until it drains.
    Raises StartupError if the model cannot be served, WorkerFailed when its engine breaks or hangs: it cannot be
    trusted then, the process has to go, and the routers' sessions move on.
    """
    redis_url = settings.redis_at(settings.redis_url)
    failed, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_crash() -> None:
        loop.call_soon_threadsafe(failed.set)

    await server.start()
    tasks: list[asyncio.Task[None]] = []
    hung = False
    member: Member | None = None

    async def drain() -> None:
        # At the same time: a Redis that is away must not hold up what runs here.
        await asyncio.gather(servicer.drain(), *([] if member is None else [member.withdraw()]))

    try:
        engine = await asyncio.to_thread(load)
        engine_loop = servicer.attach(engine, on_crash)
        if serving is not None:
            await serving(engine)
        keep_for_good()
        await server.set_serving(True)
        if redis_url is not None:
            member = Member(redis_url, settings.deployment, _listing(settings, servicer, server.address, role))
            member.start()
        watchdog = StepWatchdog(lambda: engine_loop.turn, step_limit(engine.step_costs, settings.max_batch_tokens))
        drained = asyncio.create_task(server.serve(drain, settings.drain_seconds))
        crashed = asyncio.create_task(_wait(failed))
        hangs = asyncio.create_task(watchdog.wait())
        tasks += [drained, crashed, hangs]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if drained.done():
            return drained.result()
        faulthandler.dump_traceback_later(_END_SECONDS, exit=True)
        hung = hangs.done()
        if hung:
            hangs.result()
            logger.critical(
                "the engine's thread hangs: a step takes longer than %g s",
                watchdog.limit_seconds,
                extra={"stack": engine_loop.stack()},
            )
        await server.set_serving(False)
        servicer.end_streams()
        raise WorkerFailed("the engine hangs" if hung else "the engine broke")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if member is not None:
            await member.close()
        await server.stop()
        if not hung:
            servicer.close()


def _listing(settings: WorkerSettings, servicer: WorkerServicer[Any, Any], address: str, role: Role) -> Listing:
    """How others find this worker, which listens on `address`."""
    host, _, port = address.rpartition(":")
    if host in ("0.0.0.0", "[::]"):
        host = socket.gethostname()
    kind: Literal["target", "draft"] = "draft" if settings.service == "draft" else "target"
    return Listing(kind, servicer.instance_id, settings.advertise or f"{host}:{port}", role)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
