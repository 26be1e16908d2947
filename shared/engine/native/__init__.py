"""Kernels of our own for CPUs: C++ behind a C interface, compiled by the system's compiler when first needed."""
