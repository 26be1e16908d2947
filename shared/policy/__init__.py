"""What the router decides by: pure, so that a simulation can run the very same code.

`step_costs`, `overhead`, `plain_steps` and `round_costs` say what things take, `utilisation` how much time is left,
`acceptance` what drafting brings, `trials` for how long it is left alone once it did not pay and `scouting` how it is
found out that it would by now, `gamma` how many tokens to draft, `pace` what one sequence does next (`drafting` is what
is kept of it); `placement` where a request is prefilled and decoded. Imports nothing but the standard library: no gRPC,
no torch; the clock can be given.
"""
