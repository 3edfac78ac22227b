"""The sharding rule of a kernel, derived from its TIR."""
