"""The life of a worker process: listen, load, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import transformers

from shared.engine.engine import Engine, Sampler
from shared.engine.model import CausalLM
from shared.engine.settings import EngineSettings
from shared.rpc.server import RpcServer
from shared.worker.servicer import WorkerServicer

logger = logging.getLogger(__name__)


def load_engine(settings: EngineSettings, sample: Sampler) -> Engine:
    """Loads, admits and warms up the model. Takes its time: call it off the event loop.

    Raises StartupError if the model cannot be loaded or served.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    engine = Engine(CausalLM.load(settings.model, settings.device, settings.dtype), settings, sample)
    engine.warm_up()
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
    settings: EngineSettings,
    sample: Sampler,
    serving: Callable[[Engine], Awaitable[None]] | None = None,
) -> None:
    """Runs a worker whose servicer is added to `server`, until it is drained.

    Health is NOT_SERVING until the model is loaded and warmed up and `serving` has returned.
    Raises StartupError if the model cannot be served.
    """
    await server.start()
    try:
        engine = await asyncio.to_thread(load_engine, settings, sample)
        # An engine that broke an invariant cannot be trusted: the process goes, the router's sessions move on.
        servicer.attach(engine, on_crash=lambda: os.kill(os.getpid(), signal.SIGKILL))
        if serving is not None:
            await serving(engine)
        await server.set_serving(True)
        await server.serve(servicer.drain, settings.drain_seconds)
    finally:
        await server.stop()
        servicer.close()
