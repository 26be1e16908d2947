"""The router: the public `Inference` API. Imports `shared` only.

A request's way: `tenants` says whose it is, `server` receives it, `request` checks it, `admission` lets it in,
`tokenizer_pool` gives its prompt a thread, `placement` chooses a target worker, `session` runs its rounds
(`shared.policy` says how many tokens to draft, `draft_link` and `target_link` talk to the workers over a
`connection` each), `detokenizer` turns its tokens into text, and `chunk_queue` holds that until the client reads it.
The router imports
no torch: it runs on a machine without.
"""
