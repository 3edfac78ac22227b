"""Sharding rules: which factors index which dims, and how each combines. Of kernels from their TIR, of operators from
tables."""
