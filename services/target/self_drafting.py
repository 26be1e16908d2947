"""What a target worker drafts with, by its settings."""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.target.settings import TargetSettings
from shared.engine.engine import Engine
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.self_drafting.copies import Copies
from shared.self_drafting.drafter import SelfDrafter
from shared.self_drafting.early_exit import EarlyExit
from shared.self_drafting.loader import load_head
from shared.self_drafting.rounds import SelfDrafting
from shared.self_drafting.trial import try_drafter
from shared.settings import StartupError

logger = logging.getLogger(__name__)

# What it is tried on at start, so that one that never guesses right is seen at once: a text of the target's own, so
# many tokens long, or as many as there are in so many seconds.
_TRIAL_STEPS = 4
_TRIAL_TOKENS = 48
_TRIAL_SECONDS = 3.0


def self_drafting(settings: TargetSettings, model: CausalLM) -> Callable[[Engine], None] | None:
    """What has this model's engine draft, once it is warmed up; None if nothing is to.

    Raises StartupError if that cannot be, and so may what it returns.
    """
    make_drafter = _make_drafter(settings, model)
    if make_drafter is None and settings.copied_tokens == 0:
        return None

    def begin(engine: Engine) -> None:
        copies = Copies(settings.copied_tokens) if settings.copied_tokens else None
        drafter = None if make_drafter is None else make_drafter(engine.model, engine.pool)
        engine.draft_by(SelfDrafting.of(engine, drafter, copies))
        if drafter is None:
            return
        depth = min(drafter.most_steps, _TRIAL_STEPS)
        trial = try_drafter(engine, [[0]], depth, min(_TRIAL_TOKENS, engine.max_context - 1), _TRIAL_SECONDS)
        accepted = [round(share, 2) for share in trial.by_depth]
        logger.info("drafts itself", extra={"with": drafter.source, "accepted_by_depth": accepted})

    return begin


def _make_drafter(settings: TargetSettings, model: CausalLM) -> Callable[[CausalLM, KVPool], SelfDrafter] | None:
    num_layers = settings.early_exit
    if settings.head is not None and num_layers is not None:
        raise StartupError("head and early_exit are both set: one of them drafts")
    if settings.head is not None:
        return load_head(settings.head, model)
    if num_layers is not None:
        return lambda model, pool: EarlyExit(model, pool, num_layers)
    return None
