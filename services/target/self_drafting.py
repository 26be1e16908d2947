"""What a target worker drafts with, by its settings."""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.target.settings import TargetSettings
from shared.engine.engine import Engine
from shared.engine.model import CausalLM
from shared.engine.runner import ModelRunner
from shared.engine.self_test import self_test
from shared.engine.tokenizer_fingerprint import tokenizer_fingerprint
from shared.self_drafting.copies import Copies
from shared.self_drafting.draft_model import DraftModel
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
        drafter = None if make_drafter is None else make_drafter(engine)
        engine.draft_by(SelfDrafting.of(engine, drafter, copies))
        if drafter is None:
            return
        depth = min(drafter.most_steps, _TRIAL_STEPS)
        trial = try_drafter(engine, [[0]], depth, min(_TRIAL_TOKENS, engine.max_context - 1), _TRIAL_SECONDS)
        accepted = [round(share, 2) for share in trial.by_depth]
        logger.info("drafts itself", extra={"with": drafter.source, "accepted_by_depth": accepted})

    return begin


def _make_drafter(settings: TargetSettings, model: CausalLM) -> Callable[[Engine], SelfDrafter] | None:
    num_layers = settings.early_exit
    if settings.draft is not None and settings.role == "prefill":
        return None  # it would have nothing to draft for
    if settings.draft is not None:
        return _load_draft(settings.draft, settings, model)
    if settings.head is not None:
        return load_head(settings.head, model)
    if num_layers is not None:
        return _exit_early(num_layers)
    return None


def _exit_early(num_layers: int) -> Callable[[Engine], SelfDrafter]:
    """What it returns raises StartupError if the model has no more layers than that, or they cannot be told apart."""

    def make(engine: Engine) -> SelfDrafter:
        model = engine.model
        if num_layers >= model.num_layers:
            raise StartupError(
                f"early_exit is {num_layers}: it must be below the {model.num_layers} layers of {model.name}"
            )
        runner = ModelRunner(model.first_layers(num_layers), engine.pool)
        engine.capture_steps(runner)
        return EarlyExit(runner)

    return make


def _load_draft(source: str, settings: TargetSettings, target: CausalLM) -> Callable[[Engine], SelfDrafter]:
    """Loads the small model, on the target's device, and has its KV kept beside the target's."""
    if tokenizer_fingerprint(source) != tokenizer_fingerprint(settings.model):
        raise StartupError(f"draft {source} has another tokenizer than {settings.model}: their token ids differ")
    model = CausalLM.load(source, str(target.device), settings.dtype, settings.native, settings.draft_quantize)
    target.kv_beside = (model.kv_shape, model.dtype)

    def make(engine: Engine) -> SelfDrafter:
        assert engine.pool.beside is not None
        runner = ModelRunner(model, engine.pool.beside)
        self_test(model, runner)
        engine.capture_steps(runner)
        return DraftModel(runner)

    return make
