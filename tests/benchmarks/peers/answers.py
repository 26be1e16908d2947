"""What an engine that is measured reads and writes: a line of JSON for each load. Standard library alone, as engines
run under interpreters of their own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts and a number of tokens to what greedy decoding makes of each."""


def answer_lines(load: Callable[[], Generate]) -> None:
    """Loads the engine, says so with a line, and answers each line with seconds and the number of tokens made.

    What libraries print meanwhile goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = load()
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        made = generate(asked["prompts"], asked["num_tokens"])
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": sum(map(len, made))}), file=answers)
