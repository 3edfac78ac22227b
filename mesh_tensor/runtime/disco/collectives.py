"""What a worker's module calls: the collectives and local operators of the namespace `mesh.`, and Disco's own
collectives, which TVM has for NCCL only. Importing this registers them with TVM.

Every function works for the worker that the calling thread is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import tvm_ffi
from tvm import ir, relax

from mesh_tensor.base.collectives import COLLECTIVES
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Partial, Shard, Sharding
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.targets.dtypes import torch_dtype
from mesh_tensor.targets.kernels import find_target
from mesh_tensor.targets.torch_ops import local_operators, torch_function

from .peers import WorkerPeers, apart, as_torch, as_tvm

_REDUCTIONS = {0: "sum", 1: "prod", 2: "min", 3: "max"}  # as TVM numbers them

_workers: dict[int, WorkerPeers] = {}  # by thread: a Python thread-local would end with each call from C++


def become(peers: WorkerPeers) -> None:
    """From now on this thread is that worker."""
    _workers[threading.get_ident()] = peers


def here() -> WorkerPeers:
    """The worker that this thread is."""
    peers = _workers.get(threading.get_ident())
    if peers is None:
        refuse("this thread is no worker of a DiscoSession", fix="run the module with mt.run_on_disco")
    return peers


def retire() -> None:
    """This thread is a worker no more."""
    _workers.pop(threading.get_ident()).leave()


@lru_cache(maxsize=1024)
def _layout(mesh: Mesh, ndim: int, text: str) -> Sharding:
    return Sharding.parse(mesh, ndim, text)


def _collective(tile: Any, shape: Any, src: str, dst: str, _axes: str, out_shape: Any, _dtype: str) -> Any:
    """(tile, R.shape(global), R.str(layout), R.str(layout after), R.str(axes), R.shape(tile after), R.str(dtype)).
    The shape and the layouts may take the tensor's dims further apart; padding of the new tile is zero."""
    peers, local, whole = here(), as_torch(tile), tuple(shape)
    before, after = (_layout(peers.mesh, len(whole), str(text)) for text in (src, dst))
    new = torch.zeros(after.tile_shape(whole), dtype=local.dtype)
    peers.change(whole, local.dtype, before, after)(local.view(before.tile_shape(whole)), new)
    return as_tvm(new.view(tuple(out_shape)))


def _scatter(tensor: Any, shape: Any, layout: str, out_shape: Any, dtype: str) -> Any:
    """(tensor on worker 0 else None, R.shape(global), R.str(layout), R.shape(tile), R.str(dtype)): every worker's tile,
    padded with zeros."""
    peers, whole, kind = here(), tuple(shape), torch_dtype(str(dtype))
    sharding = _layout(peers.mesh, len(whole), str(layout))
    new = torch.zeros(sharding.tile_shape(whole), dtype=kind)
    given = torch.empty(0, dtype=kind) if tensor is None else as_torch(tensor).view(whole)
    peers.scatter(whole, kind, sharding)(given, new)
    return as_tvm(new.view(tuple(out_shape)))


def gather(tile: Any, shape: tuple[int, ...], layout: str) -> torch.Tensor | None:
    """The whole tensor on worker 0, None on the others."""
    peers, local = here(), as_torch(tile)
    sharding = _layout(peers.mesh, len(shape), layout)
    new = torch.zeros(shape if peers.rank == 0 else 0, dtype=local.dtype)
    peers.gather(shape, local.dtype, sharding)(local.view(sharding.tile_shape(shape)), new)
    return new if peers.rank == 0 else None


def _coordinates(_axes: str) -> Any:
    """Where this worker stands on every axis of the mesh."""
    peers = here()
    return tvm_ffi.Shape(tuple(peers.mesh.coordinate(peers.rank).values()))


def _local_operator(name: str, *args: Any) -> Any:
    """A local operator: what it takes in local view, then R.shape and R.str(dtype) of its result."""
    peers = here()
    tensors = tuple(as_torch(arg) for arg in args if isinstance(arg, tvm_ffi.Tensor))
    forms = tuple(
        (tuple(arg.shape), str(arg.dtype)) if isinstance(arg, tvm_ffi.Tensor) else _plain(arg) for arg in args
    )
    (result,) = apart(_function_of(name, forms, peers.mesh, peers.rank)(*tensors), tensors)
    return as_tvm(result)


def _operator(call: str, *args: Any) -> Any:
    """(R.str(the call as JSON), tensors): an operator that TVM has no code for, as torch computes it."""
    peers, tensors = here(), tuple(as_torch(arg) for arg in args)
    function = _function_of_json(str(call), peers.mesh, peers.rank)
    results = [as_tvm(result) for result in apart(function(*tensors), tensors)]
    return results if len(results) > 1 else results[0]


def _kernel(func: str, numbers: Any, changed: Any, *args: Any) -> Any:
    """(R.str(a TileLang kernel as JSON), R.shape(what it takes besides tensors), R.shape(the operands that it changes),
    tensors): the changed operands, which are copies, then its results."""
    kernel, made = _kernel_of_json(str(func))
    operands = [as_torch(arg) for arg in args]
    operands = [operand.clone() if n in changed else operand for n, operand in enumerate(operands)]
    results = [torch.empty(shape, dtype=dtype) for shape, dtype in made[len(operands) :]]
    kernel(*operands, *results, *numbers)
    given = [as_tvm(tensor) for tensor in (*(operands[n] for n in changed), *results)]
    return given if len(given) > 1 else given[0]


@lru_cache(maxsize=1024)
def _kernel_of_json(text: str) -> tuple[Callable[..., None], list[tuple[tuple[int, ...], torch.dtype]]]:
    """The kernel compiled, with the shapes and dtypes of its tensors."""
    func = ir.load_json(text)
    buffers = [func.buffer_map[param] for param in func.params if param in func.buffer_map]
    tensors = [(tuple(map(int, buffer.shape)), torch_dtype(str(buffer.dtype))) for buffer in buffers]
    return find_target("c").compile(func), tensors


def _plain(arg: Any) -> Any:
    if isinstance(arg, tvm_ffi.Shape):
        return tuple(arg)
    return str(arg) if isinstance(arg, str) else arg


@lru_cache(maxsize=1024)
def _function_of(name: str, forms: tuple, mesh: Mesh, rank: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    *taken, shape, dtype = forms
    call = relax.op.call_pure_packed(name, *map(_expr, taken), sinfo_args=[relax.TensorStructInfo(shape, dtype)])
    return torch_function(op_call(relax.BlockBuilder().normalize(call)), mesh, rank)


def _expr(form: Any) -> relax.Expr:
    if isinstance(form, str):
        return relax.StringImm(form)
    if not isinstance(form, tuple):
        return relax.PrimValue(form)
    if len(form) == 2 and isinstance(form[1], str):
        return relax.Var("x", relax.TensorStructInfo(*form))
    return relax.ShapeExpr(form)


@lru_cache(maxsize=1024)
def _function_of_json(text: str, mesh: Mesh, rank: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    return torch_function(op_call(ir.load_json(text)), mesh, rank)


def _change(send: Any, recv: Any, shape: tuple[int, ...], src: Sharding, dst: Sharding) -> None:
    local, new = as_torch(send), as_torch(recv)
    here().change(shape, local.dtype, src, dst)(local.view(src.tile_shape(shape)), new.view(dst.tile_shape(shape)))


def _disco_allreduce(send: Any, kind: int, in_group: bool, recv: Any) -> None:
    mesh, shape = here().mesh, tuple(send.shape)
    if kind not in _REDUCTIONS:
        refuse("Disco's all-reduce 'avg' has no counterpart here", fix="reduce by 'sum' and divide")
    partial_ = Sharding.of(mesh, len(shape), dict.fromkeys(mesh, Partial(_REDUCTIONS[kind])))
    _change(send, recv, shape, partial_, Sharding.of(mesh, len(shape), {}))


def _disco_allgather(send: Any, in_group: bool, recv: Any) -> None:
    mesh, part = here().mesh, tuple(send.shape)
    shape = (mesh.num_devices * part[0], *part[1:])
    _change(send, recv, shape, *(Sharding.of(mesh, len(shape), p) for p in (dict.fromkeys(mesh, Shard(0)), {})))


def _disco_broadcast(send: Any, in_group: bool, recv: Any) -> None:
    new, shape = as_torch(recv), tuple(recv.shape)
    given = torch.empty(0, dtype=new.dtype) if send is None else as_torch(send)
    here().scatter(shape, new.dtype, Sharding.of(here().mesh, len(shape), {}))(given, new)


def _disco_scatter(send: Any, in_group: bool, recv: Any) -> None:
    mesh, new = here().mesh, as_torch(recv)
    given = torch.empty(0, dtype=new.dtype) if send is None else as_torch(send)
    here().scatter(*_by_device(mesh, new))(given, new.view(1, *new.shape))


def _disco_gather(send: Any, in_group: bool, recv: Any) -> None:
    mesh, local = here().mesh, as_torch(send)
    given = torch.empty(0, dtype=local.dtype) if recv is None else as_torch(recv)
    here().gather(*_by_device(mesh, local))(local.view(1, *local.shape), given)


def _by_device(mesh: Mesh, local: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, Sharding]:
    """Of a tensor with one such part per device: shape, dtype and layout."""
    shape = (mesh.num_devices, *local.shape)
    return shape, local.dtype, Sharding.of(mesh, len(shape), dict.fromkeys(mesh, Shard(0)))


def _register() -> None:
    # The function that Disco calls is `runtime.disco.<ccl>.<name>`; a session without NCCL or RCCL has no ccl.
    functions: dict[str, Callable[..., Any]] = {
        **{f"mesh.{kind}": _collective for kind in COLLECTIVES},
        **{name: partial(_local_operator, name) for name in local_operators()},
        "mesh.scatter_from_worker0": _scatter,
        "mesh.coordinates": _coordinates,
        "mesh.operator": _operator,
        "mesh.kernel": _kernel,
        "runtime.disco..allreduce": _disco_allreduce,
        "runtime.disco..allgather": _disco_allgather,
        "runtime.disco..broadcast_from_worker0": _disco_broadcast,
        "runtime.disco..scatter_from_worker0": _disco_scatter,
        "runtime.disco..gather_to_worker0": _disco_gather,
    }
    for name, function in functions.items():
        tvm_ffi.register_global_func(name, function, override=True)


_register()
