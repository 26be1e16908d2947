"""Requests as they were recorded: from a JSONL or a CSV file."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from services.simulator.workload import Request

_FIELDS = ("time", "prompt_tokens", "output_tokens", "prefix_id", "prefix_tokens", "model")


class TraceError(ValueError):
    """A trace that cannot be read; the message is one line and names file, line and field."""


def read_trace(path: Path, model: str | None = None) -> list[Request]:
    """The requests of a trace, by time; the first arrives at 0 s.

    One request a line: an object of JSON, or a row of CSV under a header, by the ending of the name. Fields: `time` in
    seconds, `prompt_tokens`, `output_tokens`; if there is a shared prefix, `prefix_id` and `prefix_tokens` (of the
    prompt's tokens, the first so many); `model`, of which one must be chosen if there are several. Other fields are
    not looked at. Raises TraceError.
    """
    rows = _rows(path)
    names = sorted({row.text("model") or "" for row in rows})
    if model is None and len(names) > 1:
        raise TraceError(f"{path}: field model names several: {', '.join(map(repr, names))}; choose one")
    requests = [row.request() for row in rows if model is None or row.text("model") == model]
    if not requests:
        raise TraceError(f"{path}: no requests" + (f" of model {model!r}" if model is not None else ""))
    return _from(min(request.time for request in requests), requests)


def read_traces(path: Path, models: Sequence[str]) -> dict[str, list[Request]]:
    """The requests for each of the models, by time; the first of all arrives at 0 s.

    The file is as for `read_trace`; every line names one of the models. Raises TraceError, also if one has no requests.
    """
    found: dict[str, list[Request]] = {model: [] for model in models}
    for row in _rows(path):
        found[row.one_of("model", models)].append(row.request())
    for model, requests in found.items():
        if not requests:
            raise TraceError(f"{path}: no requests of model {model!r}")
    start = min(request.time for requests in found.values() for request in requests)
    return {model: _from(start, requests) for model, requests in found.items()}


def _from(start: float, requests: Iterable[Request]) -> list[Request]:
    """By time, counted from there."""
    ordered = sorted(requests, key=lambda request: request.time)
    return [request._replace(time=request.time - start) for request in ordered]


def _rows(path: Path) -> list[_Row]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = _csv_lines if path.suffix.lower() == ".csv" else _json_lines
            return [_Row(path, number, values) for number, values in lines(path, file)]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error


def _json_lines(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise TraceError(f"{path}, line {number}: not an object")
        yield number, values


def _csv_lines(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, object]]]:
    reader = csv.DictReader(file, strict=True)
    try:
        for values in reader:
            # Cells left out or left empty are absent.
            yield reader.line_num, {name: cell for name, cell in values.items() if cell}
    except csv.Error as error:
        raise TraceError(f"{path}, line {reader.line_num}: {error}") from error


class _Row:
    """One line's fields, each judged when it is asked for."""

    def __init__(self, path: Path, number: int, values: Mapping[str, object]) -> None:
        self._where = f"{path}, line {number}"
        self._values = {name: values[name] for name in _FIELDS if values.get(name) is not None}

    def request(self) -> Request:
        prefix_id = self.text("prefix_id")
        num_prompt_tokens = self._count("prompt_tokens", 1)
        prefix_tokens = 0
        if prefix_id is not None:
            prefix_tokens = self._count("prefix_tokens", 0)
            if prefix_tokens > num_prompt_tokens:
                raise self._error("prefix_tokens", f"at most prompt_tokens, {num_prompt_tokens}")
        elif "prefix_tokens" in self._values and self._count("prefix_tokens", 0):
            raise TraceError(f"{self._where}: field prefix_id is missing beside prefix_tokens")
        return Request(self._time(), num_prompt_tokens, self._count("output_tokens", 1), prefix_id, prefix_tokens)

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        return None if value is None else str(value)

    def one_of(self, name: str, known: Sequence[str]) -> str:
        """The field's text, which must be one of these."""
        text = self.text(name)
        if text is None:
            raise TraceError(f"{self._where}: field {name} is missing")
        if text not in known:
            raise self._error(name, f"one of {', '.join(map(repr, known))}")
        return text

    def _time(self) -> float:
        seconds = self._number("time")
        if not math.isfinite(seconds):
            raise self._error("time", "finite")
        return seconds

    def _count(self, name: str, least: int) -> int:
        number = self._number(name)
        if not (math.isfinite(number) and number >= least and number == int(number)):
            raise self._error(name, f"a whole number from {least}")
        return int(number)

    def _number(self, name: str) -> float:
        if name not in self._values:
            raise TraceError(f"{self._where}: field {name} is missing")
        value = self._values[name]
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)
            except (ValueError, OverflowError):
                pass
        raise self._error(name, "a number")

    def _error(self, name: str, expected: str) -> TraceError:
        return TraceError(f"{self._where}: field {name} is {self._values[name]!r}: must be {expected}")
