"""The target as a teacher: what it sees and what it would say, at every token of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.engine.captures import Captures
from shared.engine.decoder_layers import decoder_layers
from shared.engine.source import cannot_be_loaded, check_source
from shared.settings import StartupError


class Lesson(NamedTuple):
    """Of a batch: `token_ids` `[B, T]`, what was captured of each `[B, T, layers, hidden]`, if anything was to be, and
    the target's logits `[B, T, V]` of what follows."""

    token_ids: Tensor
    seen: Tensor | None
    logits: Tensor


class Teacher:
    """Runs the target, of which nothing is changed, in float32 on a CPU and in its own type elsewhere."""

    def __init__(self, source: str) -> None:
        """Raises StartupError if it cannot be loaded."""
        check_source(source)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            dtype = torch.float32 if device == "cpu" else "auto"
            loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(source)
        except Exception as error:  # as in the engine: what loads models shares no exception class
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise StartupError(f"model {source} {cannot_be_loaded(source, first_line)}") from error
        self.model: Any = loaded.to(device).eval().requires_grad_(False)
        self.name = Path(source).name
        self.config: Any = self.model.config.get_text_config()
        self._decoder = decoder_layers(self.model, self.name)
        self._captures: Captures | None = None

    @property
    def layers(self) -> Any:
        return self._decoder.layers

    @property
    def num_layers(self) -> int:
        return len(self._decoder.layers)

    @property
    def norm_weight(self) -> Tensor:
        """`[hidden]`: of the norm before its head."""
        norm: Any = self._decoder.norm
        weight: Tensor = norm.weight
        return weight

    @property
    def head_weight(self) -> Tensor:
        """`[V, hidden]`: what its logits are made with."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[B, T]` to `[B, T, hidden]`, in float32."""
        embedded: Tensor = self.model.get_input_embeddings()(token_ids)
        return embedded.float()

    def capture(self, layers: Sequence[int]) -> None:
        """What lessons are to hold; once. See `CausalLM.capture`."""
        self._captures = Captures(self._decoder, layers)

    @torch.no_grad()
    def teach(self, token_ids: Tensor) -> Lesson:
        token_ids = token_ids.to(self.model.device)
        logits = self.model(input_ids=token_ids, use_cache=False).logits
        seen = None if self._captures is None else self._captures.take_batch().float()
        return Lesson(token_ids, seen, logits.float())
