"""Heads by what their files hold, whoever published them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from shared.engine.engine import Engine
from shared.engine.linear import pack_linears
from shared.engine.model import CausalLM
from shared.self_drafting.drafter import SelfDrafter
from shared.self_drafting.eagle import Eagle
from shared.self_drafting.eagle_files import eagle_head, fingerprint
from shared.self_drafting.head_files import HeadFiles
from shared.self_drafting.medusa import Medusa
from shared.self_drafting.medusa_files import is_medusa, medusa_heads
from shared.settings import StartupError

logger = logging.getLogger(__name__)


def load_head(source: str, model: CausalLM) -> Callable[[Engine], SelfDrafter]:
    """Loads the head at `source` for a model that is not laid out for serving yet, and has it keep what the head needs
    of its steps; how to make what drafts with it, once its engine is warmed up.

    Raises StartupError, with one clear line, for a head of another model, a damaged file, or one that holds more than
    weights.
    """
    files = HeadFiles(source)
    try:
        return _load(files, model)
    except StartupError:
        raise
    except Exception as error:
        # What a damaged head makes torch and transformers raise is of no one class.
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise files.error(f"cannot be made sense of ({why})") from error


def _load(files: HeadFiles, model: CausalLM) -> Callable[[Engine], SelfDrafter]:
    extra: dict[str, object] = {"head": files.source}
    if is_medusa(files.weights):
        heads = medusa_heads(files, model)
        model.capture([model.num_layers])
        logger.info("heads loaded", extra=extra | {"kind": Medusa.source, "count": len(heads)})
        for each in heads:
            _pack(each, model)
        return lambda engine: Medusa(heads, engine.model.dtype)
    head = eagle_head(files, model)
    shape = head.shape
    model.extend_kv(1, fingerprint(files))
    model.capture(shape.captured_layers)
    logger.info("head loaded", extra=extra | {"kind": shape.kind, "sees": shape.captured_layers})
    _pack(head, model)
    return lambda engine: Eagle(head, engine.model, engine.pool)


def _pack(head: nn.Module, model: CausalLM) -> None:
    """Lays its weights out as the model's are."""
    pack_linears(head, lambda: None, model.kernels, {})
