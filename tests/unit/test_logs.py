from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from shared.telemetry.logs import configure_logging

logger = logging.getLogger("shared.something")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("services", "shared"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_a_record_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", "info")
    logger.info("placed %d of\n%d", 1, 2, extra={"worker": "a:1", "path": object})
    (line,) = lines(capsys)
    time = datetime.fromisoformat(line.pop("time"))
    assert time.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - time) < timedelta(minutes=1)
    assert line == {
        "level": "INFO",
        "service": "router",
        "logger": "shared.something",
        "message": "placed 1 of\n2",
        "worker": "a:1",
        "path": "<class 'object'>",
    }


def test_extra_fields_do_not_replace_ours(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", "INFO")
    logger.info("kept", extra={"service": "other", "level": "other"})
    (line,) = lines(capsys)
    assert (line["service"], line["level"]) == ("router", "INFO")


def test_an_exception_brings_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("target", "INFO")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("step failed")
    (line,) = lines(capsys)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: broken")


def test_a_current_span_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("target", "INFO")
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1)))
    with use_span(span):
        logger.info("inside")
    logger.info("outside")
    inside, outside = lines(capsys)
    assert (inside["trace_id"], inside["span_id"]) == (f"{0xABC:032x}", f"{0xDEF:016x}")
    assert "trace_id" not in outside


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("DEBUG", ["shared DEBUG", "shared INFO", "grpc WARNING", "shared ERROR"]),
        ("INFO", ["shared INFO", "grpc WARNING", "shared ERROR"]),
        ("WARNING", ["grpc WARNING", "shared ERROR"]),
        ("ERROR", ["shared ERROR"]),
    ],
)
def test_levels(level: str, heard: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("draft", level)
    logging.getLogger("shared").debug("")
    logging.getLogger("shared").info("")
    for noisy in ("grpc", "asyncio", "transformers.modeling_utils"):
        logging.getLogger(noisy).info("")
    logging.getLogger("grpc").warning("")
    logging.getLogger("shared").error("")
    assert [f"{line['logger']} {line['level']}" for line in lines(capsys)] == heard


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match=r"log level is 'loud': must be one of DEBUG, INFO, WARNING, ERROR"):
        configure_logging("router", "loud")


def test_warnings_are_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", "INFO")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    (line,) = lines(capsys)
    assert line["logger"] == "py.warnings"
    assert "old thing" in line["message"]


def test_a_collector_that_is_down_is_reported_once_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logging("router", "INFO")
    now = 1000.0
    monkeypatch.setattr("shared.telemetry.logs.time.monotonic", lambda: now)
    exporter = logging.getLogger("opentelemetry.exporter.anything")
    for second in (0, 1, 59, 60, 61):
        now = 1000.0 + second
        exporter.error("failed at %d", second)
        logger.info("ours at %d", second)
    messages = [line["message"] for line in lines(capsys)]
    assert [message for message in messages if message.startswith("failed")] == ["failed at 0", "failed at 60"]
    assert len([message for message in messages if message.startswith("ours")]) == 5


def test_transformers_speaks_json_too() -> None:
    """It installs a handler of its own at import; in a process of its own so as to import it first."""
    code = (
        "import transformers\n"
        "from shared.telemetry.logs import configure_logging\n"
        "configure_logging('target', 'INFO')\n"
        "transformers.utils.logging.get_logger('transformers.models').warning('odd weights')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    (line,) = [json.loads(line) for line in run.stderr.splitlines()]
    assert (line["service"], line["logger"], line["message"]) == ("target", "transformers.models", "odd weights")
