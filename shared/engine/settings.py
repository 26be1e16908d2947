"""Settings of a worker, draft or target: its model and its engine."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from shared.settings import ServiceSettings


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return value


def _power_of_two(value: int) -> int:
    if value & (value - 1) or not 8 <= value <= 256:
        raise ValueError("must be a power of two from 8 to 256")
    return value


Native = Literal["auto", "off"]
Quantize = Literal["none", "int8", "int4"]


class EngineSettings(ServiceSettings):
    """What the engine needs to know, whichever worker it serves."""

    model: str = Field(min_length=1, description="Model to load: a local folder or a hub name.")
    device: Annotated[str, AfterValidator(_device)] = Field(
        default="auto", description="auto (CUDA if there is one, else CPU), cpu, cuda or cuda:N."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of weights and KV cache: float32, bfloat16, float16, or auto: the checkpoint's own.",
    )
    block_size: Annotated[int, AfterValidator(_power_of_two)] = Field(
        default=16, description="Token positions in a KV block, a power of two from 8 to 256."
    )
    num_blocks: int | None = Field(
        default=None, ge=2, description="KV blocks, taken at start; unset: as many as kv_cache_gib holds."
    )
    kv_cache_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory for the KV cache, in GiB, taken at start; unset: what memory_share leaves of a CUDA device "
        "beside weights and a step, or on CPU half that share of free RAM, at most 4, as it comes to be used.",
    )
    memory_share: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of its device's memory that the worker may take while kv_cache_gib is unset.",
    )
    host_cache_gib: float | None = Field(
        default=None,
        gt=0,
        description="RAM for KV blocks that a CUDA device's KV cache has no more room for, in GiB: they come back from "
        "there instead of being computed again; unset: none. On CPU kv_cache_gib makes better use of it.",
    )
    # A step must be able to verify one sequence's longest draft, 16 tokens, and the one before it.
    max_batch_tokens: int = Field(
        default=512, ge=17, description="Token budget of a step: decodes first, then prefill chunks."
    )
    max_sequences: int = Field(default=256, ge=1, description="Most sequences in one step.")
    max_context: int | None = Field(
        default=None,
        ge=1,
        description="Most prompt and output tokens of a sequence together; unset: the model's own limit.",
    )
    native: Native = Field(
        default="auto",
        description="auto: kernels of its own on CPUs with AVX2 or better, compiled when needed, and on NVIDIA's "
        "devices from Ampere on; off: PyTorch's.",
    )
    quantize: Quantize = Field(
        default="none",
        description="none, or what weights of linear layers but the head are rounded to: int8, with a scale for each "
        "output, or int4, with one for each 64 inputs of it. In bfloat16 on CPUs with kernels of its own.",
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads; unset: one for each 16 MiB of the model's weights, without what drafts beside it "
        "and as if none were rounded, and at most PyTorch's default.",
    )
