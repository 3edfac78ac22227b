"""What torch was told elsewhere, on ranks: kernels, modules and redistributions with DTensors and local tensors."""

from __future__ import annotations

import re

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from tvm import relax

import mesh_tensor as mt
from kernels.matmul import matmul
from tests.plan.modules import function
from tests.refusals import refusal
from tests.runtime.ambient_states import STATES, TRANSFORMS, within

from .support import pure

M, N, K = 45, 33, 70


def _calls():
    """Name -> what is called, and with what it is called where a gradient is asked for."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    func = mt.annotate(matmul(M, N, K, 16, 16, 16), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    kern, rank = mt.compile(func, target="c"), mesh.get_rank()
    a, b = torch.randn(M, K), torch.randn(K, N)
    da, db = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    mine, part = a[:, rank * 35 : rank * 35 + 35].contiguous(), b[rank * 35 : rank * 35 + 35].contiguous()
    other = distribute_tensor(a, mesh, [Shard(0)])
    with torch.inference_mode():
        out = torch.empty(M, N)
    mod = function(lambda emit, x, w: emit(relax.op.nn.softmax(emit(relax.op.matmul(x, w)))), x=(M, K), w=(K, N))
    mod = mt.annotate_module(mod, {"x": 2}, {"x": {"x": 1}})
    module = mt.distribute_module(mod, mesh, weights={"w": b})
    return {
        "DTensors": (lambda t: kern(t, db), da),
        "another layout": (lambda t: kern(t, db), other),
        "local": (lambda t: kern.local(t, part, device_mesh=mesh), mine),
        "local into a tensor": (lambda t: kern.local(t, part, out, device_mesh=mesh), mine),
        "redistribute": (lambda t: mt.redistribute(t, {"x": 1}), other),
        "from_dtensor": (lambda t: mt.from_dtensor(t), da),
        "module": (module, a),
        "module on DTensors": (lambda t: module(t), da),
    }


def states(rank):
    """The bits are those of a call where torch was told nothing."""
    calls = {name: (run, tensor, _bits(run(tensor))) for name, (run, tensor) in _calls().items()}
    for state in (*STATES, *TRANSFORMS):
        for name, (run, tensor, expected) in calls.items():
            result = within(state, lambda run=run, tensor=tensor: run(tensor))
            assert result.dtype == torch.float32, (state, name)
            assert torch.equal(_bits(result), expected), (state, name)


def gradients(rank):
    """Refused on every rank, whether or not the same was called before; fine where nobody records them."""
    calls = {name: call for name, call in _calls().items() if not name.startswith("module")}  # which are recorded
    for name, (run, tensor) in calls.items():
        wanted = tensor.detach().clone().requires_grad_()
        first = refusal(lambda run=run, wanted=wanted: run(wanted))
        assert "requires a gradient, which would be lost" in first, name
        assert re.search(r"fix: .*\.detach\(\).*torch\.no_grad\(\)", first), name
        assert "pass this rank's part" not in first, name
        assert "shapes and dtypes" not in first, name
        expected = _bits(run(tensor))
        with torch.no_grad():
            assert torch.equal(_bits(run(wanted)), expected), name
        assert torch.equal(_bits(run(wanted.detach())), expected), name


def _bits(result):
    """Of what this rank holds."""
    if isinstance(result, mt.MeshTensor):
        return pure(result.full())
    return pure(result.to_local() if isinstance(result, DTensor) else result).clone()
