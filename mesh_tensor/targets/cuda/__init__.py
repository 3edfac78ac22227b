"""Kernels on NVIDIA GPUs."""
