"""What the router does with clients: tenants, checks, whose turn it is, chunks on their way, usage."""
