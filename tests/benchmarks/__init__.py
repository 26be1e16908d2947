"""What `make bench` measures: the service through gRPC, against transformers, on one machine in one run.

May import everything; nothing imports it.
"""
