"""Kernels on real ranks, called with DTensors and with local tensors: as on the virtual mesh, bit for bit."""

from __future__ import annotations

import contextlib
import io
import os
import runpy

import tilelang.language as T
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import mesh_tensor as mt
from kernels import mlp
from kernels.flash_attention import flash_attention
from kernels.grouped_query import grouped_decode
from kernels.linear_attention import linear_attention
from kernels.matmul import matmul
from kernels.sparse import block_sparse_matmul
from tests.lowering.kernels import halved_sums, unused_parameter
from tests.refusals import refusal
from tests.runtime.programs import accumulate_kernel, kernel_of, matmul_k_split, matmul_kernel
from tests.sweep_points import AXES, KERNELS, sample, sharding_at

from .support import pure

#: What it is called, a number, the kernel, its arguments, and what they are after a call on one process.
Point = tuple[str, int, mt.MeshKernel, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def k_split_matmul(rank):
    """The first thing that anybody tries."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    kern = mt.compile(mt.annotate(matmul(96, 64, 128), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}))
    a, b = torch.randn(96, 128), torch.randn(128, 64)
    da, db = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    for _ in range(2):
        c = kern(da, db)
        assert (c.placements, c.shape, c.stride()) == ((Replicate(),), (96, 64), (64, 1))
        assert torch.equal(c.to_local(), kern(a, b))
    torch.testing.assert_close(c.full_tensor(), a @ b, rtol=1e-4, atol=1e-4)


def mlp_of_ranks(rank):
    """What the example prints where torchrun started these ranks."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for sizes in mlp.meshes_of(torch.distributed.get_world_size()):
            mlp.demonstrate_on_ranks(sizes)
    return said.getvalue()


def carried_states(rank):
    """States that are combined, and states that are handed on."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    attention = flash_attention(1, 2, 64, 2048, 16, causal=True, block_M=32, block_N=64, dtype="float32")
    recurrence = linear_attention(1, 1, 4096, 4, 4, chunk=64, decay=0.9)
    kv, sequence = {"K": {"x": 2}, "V": {"x": 2}}, {name: {"x": 1} for name in ("Q", "K", "V", "Out")}
    for func, layouts, shape in ((attention, kv, (1, 2, 2048, 16)), (recurrence, sequence, (1, 4096, 1, 4))):
        kern = mt.compile(mt.annotate(func, mt.Mesh({"x": 2}), layouts))
        assert "K.1" not in kern.explain(), "K is gathered"
        q, k, v = (torch.randn(shape) for _ in range(3))
        q = q[:, :, :64] if func is attention else q
        q = q.contiguous()
        given = [
            distribute_tensor(tensor, mesh, [Shard(layouts[name]["x"]) if name in layouts else Replicate()])
            for name, tensor in zip("QKV", (q, k, v), strict=True)
        ]
        for result, expected in zip(_all(kern(*given)), _all(kern(q, k, v)), strict=True):
            assert torch.equal(pure(result.full_tensor()), pure(expected))


def whole_blocks(rank):
    """Dims that 3 ranks don't divide into blocks, chunks and groups of heads: margins are exchanged, both ways."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("x",))
    rows, heads, steps = {"A": 0, "mask": 0, "C": 0}, {"Q": 1, "K": 2, "V": 2, "Out": 1}, {"Q": 1, "K": 1, "V": 1}
    masked = [torch.randn(40, 16), torch.randn(16, 24), torch.rand(5, 3, 2) > 0.4]
    decoded = [torch.randn(2, 10, 8), torch.randn(2, 32, 5, 8), torch.randn(2, 32, 5, 8), torch.tensor([32, 7]).int()]
    carried = [torch.randn(2, 40, 3, 4), torch.randn(2, 40, 3, 4), torch.randn(2, 40, 3, 5)]
    for func, dims, tensors in (
        (block_sparse_matmul(40, 24, 16, 8, 8, 8), rows, masked),
        (grouped_decode(2, 10, 5, 32, 8, block_H=2, block_N=8), heads, decoded),
        (linear_attention(2, 3, 40, 4, 5, chunk=8), {**steps, "Out": 1}, carried),
    ):
        names = [func.buffer_map[param].name for param in func.params]
        kern = mt.compile(mt.annotate(func, mt.Mesh({"x": 3}), {name: {"x": dim} for name, dim in dims.items()}))
        assert "halo" in kern.explain()
        given = [
            distribute_tensor(tensor, mesh, [Shard(dims[name]) if name in dims else Replicate()])
            for name, tensor in zip(names, tensors, strict=False)
        ]
        for result, expected in zip(_all(kern(*given)), _all(kern(*tensors)), strict=True):
            assert torch.equal(pure(result.full_tensor()), pure(expected))


def _all(results):
    return results if isinstance(results, (list, tuple)) else [results]


def points_of_the_sweep(sizes, step):
    """Kernels of the library, at sizes that don't divide: each with its arguments, and what they are on one process."""
    axes, made = AXES[: len(sizes)], []
    for turn, (name, case) in enumerate(list(KERNELS.items())[::step]):
        problem = case.sizes[turn % len(case.sizes)]
        func, inputs = case.build(**problem), case.make_inputs(problem)
        arguments = case.arguments(func, inputs)
        ndims = {key: tensor.ndim for key, tensor in arguments.items()}
        for point in sample(name, sizes, 0, 2):
            shardings = sharding_at(ndims, axes, point.index)
            try:
                annotated = mt.annotate(func, mt.Mesh(dict(zip(axes, sizes, strict=True))), shardings)
                kern = mt.compile(annotated, target="interpret", poison=True)
                expected = {key: tensor.clone() for key, tensor in arguments.items()}
                kern(*expected.values())
            except mt.MeshTensorError:
                continue  # refused everywhere
            made.append((point.arguments, turn, kern, arguments, expected))
    return made


def sample_of_the_sweep(rank, made, sizes):
    """DTensors of any placement in, the annotated ones out."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(AXES[: len(sizes)]))
    for name, turn, kern, arguments, expected in made:
        layouts = {key: any_placements(turn + i, len(sizes), t.ndim) for i, (key, t) in enumerate(arguments.items())}
        given = {key: distribute_tensor(t.clone(), mesh, layouts[key]) for key, t in arguments.items()}
        kern(*given.values())
        for key, tensor in given.items():
            assert torch.equal(pure(tensor.full_tensor()), pure(expected[key])), f"{name}, {key}: {layouts[key]}"
    return len(made)


def any_placements(turn, axes, ndim):
    """Placements that vary with `turn`; axes may split one dim."""
    choices = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    return [choices[(turn + axis * (turn % 3)) % len(choices)] for axis in range(axes)]


def results_that_are_made(rank):
    """New DTensors, uneven: right global shape, local parts without padding, whatever placements came in."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    func = mt.annotate(matmul(5, 6, 7), {"x": 2, "y": 2}, {"A": {"x": 0}, "B": {"y": 1}, "C": {"x": 0, "y": 0}})
    kern = mt.compile(func, target="interpret")
    a, b = torch.randn(5, 7), torch.randn(7, 6)
    for pa, pb in [([Shard(0), Replicate()], [Replicate(), Shard(1)]), ([Shard(1), Shard(1)], [Shard(0), Shard(0)])]:
        c = kern(distribute_tensor(a, mesh, pa), distribute_tensor(b, mesh, pb))
        assert (c.shape, c.stride(), c.placements) == ((5, 6), (6, 1), (Shard(0), Shard(0)))
        assert c.to_local().shape == distribute_tensor(torch.zeros(5, 6), mesh, c.placements).to_local().shape
        assert torch.equal(c.full_tensor(), kern(a, b))
        assert c.to_local().is_contiguous()
        assert torch.equal((c + c).full_tensor(), 2 * kern(a, b))


def partial_inputs_and_outputs(rank):
    """A DTensor that is partial is reduced where the kernel needs it whole; an output annotated partial stays so."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    layouts = {"A": {"x": 1}, "B": {"x": 0}, "C": mt.Sharding.make({"x": 2}, 2, {}, partial={"x": "sum"})}
    kern = mt.compile(mt.annotate(matmul(6, 4, 8), {"x": 2}, layouts), target="interpret")
    a, b = torch.randn(6, 8), torch.randn(8, 4)
    da = DTensor.from_local(a * (rank + 1), mesh, [Partial("sum")])
    c = kern(da, distribute_tensor(b, mesh, [Replicate()]))
    assert c.placements == (Partial("sum"),)
    torch.testing.assert_close(c.full_tensor(), 3 * a @ b, rtol=1e-4, atol=1e-4)


def strict_and_mixed(rank):
    """Other placements are refused under strict=True; a plain tensor among DTensors always is."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    func = mt.annotate(matmul(8, 8, 8), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    kern = mt.compile(func, target="interpret", strict=True)
    a = torch.randn(8, 8)
    right, wrong = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(a, mesh, [Shard(0)])
    text = refusal(lambda: kern(wrong, wrong))
    assert "parameter 'A': lies as 'S[0]', but expected 'S[1]'" in text
    assert "redistribute the DTensor" in text
    text = refusal(lambda: kern(right, a))
    assert "parameter 'B': a Tensor, but other parameters are DTensors" in text
    torch.testing.assert_close(kern(right, wrong).full_tensor(), a @ a, rtol=1e-4, atol=1e-4)
    text = refusal(lambda: kern(distribute_tensor(a[:4], mesh, [Shard(1)]), wrong))
    assert "parameter 'A': shape (4, 8), but expected (8, 8)" in text
    torch.testing.assert_close(kern(right, wrong).full_tensor(), a @ a, rtol=1e-4, atol=1e-4)


def in_and_out(rank):
    """What a kernel updates is updated in the DTensor, however it lies; inputs stay as they are."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    kern = mt.compile(mt.annotate(accumulate_kernel(7), {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}}), target="interpret")
    a, b = torch.randn(7), torch.randn(7)
    for placements in ([Shard(0)], [Replicate()]):
        da, db = distribute_tensor(a, mesh, placements), distribute_tensor(b.clone(), mesh, placements)
        assert kern(da, db) is db
        assert torch.equal(db.full_tensor(), a + b)
        assert torch.equal(da.full_tensor(), a)


def unused_parameters(rank):
    """Of several kernels in one function, none of which uses a parameter."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    kern = mt.compile(mt.annotate(unused_parameter(), {"x": 2}, {"a": {"x": 0}}), target="interpret")
    a, unused = torch.randn(6), torch.randn(3, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        given = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(unused, mesh, [placement])
        for result, expected in zip(kern(*given), kern(a, unused), strict=True):
            assert torch.equal(result.full_tensor(), expected)


def unused_parameters_of_cut_kernels(rank):
    """Of a kernel that is cut: devices take turns, and no part uses the parameter."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    kern = mt.compile(mt.annotate(halved_sums(), {"x": 2}, {"a": {"x": 1}}), target="interpret")
    assert kern.program.collectives, "it is not cut"
    a, unused = torch.randn(3, 12), torch.randn(3, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        given = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(unused, mesh, [placement])
        assert torch.equal(kern(*given).full_tensor(), kern(a, unused))


def local_tensors(rank):
    """Plain tensors per rank: valid parts or whole tiles, into new tensors or given ones."""
    func = mt.annotate(matmul(7, 5, 6), {"x": 2}, {"A": {"x": 0}, "B": {}, "C": {"x": 0}})
    kern = mt.compile(func, target="interpret")
    a, b = torch.randn(7, 6), torch.randn(6, 5)
    expected = kern(a, b)[rank * 4 : rank * 4 + 4]
    mine = a[rank * 4 : rank * 4 + 4]
    assert torch.equal(kern.local(mine, b), expected)
    padded = torch.full((4, 6), float("nan"))
    padded[: len(mine)] = mine
    assert torch.equal(kern.local(padded, b), expected)
    out = torch.zeros(4, 5)
    assert kern.local(mine.t().contiguous().t(), b, out) is out
    assert torch.equal(out[: len(mine)], expected)
    mesh = init_device_mesh("cpu", (2,))
    with torch.no_grad():
        assert torch.equal(kern.local(mine, torch.nn.Parameter(b), device_mesh=mesh), expected)
    with torch.inference_mode():
        assert torch.equal(kern.local(mine, b), expected)
    text = refusal(lambda: kern.local(a, b))
    wanted = "(4, 6) torch.float32 on cpu" if rank == 0 else "(3, 6) or (4, 6) torch.float32 on cpu"
    assert f"parameter 'A': (7, 6) torch.float32 on cpu, but expected {wanted}" in text
    assert "this rank's part" in text
    same = torch.zeros(6, 6)
    square = mt.compile(mt.annotate(matmul(6, 6, 6), {"x": 2}, {"A": {}, "B": {}, "C": {}}), target="interpret")
    same.normal_()
    wanted = same @ same
    torch.testing.assert_close(square.local(same, same, same), wanted, rtol=1e-4, atol=1e-4)
    flat = torch.randn(100).numpy()
    lying, over = torch.from_numpy(flat[:36]).view(6, 6), torch.from_numpy(flat[16:52]).view(6, 6)
    wanted, version = lying @ lying, over._version
    torch.testing.assert_close(square.local(lying, lying, over), wanted, rtol=1e-4, atol=1e-4)
    assert over._version > version, "torch hears of what is written"


def symbolic_sizes(rank):
    """One kernel, several sizes, each agreed on by itself."""
    size = T.dynamic("size")

    @T.prim_func
    def double(A: T.Tensor((size,), "float32"), B: T.Tensor((size,), "float32")):
        with T.Kernel(T.ceildiv(size, 16), threads=128) as bx:
            for i in T.Parallel(16):
                if bx * 16 + i < size:
                    B[bx * 16 + i] = A[bx * 16 + i] * 2.0

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    kern = mt.compile(mt.annotate(double, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}}), target="interpret")
    for length in (5, 40, 5):
        a = torch.randn(length)
        assert torch.equal(kern(distribute_tensor(a, mesh, [Shard(0)])).full_tensor(), 2 * a)
        assert kern.program.values["A"].shape == (length,)
    assert torch.equal(kern.local(a[:1].clone()), 2 * a[:1])
    assert kern(distribute_tensor(torch.ones(7), mesh, [Shard(0)])).full_tensor().sum() == 14


def inference_mode(rank):
    """DTensors made and used where autograd records nothing."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    kern = kernel_of(matmul_kernel(6, 4, 8), matmul_k_split(6, 4, 8))
    a, b = torch.randn(6, 8), torch.randn(8, 4)
    weight = torch.nn.Parameter(distribute_tensor(b, mesh, [Shard(0)]))
    with torch.inference_mode():
        inside = kern(distribute_tensor(a, mesh, [Shard(1)]), weight)
    outside = kern(distribute_tensor(a, mesh, [Shard(1)]), weight.detach())
    assert torch.equal(inside.to_local(), kern(a, b))
    assert torch.equal(outside.to_local(), kern(a, b))


def mesh_tensors(rank):
    """MeshTensors to DTensors and back, and placements."""
    mesh = mt.Mesh({"x": 2, "y": 2})
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    tensor = torch.randn(7, 5)
    for text in ("S[0], S[1]", "R, S[1]", "S[0], S[0]", "S[1], R", "R, R"):
        laid = mt.distribute(tensor, mesh, text)
        made = mt.to_dtensor(laid, device_mesh)
        assert mt.from_placements(mesh, 2, made.placements) == laid.sharding
        assert torch.equal(made.full_tensor(), tensor)
        back = mt.from_dtensor(made)
        assert back.sharding == laid.sharding
        assert all(torch.equal(back.tile(r), laid.tile(r)) for r in range(4))
    summed = mt.from_dtensor(DTensor.from_local(tensor, device_mesh, [Partial("sum"), Shard(0)]))
    assert summed.sharding.text() == "P[sum], S[0]"
    five = distribute_tensor(torch.arange(5), device_mesh, [Shard(0), Shard(0)])
    assert mt.from_dtensor(five).full().tolist() == [0, 1, 2, 3, 4]
    text = refusal(lambda: mt.to_dtensor(mt.distribute(torch.arange(5), mesh, "S[0], S[0]")))
    assert "'x', 'y' split a dim of a size that they don't divide" in text
    assert "redistribute it first, for example to 'S[0], R'" in text


def docs_page(rank, code, port):
    """The Python of a page, as torchrun starts it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the port is that of a store that is there
    found = runpy.run_path(code)
    expected = found["a"].full_tensor() @ found["b"].full_tensor()
    torch.testing.assert_close(found["c"].to_local(), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(found["part"], found["c"].to_local())
