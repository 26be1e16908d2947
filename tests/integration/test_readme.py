"""The README's client runs as it stands there."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from tests.support.service import running_stack

README = Path(__file__).parents[2] / "README.md"


async def test_the_clients_ten_lines_run() -> None:
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.splitlines()) <= 10
    async with running_stack() as stack:
        code = example.replace("127.0.0.1:50051", stack.router_address)
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        output, _ = await asyncio.wait_for(client.communicate(), 60)
    assert client.returncode == 0
    assert re.search(r"64 tokens, \d+ of them drafted", output.decode())
