"""The two-layer perceptron `gelu(x @ w1) @ w2` as two kernels, with gelu fused into the first one or on its own.

`python -m kernels.mlp` runs it sharded on virtual meshes, `torchrun --nproc-per-node 4 -m kernels.mlp` on real ranks.
"""

import os

import tilelang.language as T
import torch
import torch.nn.functional as F

import mesh_tensor as mt

from .activations import gelu, gelu_slope
from .matmul import matmul


def mlp_up(tokens, hidden, model, block_M=64, block_N=64, block_K=32, dtype="float32", accum_dtype="float32"):
    """`h[t, f] = gelu(sum_d x[t, d] * w1[d, f])` for `tokens` rows of `model` values and `hidden` features."""

    @T.prim_func
    def mlp_up_kernel(
        x: T.Tensor((tokens, model), dtype),
        w1: T.Tensor((model, hidden), dtype),
        h: T.Tensor((tokens, hidden), dtype),
    ):
        with T.Kernel(T.ceildiv(hidden, block_N), T.ceildiv(tokens, block_M), threads=128) as (bx, by):
            x_shared = T.alloc_shared((block_M, block_K), dtype)
            w1_shared = T.alloc_shared((block_K, block_N), dtype)
            h_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.clear(h_local)
            for ko in T.Pipelined(T.ceildiv(model, block_K), num_stages=2):
                T.copy(x[by * block_M, ko * block_K], x_shared)
                T.copy(w1[ko * block_K, bx * block_N], w1_shared)
                T.gemm(x_shared, w1_shared, h_local)
            for i, j in T.Parallel(block_M, block_N):
                h_local[i, j] = gelu(h_local[i, j])
            T.copy(h_local, h[by * block_M, bx * block_N])

    return mlp_up_kernel


def mlp_gelu(tokens, hidden, block_M=64, block_N=64, dtype="float32", accum_dtype="float32"):
    """`h[t, f] = gelu(g[t, f])`, for when the first product is a plain matmul."""

    @T.prim_func
    def mlp_gelu_kernel(g: T.Tensor((tokens, hidden), dtype), h: T.Tensor((tokens, hidden), dtype)):
        with T.Kernel(T.ceildiv(hidden, block_N), T.ceildiv(tokens, block_M), threads=128) as (bx, by):
            tile = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.copy(g[by * block_M, bx * block_N], tile)
            for i, j in T.Parallel(block_M, block_N):
                tile[i, j] = gelu(tile[i, j])
            T.copy(tile, h[by * block_M, bx * block_N])

    return mlp_gelu_kernel


def mlp_gelu_backward(tokens, hidden, block_M=64, block_N=64, dtype="float32", accum_dtype="float32"):
    """The gradient of `mlp_gelu`: `d_g[t, f] = d_h[t, f] * gelu'(g[t, f])`."""

    @T.prim_func
    def mlp_gelu_backward_kernel(
        g: T.Tensor((tokens, hidden), dtype),
        d_h: T.Tensor((tokens, hidden), dtype),
        d_g: T.Tensor((tokens, hidden), dtype),
    ):
        with T.Kernel(T.ceildiv(hidden, block_N), T.ceildiv(tokens, block_M), threads=128) as (bx, by):
            tile = T.alloc_fragment((block_M, block_N), accum_dtype)
            gradient = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.copy(g[by * block_M, bx * block_N], tile)
            T.copy(d_h[by * block_M, bx * block_N], gradient)
            for i, j in T.Parallel(block_M, block_N):
                gradient[i, j] = gradient[i, j] * gelu_slope(tile[i, j])
            T.copy(gradient, d_g[by * block_M, bx * block_N])

    return mlp_gelu_backward_kernel


def mlp_down(tokens, hidden, model, block_M=64, block_N=64, block_K=32, dtype="float32", accum_dtype="float32"):
    """`y[t, d] = sum_f h[t, f] * w2[f, d]`: a matmul that contracts the hidden features."""
    return matmul(tokens, model, hidden, block_M, block_N, block_K, dtype=dtype, accum_dtype=accum_dtype)


def mlp_gelu_reference(g):
    """gelu in its tanh form."""
    return F.gelu(g.double(), approximate="tanh").to(g.dtype)


def mlp_up_reference(x, w1):
    """`gelu(x @ w1)`."""
    return F.gelu(x.double() @ w1.double(), approximate="tanh").to(x.dtype)


def mlp_reference(x, w1, w2):
    """`gelu(x @ w1) @ w2`."""
    return (F.gelu(x.double() @ w1.double(), approximate="tanh") @ w2.double()).to(x.dtype)


def sharded_mlp(mesh, tokens, hidden, model, **compile_options):
    """The two kernels on a mesh, Megatron style: the hidden features are split over all axes of the mesh, so w1 lies
    split by columns and w2 by rows, x and y are replicated, and only the second kernel needs a collective."""
    mesh = mt.Mesh(mesh)
    columns, rows = dict.fromkeys(mesh.axis_names, 1), dict.fromkeys(mesh.axis_names, 0)
    up = mt.annotate(mlp_up(tokens, hidden, model), mesh, {"x": {}, "w1": columns, "h": columns})
    down = mt.annotate(mlp_down(tokens, hidden, model), mesh, {"A": columns, "B": rows, "C": {}})
    return mt.compile(up, **compile_options), mt.compile(down, **compile_options)


def demonstrate(mesh, tokens=256, hidden=1024, model=256):
    """Run the sharded MLP on a virtual mesh, say how, and compare it with torch."""
    up, down = sharded_mlp(mesh, tokens, hidden, model)
    print(f"\n===== {up.mesh}: x replicated, w1 split by columns, w2 by rows =====\n")
    for kernel in (up, down):
        print(kernel.explain(), "\n")
    x, w1, w2 = torch.randn(tokens, model), torch.randn(model, hidden) / 16, torch.randn(hidden, model) / 32
    columns, rows = dict.fromkeys(up.mesh.axis_names, 1), dict.fromkeys(up.mesh.axis_names, 0)
    h = up(x, mt.distribute(w1, up.mesh, columns))
    y = down(h, mt.distribute(w2, up.mesh, rows)).full()
    error = (y - mlp_reference(x, w1, w2)).abs().max().item()
    print(f"largest error against torch: {error:.2e}")
    if not error < 1e-4:
        raise SystemExit("the sharded MLP is wrong")


def demonstrate_on_ranks(sizes, tokens=256, hidden=1024, model=256):
    """Run the sharded MLP on the ranks of torch.distributed, with DTensors, and compare it with torch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    up, down = sharded_mlp(sizes, tokens, hidden, model)
    x, w1, w2 = torch.randn(tokens, model), torch.randn(model, hidden) / 16, torch.randn(hidden, model) / 32
    replicated, columns, rows = ([placement] * len(sizes) for placement in (Replicate(), Shard(1), Shard(0)))
    h = up(distribute_tensor(x, mesh, replicated), distribute_tensor(w1, mesh, columns))
    y = down(h, distribute_tensor(w2, mesh, rows)).full_tensor()
    error = (y - mlp_reference(x, w1, w2)).abs().max().item()
    if mesh.get_rank() == 0:
        print(f"{up.mesh}: h lies as {h.placements}; largest error against torch: {error:.2e}")
    if not error < 1e-4:
        raise SystemExit("the sharded MLP is wrong")


def meshes_of(world):
    """The sizes of the meshes that so many ranks show."""
    return [{"x": world}, {"x": 2, "y": 2}][: 2 if world == 4 else 1]


def main():
    """The seed's MLP on two devices and on 2 x 2, or on as many ranks as torchrun started."""
    torch.manual_seed(0)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
        for sizes in meshes_of(torch.distributed.get_world_size()):
            demonstrate_on_ranks(sizes)
        torch.distributed.destroy_process_group()
        return
    up, down = mlp_up(256, 1024, 256), mlp_down(256, 1024, 256)
    print("sharding rules")
    for kernel in (up, down):
        print(f"  {kernel.attrs['global_symbol']}: {mt.sharding_rule(kernel)}")
    print("\nlocal view of the second kernel on two devices\n")
    annotated = mt.annotate(down, {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    print(mt.lower(annotated).script())
    demonstrate({"x": 2})
    demonstrate({"x": 2, "y": 2})


if __name__ == "__main__":
    main()
