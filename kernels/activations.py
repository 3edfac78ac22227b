"""Activation functions as TileLang expressions, for use inside a kernel's body."""

import math

import tilelang.language as T


def relu(x):
    """`max(x, 0)`."""
    return T.max(x, 0)


def gelu(x):
    """GELU in its tanh form (`torch.nn.functional.gelu(x, approximate="tanh")`)."""
    return 0.5 * x * (1.0 + T.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def silu(x):
    """`x * sigmoid(x)`."""
    return x / (1.0 + T.exp(-x))
