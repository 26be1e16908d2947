"""What a pool of workers would do with a load: a discrete-event model of workers, under the router's own placement.

`workload` and `trace` say what arrives, `machine` and `costs` what workers are like (by a `step_log`, `step_fit` finds
out), `worker` what one does (with a `stream` while it waits, is prefilled or is `decoding`, with its `blocks`, and with
prefixes that are `coming`), `holders` who holds which prefix,
`routing` where requests go (by the policy of `shared.policy.placement`, or by a baseline), `cluster` in what order
things happen, `outcomes` how it went and `report` how that reads, `pool_sizes` how many workers it takes.

Several models on shared workers: `model` says what they are and what a worker has room for, `model_file` reads them,
`turns` is a worker that takes steps of one after another, `sharing` simulates a placement, `model_placement` looks for
a good one and `model_report` shows it.

No process of its own and no torch, no gRPC: `outrider simulate` runs it.
"""
