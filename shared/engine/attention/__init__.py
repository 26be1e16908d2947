"""Attention over paged KV: what a step tells it, one function for transformers to call, its backends.

May import torch, transformers and `shared.engine.kv_pool`.
"""
