"""What a target worker drafts with, by its settings."""

from __future__ import annotations

from functools import partial

from services.target.settings import TargetSettings
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.self_drafting.early_exit import EarlyExit
from shared.engine.self_drafting.loader import load_head
from shared.settings import StartupError
from shared.worker.service import MakeDrafter


def self_drafting(settings: TargetSettings, model: CausalLM) -> MakeDrafter | None:
    """How to make it for this model; None if it drafts with nothing. Raises StartupError if that cannot be."""
    if settings.head is not None and settings.early_exit is not None:
        raise StartupError("head and early_exit are both set: one of them drafts")
    if settings.head is not None:
        return load_head(settings.head, model)
    if settings.early_exit is not None:
        return partial(_early_exit, num_layers=settings.early_exit)
    return None


def _early_exit(model: CausalLM, pool: KVPool, num_layers: int) -> EarlyExit:
    return EarlyExit(model, pool, num_layers)
