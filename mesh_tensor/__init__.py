"""From one global-view TileLang kernel to a running mesh."""

from .base.environment import check_cache_folder, check_versions
from .base.tvm_check import check_tvm
from .base.version import __version__

check_versions()
check_tvm()
check_cache_folder()

import tilelang as _tilelang  # noqa: E402, F401  (brings the TVM that every module below imports)

from . import lowering  # noqa: E402
from .annotations.annotate import annotate  # noqa: E402
from .annotations.annotate_module import annotate_module  # noqa: E402
from .annotations.annotation import init_mesh_tensor_info  # noqa: E402
from .annotations.kernel_helpers import mesh_tensor_functions  # noqa: E402
from .annotations.stated import ModuleAnnotations, read_module_annotations  # noqa: E402
from .api.compile import MeshKernel, compile  # noqa: E402
from .api.custom_op import as_custom_op  # noqa: E402
from .api.disco import DiscoModule, DiscoSession, run_on_disco, to_disco  # noqa: E402
from .api.gradient import gradient  # noqa: E402
from .api.module import MeshModule, distribute_module  # noqa: E402
from .base.errors import MeshTensorError  # noqa: E402
from .base.mesh import Mesh  # noqa: E402
from .base.sharding import Partial, Replicate, Shard, Sharding  # noqa: E402
from .importers import ImportedModule, load_module, save_module  # noqa: E402
from .importers.onnx_frontend import from_onnx  # noqa: E402
from .importers.torch_frontend import from_torch  # noqa: E402
from .lowering import lower  # noqa: E402
from .program.steps import Program  # noqa: E402
from .redistribution.plan import RedistributionPlan  # noqa: E402
from .rules.kernel.sharding_rule import ShardingRule, sharding_rule  # noqa: E402
from .runtime.ranks import from_dtensor, from_placements, redistribute, resume, to_dtensor, to_placements  # noqa: E402
from .runtime.sequential import run_sequential  # noqa: E402
from .runtime.virtual.mesh_tensor import MeshTensor, distribute, plan_redistribution  # noqa: E402
from .targets.cpu.tilelang_gemm import register_cpu_gemm  # noqa: E402

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
    "gradient",
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
