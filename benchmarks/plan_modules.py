"""Modules and layouts whose plans are compared with those that people make by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from tvm import ir, relax

import mesh_tensor as mt
from kernels.models import gpt2, llama

FLOAT = 4  # bytes
Layouts = Mapping[str, Any]


@dataclass(frozen=True)
class Hand:
    """What a device receives where people place the collectives: bytes, how many collectives, and why that many."""

    bytes: int
    collectives: int
    why: str


@dataclass(frozen=True)
class Case:
    """A module with stated layouts on a mesh. `build` gives the module, or a step of training; `held`: weights that are
    laid out once."""

    module: str
    layout: str
    build: Callable[[], ir.IRModule | mt.TrainingStep]
    mesh: Mapping[str, int]
    shardings: Layouts
    hand: Hand
    held: tuple[str, ...] = ()


def gathered(elements: int, parts: int) -> int:
    """Bytes that a device receives when a tensor of so many float32 is gathered (or reduced and scattered)."""
    return elements * FLOAT * (parts - 1) // parts


def reduced(elements: int, parts: int) -> int:
    """The same, of an all-reduce."""
    return 2 * gathered(elements, parts)


def from_model(make: Callable[[], nn.Module], *inputs: Any) -> ir.IRModule:
    """A torch model as a module; nothing is computed."""
    return mt.from_torch(torch.export.export(make().eval(), inputs), check=False).mod


class MLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) -> the same."""
        return self.down(F.gelu(self.up(x)))


class FusedGate(nn.Module):
    """SwiGLU whose first layer makes gate and up together."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) -> the same."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class FusedAttention(nn.Module):
    """Attention whose first layer makes queries, keys and values together, taken apart by `split`."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * key_heads) * self.size)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, positions, width) -> the same."""
        batch, positions, _ = x.shape
        parts = [self.heads * self.size, self.key_heads * self.size, self.key_heads * self.size]
        q, k, v = (
            part.view(batch, positions, -1, self.size).transpose(1, 2) for part in self.qkv(x).split(parts, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.key_heads)
        return self.proj(y.transpose(1, 2).reshape(batch, positions, -1))


class Parallel(nn.Module):
    """Attention and MLP side by side on one norm, as in GPT-J. `order`: what is added first."""

    def __init__(self, width: int, heads: int, order: str) -> None:
        super().__init__()
        self.norm, self.order = nn.LayerNorm(width), order
        self.attn = llama.Attention(llama.Config(width=width, heads=heads, key_heads=heads))
        self.mlp = MLP(width, 4 * width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(batch, positions, width) -> the same."""
        normed = self.norm(x)
        attended, fed = self.attn(normed, cos, sin), self.mlp(normed)
        return x + attended + fed if self.order == "residual" else attended + fed + x


class Experts(nn.Module):
    """A mixture of experts. `how`: "capacity" sends tokens by one-hot tensors per group, as in GShard; "gathered" looks
    weights up per token; "dense" has all experts see all tokens; so have "repeated" and "stacked", which choose two for
    each token, of a copy of the tokens per expert, and by a product with all experts' matrices."""

    def __init__(self, width: int, hidden: int, experts: int, how: str) -> None:
        super().__init__()
        self.how, self.experts = how, experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(groups, tokens, width) -> the same."""
        scores, chosen = self.router(x).softmax(-1).max(-1)
        if self.how == "gathered":
            rows = x.reshape(-1, 1, x.shape[-1])
            ids = chosen.reshape(-1)
            out = F.silu(rows @ self.up[ids]) @ self.down[ids]
            return out.reshape(x.shape) * scores.unsqueeze(-1)
        if self.how in ("repeated", "stacked"):
            rows = x.flatten(0, 1)
            top, ids = self.router(rows).softmax(-1).topk(2, -1)
            weights = torch.zeros(len(rows), self.experts).scatter(1, ids, top).T.unsqueeze(-1)
            given = rows.expand(self.experts, -1, -1) if self.how == "repeated" else rows
            return (F.silu(given @ self.up) @ self.down * weights).sum(0).reshape(x.shape)
        hot = F.one_hot(chosen, self.experts).to(x.dtype)
        if self.how == "dense":
            out = torch.einsum(
                "etf,efd->etd", F.silu(torch.einsum("gtd,edf->egtf", x, self.up).flatten(1, 2)), self.down
            )
            return torch.einsum("etd,te->td", out, (hot * scores.unsqueeze(-1)).flatten(0, 1)).reshape(x.shape)
        capacity = 2 * x.shape[1] // self.experts
        places = hot.cumsum(1) * hot - 1
        send = F.one_hot(places.clamp(0, capacity - 1).long(), capacity).to(x.dtype) * hot.unsqueeze(-1)
        tokens = torch.einsum("gtec,gtd->egcd", send, x)
        out = torch.einsum("egcf,efd->egcd", F.silu(torch.einsum("egcd,edf->egcf", tokens, self.up)), self.down)
        return torch.einsum("gtec,egcd->gtd", send * scores[..., None, None], out)


class SortedExperts(nn.Module):
    """Two experts per token, whose rows are sorted by expert, as transformers has them: multiplied in groups, or, with
    biases, by matrices that are looked up."""

    def __init__(self, width: int, hidden: int, experts: int, grouped: bool) -> None:
        super().__init__()
        self.grouped, self.experts = grouped, experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))
        self.bias = None if grouped else nn.Parameter(torch.randn(experts, width))
        self.to(torch.bfloat16 if grouped else torch.float32)  # as torch multiplies groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) -> the same."""
        scores, chosen = self.router(x).softmax(-1).topk(2, -1)
        ids, order = chosen.reshape(-1).sort()
        ends = torch.histc(ids.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)

        def product(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(rows, table, offs=ends) if self.grouped else (rows[:, None] @ table[ids])[:, 0]

        out = product(F.silu(product(x[order // 2], self.up)), self.down)
        out = (out if self.bias is None else out + self.bias[ids]) * scores.reshape(-1)[order].unsqueeze(-1)
        return out[order.argsort()].reshape(-1, 2, x.shape[-1]).sum(1)


def relax_function(build: Callable[..., relax.Expr], **shapes: tuple[Any, ...]) -> ir.IRModule:
    """A module whose `main` takes tensors of these shapes (the last item may be a dtype), and what `build` makes."""
    variables = []
    for name, shape in shapes.items():
        dtype = shape[-1] if shape and isinstance(shape[-1], str) else "float32"
        sizes = [size for size in shape if not isinstance(size, str)]
        variables.append(relax.Var(name, relax.TensorStructInfo(sizes, dtype)))
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, *variables))
        builder.emit_func_output(result)
    return builder.get()


def cases() -> list[Case]:
    """All rows of the table."""
    return [
        *fully_sharded(),
        *tensor_parallel(),
        *data_parallel(),
        *fused(),
        *side_by_side(),
        *experts(),
        *few_key_heads(),
        *at_the_boundary(),
        *around_places(),
        *into_places(),
        *cached(),
        *statistics(),
    ]


_GPT = gpt2.Config(vocabulary=512, width=256, heads=8, layers=1, batch=16, positions=64)
_LLAMA = llama.Config(vocabulary=512, width=256, hidden=768, heads=8, key_heads=4, layers=1, batch=16, positions=64)


def _model(file: Any, config: Any) -> Callable[[], ir.IRModule]:
    return partial(from_model, partial(file.build, config), *file.example_inputs(config))


def _mlp(rows: int, width: int, hidden: int) -> Callable[[], ir.IRModule]:
    return partial(from_model, partial(MLP, width, hidden), torch.randn(rows, width))


def _weights(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def fully_sharded() -> list[Case]:
    """Every weight and the batch over one axis, nothing else said."""
    why = "every weight is gathered once; activations stay"
    made = []
    for rows, width, hidden, parts in ((2048, 256, 1024, 4), (4096, 128, 512, 8)):
        model = MLP(width, hidden)
        layout = {"x": {"d": 0}} | {name: {"d": 0} for name, _ in model.named_parameters()}
        hand = Hand(gathered(_weights(model), parts), 4, why)
        made.append(Case(f"MLP {rows}x{width}x{hidden}", "FSDP", _mlp(rows, width, hidden), {"d": parts}, layout, hand))
    for name, file, config in (("GPT block", gpt2, _GPT), ("LLaMA block", llama, _LLAMA)):
        model = file.build(config)
        for dim in (0, -1):
            names = [weight for weight, _ in model.named_parameters()]
            dims = {weight: dim % value.ndim for weight, value in model.named_parameters()}
            layout = {"tokens": {"d": 0}} | {weight: {"d": dims[weight]} for weight in names}
            hand = Hand(gathered(_weights(model), 4), len(names), why)
            made.append(Case(name, f"FSDP over dim {dim}", _model(file, config), {"d": 4}, layout, hand))
    return made


def tensor_parallel() -> list[Case]:
    """Megatron's layouts, and with them the positions, or the batch."""
    made = []
    layout = {"up.weight": {"m": 0}, "up.bias": {"m": 0}, "down.weight": {"m": 1}}
    hand = Hand(reduced(512 * 256, 4), 1, "the second product is summed")
    made.append(Case("MLP 512x256x1024", "TP", _mlp(512, 256, 1024), {"m": 4}, layout, hand))
    for name, file, config in (("GPT block", gpt2, _GPT), ("LLaMA block", llama, _LLAMA)):
        stream = config.batch * config.positions * config.width
        split = file.tensor_parallel(config, "m")
        hand = Hand(2 * reduced(stream, 4), 2, "attention and MLP end in an all-reduce each")
        made.append(Case(name, "TP", _model(file, config), {"m": 4}, split, hand))
        both = {key: {**split.get(key, {}), **more} for key, more in file.data_parallel("d").items()}
        hand = Hand(2 * reduced(stream // 2, 4), 2, "the same, of half the batch")
        made.append(Case(name, "DP x TP", _model(file, config), {"d": 2, "m": 4}, {**split, **both}, hand))
        positions = {**split, **file.sequence_parallel(config, "m")}
        hand = Hand(4 * gathered(stream, 4), 4, "an all-gather before, a reduce-scatter after each part")
        made.append(Case(name, "TP + SP", _model(file, config), {"m": 4}, positions, hand))
    return made


def _masked(emit: Any, x: relax.Expr, mask: relax.Expr) -> relax.Expr:
    """As transformers index masks: the mask of every (batch, position), by index."""
    batch, positions = 16, 64
    rows = emit(relax.op.reshape(emit(relax.op.arange(batch, dtype="int64")), (batch, 1, 1, 1)))
    columns = emit(relax.op.reshape(emit(relax.op.arange(positions, dtype="int64")), (1, 1, 1, positions)))
    allowed = emit(relax.op.index_tensor(mask, (rows, columns)))
    return emit(relax.op.where(allowed, x, relax.const(-1e9, "float32")))


def statistics() -> list[Case]:
    """Numbers of rows whose columns are split."""
    build = partial(relax_function, lambda emit, x: emit(relax.op.variance(x, 1)), x=(512, 16384))
    hand = Hand(2 * reduced(512, 4), 2, "means of the parts are summed, then squares of what is apart from them")
    return [Case("variance of rows", "columns", build, {"d": 4}, {"x": {"d": 1}}, hand)]


def data_parallel() -> list[Case]:
    """The batch is split; nothing needs to move."""
    hand = Hand(0, 0, "every row is computed by itself")
    layout = {"x": {"d": 0}}
    made = [
        Case(name, "DP", _model(file, config), {"d": 4}, {"tokens": {"d": 0}}, hand)
        for name, file, config in (("GPT block", gpt2, _GPT), ("LLaMA block", llama, _LLAMA))
    ]
    op = relax.op
    made += [
        Case(
            "mask by index",
            "DP",
            partial(relax_function, _masked, x=(16, 8, 64, 64), mask=(16, 64, "bool")),
            {"d": 4},
            layout | {"mask": {"d": 0}},
            hand,
        ),
        Case(
            "stack",
            "DP",
            partial(relax_function, lambda emit, x, y: emit(op.stack([x, y], 0)), x=(64, 256), y=(64, 256)),
            {"d": 4},
            layout | {"y": {"d": 0}},
            hand,
        ),
        Case(
            "stack, taken apart by a reshape",
            "DP",
            partial(
                relax_function,
                lambda emit, x, y: emit(op.reshape(emit(op.stack([x, y], 1)), (128, 256))),
                x=(64, 256),
                y=(64, 256),
            ),
            {"d": 4},
            layout | {"y": {"d": 0}},
            hand,
        ),
        Case(
            "tile",
            "DP",
            partial(relax_function, lambda emit, x: emit(op.tile(x, (1, 2))), x=(64, 256)),
            {"d": 4},
            layout,
            hand,
        ),
        Case(
            "tile of the features split",
            "TP",
            partial(relax_function, lambda emit, x: emit(op.tile(x, (2, 1))), x=(64, 256)),
            {"d": 4},
            {"x": {"d": 1}},
            hand,
        ),
        Case(
            "scatter_elements",
            "DP",
            partial(
                relax_function,
                lambda emit, x, ids, new: emit(op.scatter_elements(x, ids, new, 1)),
                x=(64, 256),
                ids=(64, 16, "int64"),
                new=(64, 16),
            ),
            {"d": 4},
            layout | {"ids": {"d": 0}, "new": {"d": 0}},
            hand,
        ),
    ]
    return made


def fused() -> list[Case]:
    """Several layers in one weight: its parts are split each, as Megatron stores them."""
    why = "every device has a part of each of the layers in one: the last product is summed"
    made = []
    layout = {"gate_up.weight": {"m": 0}, "down.weight": {"m": 1}}
    for parts in (2, 4):
        build = partial(from_model, partial(FusedGate, 256, 512), torch.randn(512, 256))
        made.append(
            Case("gate and up in one", "TP", build, {"m": parts}, layout, Hand(reduced(512 * 256, parts), 1, why))
        )
    layout = {"qkv.weight": {"m": 0}, "qkv.bias": {"m": 0}, "proj.weight": {"m": 1}}
    held = "qkv_weight", "qkv_bias", "proj_weight", "proj_bias"
    for heads, key_heads, parts in ((8, 8, 2), (8, 8, 4), (8, 2, 2), (8, 4, 4)):
        build = partial(from_model, partial(FusedAttention, 256, heads, key_heads), torch.randn(4, 64, 256))
        hand = Hand(reduced(256 * 256, parts), 1, why)
        made.append(Case(f"qkv in one, {heads} and {key_heads} heads", "TP", build, {"m": parts}, layout, hand, held))
    config = gpt2.Config(vocabulary=512, width=256, heads=8, layers=1, batch=16, positions=64, fused=True)
    hand = Hand(2 * reduced(16 * 64 * 256, 4), 2, "attention and MLP end in an all-reduce each")
    split = gpt2.tensor_parallel(config, "m")
    return [*made, Case("GPT block, qkv in one", "TP", _model(gpt2, config), {"m": 4}, split, hand)]


def side_by_side() -> list[Case]:
    """Two sums that are added to one another."""
    names = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.up")
    layout = {f"{name}.weight": {"m": 0} for name in names} | {"mlp.up.bias": {"m": 0}}
    layout |= {"attn.o_proj.weight": {"m": 1}, "mlp.down.weight": {"m": 1}}
    hand = Hand(reduced(8 * 64 * 256, 4), 1, "the parts of both sums are added, then summed once")
    inputs = torch.randn(8, 64, 256), torch.randn(64, 32), torch.randn(64, 32)
    made = []
    for order in ("residual", "sums"):
        build = partial(from_model, partial(Parallel, 256, 8, order), *inputs)
        made.append(Case(f"attention beside MLP, {order} first", "TP", build, {"m": 4}, layout, hand))
    return made


def experts() -> list[Case]:
    """A mixture of experts."""
    groups, tokens, width, hidden, count, parts = 8, 128, 256, 512, 8, 4
    x = torch.randn(groups, tokens, width)
    both = {"x": {"d": 0}, "up": {"d": 0}, "down": {"d": 0}}
    weights = {"up": {"d": 0}, "down": {"d": 0}}

    def build(how: str, x: torch.Tensor = x) -> Callable[[], ir.IRModule]:
        return partial(from_model, partial(Experts, width, hidden, count, how), x)

    sent = 2 * tokens // count * groups * count * width
    each = sent * FLOAT * (parts - 1) // parts**2
    summed = Hand(reduced(groups * tokens * width, parts), 1, "experts' parts of the tokens are summed")
    moved = Hand(2 * each, 2, "tokens go to their experts and back: two all-to-alls")
    exchanged = Hand(
        2 * gathered(groups * tokens * width, parts),
        2,
        "tokens are gathered; what experts make, reduced and scattered",
    )
    tables = Hand(
        2 * gathered(count * width * hidden, parts),
        2,
        "weights are gathered: all tokens at all experts' devices are four times the work, and how many go where is not"
        " known ahead",
    )
    scores = groups * tokens * count * FLOAT
    weighed = Hand(
        exchanged.bytes + scores * (parts - 1) // parts**2, 3, f"{exchanged.why}; scores go to their experts"
    )
    rows, halves = torch.randn(groups * tokens, width), {"up": {"d": 2}, "down": {"d": 1}}
    grouped, biased = (partial(SortedExperts, width, hidden, count, groups) for groups in (True, False))
    few = torch.randn(groups, 4, width)
    few_exchanged = Hand(2 * gathered(few.numel(), parts), 3, f"{exchanged.why}; their choices, too")
    return [
        Case("experts with capacity", "DP x EP", build("capacity"), {"d": parts}, both, moved),
        Case("experts with capacity", "EP", build("capacity"), {"d": parts}, weights, summed),
        Case("experts, all tokens", "EP", build("dense"), {"d": parts}, weights, summed),
        Case("experts, all tokens", "DP x EP", build("dense"), {"d": parts}, both, exchanged),
        Case("experts, all of copied tokens", "DP x EP", build("repeated"), {"d": parts}, both, weighed),
        Case("experts, all by stacked weights", "DP x EP", build("stacked"), {"d": parts}, both, weighed),
        Case("experts, looked up", "EP", build("gathered"), {"d": parts}, weights, summed),
        Case("experts, looked up", "DP x EP", build("gathered"), {"d": parts}, both, tables),
        Case(
            "experts, rows sorted into groups",
            "DP",
            partial(from_model, grouped, rows.bfloat16()),
            {"d": parts},
            {"x": {"d": 0}},
            Hand(0, 0, "every device sorts its own rows"),
        ),
        Case(
            "experts, sorted rows and biases",
            "TP",
            partial(from_model, biased, rows),
            {"d": parts},
            halves,
            Hand(summed.bytes, 1, "a token's two experts are summed, then the parts"),
        ),
        Case("experts, looked up by few tokens", "DP x EP", build("gathered", few), {"d": parts}, both, few_exchanged),
    ]


def few_key_heads() -> list[Case]:
    """Fewer key heads than devices."""
    config = llama.Config(
        vocabulary=512, width=512, hidden=1024, heads=16, key_heads=4, layers=1, batch=8, positions=64
    )
    stream = config.batch * config.positions * config.width
    keys = stream // 4
    hand = Hand(
        2 * reduced(stream, 8) + 2 * gathered(2 * keys // 8, 2), 4, "pairs of devices exchange the halves of a key head"
    )
    split = llama.tensor_parallel(config, "m")
    return [Case("LLaMA block, 4 key heads", "TP on 8", _model(llama, config), {"m": 8}, split, hand)]


def at_the_boundary() -> list[Case]:
    """Small operands, and dims that a reshape takes apart."""
    op = relax.op

    def shifted(emit: Any, x: relax.Expr, bias: relax.Expr) -> relax.Expr:
        return emit(op.nn.softmax(emit(op.add(x, bias)), -1))

    def apart(emit: Any, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return emit(op.matmul(emit(op.reshape(x, (8, 64, 256))), w))

    def whole(emit: Any, x: relax.Expr) -> relax.Expr:
        return emit(op.nn.relu(emit(op.reshape(x, (3, 128, 256)))))

    return [
        Case(
            "a small operand, broadcast",
            "operand",
            partial(relax_function, shifted, x=(2048, 256), bias=(256,)),
            {"d": 2},
            {"bias": {"d": 0}},
            Hand(gathered(256, 2), 1, "the small operand is gathered"),
        ),
        Case(
            "reshape of split rows",
            "rows",
            partial(relax_function, apart, x=(512, 256), w=(256, 256)),
            {"d": 4},
            {"x": {"d": 0}},
            Hand(0, 0, "tiles are the same bytes"),
        ),
        Case(
            "reshape of split rows, major dim too small",
            "rows",
            partial(relax_function, whole, x=(384, 256)),
            {"d": 4},
            {"x": {"d": 0}},
            Hand(0, 0, "an input that nobody holds yet is laid out as it is needed"),
        ),
    ]


class Shifted(nn.Module):
    """Attention in windows of `size` x `size`, then in windows that are shifted by half of that, as in Swin."""

    def __init__(self, rows: int, columns: int, width: int, size: int) -> None:
        super().__init__()
        self.shape, self.size = (rows // size, size, columns // size, size, width), size
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, rows, columns, width) -> the same."""
        x = x + self.attended(x)
        half = self.size // 2
        shifted = self.attended(torch.roll(x, (-half, -half), (1, 2)))
        return x + torch.roll(shifted, (half, half), (1, 2))

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        """Attention inside the windows."""
        windows = x.view(-1, *self.shape).permute(0, 1, 3, 2, 4, 5).reshape(-1, 1, self.size**2, self.shape[-1])
        made = F.scaled_dot_product_attention(*self.qkv(windows).chunk(3, -1))
        made = made.view(-1, *(self.shape[n] for n in (0, 2, 1, 3, 4)))
        return made.permute(0, 1, 3, 2, 4, 5).reshape(x.shape)


def around_places() -> list[Case]:
    """What is next to a tile is read."""
    op, kept = relax.op, "what crosses the tiles' borders is exchanged"
    row = 4 * 256 * FLOAT

    def taken(emit: Any, x: relax.Expr, begin: int, end: int) -> relax.Expr:
        return emit(op.strided_slice(x, [1], [begin], [end], [1]))

    def differences(emit: Any, x: relax.Expr) -> relax.Expr:
        return emit(op.subtract(taken(emit, x, 1, 512), taken(emit, x, 0, 511)))

    def moved_on(emit: Any, cache: relax.Expr, new: relax.Expr) -> relax.Expr:
        return emit(op.concat([taken(emit, cache, 4, 512), new], 1))

    def last(emit: Any, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return emit(op.matmul(taken(emit, x, 511, 512), w))

    def of_torch(f: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], ir.IRModule]:
        return partial(from_model, partial(Lambda, f), *inputs)

    x = torch.randn(4, 512, 256)
    image, weight = torch.randn(2, 16, 64, 32), torch.randn(16, 16, 3, 3)
    line = 2 * 16 * 32 * FLOAT
    shifted = partial(from_model, partial(Shifted, 64, 32, 16, 8), image.permute(0, 2, 3, 1).contiguous())
    rolled = of_torch(lambda x: torch.roll(x, 3, 1), x)
    windows = of_torch(lambda x: x.unfold(1, 16, 8).amax(-1), x)
    convolved = of_torch(lambda x, w: F.relu(F.conv2d(x, w, padding=1)), image, weight)
    pooled = of_torch(lambda x: F.max_pool2d(x, 3, 2, 1), image)
    sequence = {"x": {"d": 1}}
    relaxed = partial(relax_function, differences, x=(4, 512, 256))
    cached = partial(relax_function, moved_on, x=(4, 512, 256), new=(4, 4, 256))
    logits = partial(relax_function, last, x=(4, 512, 256), w=(256, 1024))
    one = Hand(reduced(4 * 256, 4), 1, "the device that has the last position gives it to all: they add up one row")
    return [
        Case("differences of neighbours", "positions", relaxed, {"d": 4}, sequence, Hand(row, 1, kept)),
        Case("roll", "positions", rolled, {"d": 4}, {"inputs_0": {"d": 1}}, Hand(3 * row, 1, kept)),
        Case("windows, overlapping", "positions", windows, {"d": 4}, {"inputs_0": {"d": 1}}, Hand(8 * row, 1, kept)),
        Case("convolution", "rows", convolved, {"d": 4}, {"inputs_0": {"d": 2}}, Hand(2 * line, 1, kept)),
        Case("largest of windows", "rows", pooled, {"d": 4}, {"inputs_0": {"d": 2}}, Hand(line, 1, kept)),
        Case("shifted windows", "rows", shifted, {"d": 4}, {"x": {"d": 1}}, Hand(2 * 4 * line, 2, kept)),
        Case("cache that moves along", "positions", cached, {"d": 4}, sequence, Hand(4 * row, 1, kept)),
        Case("logits of the last position", "positions", logits, {"d": 4}, sequence, one),
    ]


def cached() -> list[Case]:
    """A token attends to a cache whose positions are split; four heads of queries share a head of keys."""

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v = torch.randn(4, 8, 1, 64), torch.randn(4, 2, 4096, 64), torch.randn(4, 2, 4096, 64)
    build = partial(from_model, partial(Lambda, attended), q, k, v)
    positions = {"inputs_1": {"d": 2}, "inputs_2": {"d": 2}}
    why = "per head: the largest score, then a sum and the weighed values"
    hand = Hand(reduced(4 * 8 * (1 + 1 + 64), 4), 2, why)
    return [Case("one token, a cache", "positions", build, {"d": 4}, positions, hand)]


class Lambda(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """What the function gives."""
        return self.function(*inputs)


def into_places() -> list[Case]:
    """Rows go into a tensor that is split where they go."""
    op = relax.op
    hand = Hand(0, 0, "every device knows the new rows, and enters those that belong into its tile")

    def entered(emit: Any, x: relax.Expr, new: relax.Expr) -> relax.Expr:
        return emit(op.slice_scatter(x, new, 100, 116, 1, axis=0))

    def scattered(emit: Any, x: relax.Expr, places: relax.Expr, new: relax.Expr) -> relax.Expr:
        return emit(op.scatter_nd(x, places, new))

    cache = partial(relax_function, entered, x=(512, 256), new=(16, 256))
    pages = partial(relax_function, scattered, x=(512, 256), places=(16, 1, "int64"), new=(16, 256))
    layout = {"x": {"d": 0}}
    return [
        Case("cache rows, at a place", "positions", cache, {"d": 4}, layout, hand),
        Case("cache rows, where data says", "positions", pages, {"d": 4}, layout, hand),
    ]
