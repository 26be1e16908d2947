"""The router: the public `Inference` API. Imports `shared` only.

A request's way: `server` receives it, `tenants` says whose it is, `admission` lets it in, `request` checks
it, `placement` chooses a target worker, `session` runs its rounds (`gamma` says how many tokens to draft,
`draft_link` and `target_link` talk to the workers over a `connection` each) and `detokenizer` turns its
tokens into text. The router imports no torch: it runs on a machine without.
"""
