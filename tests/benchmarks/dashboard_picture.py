"""The dashboard's picture: its panels over a real load, drawn by a Prometheus server's own page in a browser.

It needs prometheus and chromium, as Debian packages them (that page is Debian's):

python -m tests.benchmarks.dashboard_picture --out k8s/components/monitoring/dashboard.png
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.cli.ports import free_ports
from services.cli.stack import LOOPBACK
from tests.support.service import running_stack

DASHBOARD = Path("k8s/components/monitoring/dashboard.json")
LIBRARIES = Path("/usr/share/doc/prometheus/examples/console_libraries")
POOLS = {"router": "router", "prefill-0": "prefill", "decode-0": "decode", "draft": "draft"}
SCRAPED_EVERY_SECONDS = 2
RATE_INTERVAL = "15s"
# Of Grafana's grid, which has 24 columns.
COLUMN_PIXELS, ROW_PIXELS = 68, 36


def console(dashboard: Mapping[str, Any], seconds: int) -> str:
    """The dashboard's panels as a page of Prometheus's, each at its place."""
    divisions, graphs = [], []
    for number, panel in enumerate(dashboard["panels"]):
        place = panel["gridPos"]
        style = (
            f"position:absolute;left:{place['x'] * COLUMN_PIXELS + 20}px;top:{place['y'] * ROW_PIXELS + 50}px;"
            f"width:{place['w'] * COLUMN_PIXELS - 20}px"
        )
        divisions.append(f'<div style="{style}"><b>{panel["title"]}</b><div id="graph{number}"></div></div>')
        targets = panel["targets"]
        parameters = {
            "expr": [target["expr"].replace("$__rate_interval", RATE_INTERVAL) for target in targets],
            "name": [target["legendFormat"].replace("{{", "[[").replace("}}", "]]") for target in targets],
            "height": place["h"] * ROW_PIXELS - 130,
            "width": place["w"] * COLUMN_PIXELS - 90,
            "min": 0,
            "duration": seconds,
            "yUnits": panel["fieldConfig"]["defaults"].get("unit", "").replace("short", ""),
        }
        script = json.dumps(parameters)[:-1]
        graphs.append(f'new PromConsole.Graph({script}, "node": document.querySelector("#graph{number}")}});')
    # Braces are the template language's.
    body = "\n".join(divisions) + "<script>\n" + "\n".join(graphs) + "\n</script>"
    title = f"<h4 style='position:absolute;left:20px;top:10px'>{dashboard['title']}</h4>"
    head = '<!doctype html><html><head>{{ template "prom_console_head" }}</head><body>'
    return head + title + body.replace("{{", "{ {").replace("}}", "} }") + "</body></html>"


async def _run(out: Path, minutes: float) -> None:
    *ports, prometheus_port = free_ports(LOOPBACK, len(POOLS) + 1)
    pages = dict(zip(POOLS, ports, strict=True))
    environment = {name: {f"OUTRIDER_{_service(name)}_METRICS_PORT": str(port)} for name, port in pages.items()}
    with tempfile.TemporaryDirectory() as folder:
        height = _write_console(Path(folder, "consoles"), round(60 * minutes))
        _write_configuration(Path(folder, "prometheus.yaml"), pages)
        async with running_stack(environment, num_prefill=1, num_decode=1, prefix_store=True) as stack:
            prometheus = await asyncio.create_subprocess_exec(
                "prometheus",
                f"--config.file={folder}/prometheus.yaml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={LOOPBACK}:{prometheus_port}",
                f"--web.console.templates={folder}/consoles",
                f"--web.console.libraries={LIBRARIES}",
                stderr=subprocess.DEVNULL,
            )
            try:
                await _load(stack.router_address, 60 * minutes)
                url = f"http://{LOOPBACK}:{prometheus_port}/consoles/outrider.html"
                # Raises where the page is not there.
                await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())
                await asyncio.to_thread(_draw, url, out, (24 * COLUMN_PIXELS + 40, height), folder)
            finally:
                prometheus.terminate()
                await prometheus.wait()


def _service(name: str) -> str:
    return "TARGET" if name.partition("-")[0] in ("prefill", "decode") else name.upper()


def _write_configuration(path: Path, pages: Mapping[str, int]) -> None:
    targets = [{"targets": [f"{LOOPBACK}:{port}"], "labels": {"pool": POOLS[name]}} for name, port in pages.items()]
    every = f"{SCRAPED_EVERY_SECONDS}s"
    path.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": every},
                "scrape_configs": [{"job_name": "outrider", "static_configs": targets}],
            }
        )
    )


async def _load(address: str, seconds: float) -> None:
    """The load generator's, one rate after another."""
    command = [sys.executable, "-m", "services.cli.main", "load", f"--address={address}", "--prefixes=4"]
    command += ["--prompt-tokens=300", "--output-tokens=60", "--temperature=0", "--prefix-tokens=320"]
    ends, rates = time.monotonic() + seconds, (1.0, 2.0, 4.0, 1.5)
    for number, rate in enumerate(rates):
        left = (ends - time.monotonic()) / (len(rates) - number)
        process = await asyncio.create_subprocess_exec(
            *command, f"--rate={rate}", f"--requests={max(1, round(rate * left))}", stdout=subprocess.DEVNULL
        )
        if await process.wait():
            sys.exit("the load failed")


def _write_console(folder: Path, seconds: int) -> int:
    """How high the page is, in pixels."""
    dashboard = json.loads(DASHBOARD.read_text())
    folder.mkdir()
    (folder / "outrider.html").write_text(console(dashboard, seconds))
    rows: int = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    return rows * ROW_PIXELS + 60


def _draw(url: str, out: Path, size: tuple[int, int], folder: str) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--hide-scrollbars", "--virtual-time-budget=20000", f"--user-data-dir={folder}/browser"]
    command += [f"--window-size={size[0]},{size[1]}", f"--screenshot={out.absolute()}", url]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    if not out.exists():
        sys.exit("the browser drew nothing")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.dashboard_picture", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Where the PNG goes.")
    parser.add_argument("--minutes", type=float, default=4.0, help="How long the load is; default 4.")
    options = parser.parse_args()
    asyncio.run(_run(options.out, options.minutes))


if __name__ == "__main__":
    main()
