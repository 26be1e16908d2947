"""What the router decides by: pure, so that a simulation can run the very same code.

`step_costs`, `overhead` and `plain_steps` say what things take, `utilisation` how much time is left over,
`acceptance` what drafting brings, `trials` for how long it is left alone once it did not pay, `gamma` how many
tokens to draft, `pace` what one sequence does next; `placement` where a request is prefilled and decoded. Imports
nothing but the standard library: no gRPC, no torch; the clock can be given.
"""
