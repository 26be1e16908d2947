"""Another engine, in a process of its own under an interpreter of its own."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.engine.settings import Quantize
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.model_pair import Pair

NUM_DRAFT_TOKENS = 4
_FOLDER = Path(__file__).parent
_EXPORTS = Path("build/peers")
# Prompts of a load make a long line.
_LINE_BYTES = 1 << 24


@dataclass(eq=False, slots=True)
class Engine:
    """`name` as tables have it."""

    name: str
    _process: asyncio.subprocess.Process
    _complaints: tempfile._TemporaryFileWrapper[bytes]

    async def load(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        """Seconds of a load whose streams start together. Raises BenchmarkError if it failed or is short."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}).encode() + b"\n")
        answer = await self._answer()
        wanted = len(prompts) * num_tokens
        if answer["tokens"] != wanted:
            raise BenchmarkError(f"{self.name} made {answer['tokens']} tokens where {wanted} were asked for")
        return float(answer["seconds"])

    async def ready(self) -> None:
        """Returns when it has loaded its models. Raises BenchmarkError if it cannot."""
        await self._answer()

    async def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()
            self._complaints.seek(0)
            last_words = self._complaints.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise BenchmarkError(f"{self.name} ended with status {self._process.returncode}: {last_words[-1]}")
        answer: dict[str, float] = json.loads(line)
        return answer


@asynccontextmanager
async def run_engine(
    kind: str, interpreter: Path, pair: Pair, drafts: bool, quantize: Quantize = "none"
) -> AsyncIterator[Engine]:
    """`kind`: openvino or vllm. Ends with this context; raises BenchmarkError if it does not start."""
    name = f"{kind}, {f'{NUM_DRAFT_TOKENS} drafted' if drafts else 'plain'}"
    command = [str(interpreter), str(_FOLDER / f"{kind}_engine.py"), str(pair.target), str(pair.draft)]
    command += [str(_EXPORTS / kind / pair.name), str(NUM_DRAFT_TOKENS if drafts else 0), quantize]
    # Its own packages, and the OpenMP that it is best with.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    preload = interpreter.parent.parent / "lib" / "libiomp5.so"
    if preload.exists():
        environment["LD_PRELOAD"] = str(preload)
    with tempfile.TemporaryFile() as complaints:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=PIPE, stdout=PIPE, stderr=complaints, limit=_LINE_BYTES
            )
        except OSError as error:
            raise BenchmarkError(f"{kind}'s interpreter {str(interpreter)!r}: {error.strerror}") from error
        try:
            engine = Engine(name, process, complaints)  # type: ignore[arg-type]
            await engine.ready()
            yield engine
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
