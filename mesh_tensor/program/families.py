"""Plans for other sizes: what a plan for some sizes says, with what a plan of fewer layers says for the new ones.

A function with alike layers (of `fewer_layers`) is planned whole for one choice of sizes. For others only the small
module is: by the same planner, so nothing is assumed about what depends on sizes. Where the small plan has the same
steps, layouts and names as the small plan of sizes for which the whole one is known (of a *family*), the whole plan is
that one with the small plan's shapes, calls and bytes: every step of it is a step of the small plan, for operands of
the same shapes that lie alike. Where it has not, the whole function is planned, and this is another family.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.recent import MODULE_SIZES, Recent, uncollected
from mesh_tensor.plan.fewer_layers import FewerLayers

from .family import Family, family_of, way
from .loop_step import LoopStep
from .plan_module import Decided, ModulePlan, Stages, decisions
from .steps import AllocStep, CollectiveStep, FreeStep, KernelStep, OpStep, WaitStep

Sizes = tuple[int, ...]


class PlanFamilies:
    """The plans of a function for any sizes. `plan` makes one anew, of the small module if it is given, with what
    another one decided; `fewer` is the module with so many of its alike layers, if it has more."""

    def __init__(
        self,
        plan: Callable[[Sizes, FewerLayers | None, Decided | None], ModulePlan],
        fewer: Callable[[int], FewerLayers | None],
    ) -> None:
        self._plan, self._fewer = plan, fewer
        self._first: tuple[Sizes, ModulePlan] | None = None
        self._small: FewerLayers | None = None
        self._is_whole = False  # the small modules don't tell
        self._known: Recent[Hashable, Family | _None] = Recent(MODULE_SIZES)
        self._decided: Recent[Sizes, tuple[Decided, Hashable]] = Recent(MODULE_SIZES)

    @uncollected
    def of(self, sizes: Sizes) -> ModulePlan:
        """The plan for these sizes. Planning may refuse the function for them."""
        if self._small is None and not self._is_whole:
            if self._first is None:
                self._first = sizes, self._plan(sizes, None, None)
                return self._first[1]
            self._choose(*self._first)
            self._first = None
        if self._small is not None and (found := self._as_known(sizes, self._small)) is not None:
            return found
        plan = self._plan(sizes, None, None)
        if self._small is None:
            self._decided.put(sizes, (decisions(plan), outline(plan)))
        return plan

    def like(self, sizes: Sizes, others: Sizes, dearer: float) -> ModulePlan | None:
        """A plan for sizes that is of the family of that for the others: the cheapest, or one that decides what this
        one did, and is at most so many times as dear (0: none does); None where there is no such plan."""
        if (known := self._decided.get(others)) is None:
            return None
        decided, kind = known
        made = self._plan(sizes, self._small, None)
        if outline(made) != kind:
            again = self._plan(sizes, self._small, decided) if dearer else made
            if outline(again) != kind or again.cost > dearer * made.cost:
                return None
            made = again
        if self._small is None:
            return made
        family = self._known.get(kind)
        return self._member(family, made, sizes) if isinstance(family, Family) else None

    def stages(self, sizes: Sizes, like: ModulePlan) -> Stages:
        """What is made on the way to the plan for sizes that has the outline of another one."""
        free = self._plan(sizes, None, None)
        return (free if outline(free) == outline(like) else self._plan(sizes, None, decisions(like))).stages()

    def _choose(self, sizes: Sizes, whole: ModulePlan) -> None:
        """The fewest layers that have all steps of the plan for the first sizes."""
        for copies in (1, 2, 3):
            fewer = self._fewer(copies)
            if fewer is None:
                break
            small = self._tried(sizes, fewer)
            family = None if small is None else family_of(whole, small, fewer.stands)
            if small is not None and family is not None:
                self._known.put(outline(small), family)
                self._small = fewer
                return
        self._is_whole = True

    def _tried(self, sizes: Sizes, fewer: FewerLayers) -> ModulePlan | None:
        """The small plan; None where it is refused: planning the whole function says why."""
        try:
            return self._plan(sizes, fewer, None)
        except MeshTensorError:
            return None

    def _as_known(self, sizes: Sizes, fewer: FewerLayers) -> ModulePlan | None:
        """The plan that another one of the family is for these sizes, if there is one."""
        if (small := self._tried(sizes, fewer)) is None:
            return None
        kind = outline(small)
        self._decided.put(sizes, (decisions(small), kind))
        family = self._known.get(kind)
        if family is None:
            whole = self._plan(sizes, None, None)
            self._known.put(kind, family_of(whole, small, fewer.stands) or _None())
            return whole
        return None if isinstance(family, _None) else self._member(family, small, sizes)

    def _member(self, family: Family, small: ModulePlan, sizes: Sizes) -> ModulePlan | None:
        return family.sized(small, lambda: self.stages(sizes, family.whole))


class _None:
    """No family."""


def outline(plan: ModulePlan) -> Hashable:
    """All of a plan that is the same for all sizes of a family."""
    program = plan.made.program
    values = tuple([(v.name, len(v.shape), v.dtype, v.sharding, v.storage, v.slab) for v in program.values.values()])
    ports = tuple([(p.name, p.dtype, tuple(map(len, p.dims)), p.sharding, p.order) for p in plan.ports])
    checks = tuple([(check.parameter, check.where) for check in plan.index_checks])
    steps = tuple(program.mean(_Outline()))
    made = plan.made.inputs, tuple(plan.made.constants), plan.made.result
    return program.mesh, program.parameters, values, ports, plan.params, tuple(plan.state.items()), checks, steps, made


class _Outline:
    """All of a step that is the same for all sizes of a family."""

    def kernel(self, step: KernelStep | LoopStep) -> Hashable:
        """What it is called, and what it uses: families have no kernels or loops."""
        return step.words, step.uses

    loop = kernel

    def op(self, step: OpStep) -> Hashable:
        """All but shapes."""
        whole = tuple([name in step.whole for name in step.results])
        return step.call.name, step.args, step.results, whole, step.where, step.kernel is None, step.checked

    def collective(self, step: CollectiveStep | WaitStep) -> Hashable:
        """All but bytes."""
        return type(step), way(step.collective), step.collective.src, step.collective.dst, step.collective.wait

    wait = collective

    def alloc(self, step: AllocStep | FreeStep) -> Hashable:
        """The step itself."""
        return step

    free = alloc
