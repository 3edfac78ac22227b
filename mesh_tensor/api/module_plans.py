"""The plans of a module's function: one for each choice of sizes for its symbols."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import ir

from mesh_tensor.annotations.module_annotations import ModuleAnnotations
from mesh_tensor.annotations.names import relax_function
from mesh_tensor.annotations.size_conditions import size_conditions
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import MODULE_SIZES, Recent
from mesh_tensor.plan.fewer_layers import FewerLayers, fewer_layers
from mesh_tensor.program.families import PlanFamilies
from mesh_tensor.program.plan_module import Decided, ModulePlan, PlanOptions, plan_module, with_parts
from mesh_tensor.program.regions import Regions
from mesh_tensor.program.size_terms import divisions
from mesh_tensor.runtime.module_inputs import bound


@dataclass(frozen=True, eq=False)
class ModulePlans:
    """How a function of an annotated module is planned for a mesh. `symbols`: its open sizes; `strict`: whether
    annotations that can't be used together are refused; `parts`: the results, by their numbers, that plans leave as
    their parts."""

    stated: ModuleAnnotations
    function: str
    mesh: Mesh
    symbols: Sequence[Any]
    strict: bool
    options: PlanOptions
    parts: tuple[int, ...] = ()
    _known: Recent[tuple, ModulePlan] = field(default_factory=lambda: Recent(MODULE_SIZES))
    _sizers: dict[tuple, Callable[[tuple[int, ...]], ModulePlan]] = field(default_factory=dict)

    def key(self, sizes: Mapping[Any, int]) -> tuple[int, ...]:
        """The sizes in the order of the symbols."""
        return tuple(sizes[var] for var in self.symbols)

    def of(
        self, sizes: Mapping[Any, int], held: Collection[str], whole_axes: bool = False, on_ranks: bool = False
    ) -> ModulePlan:
        """The plan for these sizes of symbols, where `held` are the names of parameters that lie as it wants them.
        `whole_axes`: one that takes no axis apart. `on_ranks`: one that does not depend on what was asked before, which
        may be something else on another rank. Refused: annotations that can't be used together (`strict`), or that
        state parts of axes where no axis is to be taken apart; what planning refuses."""
        is_sized = bool(self.symbols) and not whole_axes
        key = (self.key(sizes), whole_axes, on_ranks and is_sized)

        def make() -> ModulePlan:
            return self._sized(sizes, held, on_ranks) if is_sized else self.new(sizes, held, whole_axes)

        return self._known.made(key, make)

    def _sized(self, sizes: Mapping[Any, int], held: Collection[str], on_ranks: bool) -> ModulePlan:
        """A plan for these sizes, as others of their family, or of their region."""
        key = frozenset(held), on_ranks
        if key not in self._sizers:
            self._sizers[key] = self._sizer(*key)
        return self._sizers[key](self.key(sizes))

    def _sizer(self, held: Collection[str], on_ranks: bool) -> Callable[[tuple[int, ...]], ModulePlan]:
        stated = self.stated

        def plan(key: tuple[int, ...], fewer: FewerLayers | None, decided: Decided | None) -> ModulePlan:
            module = None if fewer is None else fewer.module
            return self.new(dict(zip(self.symbols, key, strict=True)), held, False, module, decided)

        def fewer(copies: int) -> FewerLayers | None:
            return fewer_layers(stated.module, self.function, stated.annotations, held, copies)

        families = PlanFamilies(plan, fewer)
        func = relax_function(stated.module, self.function)
        names, conditions = [var.name for var in self.symbols], size_conditions(func)

        def allowed(sizes: Mapping[str, int]) -> bool:
            return all(c.holds(sizes) for c in conditions if c.names <= sizes.keys())

        found = divisions(func, names)
        if found is None:
            return families.of
        return Regions(families, found, names, self.mesh.num_devices, allowed, on_ranks).of

    def new(
        self,
        sizes: Mapping[Any, int],
        held: Collection[str],
        whole_axes: bool,
        module: ir.IRModule | None = None,
        decided: Decided | None = None,
    ) -> ModulePlan:
        """Like `of`, but made anew, and not kept; of a `module` that is not the whole one, if it is given. `decided`:
        as `plan_module` takes it."""
        if whole_axes and self.stated.mesh != self.mesh:
            refuse(
                f"the module is annotated for parts of axes, {self.stated.mesh}, and Disco takes none apart",
                where=f"module function {self.function!r} on {self.mesh}",
                fix="use a mesh that has these parts as axes of its own",
            )
        plan = plan_module(
            bound(self.stated.module if module is None else module, self.function, sizes),
            self.function,
            self.stated.mesh,
            self.stated.annotations,
            replace(self.options, sub_axes=self.options.sub_axes and not self.strict and not whole_axes),
            held=held,
            base=self.mesh,
            decided=decided,
        )
        self._check(plan)
        return with_parts(plan, self.parts, self.options) if self.parts else plan

    def with_parts(self, numbers: Iterable[int]) -> ModulePlans:
        """The same plans, which leave these results as their parts."""
        parts = tuple(numbers)
        known = self._known.changed(lambda plan: with_parts(plan, parts, self.options))
        return replace(self, parts=parts, _known=known, _sizers={})

    def _check(self, plan: ModulePlan) -> None:
        if not self.strict or not plan.layouts.conflicts:
            return
        why = "the annotations ask for different layouts there"
        fix = "annotate the values between them so that they agree, or leave out strict"
        if len(self.stated.annotations) == 1:
            why = "the one annotation there is can't be used as stated there: an axis splits one factor of an operator"
            fix = "state another layout for it, or leave out strict"
        facts = [str(conflict) for conflict in plan.layouts.conflicts]
        refuse(facts, where=f"module function {self.function!r}, strict", why=why, fix=fix)
