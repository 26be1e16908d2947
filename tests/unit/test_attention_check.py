"""Kernels that attend wrongly are seen before they serve, in whatever way a model's layers attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared.engine.attention.layer import LayerAttention
from shared.engine.attention_check import check_attention
from shared.engine.kv_pool import KVShape
from shared.engine.native.step import NativeStep
from shared.settings import StartupError
from tests.support.kernels import INSTRUCTION_SETS, kernels

SHAPES = [KVShape(3, 2, 64, 64), KVShape(2, 1, 24, 16)]
PLAIN = LayerAttention(8, 0.125, None, None)
WAYS = {
    "plain": PLAIN,
    "short window": PLAIN._replace(sliding_window=9),
    "long window": PLAIN._replace(sliding_window=4096),
    "longer window than is tested": PLAIN._replace(sliding_window=32768),
    "soft cap": PLAIN._replace(softcap=50.0),
    "another scale": PLAIN._replace(scale=1.0),
}


def check(instruction_set: str, how: LayerAttention, shape: KVShape = SHAPES[0], most: int = 1 << 17) -> None:
    check_attention(kernels(instruction_set), shape, [how, how], 16, torch.bfloat16, most)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_kernels_pass(instruction_set: str, dtype: torch.dtype, shape: KVShape) -> None:
    library = kernels(instruction_set)
    for most in (8192, 600, 41):
        check_attention(library, shape, WAYS.values(), 16, dtype, most)


# Each takes the arguments of `attend` behind the heads: scale, window, soft cap, sinks.
WRONG: dict[str, tuple[str, Callable[..., tuple[Any, ...]]]] = {
    "a window of one more": ("long window", lambda scale, window, *rest: (scale, window + 1, *rest)),
    "a window of one less": ("long window", lambda scale, window, *rest: (scale, window - 1, *rest)),
    "a short window of one more": ("short window", lambda scale, window, *rest: (scale, window + 1, *rest)),
    "no window": ("long window", lambda scale, window, *rest: (scale, None, *rest)),
    "no soft cap": ("soft cap", lambda scale, window, cap, sinks: (scale, window, None, sinks)),
    "its own scale": ("another scale", lambda scale, *rest: (0.125, *rest)),
    "a scale that is somewhat less": ("plain", lambda scale, *rest: (0.95 * scale, *rest)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_wrong_ones_do_not(instruction_set: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, change = WRONG[wrong]
    right = NativeStep.attend

    def attend(step: NativeStep, layer: int, query: Any, key: Any, value: Any, *how: Any) -> Any:
        return right(step, layer, query, key, value, *change(*how))

    check(instruction_set, WAYS[way])
    monkeypatch.setattr(NativeStep, "attend", attend)
    with pytest.raises(StartupError, match=r"attend otherwise than PyTorch, by .* native off serves without them"):
        check(instruction_set, WAYS[way])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_single_key_that_is_not_looked_at_is_seen(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a stretch that kernels take apart from the others."""
    right = NativeStep.attend

    def attend(step: NativeStep, *arguments: Any) -> Any:
        pool, indices, _ = step._kept
        tables = indices[4 * 3 :]
        pool.data[int(tables[512 // 16]), 0, :, 512 % 16] = 0
        return right(step, *arguments)

    monkeypatch.setattr(NativeStep, "attend", attend)
    with pytest.raises(StartupError, match="over 1100 positions"):
        check(instruction_set, PLAIN)


@pytest.mark.parametrize("way", ["plain", "short window", "soft cap"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_token_of_a_tree_that_sees_another_line_is_seen(
    instruction_set: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = NativeStep.attend

    def attend(step: NativeStep, *arguments: Any) -> Any:
        trees = step._kept[2]
        assert trees is not None
        # Both follow a token of the same depth.
        first = trees.num_tokens + 2 * trees.num_sequences
        trees.packed[first + 4], trees.packed[first + 7] = trees.packed[first + 7], trees.packed[first + 4]
        return right(step, *arguments)

    monkeypatch.setattr(NativeStep, "attend", attend)
    with pytest.raises(StartupError, match="attend otherwise"):
        check(instruction_set, WAYS[way])
