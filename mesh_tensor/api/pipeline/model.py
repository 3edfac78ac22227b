"""Pipeline: a model on several meshes, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NoReturn

import torch

from mesh_tensor.base.errors import MeshTensorError, listing, refuse
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.topology import Topology
from mesh_tensor.importers.constants import Constants
from mesh_tensor.importers.imported import CallForm, call_tensors
from mesh_tensor.pipelining.assign import annotated_topology
from mesh_tensor.pipelining.balance import check_pipeline, place
from mesh_tensor.pipelining.clock import hangs
from mesh_tensor.pipelining.flow import Flow
from mesh_tensor.pipelining.schedule import Schedule
from mesh_tensor.pipelining.stages import check_state, cut
from mesh_tensor.plan.ir import map_tree
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.module_inputs import ModuleSignature, refuse_outside
from mesh_tensor.runtime.ranks.alike import values_of
from mesh_tensor.runtime.ranks.faults import ways_of
from mesh_tensor.runtime.ranks.transfers import RankTopology
from mesh_tensor.targets.kernels import find_target

from ..fragments import Options, StageFragments, Values
from ..module_ports import whole
from ..on_ranks import Turns
from ..own_memory import in_own_memory
from ..training_optimizer import LossScale
from .carriers import Mailbox, RankCarrier
from .checkpoints import Learned
from .explain import explain_pipeline
from .measured import Measured
from .planned import PlannedStages
from .ranks import RankRuns, message_numbers
from .results import Results, results_of, rows_of, split_batch
from .rows import Microbatch, Row, run_rows
from .stated import stage_layouts, stages_of, trained_weights
from .stopwatch import Stopwatch
from .weights import StageWeights

_SMALL = 4096  # bytes: sending less takes as long as starting to send


class Pipeline(Learned, Measured):
    """A model in stages on several meshes, as a callable: it takes a whole batch, splits it into microbatches, and runs
    its schedule, with a thread per mesh. Results with rows are concatenated over microbatches; scalar results are
    means, or sums, over the batch's rows.

    topology, schedule, stages   the meshes, the order of actions, and what runs on which mesh
    inputs, trained              names of the parameters that calls pass, and of those whose gradients are computed
    peak_bytes                   per mesh: the most bytes kept for backwards in the last call
    peak_microbatches            per mesh: the most microbatches kept for backwards in the last call
    memory                       name -> kind of memory, of weights and values for which one was stated
    skipped                      number of updates skipped because gradients overflowed under a dynamic loss scale
    """

    def __init__(
        self,
        flow: Flow,
        topology: Any,
        weights: Mapping[str, Any],
        train: bool | Sequence[str],
        options: Options,
        ranks: bool,
    ) -> None:
        self._flow, self._options = flow, options
        self._signature = ModuleSignature(flow.mod, flow.function)
        self._device_type = find_target(options.target).device_type
        self._whole = {name: whole(tensor) for name, tensor in self._signature.weights(weights, "cpu").items()}
        self._open = self._signature.is_open(self._whole)
        self._check_state()
        own = [n for n, t in self._whole.items() if n in flow.state or t.ndim < 2 or self._signature.symbols]
        self._whole |= {name: self._whole[name].clone() for name in own}  # others are laid out now
        self.trained = trained_weights(flow, self._whole, train)
        self.inputs = tuple(name for name in flow.params if name not in self._whole)
        self.topology = annotated_topology(flow) if topology is None else Topology(topology)
        self._runs = RankRuns(RankTopology(self.topology), flow.function) if ranks else None
        carrier = Mailbox() if self._runs is None else RankCarrier(self._runs.ranks, {})
        self.memory: dict[str, str] = {}
        self._weights = StageWeights(self._whole, carrier, self._runs, self.memory)
        self._gradients: dict[int, Values] = {}
        self._checks_indices, self._ran, self._turns = True, False, Turns(self._as_call)
        self._machine: Machine = CPU
        self._constants = Constants()
        self._form: CallForm | None = None
        self._results = Results(flow)
        self._scale: LossScale | None = None
        self.skipped, self.microbatches = 0, 1
        self._watches: dict[str, Stopwatch] = {}
        self.peak_bytes = dict.fromkeys(self.topology, 0)
        self.peak_microbatches = dict.fromkeys(self.topology, 0)

    def _check_state(self) -> None:
        """Refuse a model that writes what is no weight here: it would have to come with every microbatch."""
        missing = [self._signature.names[name][0] for name in self._flow.state if name not in self._whole]
        if missing:
            refuse(
                f"the weights lack {listing(missing)}, which the model writes",
                where=f"pipeline of {self._flow.function!r}",
                fix="give them among the weights: they are kept, and handed on from microbatch to microbatch",
            )

    def _read_results(self, microbatches: int, reduction: str | None, per_microbatch: Sequence[str]) -> None:
        """Find out how microbatches make the results of a batch."""
        self.microbatches = microbatches
        self._results = results_of(
            self._flow, self._signature, self.inputs, self.trained, reduction, microbatches, per_microbatch
        )
        self._flow = self._results.flow

    def _cut(self, stages: Any, shardings: Mapping[str, Any], schedule: Schedule | str, limit: Any) -> None:
        """Cut the function into stages, lay these out, and check that the schedule can run them."""
        flow = self._flow
        where, meshes = stages_of(flow, stages, self.topology, self.inputs, self._signature, self._machine)
        on_meshes, self.schedule = place(self.topology, meshes, schedule, self.microbatches)
        check_state(flow, where, self.schedule)
        self.stages = cut(flow, where, on_meshes)
        self._weights.homes = {name: stage for stage in reversed(self.stages) for name in stage.params}
        self._takes = {stage.index: tuple(dict.fromkeys(stage.takes.values())) for stage in self.stages}
        check_pipeline(self.schedule, self._takes, bool(self.trained), limit)
        if self._runs is not None and (stuck := hangs(self.schedule, "per message", self._takes)):
            refuse(
                f"the schedule hangs: {stuck}",
                where=f"schedule {self.schedule.name!r} on ranks",
                fix="put the action that is waited for before that, or take a schedule with a name",
            )
        self._planned = PlannedStages(
            flow,
            self._signature,
            self.topology,
            where,
            self.stages,
            self.schedule,
            stage_layouts(flow, self.stages, self.topology, shardings),
            self.trained,
            self._options,
            self._weights,
            bool(self.memory),  # which is stated by names
        )
        if not self._signature.symbols:
            self._planned.of({})

    @undisturbed
    def __call__(self, *batch: Any, **named: Any) -> Any:
        if not (self.trained or self._flow.state):
            return self._called(batch, named)
        with self._turns.one("a call of a pipeline"):
            return self._called(batch, named)

    def _called(self, batch: Sequence[Any], named: Mapping[str, Any]) -> Any:
        self._forget()  # gradients are those of this call, which all ranks make, or there are none
        self._watches = {}
        if self._runs is None:
            return self._run(self._prepared(self._given(batch, named)))
        given = dict[str, torch.Tensor]()

        def prepare() -> tuple[dict[str, str], list[Microbatch]]:
            given.update(self._given(batch, named))
            return self._facts(self._prepared(given))

        made = self._runs.call(prepare, self._run_on_ranks, lambda _: given)
        if isinstance(made, MeshTensorError):
            raise made
        self._ran = True
        return made

    def _given(self, batch: Sequence[Any], named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The inputs of a call, by parameter."""
        return self._signature.passed(self._whole, *call_tensors(self._form, batch, named))

    def _prepared(self, given: Mapping[str, torch.Tensor]) -> list[Microbatch]:
        """The microbatches of a batch, with the stages for their sizes."""
        tensors = {**self._whole, **given}
        parts = split_batch(self._signature, {name: tensors[name] for name in self.inputs}, self.microbatches)
        checked = tensors if self._open else {}  # weights of known sizes were checked before
        known: dict[tuple[torch.Size, ...], tuple[StageFragments, ...]] = {}
        plans = []
        for part in parts:
            shapes = tuple(tensor.shape for tensor in part.values())
            if shapes not in known:
                known[shapes] = self._planned.of(self._signature.check({**checked, **part}, self._device_type))
            plans.append(known[shapes])
        if self._checks_indices:
            for here in plans[0]:
                refuse_outside(here.fragments["F"].module.plan.index_checks, tensors, self._flow.function)
        counts = [rows_of(part) for part in parts]
        shares = [count / sum(counts) for count in counts] if len(parts) > 1 else [1.0]
        mine = [stage for stage in self.stages if self._runs is None or stage.mesh == self._runs.ranks.name]
        taken = {name for stage in mine for name in stage.params}
        parts = self._results.with_totals(self._whole, parts, shares, taken)
        seeds = [self._results.seed(self._flow.returned[0], share) for share in shares]
        scale = self.loss_scale or 1.0
        return [Microbatch(*each, scale) for each in zip(parts, plans, shares, seeds, strict=True)]

    def _run(self, microbatches: list[Microbatch]) -> Any:
        mailbox = Mailbox()
        rows = [Row(mailbox, self._weights.of, microbatches, self._loss, self.memory) for _ in self.topology]
        run_rows(self.schedule, rows, self.topology.names, mailbox)
        for name, row in zip(self.topology, rows, strict=True):
            self._note(name, row)
        made = {key: value.full() for row in rows for key, value in row.results.items()}
        result = self._result(made, microbatches)
        self._gradients = {stage: sums for row in rows for stage, sums in row.gradients.items()}
        self._weights.advance({stage: state for row in rows for stage, state in row.state.items()})
        self._watches = {name: row.watch for name, row in zip(self.topology, rows, strict=True)}
        self._ran = True
        return result

    def _run_on_ranks(self, microbatches: list[Microbatch]) -> Any:
        """The results; or why they are refused, by which all ranks go on."""
        assert self._runs is not None
        numbers = message_numbers(self.stages, self.microbatches)
        carrier = RankCarrier(self._runs.ranks, numbers)
        row = Row(carrier, self._weights.of, microbatches, self._loss, self.memory)
        self._runs.row(self.schedule, row)
        self._runs.finish(self.schedule, carrier)
        self._note(self._runs.ranks.name, row)
        results = [(name, i) for name in dict.fromkeys(self._flow.returned) for i in range(self.microbatches)]
        made = {key: carrier.whole(value) for key, value in row.results.items()}
        home = {name: stage for stage in self.stages for name in stage.results}
        like = {(name, i): microbatches[i].stages[home[name].index].types[name] for name, i in results}
        owners = {key: home[key[0]] for key in results}
        shared = self._runs.share(made, owners, like, len(numbers), together=_SMALL)
        try:
            result = self._result(shared, microbatches)
        except MeshTensorError as error:
            return error
        self._gradients = row.gradients
        if self._flow.state:
            self._runs.settle([], None, "state of a pipeline")  # of all stages, or of none
            self._weights.advance(row.state)
        self._watches = {self._runs.ranks.name: row.watch}
        return result

    @property
    def fragments(self) -> tuple[StageFragments, ...]:
        """What every stage runs, for the sizes planned last."""
        return self._planned.latest

    @property
    def not_simulated(self) -> tuple[str, ...]:
        """What simulations of a call leave out, in words."""
        kinds = sorted({kind for kind in self.memory.values() if kind != "device"})
        found = [
            f"values that are held in {kind}, and their way there: as if they stayed on the device" for kind in kinds
        ]
        return (*found, *["the optimizer's update"] * bool(self.trained))

    def _as_call(self, _: Iterable[Any]) -> AbstractContextManager[None]:
        return nullcontext() if self._runs is None else self._runs.as_call()

    def refuse_call(self, error: Exception, given: Iterable[Any] = ()) -> NoReturn:
        """Raise `error` instead of a call, which the other ranks make."""
        with self._as_call(given):
            raise error

    @property
    def _loss(self) -> str | None:
        return self._flow.returned[0] if self.trained else None

    def _note(self, mesh: str, row: Row) -> None:
        self.peak_bytes[mesh], self.peak_microbatches[mesh] = row.peak_bytes, row.peak_microbatches

    def _facts(self, microbatches: list[Microbatch]) -> tuple[dict[str, str], list[Microbatch]]:
        """What has to be alike on all ranks."""
        layouts = dict.fromkeys(here.layouts_text for part in microbatches for here in part.stages)
        shapes = [f"{name} {tuple(part.inputs[name].shape)}" for part in microbatches for name in self.inputs]
        return {
            **self._own_facts,
            "loss scale": str(self.loss_scale),
            "layouts": ", ".join(layouts),
            "inputs": ", ".join(shapes),
        }, microbatches

    @cached_property
    def _own_facts(self) -> dict[str, str]:
        """What has to be alike on all ranks, whatever the batch. Ranks of a mesh compare their programs beside."""
        parts = [part for here in self.fragments for part in here.fragments["F"].module.program.parts]
        return {
            **ways_of(str(step.call.expr) for part in parts for step in part.ops),
            "schedule": str(self.schedule),
            "topology": str(self.topology),
            "stages": str(self.stages),
            "trained weights": ", ".join(self.trained),
            **values_of(self._weights.whole),
            "results": str(self._results),
        }

    def _result(self, made: Mapping[tuple[str, int], torch.Tensor], microbatches: Sequence[Microbatch]) -> Any:
        shares = [part.share for part in microbatches]
        parts = {name: [made[name, i] for i in range(len(shares))] for name in self._flow.returned}
        self._results.check_totals(parts, self._whole, [part.inputs for part in microbatches], shares)
        values = {name: self._results.merged(name, found, shares) for name, found in parts.items()}
        taken = set[int]()
        results = map_tree(self._flow.tree(values), lambda tensor: in_own_memory(tensor, taken))
        if self._form is None:
            return results
        return self._form.result(results if isinstance(results, tuple) else [results])

    def explain(self, machine: Machine | str | None = None) -> str:
        """The stages with their costs on a machine (the pipeline's, or another, or a preset's name), what goes between
        them, the schedule with its bubble, and what every mesh holds at most; for the sizes planned last."""
        machine = machine or self._machine
        return explain_pipeline(self.topology, self.schedule, self.fragments, self._takes, machine, self.memory)

    def __reduce__(self) -> NoReturn:
        refuse("a Pipeline can't be pickled or copied", fix="save its state_dict(), and make the pipeline again there")

    def __repr__(self) -> str:
        return f"Pipeline({self._flow.function}, {len(self.stages)} stages, {self.schedule.name!r}, {self.topology})"
