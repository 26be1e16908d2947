"""What a draft and a target worker have in common: wire conversions, streams, the engine's life.

May import the rest of `shared` and the generated protos; `messages` imports no torch, so that the router
can use it too.
"""
