"""`outrider load`: requests that come when they come, and what became of them."""
