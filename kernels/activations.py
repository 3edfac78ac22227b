"""Activation functions as TileLang expressions, for use inside a kernel's body."""

import math

import tilelang.language as T


def relu(x):
    """`max(x, 0)`."""
    return T.max(x, 0)


def gelu(x):
    """GELU in its tanh form (`torch.nn.functional.gelu(x, approximate="tanh")`)."""
    return 0.5 * x * (1.0 + T.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_slope(x):
    """The derivative of `gelu`."""
    bent = T.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))
    inner = math.sqrt(2.0 / math.pi) * (1.0 + 3 * 0.044715 * x * x)
    return 0.5 * (1.0 + bent) + 0.5 * x * (1.0 - bent * bent) * inner


def silu(x):
    """`x * sigmoid(x)`."""
    return x / (1.0 + T.exp(-x))
