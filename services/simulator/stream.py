"""A simulated request on its way, and what it holds on a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.simulator.workload import Request

if TYPE_CHECKING:
    from services.simulator.worker import Worker


@dataclass(slots=True)
class Hold:
    """Blocks that a stream has on a worker: nameless ones, and whether it uses its prefix's."""

    num_blocks: int = 0
    of_prefix: bool = False


class Stream:
    """A request on its way; what its worker keeps of it stands here.

    `order`: its turn; it keeps it when it is preempted. `num_context`: tokens whose KV it needs before it decodes;
    `num_left`: those of them still to be computed, as far as is known. `coming_blocks`: blocks of its prefix that who
    comes next will find where it is prefilled. `num_generated`: tokens of output before it
    began to decode here, at step `join_step`. `destination`: the worker that is to decode it, if that is another.
    """

    __slots__ = (
        *(
            "coming_blocks",
            "destination",
            "end_step",
            "first_token_at",
            "hold",
            "join_step",
            "last_token_at",
            "num_context",
        ),
        *("num_generated", "num_left", "order", "prefix_blocks", "request"),
    )

    def __init__(self, request: Request, order: int, block_size: int) -> None:
        self.request = request
        self.order = order
        self.prefix_blocks = request.prefix_tokens // block_size
        self.coming_blocks = 0
        self.num_context = request.num_prompt_tokens
        self.num_left = 0
        self.num_generated = 0
        self.destination: Worker | None = None
        self.hold = Hold()
        self.join_step = self.end_step = 0
        self.first_token_at = self.last_token_at = 0.0

    def __lt__(self, other: Stream) -> bool:
        return self.order < other.order
