"""What workers with no model share: real gRPC servers, a next token that is a function of those before it.

They hold the router to the protocol (`violations`), and fail when and how a test says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from outrider.v1 import worker_pb2

from shared.rpc.options import SERVER_OPTIONS

VOCAB_SIZE = 257
NUM_TEXT_IDS = 94  # ids 1 to 94 are printable ASCII in tests.support.models.byte_tokenizer


def key_of(params: worker_pb2.SequenceParams) -> int:
    """What the tokens depend on besides those before them: nothing if greedy, else seed and index."""
    return 0 if params.temperature == 0 else 1 + params.seed + params.sequence_index


def next_token(token_ids: Sequence[int], key: int = 0) -> int:
    """The target's next token; it depends on every token before it and on how many there are."""
    return 1 + _state(token_ids, key) % NUM_TEXT_IDS


def draft_token(token_ids: Sequence[int], key: int = 0) -> int:
    """The drafter's: the target's own, but for about one in four."""
    right = next_token(token_ids, key)
    return right if _state(token_ids, key) // NUM_TEXT_IDS % 4 else right % NUM_TEXT_IDS + 1


def draft_tokens(token_ids: Sequence[int], count: int, key: int = 0) -> list[int]:
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(draft_token(tokens, key))
    return tokens[len(token_ids) :]


def tree_tokens(
    token_ids: Sequence[int], num_draft_tokens: int, num_nodes: int, key: int = 0
) -> tuple[list[int], list[int]]:
    """The drafter's tree and the row that each of its tokens follows: its own token and the target's at each depth, as
    long as there is room, and behind them more that are neither."""
    tokens, found, rows, row = list(token_ids), [], [], 0
    for _ in range(num_draft_tokens):
        right = next_token(tokens, key)
        for token in dict.fromkeys((draft_token(tokens, key), right)):
            found.append(token)
            rows.append(row)
        tokens.append(right)
        row = len(found)
    while len(found) < num_nodes:
        found.append(NUM_TEXT_IDS + len(found))
        rows.append(0)
    return found[:num_nodes], rows[:num_nodes]


def plain_output(prompt_ids: Sequence[int], max_tokens: int, key: int = 0) -> list[int]:
    """What the target alone makes of a prompt."""
    tokens = list(prompt_ids)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, key))
    return tokens[len(prompt_ids) :]


def _state(token_ids: Sequence[int], key: int) -> int:
    state = 7 + 101 * key
    for token in token_ids:
        state = (state * 31 + token + 1) % 65521
    return state


class Worker:
    """A server on a port of its own, that can be stopped and started again."""

    def __init__(self, info: worker_pb2.WorkerInfo) -> None:
        self.info = info
        self.port = 0
        self.num_starts = 0
        self.num_described = 0
        self.violations: list[str] = []
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.num_starts += 1
        self.info.instance_id = f"{id(self):x}-{self.num_starts}"
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._register(self._server)
        self.port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Dies: streams break off, sequences are gone."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    @property
    def num_sequences(self) -> int:
        raise NotImplementedError

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def GetWorkerInfo(self, request: worker_pb2.GetWorkerInfoRequest, context: Any) -> worker_pb2.WorkerInfo:
        self.num_described += 1
        return self.info

    async def GetWorkerState(self, request: worker_pb2.GetWorkerStateRequest, context: Any) -> worker_pb2.WorkerState:
        return worker_pb2.WorkerState(num_sequences=self.num_sequences)

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(otherwise)


def worker_info(model: str, tokenizer_fingerprint: str, seconds: float) -> worker_pb2.WorkerInfo:
    """Steps take as long with 1 token as with 128: drafting pays."""
    return worker_pb2.WorkerInfo(
        model=model,
        fingerprint="fake",
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocab_size=VOCAB_SIZE,
        max_context=512,
        eos_token_ids=[0],
        block_size=16,
        block_bytes=16 * 1024,
        num_blocks=1024,
        max_batch_tokens=512,
        device="none",
        dtype="float32",
        step_costs=[worker_pb2.StepCost(num_tokens=size, seconds=seconds) for size in (1, 128)],
    )
