"""An interpreter of TileLang kernels: numpy instead of generated code, as the oracle that is independent of it."""

from .intrinsics import poisoned
from .run import interpret
