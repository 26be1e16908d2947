"""The workers as the router sees them: who is there and fit, who serves what, and a stream to each."""
