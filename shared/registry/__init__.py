"""Which workers there are: each lists itself in Redis for as long as it lives, and routers read the list.

A `listing` is what a worker says of itself; `member` keeps it in Redis under a lease, `directory` reads those of a
deployment, `keys` is what both call them there. A listing says where a worker may be found, not that it is well:
whoever reads it connects, and judges by that.

May import `shared.redis`: no torch, no gRPC, no other part of ours.
"""
