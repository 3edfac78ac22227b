"""The stages of a pipeline, laid out for the sizes of microbatches; those that are alike once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.recent import MODULE_SIZES, Recent
from mesh_tensor.base.topology import Topology
from mesh_tensor.pipelining.assign import Stages
from mesh_tensor.pipelining.flow import Flow
from mesh_tensor.pipelining.fragments import Stage, cut, trained_values
from mesh_tensor.pipelining.schedule import Schedule
from mesh_tensor.runtime.module_inputs import ModuleSignature, bound

from ..fragments import Options, StageFragments, training_fragments
from .alike import AlikeStages
from .weights import StageWeights


@dataclass(frozen=True, eq=False)
class PlannedStages:
    """What every stage runs, by sizes. `where`: the stages of every binding; `layouts`: per stage, by name."""

    flow: Flow
    signature: ModuleSignature
    topology: Topology
    where: Stages
    stages: Sequence[Stage]
    schedule: Schedule
    layouts: Sequence[Mapping[str, Any]]
    trained: Sequence[str]
    options: Options
    weights: StageWeights
    by_names: bool
    _plans: Recent[tuple[int, ...], tuple[StageFragments, ...]] = field(default_factory=lambda: Recent(MODULE_SIZES))
    _alike: AlikeStages = field(default_factory=AlikeStages)

    def of(self, sizes: Mapping[Any, int]) -> tuple[StageFragments, ...]:
        """The stages for microbatches of these sizes."""
        key = tuple(sizes[var] for var in self.signature.symbols)
        plan = self._plans.get(key)
        if plan is None:
            stages = self.stages
            if sizes:
                flow = Flow(bound(self.flow.mod, self.flow.function, sizes), self.flow.function)
                stages = cut(flow, self.where, [stage.mesh for stage in stages])
            plan = tuple(map(self._fragments, stages))
            self._plans.put(key, plan)
        return plan

    @property
    def latest(self) -> tuple[StageFragments, ...]:
        """The stages for the sizes planned last."""
        if not self.signature.symbols:
            return self.of({})
        if not len(self._plans):
            refuse(
                f"the sizes of {self.flow.function!r} are open: {', '.join(map(str, self.signature.symbols))}; "
                "the pipeline has no plan yet",
                fix="call it first, or make it of a module of known sizes",
            )
        return list(self._plans)[-1]

    def _fragments(self, stage: Stage) -> StageFragments:
        """A stage on its mesh. Its weights lie as they did when it was first laid out."""
        mesh, kinds = self.topology[stage.mesh], {action.kind for row in self.schedule.rows for action in row}
        layouts = {**self.layouts[stage.index], **self.weights.layouts.get(stage.index, {})}
        passed = {*self.trained, *trained_values(self.flow, self.trained)} if self.trained else ()
        wrt = [name for name in (*stage.params, *stage.takes) if name in passed]

        def make() -> StageFragments:
            return training_fragments(stage, mesh, layouts, self.options, wrt, kinds)

        # what alike stages hold has the names of the first
        found = make() if self.by_names else self._alike.made(stage, mesh, layouts, wrt, kinds, make)
        made = replace(
            found,
            inputs=tuple(name for name in stage.params if name not in self.weights.whole),
            layouts={**{name: found.layouts[new] for name, new in stage.state.items()}, **found.layouts},
        )
        self.weights.place(made)
        return made
