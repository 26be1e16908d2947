"""A draft worker without a model: it copies, and computes nothing."""

from __future__ import annotations

import torch

from services.draft.proposer import draw
from services.draft.settings import DraftSettings
from shared.engine.engine import Engine
from shared.engine.kv_pool import KVShape
from shared.engine.model import CausalLM

# Longer than any target's context, in blocks of the largest size.
_MAX_CONTEXT = 1 << 20
_BLOCK_SIZE = 256
# What copying takes of a worker, for each token that it is told of.
_TOKEN_SECONDS = 2e-6


class NoModel(CausalLM):
    """Takes a model's place where nothing is ever to be computed."""

    def __init__(self) -> None:
        self.name = "none"
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        # Any target's ids are as good as another's.
        self.vocab_size = (1 << 31) - 1
        self.eos_token_ids = frozenset()
        self.kv_shape = KVShape(1, 1, 1, 1)
        self.kv_beside = None
        self.max_context = _MAX_CONTEXT
        self.kernels = self._triton = None

    def fingerprint(self, block_size: int) -> str:
        return "none"


def engine_without_model(settings: DraftSettings) -> Engine:
    """An engine that keeps books of sequences, and takes no steps for them."""
    size = {"block_size": _BLOCK_SIZE, "num_blocks": _MAX_CONTEXT // _BLOCK_SIZE, "host_cache_gib": None}
    engine = Engine(NoModel(), settings.model_copy(update=size), draw)
    engine.step_costs = [(1, _TOKEN_SECONDS)]
    return engine
