"""A filter by rows, an embedding by vocabulary, attention with keys or heads split, on a virtual mesh of two devices,
against one device: by the CPU time of the busiest device, which other processes do not change, and by the clock on
the wall.

python -m benchmarks.bench_neighbours
"""

from __future__ import annotations

import torch
from tilelang import tvm

import mesh_tensor as mt
from kernels.embedding import embedding
from kernels.flash_attention import flash_attention
from kernels.neighbourhoods import filter_2d

from ._timing import Row, Run, busiest_thread, header, interleaved, row, verdicts

_MUST = 1 / 1.6
_ROUNDS = 15


def _on(devices: int, func: tvm.tirx.PrimFunc, dims: dict[str, int], inputs: dict[str, torch.Tensor]) -> Run:
    """The kernel on tensors that lie on so many devices."""
    mesh = mt.Mesh({"x": devices})
    layouts = {b.name: {"x": dims[b.name]} if b.name in dims else {} for b in func.buffer_map.values()}
    kernel = mt.compile(mt.annotate(func, mesh, layouts), target="c")
    tiles = [mt.distribute(tensor, mesh, layouts[name]) for name, tensor in inputs.items()]
    return lambda: kernel(*tiles)


def _attention() -> list[Row]:
    """One head of many keys, which are split, and heads that share keys, split with them."""
    long, shared = (1, 1, 256, 32768, 64), (1, 8, 1024, 1024, 64)
    q, keys, values = torch.randn(1, 1, 256, 64), torch.randn(1, 1, 32768, 64), torch.randn(1, 1, 32768, 64)
    heads = [torch.randn(1, 8, 1024, 64), *(torch.randn(1, 2, 1024, 64) for _ in range(2))]
    return [
        *_rows_of(
            "flash attention by keys",
            flash_attention(*long, dtype="float32"),
            {"K": 2, "V": 2},
            dict(zip("QKV", (q, keys, values), strict=True)),
        ),
        *_rows_of(
            "grouped attention by key heads",
            flash_attention(*shared, groups=4, dtype="float32"),
            dict.fromkeys(("Q", "K", "V", "Out"), 1),
            dict(zip("QKV", heads, strict=True)),
        ),
    ]


def _embedding(tokens: int, table: torch.Tensor) -> list[Row]:
    """Of few tokens the call itself, which is not divided, is a good part of the time."""
    words = {"ids": torch.randint(0, len(table), (tokens,)).int(), "table": table}
    func = embedding(tokens, *table.shape)
    return _rows_of(f"embedding of {tokens} tokens by vocabulary", func, {"table": 0, "out": 0}, words)


def _rows_of(what: str, func: tvm.tirx.PrimFunc, dims: dict[str, int], inputs: dict[str, torch.Tensor]) -> list[Row]:
    runs = {f"{devices} devices": _on(devices, func, dims, inputs) for devices in (2, 1)}
    busiest = interleaved(runs, rounds=_ROUNDS, clock=busiest_thread)
    return [
        row(f"{what}, CPU time", busiest, "2 devices", "1 devices", must=_MUST),
        row(what, interleaved(runs, rounds=_ROUNDS), "2 devices", "1 devices"),
    ]


def rows() -> list[Row]:
    """Two devices beside one."""
    size, features = 3074, 1024
    image = {"A": torch.randn(size, size), "K": torch.randn(3, 3)}
    lines, block = 3152, 126  # rows of whole cache lines: a device's window of them lies in its neighbours' tiles
    aligned = {"A": torch.randn(size, lines), "K": torch.randn(3, 3)}
    table = torch.randn(65536, features)
    return [
        *_rows_of("3 x 3 filter by rows", filter_2d(size, size), {"A": 0, "out": 0}, image),
        *_rows_of(
            "3 x 3 filter by rows of whole cache lines",
            filter_2d(size, lines, block_w=block),
            {"A": 0, "out": 0},
            aligned,
        ),
        *_attention(),
        *(row for tokens in (4096, 16384) for row in _embedding(tokens, table)),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(header("Neighbours and tables"))
    print(verdicts(rows()))
