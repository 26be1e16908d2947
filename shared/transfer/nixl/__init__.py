"""Blocks read out of a peer's memory by nixl: by RDMA, from GPU to GPU, or from another process of the same machine.

nixl (https://github.com/ai-dynamo/nixl, over UCX) is optional and for Linux only: `library` imports it when an engine
is made. `place` is where an engine's blocks lie, `agent` nixl's own calls, `thread` the one that makes them, `peer`
another worker, `engine` what a worker reads with. Workers that none of these ways connects cannot read from each other
with it; the first try is TransferFailed.
"""
