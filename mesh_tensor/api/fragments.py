"""Fragments that run: of a stage of a pipeline, or of a module that autograd records; and the layouts on their way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from tvm import ir

from mesh_tensor.annotations.annotate_module import annotate_module
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.pipelining.fragments import FragmentFunction, JointStage, fragments_of, gradient_name, without_gradient
from mesh_tensor.pipelining.stages import FUNCTION, Stage
from mesh_tensor.plan.explicit import completed_last
from mesh_tensor.plan.gradient import gradient_function
from mesh_tensor.program.plan_module import PlanOptions
from mesh_tensor.redistribution.transfer import TransferPlan
from mesh_tensor.runtime.ranks.dtensor import mesh_of
from mesh_tensor.runtime.virtual.mesh_tensor import ShardingLike
from mesh_tensor.targets.op_steps import Record, carried_pairs

from .mesh_module import MeshModule
from .module_ports import HeldWeights, parameter_layouts, ports_of, result_layouts

Values = dict[str, Any]  # MeshTensors, or parts on ranks
ParameterLayouts = Mapping[str, ShardingLike]


@dataclass(frozen=True, eq=False)
class Fragment:
    """What a stage runs on one microbatch: `module` takes the values `takes`, in order, and makes `gives`."""

    kind: str
    module: MeshModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    @cached_property
    def own(self) -> dict[str, str]:
        """The program's own names of what it takes, and of what it gives and doesn't take."""
        made = self.module.plan.made
        return dict(zip(self.gives, made.result, strict=True)) | dict(zip(self.takes, made.inputs, strict=True))

    def sums(self, params: Collection[str]) -> dict[str, int]:
        """The results that are gradients of parameters, by these, as numbers."""
        named = {gradient_name(name): name for name in params}
        return {named[name]: number for number, name in enumerate(self.gives) if name in named}

    @cached_property
    def layouts(self) -> dict[str, Sharding]:
        """How what it takes and gives lies."""
        plan = self.module.plan
        taken = zip(self.takes, parameter_layouts(plan).values(), strict=True)
        return dict(taken) | dict(zip(self.gives, result_layouts(plan), strict=True))

    @cached_property
    def types(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what it takes and gives."""
        plan = self.module.plan
        ports = {port.name: port for port in ports_of(plan)}
        names = zip((*self.takes, *self.gives), (*plan.made.inputs, *plan.made.result), strict=True)
        return {name: (ports[port].shape, ports[port].torch_dtype()) for name, port in names}


@dataclass(frozen=True, eq=False)
class StageFragments:
    """A stage on its mesh: its fragments by kind, and the layout of every value that enters or leaves one. `inputs` are
    those of its parameters that come with every batch; `still` those weights whose gradients are zero here."""

    stage: Stage
    mesh: Mesh
    fragments: Mapping[str, Fragment]
    layouts: Mapping[str, Sharding]
    inputs: tuple[str, ...] = ()
    still: frozenset[str] = frozenset()

    @cached_property
    def types(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every value that enters or leaves a fragment; a gradient has its value's."""
        found = {name: kind for fragment in self.fragments.values() for name, kind in fragment.types.items()}
        return {gradient_name(name): kind for name, kind in found.items()} | found

    @cached_property
    def layouts_text(self) -> str:
        """The layouts in words."""
        return ", ".join(f"{self.stage.index}.{name} '{layout}'" for name, layout in self.layouts.items())

    @cached_property
    def routes(self) -> dict[tuple[str, int], TransferPlan]:
        """How values go from here on ranks, by name and the stage that takes them, as far as that is planned: stages of
        other sizes are others."""
        return {}

    @cached_property
    def held_bytes(self) -> dict[str, int]:
        """What is held for backwards after an action of a kind, as far as one has run: the same each time."""
        return {}

    @cached_property
    def boxes(self) -> dict[str, Any]:
        """What this rank has of values that are placed, by name, as far as any were."""
        return {}

    @cached_property
    def given(self) -> frozenset[str]:
        """The values that fragments make."""
        return frozenset(name for fragment in self.fragments.values() for name in fragment.gives)

    @cached_property
    def taken(self) -> frozenset[str]:
        """What fragments take."""
        return frozenset(name for fragment in self.fragments.values() for name in fragment.takes)

    @cached_property
    def later(self) -> dict[str, frozenset[str]]:
        """What is still needed after an action of a kind: after F by backwards, after I by W."""
        kinds = {"F": "BIW", "I": "W", "B": "", "W": ""}
        takes = {kind: fragment.takes for kind, fragment in self.fragments.items()}
        return {done: frozenset(n for kind in left for n in takes.get(kind, ())) for done, left in kinds.items()}

    @cached_property
    def lasts(self) -> dict[str, frozenset[str]]:
        """What an action of a kind is the last to take."""
        return {kind: frozenset(made.takes) - self.later[kind] for kind, made in self.fragments.items()}

    @cached_property
    def sums(self) -> dict[str, dict[str, int]]:
        """By kind, the results that are gradients of the stage's parameters, by these, as numbers."""
        return {kind: made.sums(self.stage.params) for kind, made in self.fragments.items()}

    @cached_property
    def own(self) -> frozenset[str]:
        """The stage's parameters."""
        return frozenset(self.stage.params)

    @cached_property
    def valued(self) -> dict[str, str]:
        """By the name of a gradient, the parameter or value of the stage that it is of."""
        return {gradient_name(name): name for name in (*self.stage.params, *self.stage.takes, *self.stage.gives)}


@dataclass(frozen=True)
class Options:
    """How fragments are made, as `distribute_module` takes it; `recompute`: backwards run their forward again;
    `weights`: values that fragments take and callers don't pass; `carries`: what torch keeps in a forward for gradients
    is carried to the backward (see `MeshModule.carry`)."""

    target: str = "auto"
    strict: bool = False
    poison: bool = False
    recompute: bool = False
    weights: HeldWeights = field(default_factory=lambda: HeldWeights({}))
    plan: PlanOptions = PlanOptions()
    carries: bool = False

    def fragment(
        self,
        kind: str,
        mod: ir.IRModule,
        function: str,
        mesh: Any,
        layouts: ParameterLayouts,
        ports: FragmentFunction | Stage,
    ) -> Fragment:
        """A function of a module as a fragment."""
        taken = (*ports.params, *ports.takes) if isinstance(ports, Stage) else ports.takes
        names = mesh_of(mesh) if type(mesh).__name__ == "DeviceMesh" else mesh
        module = MeshModule(
            annotate_module(mod, names, layouts, function) if layouts else mod,
            mesh,
            weights=self.weights.some(taken),
            function=function,
            target=self.target,
            strict=self.strict,
            poison=self.poison,
            options=replace(self.plan, check_indices=kind == "F" and self.plan.check_indices, sub_axes=False),
        )
        return Fragment(kind, module, tuple(taken), ports.gives)


def forward_fragments(stage: Stage, mesh: Mesh, layouts: ParameterLayouts, options: Options) -> StageFragments:
    """A stage that only runs forwards."""
    made = options.fragment("F", stage.module, FUNCTION, mesh, layouts, stage)
    return StageFragments(stage, mesh, {"F": made}, made.layouts)


def training_fragments(
    stage: Stage,
    mesh: Any,
    layouts: ParameterLayouts,
    options: Options,
    wrt: Sequence[str],
    kinds: Iterable[str],
    constant: Sequence[str] = (),
    shared: Sequence[str] = (),
) -> StageFragments:
    """A stage that runs forwards, and backwards of these kinds, to the gradients of `wrt`; those of weights that are
    `shared` with other stages may be zero.

    The forward's layouts are those of all: what it saves is taken as it lies, and a gradient lies as its value, but
    for those of weights, which may be left to be reduced. What follows from the parameters `constant` is not saved.
    """
    module = annotate_module(stage.module, mesh, layouts, FUNCTION) if layouts else stage.module
    joint = None
    if wrt:
        optional, unseeded = {*stage.takes, *shared}, [stage.gives.index(name) for name in stage.only_state]
        joint = gradient_function(module, FUNCTION, list(wrt), seeded=True, optional=optional, unseeded=unseeded)
    if joint is None:  # nothing to train here, and nothing before it
        return forward_fragments(stage, mesh, layouts, options)
    joined = JointStage(stage, joint, tuple(wrt), tuple(constant))
    functions = fragments_of(joined, options.recompute)
    forward = options.fragment("F", functions["F"].module, "F", mesh, {}, functions["F"])
    known, made = dict(forward.layouts), {"F": forward}
    known |= {gradient_name(name): layout.complete for name, layout in forward.layouts.items()}
    for kind in [kind for kind in "BIW" if kind in functions and kind in kinds]:
        function = functions[kind]
        inner = set(function.own) - {name for name in function.gives if function.own[name] in _parameters(function)}
        stated = {function.own[name]: known[name] for name in function.own if name in known and name in inner}
        fragment = options.fragment(kind, function.module, kind, mesh, stated, function)
        if parts := _added_up_last(fragment, [name for name in wrt if name in stage.params]):
            fragment = replace(fragment, module=fragment.module.with_parts(parts))
        made[kind] = fragment
        known = {**fragment.layouts, **known}
    if options.carries:
        _carry(made)
    still = without_gradient(joined) & {*shared} if shared else frozenset()
    here = StageFragments(stage, mesh, made, known, still=still)
    for kind in made.keys() - {"F"}:
        last = here.lasts[kind] - here.own
        made[kind].module.forget([number for number, name in enumerate(made[kind].takes) if name in last])
        made[kind].module.add_up(list(here.sums[kind].values()))
        made[kind].module.hand_on_first(
            [number for number, name in enumerate(made[kind].gives) if here.valued.get(name) in stage.takes]
        )
    return here


def _carry(fragments: Mapping[str, Fragment]) -> None:
    """Let the forward keep what it computes beside results for the first backward of a microbatch: B, or I, or W
    where there is no I."""
    forward = fragments["F"]
    found: dict[str, Record] = {}
    for later in [fragments[kind] for kind in ("B", "I" if "I" in fragments else "W") if kind in fragments]:
        same = {own: forward.own[name] for name, own in later.own.items() if name in forward.own}
        keeps, takes = carried_pairs(forward.module.program, later.module.program, same)
        alike = set[str]()
        for name, record in keeps.items():  # who wants other gradients than B computes it again
            if found.setdefault(name, record).gradient.call.kind == record.gradient.call.kind:
                alike.add(record.name)
        later.module.carry({name: record for name, record in takes.items() if record.name in alike})
    forward.module.carry(found)


def _parameters(function: FragmentFunction) -> set[str]:
    """The function's own names of what it takes and hands on as it is."""
    return {function.own[name] for name in function.takes} & {function.own[name] for name in function.gives}


def _added_up_last(fragment: Fragment, weights: Sequence[str]) -> list[int]:
    """The gradients of weights, as numbers of results, whose parts a fragment adds up over devices at its end: those of
    microbatches are added up first, and reduced once. Those that are scattered in it are not, which would take more
    memory, and neither are those that are other results, too, which are taken whole."""
    last, results = completed_last(fragment.module.plan.explicit), fragment.module.plan.made.result
    wanted = {*map(gradient_name, weights)}
    whole = {results[number] for number, name in enumerate(fragment.gives) if name not in wanted}
    alone = last.keys() - whole
    numbers = [number for number, name in enumerate(fragment.gives) if name in wanted and results[number] in alone]
    return [
        number  # parts of a low-precision sum would be rounded
        for number in numbers
        if fragment.types[fragment.gives[number]][1].itemsize >= 4
    ]
