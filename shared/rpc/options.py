"""Transport options that both ends of a connection must agree on."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

# A silent peer is found dead 10 seconds after a ping, and that is sent after 30 seconds of silence at the latest,
# whether calls are open or not.
_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The transport waits for a ping's answer by a limit of its own, by default a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

_MESSAGE_SIZE: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_MESSAGE_SIZE,
    *_KEEPALIVE,
    # Pings from a client as above are no abuse; with the default of 5 minutes they end the connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Of one connection, each of which costs memory before a byte of its request has come.
    ("grpc.max_concurrent_streams", 4096),
    # One that connects and says nothing has so long; by default two minutes.
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Two servers on one port would share its calls at random: the second must fail instead.
    ("grpc.so_reuseport", 0),
)

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_MESSAGE_SIZE,
    *_KEEPALIVE,
    # Whether a call may be repeated is for its caller to know.
    ("grpc.enable_retries", 0),
    # Channels to one address otherwise share one connection, so bulk bytes would delay tokens.
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted worker is found within seconds; the default backs off to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    # How long one attempt may take: a busy machine, or TLS to another zone, needs more than a moment.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
)


def server_options(max_request_bytes: int, max_connections: int) -> tuple[tuple[str, int], ...]:
    """SERVER_OPTIONS with limits of the server's own: a longer message gets RESOURCE_EXHAUSTED from gRPC, a connection
    too many is closed as soon as it is made."""
    receive = "grpc.max_receive_message_length"
    return (
        *(option for option in SERVER_OPTIONS if option[0] != receive),
        (receive, max_request_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
    )
