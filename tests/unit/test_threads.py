"""How many CPU threads a worker computes with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.target.settings import TargetSettings
from shared.engine.model import CausalLM
from shared.engine.threads import num_threads_for
from shared.models import DEMO_TARGET
from shared.sampling.verifier import verify
from shared.worker.service import load_engine
from tests.support.threads import threads

_MIB = 1 << 20


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Are PyTorch's default."""
    with threads(3):
        yield


@pytest.mark.parametrize(
    ("mebibytes", "most", "expected"), [(0, 2, 1), (31, 2, 1), (32, 2, 2), (550, 2, 2), (550, 64, 34), (550, 1, 1)]
)
def test_there_is_a_thread_for_each_16_mib_of_weights(mebibytes: int, most: int, expected: int) -> None:
    assert num_threads_for(mebibytes * _MIB, most) == expected


def test_weights_are_counted_as_they_were_loaded() -> None:
    in_file = (DEMO_TARGET / "model.safetensors").stat().st_size
    for dtype, times in (("bfloat16", 1), ("float32", 2)):
        loaded = CausalLM.load(str(DEMO_TARGET), "cpu", dtype).weight_bytes
        assert loaded == pytest.approx(times * in_file, rel=0.01)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("said", "expected"), [(None, 1), (2, 2)])
def test_a_worker_computes_with_as_many_as_pay_or_are_asked_for(
    said: int | None, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TargetSettings(model=str(DEMO_TARGET), device="cpu", num_blocks=30, num_threads=said)
    with caplog.at_level("INFO"):
        load_engine(settings, verify)
    (ready,) = [record.__dict__ for record in caplog.records if record.message == "model ready"]
    assert (torch.get_num_threads(), ready["threads"]) == (expected, expected)
