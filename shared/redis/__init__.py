"""How everything here that keeps something in Redis reaches it, and notices that it cannot.

`link` runs scripts there, `outage` says once in the log that it is away, and `server` runs a Redis for the local
stack. What is kept, and under which keys, is the matter of those who keep it (`shared.prefix`, `shared.registry`).
Nothing here imports torch, gRPC, any other part of ours, or the services.
"""
