"""The stages of a pipeline on their meshes: fragments that run, and the layouts that values have on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tvm import ir

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.pipeline.stages import Stage
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, ShardingLike, distribute

from .module import MeshModule, distribute_module
from .module_ports import parameter_layouts, result_layouts

Values = dict[str, MeshTensor]


@dataclass(frozen=True, eq=False)
class Fragment:
    """What a stage runs on one microbatch: `module` takes the values `takes`, in order, and makes `gives`."""

    kind: str
    module: MeshModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    @property
    def layouts(self) -> dict[str, Sharding]:
        """How what it takes and gives lies."""
        plan = self.module.plan
        return parameter_layouts(plan) | dict(zip(self.gives, result_layouts(plan), strict=True))

    def __call__(self, values: Mapping[str, MeshTensor]) -> Values:
        made = self.module(*(values[name] for name in self.takes))
        return dict(zip(self.gives, made, strict=True))


@dataclass(frozen=True, eq=False)
class StageFragments:
    """A stage on its mesh: its fragments by kind, and the layout of every value that enters or leaves one."""

    stage: Stage
    mesh: Mesh
    fragments: Mapping[str, Fragment]
    layouts: Mapping[str, Sharding]

    def place(self, name: str, tensor: torch.Tensor) -> MeshTensor:
        """A whole tensor as the value `name` lies."""
        return distribute(tensor, self.mesh, self.layouts[name])


@dataclass(frozen=True)
class Options:
    """How fragments are made, as `distribute_module` takes it."""

    target: str = "auto"
    strict: bool = False
    replicate_unknown: bool = False
    poison: bool = False

    def fragment(
        self,
        kind: str,
        mod: ir.IRModule,
        function: str,
        mesh: Mesh,
        layouts: Mapping[str, ShardingLike],
        takes: Sequence[str],
        gives: Sequence[str],
    ) -> Fragment:
        """A function of a module as a fragment."""
        module = distribute_module(
            mod,
            mesh,
            layouts,
            function=function,
            target=self.target,
            strict=self.strict,
            replicate_unknown=self.replicate_unknown,
            poison=self.poison,
            check_indices=False,  # whole batches are checked before they are split
        )
        return Fragment(kind, module, tuple(takes), tuple(gives))


def forward_fragments(
    stage: Stage, mesh: Mesh, layouts: Mapping[str, ShardingLike], options: Options
) -> StageFragments:
    """A stage that only runs forwards."""
    takes = (*stage.params, *stage.takes)
    made = options.fragment("F", stage.module, "stage", mesh, layouts, takes, stage.gives)
    return StageFragments(stage, mesh, {"F": made}, made.layouts)
