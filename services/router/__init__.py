"""The router: the public `Inference` API. Imports `shared` only.

`server` is the service and the process. A request's way through the rooms: `clients` (whose it is, whether it is
sound, when its turn comes, what goes back to it), `text` (to tokens and back), `generation` (its life: prefill,
rounds, failover), `workers` (who serves it, and the streams to them). What is decided on the way (how many tokens to
draft, where a prompt goes) is pure code in `shared.policy`. The router imports no torch: it runs on a machine without.
"""
