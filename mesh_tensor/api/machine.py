"""Machine, which can be measured here."""

from mesh_tensor.base.machine import Machine

from . import measure as _measure  # noqa: F401  (gives it its `measure`)

__all__ = ["Machine"]
