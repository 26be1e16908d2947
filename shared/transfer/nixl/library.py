"""nixl itself, which may not be there, and its errors."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

from shared.transfer.engine import TransferFailed


def nixl_available() -> bool:
    """Whether nixl can be imported here."""
    try:
        import_nixl()
    except ImportError:
        return False
    return True


def import_nixl() -> ModuleType:
    # On import, nixl configures logging, and stops it from reporting errors of its own: everybody's.
    raise_exceptions = logging.raiseExceptions
    try:
        return importlib.import_module("nixl")
    except ImportError as error:
        raise ImportError(f"nixl cannot be imported ({error}): it comes with outrider[nixl], for Linux only") from error
    finally:
        logging.raiseExceptions = raise_exceptions


class NixlErrors:
    """Makes TransferFailed of what nixl raises within it, which has no type of its own."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            raise TransferFailed(f"nixl: {error}") from error
