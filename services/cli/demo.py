"""`outrider demo`: the whole stack on the demo pair, one request, and the end of it."""

from __future__ import annotations

import asyncio

import typer
from outrider.v1 import inference_pb2
from rich.console import Console

from services.cli.client import Client
from services.cli.generate import GenerateError, stream
from services.cli.stack import Stack, StackSettings

PROMPT = '''import os
import sys


def main():
    """Read the file names given on the command line."""
'''


def demo() -> None:
    """Start the stack on the demo pair, generate once with speculation shown, and stop."""
    asyncio.run(_demo(Console(highlight=False, soft_wrap=True)))


async def _demo(console: Console) -> None:
    """Raises StartupError if the stack cannot start, Exit(1) if the request fails."""
    request = inference_pb2.GenerateRequest(
        text=PROMPT,
        max_tokens=160,
        temperature=0.6,
        seed=1,
        ignore_eos=True,
        speculation=inference_pb2.Speculation(num_draft_tokens=4),
        include_draft_tokens=True,
    )
    console.print("Starting Redis, a draft worker, a target worker and a router ...", style="dim")
    async with Stack(StackSettings(port=0)) as stack:
        console.print(f"Ready at {stack.router_address}. The prompt, then what the service makes of it:\n", style="dim")
        console.print(PROMPT, style="bold", markup=False)
        try:
            await stream(Client(stack.router_address), request, console, show_speculation=True)
        except GenerateError as error:
            typer.echo(f"outrider: {error}", err=True)
            raise typer.Exit(1) from error
