"""Example kernels: plain TileLang in global view; each file has one kernel, its variants and their torch reference."""
