"""Text to train on that the target writes itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.training.corpus import Corpus, split
from shared.training.kept import SAMPLES, Kept

_NUM_ROWS = 16
_KEEP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Writing:
    """How far the target is: so many tokens of those wanted."""

    num_tokens: int
    wanted: int

    @property
    def share(self) -> float:
        return min(1.0, self.num_tokens / self.wanted)

    @property
    def news(self) -> object:
        """What is worth another line when it changes."""
        return int(10 * self.share)

    def __str__(self) -> str:
        return f"the target has written {self.num_tokens:,} of at least {self.wanted:,} tokens"


@dataclass(frozen=True, slots=True)
class Sampling:
    """So many tokens of a target's own text, at temperature 1, in texts of at most `length` from its end-of-text token
    or its first on; the same for the same `seed`. They are kept in `folder`, with `identity`, for whom this is broken
    off: from there if by Ctrl-C, and else from the latest minute."""

    num_tokens: int
    length: int
    seed: int
    folder: Path
    identity: str

    def corpus(self, target: Any, tokenizer: Any, on_progress: Callable[[Writing], None]) -> Corpus:
        """Raises StartupError if they are too few, or what is kept there is of another training."""
        kept = Kept(self.folder / SAMPLES, f"{self.identity}, {self.length} at a time")
        tokens: list[int] = []
        num_batches = 0

        def take_up(state: Mapping[str, Any]) -> None:
            nonlocal num_batches
            num_batches = state["num_batches"]
            tokens[:] = state["tokens"].tolist()

        def keep() -> None:
            kept.write({"num_batches": num_batches, "tokens": torch.tensor(tokens, dtype=torch.int32)})

        kept.read(take_up)
        kept_at = time.monotonic()
        try:
            while len(tokens) < self.num_tokens:
                on_progress(Writing(len(tokens), self.num_tokens))
                tokens += self._draw(target, tokenizer, num_batches)
                num_batches += 1
                if time.monotonic() - kept_at >= _KEEP_SECONDS:
                    keep()
                    kept_at = time.monotonic()
        finally:
            keep()
        on_progress(Writing(len(tokens), self.num_tokens))
        return split(torch.tensor(tokens, dtype=torch.int64), self.length)

    @torch.no_grad()
    def _draw(self, target: Any, tokenizer: Any, index: int) -> list[int]:
        """The batch of that number."""
        torch.manual_seed(random.Random(f"{self.seed} {index}").getrandbits(63))
        end = tokenizer.eos_token_id
        first = 0 if end is None else end
        start = torch.full((_NUM_ROWS, 1), first, device=target.device)
        drawn = target.generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_new_tokens=self.length,
            pad_token_id=first,
        )
        tokens: list[int] = []
        for row in drawn[:, 1:].tolist():  # behind its end a row is filled up
            tokens += row[: row.index(end) + 1] if end in row else row
        return tokens
