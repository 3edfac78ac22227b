"""Modules on real ranks: the same bits as on the virtual mesh, with global tensors and with DTensors."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import mesh_tensor as mt
from kernels.models import gpt2
from mesh_tensor.runtime.ranks.dtensor import local_part
from mesh_tensor.targets.tile_memory import memory_of
from tests.annotations import test_experts
from tests.api.test_module_memory import Passed, expected
from tests.api.test_module_state import Cache
from tests.plan import test_shifts
from tests.plan.loop_modules import LOOPS, looped
from tests.plan.seed_modules import NESTED
from tests.plan.test_loops import Halving
from tests.plan.test_loops import data as loop_data
from tests.plan.test_manual import Nested, comm, manual_module
from tests.plan.test_order_of_axes import mlp
from tests.plan.test_sub_axes import product
from tests.program import test_families
from tests.random_modules.build import build
from tests.random_modules.check import flat, make_data
from tests.random_modules.strategy import make_case
from tests.refusals import refusal

from .support import pure


def modules_of(sizes, numbers):
    """Random modules on a virtual mesh of these sizes, each with what it is called with."""
    made = []
    for number in numbers:
        case = make_case(number)
        if tuple(case.mesh.values()) != sizes:
            continue
        mod = mt.annotate_module(build(case.source), case.mesh, case.shardings, open=case.open, priority=case.priority)
        data = make_data(case)
        weights = {name: data[name] for name in case.weights}
        inputs = [tensor for name, tensor in data.items() if name not in weights]
        made.append((number, mod, weights, inputs, mt.distribute_module(mod, case.mesh, weights=weights)))
    return made


def random_modules(rank, made, sizes):
    """Global tensors, then DTensors of any placement; bit for bit as on the virtual mesh. How many ran."""
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y")[: len(sizes)])
    for number, mod, weights, inputs, virtual in made:
        expected, run = flat(virtual(*inputs)), mt.distribute_module(mod, device_mesh, weights=weights)
        for _ in range(2):
            _same_bits(flat(run(*inputs)), expected, number)
        if inputs:
            given = [distribute_tensor(t, device_mesh, _placements(number + i, t, sizes)) for i, t in enumerate(inputs)]
            _same_bits(_full(run(*given)), expected, number)
    return len(made)


def sub_axes(rank, size):
    """Parts of an axis: bit for bit as on the virtual mesh; DTensors come and go on the whole axis."""
    device_mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    for mod, layouts, inputs in _sub_axes():
        virtual = mt.distribute_module(mod, {"x": size}, layouts)
        run = mt.distribute_module(mod, device_mesh, layouts)
        assert run.plan.graph.mesh == mt.Mesh({"x:(1)2": 2, "x:(2)2": 2}) == virtual.plan.graph.mesh
        _same_bits([run(*inputs)], [virtual(*inputs)], 0)
        for placement in (Replicate(), Shard(0), Shard(1)):
            given = [distribute_tensor(tensor, device_mesh, [placement]) for tensor in inputs]
            made = run(*given)
            assert made.device_mesh == device_mesh
            _same_bits([made.full_tensor()], [virtual(*inputs)], 0)


def order_and_manual(rank, sizes):
    """Axes in another order than the mesh's, and manual computations: bit for bit as on the virtual mesh; DTensors come
    and go in torch's layouts."""
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y"))
    mesh, both = dict(zip("xy", sizes, strict=True)), {"x": 1, "y": 1}
    torch.manual_seed(0)
    cases = [
        (mlp(), {"x": {("y", "x"): 0}}, (torch.randn(12, 12), torch.randn(12, 6))),
        (mlp(), {"x": {("y", "x"): 0}, "lv1": {("x", "y"): 0}}, (torch.randn(12, 12), torch.randn(12, 6))),
        (Nested, {"x": {"y": 0}}, (torch.randn(8, 4),)),
    ]
    for send, out in ((lambda t: comm.broadcast(t, mesh, 2), {}), (lambda t: comm.scatter(t, mesh, 1, 3), both)):
        mod = manual_module(lambda emit, t, send=send: emit(send(t)), [(8, 12)], mesh, [{"x": 0, "y": 0}], out)
        cases.append((mod, {}, (torch.randn(8, 12),)))
    for mod, layouts, inputs in cases:
        virtual = mt.distribute_module(mod, mesh, layouts)
        run = mt.distribute_module(mod, device_mesh, layouts)
        _same_bits([run(*inputs)], [virtual(*inputs)], 0)
        for placements in ([Replicate(), Replicate()], [Shard(0), Shard(0)], [Shard(1), Shard(0)]):
            given = [distribute_tensor(tensor, device_mesh, placements) for tensor in inputs]
            _same_bits([run(*given).full_tensor()], [virtual(*inputs)], 0)
    mod = test_experts.module(16, 8, mesh, room=2)  # a loop in one, as long as data says
    inputs = test_experts.inputs(16, 8, torch.tensor([0, 0, 0, 5, 7, -1, 1, 2] * 2))
    virtual, run = (mt.distribute_module(mod, where, {"up": {"x": 0, "y": 0}}) for where in (mesh, device_mesh))
    _same_bits([run(*inputs)], [virtual(*inputs)], 0)
    tensor = distribute_tensor(torch.randn(12, 4), device_mesh, [Shard(0), Shard(0)])
    try:
        mt.redistribute(tensor, {("y", "x"): 0})
    except mt.MeshTensorError as error:
        return str(error)


def _sub_axes():
    """Modules, layouts, operands: parts that are stated, on even and uneven dims."""
    x, w = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)), torch.ones(8, 16)
    for layout in ({"x:(1)2": 0, "x:(2)2": 1}, {"x:(1)2": 1, "x:(2)2": 1}, {"x:(2)2": 2}):
        yield product(), {"x": layout}, (x, w)
        yield product(), {"x": layout, "w": {"x": 1}}, (x, w)


def shifted(rank, size):
    """What goes to other places of a split dim, from neighbours or by places that data says, is what torch gives, bit
    for bit; what is computed of it is what the virtual mesh gives."""
    device_mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    cases = dict(test_shifts.CASES)
    summed, tensors, *_ = cases.pop("slice that others take too")
    put = test_shifts.X.T.contiguous(), torch.randn(2, 3), test_shifts.PLACES
    given = [(make, reference, operands, 1) for make, operands, reference, *_ in cases.values()]
    given += [(make, reference, put, 0) for make, reference in test_shifts.PUT.values()]
    for make, operands in ((summed, tensors), (test_shifts.shifted_windows, (torch.randn(1, 24, 8, 3),))):
        virtual = mt.distribute_module(test_shifts.module(make, *operands), {"x": size}, {"p0": {"x": 1}})
        given.append((make, virtual, operands, 1))
    for number, (make, reference, operands, dim) in enumerate(given):
        expected = reference(*operands)
        run = mt.distribute_module(test_shifts.module(make, *operands), device_mesh, {"p0": {"x": dim}})
        _same_bits([run(*operands)], [expected], number)
        lie = [_placements(number + i, tensor, (size,)) for i, tensor in enumerate(operands)]
        tensors = [distribute_tensor(t, device_mesh, placements) for t, placements in zip(operands, lie, strict=True)]
        _same_bits(_full(run(*tensors)), [expected], number)
    return len(given) + _loops(device_mesh, size)


def _loops(device_mesh, size):
    """Loops of known length, and as long as data says: bit for bit as on the virtual mesh."""
    cases = [(looped(loop, 4), {"c0": {"x": 0}}, loop_data(loop)) for loop in LOOPS.values()]
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    cases += [(Halving, {"x": {"x": 1}}, (x, torch.tensor(least))) for least in (0.5, 1e9)]
    for number, (mod, layouts, inputs) in enumerate(cases):
        expected = flat(mt.distribute_module(mod, {"x": size}, layouts)(*inputs))
        run = mt.distribute_module(mod, device_mesh, layouts)
        for _ in range(2):
            _same_bits(flat(run(*inputs)), expected, number)
        lie = [_placements(number + i, tensor, (size,)) for i, tensor in enumerate(inputs)]
        tensors = [distribute_tensor(t, device_mesh, placements) for t, placements in zip(inputs, lie, strict=True)]
        _same_bits(_full(run(*tensors)), expected, number)
    return len(cases)


def other_sizes(rank):
    """Plans that are read off those of fewer layers: bit for bit as on the virtual mesh, and what torch gives."""
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    torch.manual_seed(0)
    tower = test_families.Tower(test_families.mlp)
    run, virtual = (
        mt.distribute_module(tower.mod, mesh, {"x": {"x": 0}}, weights=tower.weights)
        for mesh in (device_mesh, {"x": 2})
    )
    for batch, places in ((4, 6), (3, 5), (8, 8)):
        x = expected = torch.randn(batch, places, 8)
        for number in range(test_families.COUNT):
            expected = test_families.mlp_in_torch(expected, tower.weights, number)
        made = run(distribute_tensor(x, device_mesh, [Shard(1)])).full_tensor()
        torch.testing.assert_close(made, expected, rtol=2e-4, atol=2e-5)
        _same_bits([made], [virtual(x)], 0)


def _placements(number, tensor, sizes):
    """Every axis splits some dim, or none."""
    options = [Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]
    return [options[(number + axis) % len(options)] for axis in range(len(sizes))]


def _full(tree):
    if isinstance(tree, tuple):
        return [leaf for item in tree for leaf in _full(item)]
    assert isinstance(tree, DTensor)
    return [tree.full_tensor()]


def _same_bits(found, expected, number):
    assert len(found) == len(expected)
    for have, want in zip(found, expected, strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype), number
        assert torch.equal(pure(have), pure(want)), f"module {number}: {have}\nexpected\n{want}"


def a_model(rank, sizes):
    """GPT-2 blocks, tensor parallel (and data parallel on a mesh with two axes), weights and tokens as DTensors."""
    axes = ("model", "data")[: len(sizes)]
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    torch.manual_seed(0)
    config = gpt2.Config()
    model, inputs = gpt2.build(config), gpt2.example_inputs(config)
    module = mt.from_torch(torch.export.export(model, inputs))
    mesh = dict(zip(axes, sizes, strict=True))
    layouts = gpt2.tensor_parallel(config, "model")
    mod = mt.annotate_module(module.mod, mesh, layouts)
    expected = mt.distribute_module(mod, mesh, weights=module.params)(*inputs)
    run = mt.distribute_module(mod, device_mesh, weights=module.params)
    assert torch.equal(pure(run(*inputs)), pure(expected))
    tokens = [distribute_tensor(t, device_mesh, [Replicate()] * len(sizes)) for t in inputs]
    assert torch.equal(pure(run(*tokens).full_tensor()), pure(expected))
    with torch.no_grad():
        torch.testing.assert_close(expected, model(*inputs), rtol=1e-4, atol=2e-5)


def mesh_larger_than_the_world(rank):
    """The module is annotated for four devices, and there are two ranks: what is said of the mesh, and of DTensors."""
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    annotated = mt.annotate_module(NESTED, {"x": 4}, {"A": {"x": 1}})
    run = mt.distribute_module(annotated)
    tensors = [distribute_tensor(torch.ones(128, 128), device_mesh, [Replicate()]) for _ in range(5)]
    return refusal(lambda: mt.distribute_module(annotated, device_mesh)), refusal(lambda: run(*tensors))


def mesh_tensors(rank):
    """What is said of a MeshTensor that a module on ranks is given, and that it still runs after that."""
    run = mt.distribute_module(NESTED, init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), {"A": {"x": 1}})
    tensors = [torch.ones(128, 128) for _ in range(5)]
    text = refusal(lambda: run(mt.distribute(tensors[0], {"x": 2}, {"x": 0}), *tensors[1:]))
    torch.testing.assert_close(run(*tensors), mt.run_sequential(NESTED, tensors))
    return text


class Rows(torch.nn.Module):
    """Rows of a table of 6, one further than the indices say."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(6, 4)

    def forward(self, ids):
        return self.table(ids + 1)


def indices_out_of_range(rank):
    """What is said of computed indices that are out of range, on the rank that has them and on the other."""
    module = mt.from_torch(torch.export.export(Rows(), (torch.arange(4),)))
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    run = mt.distribute_module(module.mod, device_mesh, {"ids": {"x": 0}}, weights=module.params)
    run(torch.arange(4))
    return refusal(lambda: run(torch.tensor([0, 1, 2, 5])))


def a_cache(rank):
    """A module that writes buffers: what it keeps on ranks between calls is what it keeps on the virtual mesh."""
    torch.manual_seed(0)
    module = mt.from_torch(torch.export.export(Cache().eval(), (torch.randn(2, 1, 8), torch.tensor([3]))))
    device_mesh, shardings = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), {"cache": {"x": 1}, "x": {"x": 0}}
    run = mt.distribute_module(module, device_mesh, shardings)
    expected = mt.distribute_module(module, {"x": 2}, shardings)
    for position in range(3):
        x, where = torch.randn(2, 1, 8), torch.tensor([position])
        found, meant = run(x, where), expected(x, where)
        assert list(found) == list(meant)
        for have, want in zip(pytree.tree_leaves(found), pytree.tree_leaves(meant), strict=True):
            assert have is want is None or have == want if not isinstance(want, torch.Tensor) else have.equal(want)
        assert run.state_dict()["cache"].equal(expected.state_dict()["cache"])
    _own_memory(device_mesh)


def _own_memory(device_mesh):
    """What is written into this rank's parts of results changes neither arguments, weights nor what is kept."""
    model, x = Passed(), torch.randn(7, 6)
    module = mt.from_torch(torch.export.export(model, (x,)))
    laid = [distribute_tensor(x.clone(), device_mesh, [placement]) for placement in (Shard(0), Replicate())]
    for argument in (x.clone(), *laid):
        run = mt.distribute_module(module, device_mesh, {"x": {"x": 0}, "weight": {"x": 1}})
        parts = [local_part(t) if isinstance(t, DTensor) else t for t in (argument, *run(argument))]
        assert len({memory_of(part) for part in parts}) == len(parts)
        before = parts[0].clone()
        for number, part in enumerate(parts[1:]):
            part.fill_(number)
        assert parts[0].equal(before)
        run.reset_state()
        torch.testing.assert_close(run(x), tuple(expected(model, x)), rtol=1e-5, atol=1e-5)
