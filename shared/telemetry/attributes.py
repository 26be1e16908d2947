"""Names of span and metric attributes: OpenTelemetry's conventions, and ours under `outrider.`.

Conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/ and .../rpc/.
"""

from __future__ import annotations

from typing import Final

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

OPERATION_CHAT: Final = "chat"
OPERATION_TEXT_COMPLETION: Final = "text_completion"
PROVIDER: Final = "outrider"

RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_RESPONSE_STATUS_CODE: Final = "rpc.response.status_code"
ERROR_TYPE: Final = "error.type"

# Position of a token within its draft, from 0.
POSITION: Final = "outrider.position"
ROUND: Final = "outrider.round"
NUM_DRAFT_TOKENS: Final = "outrider.num_draft_tokens"
DRAFT_SOURCE: Final = "outrider.draft.source"
NUM_ACCEPTED: Final = "outrider.num_accepted"
NUM_TOKENS: Final = "outrider.num_tokens"
NUM_SEQUENCES: Final = "outrider.num_sequences"
CACHED_TOKENS: Final = "outrider.cached_tokens"
SEQUENCE_INDEX: Final = "outrider.sequence_index"
# Addresses of the workers that placement chose, what of the prompt is there already, and what it foresaw, in seconds:
# all in all, to the first token, and by which other streams are delayed.
PLACEMENT_WORKER: Final = "outrider.placement.worker"
PLACEMENT_PREFILL_WORKER: Final = "outrider.placement.prefill_worker"
PLACEMENT_PREFIX_TOKENS: Final = "outrider.placement.prefix_tokens"
PLACEMENT_COST: Final = "outrider.placement.cost"
PLACEMENT_TTFT: Final = "outrider.placement.ttft"
PLACEMENT_HARM: Final = "outrider.placement.harm"
# Of KV from another worker: its address, what moved the bytes, and how many.
TRANSFER_PEER: Final = "outrider.transfer.peer"
TRANSFER_ENGINE: Final = "outrider.transfer.engine"
TRANSFER_BYTES: Final = "outrider.transfer.bytes"
# Of what is counted: which of its states it is in.
STATE: Final = "outrider.state"
# What a worker is for: target or draft.
WORKER_KIND: Final = "outrider.worker.kind"
# Where KV came from: another worker, or the prefix store.
TRANSFER_SOURCE: Final = "outrider.transfer.source"
# What became of a block on its way to the prefix store or from it: stored, dropped, hit or corrupt.
STORE_OUTCOME: Final = "outrider.prefix_store.outcome"
CANCELLED: Final = "outrider.cancelled"
