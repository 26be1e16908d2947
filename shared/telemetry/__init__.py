"""Traces, metrics and logs, the same way in every service; all off or quiet unless asked for.

May import the standard library and OpenTelemetry only: no other part of Outrider, no torch, no grpc.
"""
