"""From one global-view TileLang kernel to a running mesh."""

from ._environment import check_cache_folder, check_versions
from ._tvm_check import check_tvm
from ._version import __version__

check_versions()
check_tvm()
check_cache_folder()

import tilelang as _tilelang  # noqa: E402, F401  (brings the TVM that every module below imports)

from . import lowering  # noqa: E402
from ._annotation import init_mesh_tensor_info  # noqa: E402
from .compile import MeshKernel, compile  # noqa: E402
from .custom_op import as_custom_op  # noqa: E402
from .disco import DiscoModule, DiscoSession, run_on_disco, to_disco  # noqa: E402
from .errors import MeshTensorError  # noqa: E402
from .frontend import annotate  # noqa: E402
from .graph import ModuleAnnotations, annotate_module, read_module_annotations  # noqa: E402
from .graph.frontends import ImportedModule, load_module, save_module  # noqa: E402
from .kernel_helpers import mesh_tensor_functions  # noqa: E402
from .lowering import lower  # noqa: E402
from .mesh import Mesh  # noqa: E402
from .module import MeshModule, distribute_module  # noqa: E402
from .onnx_frontend import from_onnx  # noqa: E402
from .program import Program  # noqa: E402
from .redistribution import RedistributionPlan  # noqa: E402
from .rules import ShardingRule, sharding_rule  # noqa: E402
from .runtime import MeshTensor, distribute, plan_redistribution  # noqa: E402
from .runtime.distributed import (  # noqa: E402
    from_dtensor,
    from_placements,
    redistribute,
    resume,
    to_dtensor,
    to_placements,
)
from .runtime.tilelang_gemm import register_cpu_gemm  # noqa: E402
from .sequential import run_sequential  # noqa: E402
from .sharding import Partial, Replicate, Shard, Sharding  # noqa: E402
from .torch_frontend import from_torch  # noqa: E402

__all__ = [
    "DiscoModule",
    "DiscoSession",
    "ImportedModule",
    "Mesh",
    "MeshKernel",
    "MeshModule",
    "MeshTensor",
    "MeshTensorError",
    "ModuleAnnotations",
    "Partial",
    "Program",
    "RedistributionPlan",
    "Replicate",
    "Shard",
    "Sharding",
    "ShardingRule",
    "__version__",
    "annotate",
    "annotate_module",
    "as_custom_op",
    "compile",
    "distribute",
    "distribute_module",
    "from_dtensor",
    "from_onnx",
    "from_placements",
    "from_torch",
    "init_mesh_tensor_info",
    "load_module",
    "lower",
    "lowering",
    "mesh_tensor_functions",
    "plan_redistribution",
    "read_module_annotations",
    "redistribute",
    "register_cpu_gemm",
    "resume",
    "run_on_disco",
    "run_sequential",
    "save_module",
    "sharding_rule",
    "to_disco",
    "to_dtensor",
    "to_placements",
]
