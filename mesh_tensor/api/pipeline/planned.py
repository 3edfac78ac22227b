"""The stages of a pipeline, laid out for the sizes of microbatches. Those that are alike are laid out once: what the
others run is the same plans, by their own names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tvm import ir, relax

from mesh_tensor.annotations.annotation import from_attr
from mesh_tensor.annotations.module_annotations import HINTS_ATTR
from mesh_tensor.annotations.names import relax_function, variables
from mesh_tensor.api.fragments import Fragment, Options, StageFragments, training_fragments
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import MODULE_SIZES, Recent
from mesh_tensor.base.topology import Topology
from mesh_tensor.pipelining.assign import Stages
from mesh_tensor.pipelining.flow import Flow
from mesh_tensor.pipelining.fragments import gradient_name, trained_values
from mesh_tensor.pipelining.schedule import Schedule
from mesh_tensor.pipelining.stages import FUNCTION, Stage, cut
from mesh_tensor.runtime.module_inputs import ModuleSignature, bound

from .weights import StageWeights


@dataclass(frozen=True)
class _Known:
    """A stage that is laid out, and what that depends on: by position where names differ from stage to stage."""

    func: relax.Function
    others: Mapping[str, Any]
    facts: tuple[Any, ...]
    made: StageFragments


class AlikeStages:
    """The stages that are laid out so far."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Known]] = {}

    def made(
        self,
        stage: Stage,
        mesh: Mesh,
        layouts: Mapping[str, Any],
        wrt: Sequence[str],
        kinds: Collection[str],
        make: Callable[[], StageFragments],
        shared: Sequence[str] = (),
    ) -> StageFragments:
        """The fragments of a stage: those of one like it under this one's names, or what `make` gives."""
        func, others, facts = _read(stage, mesh, layouts, wrt, kinds, shared)
        alike = self._known.setdefault(ir.structural_hash(func), [])
        for known in alike:
            if known.facts == facts and _equal(func, known.func) and _all_equal(others, known.others):
                return _renamed(known.made, stage, mesh)
        alike.append(_Known(func, others, facts, make()))
        return alike[-1].made


def _equal(one: Any, other: Any) -> bool:
    return one.same_as(other) or ir.structural_equal(one, other)


def _all_equal(functions: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return functions.keys() == others.keys() and all(_equal(func, others[name]) for name, func in functions.items())


def _read(
    stage: Stage,
    mesh: Mesh,
    layouts: Mapping[str, Any],
    wrt: Sequence[str],
    kinds: Collection[str],
    shared: Sequence[str],
) -> tuple[relax.Function, dict[str, Any], tuple[Any, ...]]:
    """A stage's function without its attributes; the functions that it may call; and all else that says how it is laid
    out, of its values by their positions."""
    func = relax_function(stage.module, FUNCTION)
    at = {var.name_hint: position for position, var in enumerate(variables(func))}
    hints = from_attr((func.attrs or {}).get(HINTS_ATTR, {}))
    stated = sorted((at.get(name, name), repr(layout)) for name, layout in layouts.items()) if layouts else []
    hinted = sorted((str(at.get(name, name)), repr(hint)) for name, hint in hints.items())
    others = {var.name_hint: other for var, other in stage.module.functions_items() if var.name_hint != FUNCTION}
    aside = tuple(stage.gives.index(name) for name in stage.only_state)
    trained = tuple((at[name], name in shared) for name in wrt)
    facts = (mesh, repr(stated), repr(hinted), trained, tuple(sorted(kinds)), aside)
    bare = relax.Function(func.params, func.body, func.ret_struct_info, func.is_pure)
    return bare, others, facts


def _renamed(made: StageFragments, stage: Stage, mesh: Mesh) -> StageFragments:
    """The fragments of a stage as those of another one that is like it. What they leave for each other keeps its
    name."""
    olds = (*made.stage.params, *made.stage.takes, *made.stage.gives)
    news = (*stage.params, *stage.takes, *stage.gives)
    names = dict(zip(olds, news, strict=True))
    names |= {gradient_name(old): gradient_name(new) for old, new in names.items()}

    def renamed(fragment: Fragment) -> Fragment:
        takes, gives = (tuple(names.get(n, n) for n in ports) for ports in (fragment.takes, fragment.gives))
        return replace(fragment, module=fragment.module.twin(), takes=takes, gives=gives)

    fragments = {kind: renamed(fragment) for kind, fragment in made.fragments.items()}
    layouts = {names.get(name, name): layout for name, layout in made.layouts.items()}
    return StageFragments(stage, mesh, fragments, layouts, still=frozenset(names[name] for name in made.still))


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
            self._check_gradients(plan)
            self._plans.put(key, plan)
        return plan

    def _check_gradients(self, plan: Sequence[StageFragments]) -> None:
        """Refuse weights of several stages, if none of them has a gradient for them."""
        lost = [w for w in self.shared if all(w in here.still for here in plan if w in here.stage.params)]
        if lost:
            refuse(
                [f"the loss does not depend on {self.signature.names[name][0]!r}" for name in lost],
                where=f"gradient of {self.flow.function!r}",
                why="its gradient would be zero, which is more likely a mistake",
                fix="name the weights that are trained (train=[...])",
            )

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The trained weights that several stages have."""
        count = Counter(name for stage in self.stages for name in stage.params)
        return tuple(name for name in self.trained if count[name] > 1)

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
        shared = [name for name in self.shared if name in stage.params]

        def make() -> StageFragments:
            return training_fragments(stage, mesh, layouts, self.options, wrt, kinds, shared=shared)

        # what alike stages hold has the names of the first
        found = make() if self.by_names else self._alike.made(stage, mesh, layouts, wrt, kinds, make, shared)
        made = replace(
            found,
            inputs=tuple(name for name in stage.params if name not in self.weights.whole),
            layouts={**{name: found.layouts[new] for name, new in stage.state.items()}, **found.layouts},
        )
        self.weights.place(made)
        return made
