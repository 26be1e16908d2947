"""Medusa heads as they are published: FasterDecoding's layout and vLLM's."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from shared.engine.model import CausalLM
from shared.self_drafting.head_files import HeadFiles
from shared.self_drafting.medusa import MedusaHead

# Head, then place in it: blocks one behind the other, and behind them what makes logits.
_ORIGINAL = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_OUT = re.compile(r"lm_heads\.(\d+)\.weight")
# Which tokens the logits of the smaller vocabulary of some are, which we have no use for.
_TOKEN_MAP = "token_map"


def is_medusa(weights: dict[str, Tensor]) -> bool:
    return any(_ORIGINAL.fullmatch(name) or _VLLM_OUT.fullmatch(name) for name in weights)


def medusa_heads(files: HeadFiles, model: CausalLM) -> list[MedusaHead]:
    """All that there are: how many, the weights say, as configs are known to be wrong. Raises StartupError if they are
    not for this model or not whole."""
    if _TOKEN_MAP in files.weights:
        raise files.error("has logits for some of the vocabulary only, which is not supported")
    blocks: dict[tuple[int, int], dict[str, Tensor]] = {}
    outs: dict[int, Tensor] = {}
    for name, tensor in files.weights.items():
        if match := _ORIGINAL.fullmatch(name):
            head, place, what = int(match[1]), int(match[2]), match[3]
            if what == "weight":
                outs[head] = tensor
            else:
                blocks.setdefault((head, place), {})[what.removeprefix("linear.")] = tensor
        elif match := _VLLM_BLOCK.fullmatch(name):
            blocks.setdefault((int(match[1]), int(match[2])), {})[match[3]] = tensor
        elif match := _VLLM_OUT.fullmatch(name):
            outs[int(match[1])] = tensor
        else:
            raise files.error(f"has weights of no Medusa: {name}")
    if sorted(outs) != list(range(len(outs))) or any(head not in outs for head, _ in blocks):
        raise files.error(f"lacks heads: of {max([*outs, *(head for head, _ in blocks)]) + 1} it has {len(outs)} whole")
    return [_head(files, model, blocks, head, out) for head, out in sorted(outs.items())]


def _head(
    files: HeadFiles, model: CausalLM, blocks: dict[tuple[int, int], dict[str, Tensor]], index: int, out: Tensor
) -> MedusaHead:
    places = sorted(place for head, place in blocks if head == index)
    if places != list(range(len(places))):
        raise files.error(f"lacks a block of head {index}: it has {places}")
    if tuple(out.shape) != (model.vocab_size, model.hidden_size):
        raise files.error(
            f"has logits of {out.shape[0]} tokens from {out.shape[-1]} hidden numbers, where {model.name} has "
            f"{model.vocab_size} and {model.hidden_size}"
        )
    with torch.device("meta"):
        head = MedusaHead(model.hidden_size, len(places), model.vocab_size)
    state = {"out.weight": out}
    for place in places:
        for what in ("weight", "bias"):
            tensor = blocks[index, place].get(what)
            # The projects that publish them leave a bias of 0 out.
            state[f"blocks.{place}.linear.{what}"] = torch.zeros(model.hidden_size) if tensor is None else tensor
    try:
        head.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise files.error(f"has a head {index} of other shapes: {' '.join(str(error).split())[:300]}") from error
    return head.to(model.device, model.dtype).eval()
