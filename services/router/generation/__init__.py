"""One request's life: prefill, rounds until every sequence has ended, failover, release.

`session` is the request: where it goes, and the chunks that its sequences write together. `sequence_session` is one of
them, from its first token to its last; `sequence_output` makes its chunks, `passage` takes it to another worker,
`scout` drafts beside it.
"""
