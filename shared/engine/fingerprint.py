"""A model's fingerprint: what its KV blocks mean, the same on every machine and after every restart."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

from shared.engine.kv_pool import LAYOUT_VERSION

_SAMPLED_ELEMENTS = 64


def model_fingerprint(model: PreTrainedModel, block_size: int, beside: str = "") -> str:
    """SHA-256 over weights identity, config, dtype, block size and layout version, and what blocks hold `beside` the
    model's KV, as 32 hex digits.

    A weight counts by name, shape and evenly spaced elements: enough to tell checkpoints and fine-tunes
    apart, without reading gigabytes. Call it before weights are repacked.
    """
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "_attn_implementation_autoset", "dtype"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(f"{model.dtype} {block_size} {LAYOUT_VERSION}{beside}".encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        # An odd step from end to end: an even one could meet the same column of every row.
        sample = flat[:: -(-flat.numel() // _SAMPLED_ELEMENTS) | 1]
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(sample.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:32]
