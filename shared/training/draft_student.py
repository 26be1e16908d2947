"""A draft model as it is trained: cut out of the target, and taught its distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.training.teacher import Lesson, Teacher


class DraftStudent:
    """`model` is of the target's own class, with its vocabulary."""

    kind = "draft"
    first_ahead = 0

    def __init__(self, teacher: Teacher, model: Any) -> None:
        self._model = model.to(teacher.model.device)
        self._tokenizer = teacher.tokenizer

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._model
        return module

    def predictions(self, lesson: Lesson) -> list[Tensor]:
        return [self._model(input_ids=lesson.token_ids, use_cache=False).logits.float()]

    def write(self, folder: Path) -> None:
        """As a checkpoint of transformers', with the target's tokenizer, in bf16."""
        folder.mkdir(parents=True, exist_ok=True)
        self._model.to(torch.bfloat16).save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        self._model.float()
