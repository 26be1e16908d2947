"""Prefix blocks shared between workers: what names a block, and the Redis index of who holds it.

`block_hash` names full blocks of committed tokens. Workers tell Redis through `publisher` which blocks
they hold; the router asks through `index` how long a prefix each worker has; `keys` is what both call
them there. The index is a hint: wrong or missing entries cost time, never tokens.

`store` keeps the blocks' bytes in Redis, framed by `payload`, and `payload_index` says how long a prefix is there.

`block_hash` imports nothing but the standard library, so the scheduler may use it. Nothing here imports
torch, gRPC, any other part of `shared` but `shared.redis`, or the services.
"""
