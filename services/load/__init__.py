"""Load for a service that runs: requests that come when they come, and what became of them."""
