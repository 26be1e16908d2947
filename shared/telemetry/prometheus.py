"""A page that Prometheus reads: what the OpenTelemetry instruments of this process have counted."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from shared.settings import StartupError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

logger = logging.getLogger(__name__)

# What strangers can have here: so many at a time, each for so long, however little it says at a time.
_MAX_READERS = 8
_SILENT_SECONDS = 5.0
_WHOLE_SECONDS = 15.0


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def log_message(self, *_: object) -> None:
        """Not a line for every scrape."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.BoundedSemaphore(_MAX_READERS)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        limit = threading.Timer(_WHOLE_SECONDS, _hang_up, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def server_bind(self) -> None:
        # Not HTTPServer's own, which asks DNS for this machine's name, and waits.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """One that is gone, or said nothing in time: in place of a traceback on stderr."""
        logger.info("a reader of metrics was given up", extra={"reason": str(sys.exc_info()[1])})


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class PrometheusPage:
    """`/metrics` over HTTP, in a thread of its own. `reader` is for the process's MeterProvider."""

    def __init__(self, host: str, port: int) -> None:
        """Port 0 lets the system choose; `port` says which it is. Raises StartupError if nobody can listen there."""
        # Imported here: a process without such a page should not pay for it.
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry()
        self.reader: MetricReader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
        try:
            self._server: WSGIServer = make_server(host.strip("[]"), port, make_wsgi_app(registry), _Server, _Handler)
        except OSError as error:
            raise StartupError(f"metrics_port {port} of {host} cannot be listened on: {error.strerror}") from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; one that is being answered may take its time."""
        self._server.shutdown()
        self._server.server_close()
