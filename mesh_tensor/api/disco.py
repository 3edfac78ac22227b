"""Modules on TVM's Disco: `to_disco`, DiscoModule and `run_on_disco`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tvm import ir

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.recent import MODULE_SIZES, Recent
from mesh_tensor.plan.ir import map_tree
from mesh_tensor.program.plan_module import ModulePlan
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.disco import DiscoSession, Held
from mesh_tensor.runtime.disco.disco_module import WORKER_FUNC, export, to_disco_module
from mesh_tensor.targets.dtypes import is_plain

from .mesh_module import MeshModule
from .module_ports import ports_of


def to_disco(module: MeshModule) -> ir.IRModule:
    """The Relax module that every worker of a Disco session runs: the local module, and `worker_func`, which takes
    global tensors on worker 0 and sends every worker its tiles. `relax.build` builds it like any other.

    Raises:
        MeshTensorError: `module` is no MeshModule, has a function `worker_func`, or TVM can't build it for the CPU.
    """
    _check(module, "to_disco")
    return to_disco_module(module.plan_as_passed())[0]


class DiscoModule:
    """A distributed module on the workers of a Disco session, as a callable: it takes and returns global torch tensors,
    as `module` does.

    `session`: a session on the module's mesh; None makes one with `options`, those of DiscoSession, and `close` ends
    it. Weights are sent to the workers at every call, as the worker function takes them."""

    def __init__(self, module: MeshModule, session: DiscoSession | None = None, **options: Any) -> None:
        _check(module, "DiscoModule")
        if session is not None and not isinstance(session, DiscoSession):
            refuse(f"a {type(session).__name__} is no DiscoSession", where="DiscoModule", fix="mt.DiscoSession(mesh)")
        if session is not None and (session.mesh != module.mesh or options):
            refuse(
                f"the session is for {session.mesh}, the module for {module.mesh}"
                if not options
                else "a session and options for one",
                where="DiscoModule",
                fix="make a DiscoSession of the module's mesh, or pass none",
            )
        self._module, self._built = module, Recent[int, tuple[ModulePlan, Held]](MODULE_SIZES)
        self._owned = session is None
        self.session = session or DiscoSession(module.mesh, **options)

    @undisturbed
    def __call__(self, *args: Any, **named: Any) -> Any:
        """What the function returns.

        Raises:
            MeshTensorError: the tensors do not fit, TVM can't build the module, or a worker fails.
        """
        tensors, plan = self._module.bind(*args, **named)
        wrong = [name for name, tensor in tensors.items() if not is_plain(tensor)]
        if wrong:
            refuse(
                [f"argument {name!r} is a {type(tensors[name]).__name__}" for name in wrong],
                where="DiscoModule",
                fix="pass plain torch tensors: workers get their tiles from worker 0",
            )
        ports = {port.name: port for port in ports_of(plan)}
        params = zip(plan.params, plan.made.inputs, strict=True)
        wanted = _paths(plan.made.result)
        taken = [(path, ports[name].refined, ports[name].sharding.text()) for path, name in wanted]
        given = [ports[port].arranged(tensors[name]).view(ports[port].shape) for name, port in params]
        with self.session.turn():
            gathered = self.session.gather(self._ran(plan, given), taken)
        results = iter([whole.view(ports[name].shape) for (_, name), whole in zip(wanted, gathered, strict=True)])
        return map_tree(plan.made.result, lambda _: next(results))

    def close(self) -> None:
        """End the session, if it is this module's own."""
        self._built = Recent(MODULE_SIZES)
        if self._owned:
            self.session.close()

    def __enter__(self) -> DiscoModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ran(self, plan: ModulePlan, given: Iterable[torch.Tensor]) -> Held:
        """What the workers make of these tensors."""
        return self.session.act("run", self._machine(plan), WORKER_FUNC, *map(self.session.put, given))

    def _machine(self, plan: ModulePlan) -> Held:
        """The virtual machine of the plan on every worker."""
        built = self._built.get(id(plan))
        if built is None:
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder, "module.so"))
                _, executable = to_disco_module(plan)
                export(executable, path)
                built = self._built.put(id(plan), (plan, self.session.act("load", path)))
        return built[1]


def run_on_disco(module: MeshModule, *args: Any, threads: bool = False, timeout: float = 60.0, **named: Any) -> Any:
    """What `module` returns for global torch tensors, run once on Disco workers that are started for it. DiscoModule
    keeps them for more calls.

    Args:
        module: a module on a mesh, as `distribute_module` makes them.
        args, named: global tensors, as the module takes them.
        threads: the workers are threads of this process, not processes of their own.
        timeout: seconds after which workers that don't answer are given up.

    Raises:
        MeshTensorError: the tensors do not fit, TVM can't build the module, or a worker fails.
    """
    with DiscoModule(module, threads=threads, timeout=timeout) as run:
        return run(*args, **named)


def _check(module: Any, caller: str) -> None:
    if not isinstance(module, MeshModule):
        refuse(f"{caller} takes a MeshModule, not {type(module).__name__}", fix="make one: mt.distribute_module")


def _paths(tree: Any, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], str]]:
    """The names in a tree, with where they are."""
    if isinstance(tree, str):
        return [(path, tree)]
    return [found for index, item in enumerate(tree) for found in _paths(item, (*path, index))]


__all__ = ["DiscoModule", "DiscoSession", "run_on_disco", "to_disco"]
