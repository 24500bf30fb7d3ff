"""Compiled kernels for CPUs with AVX-512 and bf16: what torch does in many passes over memory, done in one. Never required to run."""
