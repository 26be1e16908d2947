"""KV blocks from one target worker to another: who may read what and until when, and two ways of reading it.

`offers` and `servicer` are the end that has the blocks, `fetch` the end that needs them; `engine` is the interface of
those that move the bytes, `nixl` and `grpc` implement it, and nothing else knows which one is at work.
"""
