"""Telemetry of a service, as its settings want it."""

from __future__ import annotations

import logging

from shared.settings import ServiceSettings
from shared.telemetry.prometheus import PrometheusPage
from shared.telemetry.tracing import Telemetry, configure

logger = logging.getLogger(__name__)


def configure_service(service_name: str, settings: ServiceSettings) -> Telemetry:
    """Raises StartupError if metrics cannot be shown on their port."""
    page = None
    if settings.metrics_port is not None:
        page = PrometheusPage(settings.host, settings.metrics_port)
        logger.info("metrics", extra={"port": page.port})
    return configure(service_name, settings.otlp_endpoint, page)
