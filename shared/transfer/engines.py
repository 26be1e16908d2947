"""Which engines a worker reads and is read with."""

from __future__ import annotations

import logging
from typing import Literal

from shared.engine.kv_pool import KVPool
from shared.security.identity import Identity
from shared.settings import StartupError
from shared.transfer.engine import TransferEngine, TransferFailed
from shared.transfer.grpc import GrpcEngine
from shared.transfer.nixl.engine import NixlEngine
from shared.transfer.nixl.library import nixl_available

logger = logging.getLogger(__name__)


def make_engines(
    setting: Literal["auto", "nixl", "grpc"], pool: KVPool, instance_id: str, identity: Identity
) -> dict[str, TransferEngine]:
    """By name, the best first. Raises StartupError if nixl is asked for and not to be had."""
    engines: dict[str, TransferEngine] = {}
    if setting == "nixl" and not nixl_available():
        raise StartupError("kv_transfer is nixl, but the package nixl is not installed: pip install 'outrider[nixl]'")
    if setting != "grpc" and nixl_available():
        try:
            engines[NixlEngine.name] = NixlEngine(pool, instance_id)
        except TransferFailed as error:
            if setting == "nixl":
                raise StartupError(f"kv_transfer is nixl, but nixl does not work here: {error}") from error
            logger.warning("KV goes by gRPC alone: nixl does not work here", extra={"reason": str(error)})
    if setting != "nixl":
        engines[GrpcEngine.name] = GrpcEngine(pool, identity)
    logger.info("KV transfer", extra={"engines": list(engines)})
    return engines
