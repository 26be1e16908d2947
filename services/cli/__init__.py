"""The `outrider` command: the local stack, one service by itself, and a client for the terminal.

May import shared, and of the other services their settings; their servers only when it runs one.
"""

import os

# Before anything imports gRPC: its C++ core would put lines of its own, of what is no fault, between ours.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Messages come and go by the thread that waits for them, not through a pool of others as has become the default: half
# of the way between two processes, and a tenth of a router's work.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
