# The public names, and where each is: `mesh_tensor/__init__.py` imports a module when the first of its names is used.

from . import lowering
from .annotations import comm
from .annotations.annotate import annotate
from .annotations.annotate_module import annotate_module
from .annotations.annotation import init_mesh_tensor_info
from .annotations.combination import combine
from .annotations.experts import experts
from .annotations.kernel_helpers import mesh_tensor_functions
from .annotations.manual import manual_computation
from .annotations.module_annotations import ModuleAnnotations, read_module_annotations
from .api import strategies
from .api.compile import MeshKernel, compile
from .api.custom_op import as_custom_op
from .api.disco import DiscoModule, DiscoSession, run_on_disco, to_disco
from .api.generate import generate
from .api.machine import Machine
from .api.mesh_module import MeshModule
from .api.module import distribute_module
from .api.module_files import load, save
from .api.module_gradient import gradient
from .api.pipeline import Pipeline, pipeline
from .api.search import search
from .api.training import TrainingStep, training_step
from .api.training_run import TrainingRun
from .base.errors import MeshTensorError
from .base.mesh import Mesh
from .base.sharding import Partial, Replicate, Shard, Sharding
from .base.topology import Topology
from .base.version import __version__
from .importers import ImportedModule, load_module, save_module
from .importers.onnx_import import from_onnx
from .importers.torch_frontend import from_torch
from .importers.torch_ranks import from_torch_rank
from .importers.transformers_models import from_transformers
from .importers.weight_files import open_weights
from .lowering import lower
from .pipelining.schedule import Schedule
from .program.program import Program
from .redistribution.plan import RedistributionPlan
from .rules.kernel.sharding_rule import ShardingRule, sharding_rule
from .runtime.ranks import from_dtensor, from_placements, redistribute, resume, to_dtensor, to_placements
from .runtime.sequential import run_sequential
from .runtime.virtual.mesh_tensor import MeshTensor, distribute, plan_redistribution, plan_transfer, transfer
from .simulation import Simulation, simulate
from .targets.cpu.tilelang_gemm import register_cpu_gemm

__all__ = [
    "DiscoModule",
    "DiscoSession",
    "ImportedModule",
    "Machine",
    "Mesh",
    "MeshKernel",
    "MeshModule",
    "MeshTensor",
    "MeshTensorError",
    "ModuleAnnotations",
    "Partial",
    "Pipeline",
    "Program",
    "RedistributionPlan",
    "Replicate",
    "Schedule",
    "Shard",
    "Sharding",
    "ShardingRule",
    "Simulation",
    "Topology",
    "TrainingRun",
    "TrainingStep",
    "__version__",
    "annotate",
    "annotate_module",
    "as_custom_op",
    "combine",
    "comm",
    "compile",
    "distribute",
    "distribute_module",
    "experts",
    "from_dtensor",
    "from_onnx",
    "from_placements",
    "from_torch",
    "from_torch_rank",
    "from_transformers",
    "generate",
    "gradient",
    "init_mesh_tensor_info",
    "load",
    "load_module",
    "lower",
    "lowering",
    "manual_computation",
    "mesh_tensor_functions",
    "open_weights",
    "pipeline",
    "plan_redistribution",
    "plan_transfer",
    "read_module_annotations",
    "redistribute",
    "register_cpu_gemm",
    "resume",
    "run_on_disco",
    "run_sequential",
    "save",
    "save_module",
    "search",
    "sharding_rule",
    "simulate",
    "strategies",
    "to_disco",
    "to_dtensor",
    "to_placements",
    "training_step",
    "transfer",
]
