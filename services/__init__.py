"""The services: `router`, `draft`, `target`, and `cli`, which starts them.

Each holds only what is its own and imports `shared`, never another service; `cli` alone reads the others'
settings and starts their servers, by name.
"""
