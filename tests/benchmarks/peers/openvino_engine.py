"""OpenVINO GenAI, plain or with a draft model, for `answers`; under the interpreter of an environment that has
openvino-genai, optimum-intel and transformers below 4.60.

python openvino_engine.py TARGET DRAFT EXPORTS NUM_DRAFT_TOKENS none|int8|int4
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from answers import Generate, answer_lines

# As its users have them: symmetric and per channel in 8 bits, of groups in 4.
_QUANTIZED: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "sym": True},
    "int4": {"bits": 4, "sym": True, "group_size": 64},
}


def export(model: Path, exports: Path, quantize: str) -> Path:
    """The model in OpenVINO's format, in bf16 or with weights in int8 or int4, with a tokenizer, which its pipelines
    ask for; made if it is not there yet, or is older than the model."""
    place = exports / (model.name if quantize == "none" else f"{model.name}-{quantize}")
    made = place / "openvino_tokenizer.xml"
    weights = model / "model.safetensors"
    if made.exists() and made.stat().st_mtime > weights.stat().st_mtime:
        return place
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import PreTrainedTokenizerFast

    weights_as: dict[str, Any] = {"load_in_8bit": False}
    if quantize != "none":
        weights_as = {"quantization_config": OVWeightQuantizationConfig(**_QUANTIZED[quantize])}
    exported = OVModelForCausalLM.from_pretrained(str(model), export=True, compile=False, **weights_as)
    exported.save_pretrained(place)
    # Not by its folder: these transformers do not know the classes that newer ones name there.
    tokenizer: Any = PreTrainedTokenizerFast
    there, back = convert_tokenizer(tokenizer(tokenizer_file=str(model / "tokenizer.json")), with_detokenizer=True)
    openvino.save_model(back, place / "openvino_detokenizer.xml")
    openvino.save_model(there, made)
    return place


def load() -> Generate:
    target, draft, exports = (Path(each) for each in sys.argv[1:4])
    num_draft_tokens, quantize = int(sys.argv[4]), sys.argv[5]
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = 2
    scheduling.max_num_batched_tokens = 2048
    options = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    if num_draft_tokens:
        options["draft_model"] = openvino_genai.draft_model(export(draft, exports, quantize), "CPU")
    pipeline = openvino_genai.ContinuousBatchingPipeline(export(target, exports, quantize), scheduling, "CPU", options)
    how = openvino_genai.GenerationConfig()
    how.do_sample, how.ignore_eos = False, True
    if num_draft_tokens:
        how.num_assistant_tokens = num_draft_tokens

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        how.max_new_tokens = how.min_new_tokens = num_tokens
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [list(each.m_generation_ids[0]) for each in pipeline.generate(inputs, [how] * len(inputs))]

    return generate


if __name__ == "__main__":
    answer_lines(load)
