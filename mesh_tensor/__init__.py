"""From one global-view TileLang kernel to a running mesh."""

from ._tvm_check import check_tvm

check_tvm()

import tilelang as _tilelang  # noqa: E402, F401  (brings the TVM that every module below imports)

from .errors import MeshTensorError  # noqa: E402
from .frontend import annotate, mesh_tensor_functions  # noqa: E402
from .mesh import Mesh  # noqa: E402
from .sharding import Partial, Replicate, Shard, Sharding  # noqa: E402

__all__ = [
    "Mesh",
    "MeshTensorError",
    "Partial",
    "Replicate",
    "Shard",
    "Sharding",
    "annotate",
    "mesh_tensor_functions",
]
