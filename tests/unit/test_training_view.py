"""What a training shows where no bar can move."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from services.cli.training_view import following
from shared.training.samples import Writing
from shared.training.trainer import Progress


def test_a_line_whenever_more_is_known_and_one_of_how_to_go_on() -> None:
    output = io.StringIO()

    def train() -> None:
        with following(Console(file=output, width=200), "draft") as on_progress:
            for num_tokens in (0, 999, 1000, 1999, 20000):
                on_progress(Writing(num_tokens, 10_000))
            on_progress(Progress(0.0, 0, math.nan, []))
            on_progress(Progress(0.25, 9, 1.5, []))
            on_progress(Progress(0.5, 20, 1.25, [0.5, 0.25]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    lines = [line.strip() for line in output.getvalue().splitlines()]
    assert lines[:6] == [
        "0% draft: the target has written 0 of at least 10,000 tokens",
        "10% draft: the target has written 1,000 of at least 10,000 tokens",
        "100% draft: the target has written 20,000 of at least 10,000 tokens",
        "0% draft: begins",
        "50% draft: loss 1.250, agrees 50% 25%",
        "broken off: the same command goes on from what it has kept",
    ]
