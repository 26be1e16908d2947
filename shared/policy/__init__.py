"""What the router decides by: pure, so that a simulation can run the very same code.

`step_costs` and `overhead` say what things take, `acceptance` what drafting brings, `gamma` how many tokens
to draft, `pace` what one sequence does next. Imports nothing but the standard library: no gRPC, no torch,
no clock of its own.
"""
