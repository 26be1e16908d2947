"""One request's life: prefill, rounds until every sequence has ended, failover, release."""
