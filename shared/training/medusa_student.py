"""Medusa heads as they are trained: each begins as the target's own (Cai et al. 2024)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shared.self_drafting.head_files import remove_weights
from shared.self_drafting.medusa import MedusaHead, ResidualBlock
from shared.training.teacher import Lesson, Teacher

_NUM_BLOCKS = 1


class MedusaStudent:
    """`num_heads` heads on the target's last state, behind its norm."""

    kind = "medusa"
    first_ahead = 1

    def __init__(self, teacher: Teacher, num_heads: int) -> None:
        hidden, weight = teacher.config.hidden_size, teacher.head_weight
        heads = [MedusaHead(hidden, _NUM_BLOCKS, len(weight)) for _ in range(num_heads)]
        for head in heads:
            head.out.weight.data.copy_(weight)
            for block in head.blocks:
                assert isinstance(block, ResidualBlock)
                nn.init.zeros_(block.linear.weight)
                nn.init.zeros_(block.linear.bias)
        self._heads = nn.ModuleList(heads).to(weight.device)
        teacher.capture([teacher.num_layers])

    @property
    def module(self) -> nn.Module:
        return self._heads

    def predictions(self, lesson: Lesson) -> list[Tensor]:
        assert lesson.seen is not None
        seen = lesson.seen[:, :, 0]
        return [head(seen[:, : -(depth + 1)]) for depth, head in enumerate(self._heads)]

    def write(self, folder: Path) -> None:
        weights = {}
        for i, head in enumerate(self._heads):
            assert isinstance(head, MedusaHead)
            for j, block in enumerate(head.blocks):
                assert isinstance(block, ResidualBlock)
                weights[f"{i}.{j}.linear.weight"] = block.linear.weight
                weights[f"{i}.{j}.linear.bias"] = block.linear.bias
            weights[f"{i}.{len(head.blocks)}.weight"] = head.out.weight
        folder.mkdir(parents=True, exist_ok=True)
        remove_weights(folder)
        half = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()}
        save_file(half, folder / "medusa_lm_head.safetensors")
        config = {"medusa_num_heads": len(self._heads), "medusa_num_layers": _NUM_BLOCKS}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
