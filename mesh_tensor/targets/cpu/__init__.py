"""Kernels on a CPU: TIR made fit for TileLang's C code generator, compiled and kept."""
