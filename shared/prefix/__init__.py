"""Prefix blocks shared between workers: what names a block, and the Redis index of who holds it.

`block_hash` names full blocks of committed tokens. Workers tell Redis through `publisher` which blocks
they hold; the router asks through `index` how long a prefix each worker has. `redis_link` is the road of
both to Redis, `outage` says once in the log that it is closed, and `redis_server` runs a Redis for the
local stack. The index is a hint: wrong or missing entries cost time, never tokens.

`block_hash` imports nothing but the standard library, so the scheduler may use it. Nothing here imports
torch, gRPC, any other part of `shared`, or the services.
"""
