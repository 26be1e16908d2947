"""The baseline: transformers' own `generate` on the same pair, plain and assisted by the draft.

It runs in a process of its own, with the threads and kernels that PyTorch takes by default:

    echo '[[1, 2, 3]]' | python -m tests.benchmarks.baseline --target DIR --draft DIR --num-tokens 128
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from services.cli.launcher import PARENT, die_with_parent
from tests.benchmarks.errors import BenchmarkError

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Baseline:
    """Output tokens a second at one stream, prefill included, over all prompts."""

    plain: float
    assisted: float


async def run_baseline(target: Path, draft: Path, prompts: Sequence[list[int]], num_tokens: int) -> Baseline:
    """Measures in a child process, which ends with this call, whichever way; raises BenchmarkError if it fails."""
    command = [sys.executable, "-m", "tests.benchmarks.baseline"]
    command += ["--target", str(target), "--draft", str(draft), "--num-tokens", str(num_tokens)]
    environment = {**os.environ, PARENT: str(os.getpid())}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    try:
        output, complaints = await process.communicate(json.dumps(list(prompts)).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last_words = (complaints.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise BenchmarkError(f"the baseline ended with status {process.returncode}: {last_words}")
    return Baseline(**json.loads(output))


def measure(target: Path, draft: Path, prompts: Sequence[list[int]], num_tokens: int) -> Baseline:
    """Loads the pair in bf16, warms up, and takes plain and assisted in turns, prompt by prompt."""
    target_model, draft_model = _load(target), _load(draft)
    assisted = {"assistant_model": draft_model}
    _generate(target_model, prompts[0], _WARM_UP_TOKENS)
    _generate(target_model, prompts[0], _WARM_UP_TOKENS, **assisted)
    plain_seconds = assisted_seconds = 0.0
    for prompt in prompts:
        plain_seconds += _generate(target_model, prompt, num_tokens)
        assisted_seconds += _generate(target_model, prompt, num_tokens, **assisted)
    total = len(prompts) * num_tokens
    return Baseline(plain=total / plain_seconds, assisted=total / assisted_seconds)


def _load(model: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    return loaded


def _generate(model: Any, prompt: list[int], num_tokens: int, **options: Any) -> float:
    """Seconds of one greedy `generate` with a KV cache. Raises BenchmarkError if it stops short."""
    input_ids = torch.tensor([prompt])
    start = time.perf_counter()
    with torch.inference_mode():
        sequence = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=num_tokens,
            **options,
        )
    seconds = time.perf_counter() - start
    num_new = sequence.shape[1] - len(prompt)
    if num_new != num_tokens:
        raise BenchmarkError(f"generate made {num_new} tokens where {num_tokens} were asked for")
    return seconds


def main() -> None:
    """Prompts come as JSON on standard input, a Baseline goes as JSON to standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--num-tokens", type=int, required=True)
    options = parser.parse_args()
    die_with_parent()
    print(json.dumps(asdict(measure(options.target, options.draft, json.load(sys.stdin), options.num_tokens))))


if __name__ == "__main__":
    main()
