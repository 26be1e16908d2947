"""What every gRPC server and client here shares: server, edge, health, channel, errors, deadlines.

May import grpc, protobuf and `shared.telemetry`; never services, engine or sampling, and no torch.
"""
