"""A token that the services of a deployment share, where their connections are encrypted by something else, or not."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from shared.rpc.errors import Unauthenticated

_MIN_CHARS = 16
_BEARER = "Bearer "


def parse_tokens(contents: Sequence[bytes]) -> tuple[str, ...]:
    """Of one file: a token a line. The first is shown to others, each is taken from them. Raises ValueError."""
    (content,) = contents
    try:
        lines = [line.strip() for line in content.decode("ascii").splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError("a token must be ASCII") from error
    tokens = tuple(line for line in lines if line)
    if not tokens or any(len(token) < _MIN_CHARS or not token.isprintable() for token in tokens):
        raise ValueError(f"must hold tokens of {_MIN_CHARS} characters or more, one a line")
    return tokens


def token_metadata(tokens: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """What a call carries that shows the first."""
    return (("authorization", _BEARER + tokens[0]),)


def check_token(tokens: Sequence[str], metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Raises Unauthenticated unless the call's metadata shows one of them."""
    shown = [value for name, value in metadata if name == "authorization" and isinstance(value, str)]
    if len(shown) != 1 or not shown[0].startswith(_BEARER):
        raise Unauthenticated("metadata must hold one `authorization: Bearer <token>`, of this deployment's services")
    token = shown[0].removeprefix(_BEARER).encode()
    # Each is compared, in constant time.
    if sum(hmac.compare_digest(token, known.encode()) for known in tokens) == 0:
        raise Unauthenticated("not a token of this deployment")
