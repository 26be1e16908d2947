"""The inference engine that draft and target workers share: any Hugging Face causal LM over paged KV.

A step flows scheduler -> runner -> sampler -> scheduler. `sequence`, `block_pool` and `scheduler` decide
what runs and know no tensors; `runner`, `kv_pool`, `model` and `attention` compute and know no queues;
`engine` is the only place where the two meet, `loop` the thread it runs on. May import `shared.sampling`
and `shared.prefix.block_hash`; knows nothing of gRPC, Redis or the services.
"""
