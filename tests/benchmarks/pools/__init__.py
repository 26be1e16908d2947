"""What `make bench-pools` measures: pools of target workers, what moves KV between them, and the simulator that is to
predict both, on one machine in one run."""
