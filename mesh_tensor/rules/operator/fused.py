"""Operators that are several of Relax's at once, where torch has them as one: only steps call them.

fused.linear      x @ transpose(w), plus a bias over the last dim where there is one: (x, w) or (x, w, bias)
fused.matmul_add  x @ w + bias, of a matrix w and a bias over the last dim
"""

LINEAR, MATMUL_ADD = "fused.linear", "fused.matmul_add"
