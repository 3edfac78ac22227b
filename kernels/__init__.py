"""Example kernels: plain TileLang in global view, each file with one kernel (and its variants) and its torch reference."""
