"""Kernels of which every position reads a window of its neighbourhood: a convolution of one channel, sums on a plane
that goes around, larger pictures, and attention to the positions just before; one of which each has its own loop."""

import tilelang.language as T
import torch
import torch.nn.functional as F


def filter_2d(height, width, size=3, stride=1, block_h=32, block_w=128):
    """`out[y, x] = sum_rc A[stride * y + r, stride * x + c] * K[r, c]`."""
    rows, columns = (height - size) // stride + 1, (width - size) // stride + 1

    @T.prim_func
    def filter_2d_kernel(
        A: T.Tensor((height, width), "float32"),
        K: T.Tensor((size, size), "float32"),
        out: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(T.ceildiv(columns, block_w), T.ceildiv(rows, block_h), threads=32) as (bx, by):
            acc = T.alloc_fragment((block_h, block_w), "float32")
            T.clear(acc)
            for r in T.serial(size):
                for c in T.serial(size):
                    for i, j in T.Parallel(block_h, block_w):
                        if by * block_h + i < rows and bx * block_w + j < columns:
                            acc[i, j] += A[(by * block_h + i) * stride + r, (bx * block_w + j) * stride + c] * K[r, c]
            T.copy(acc, out[by * block_h, bx * block_w])

    return filter_2d_kernel


def filter_2d_reference(a, k, stride=1):
    return F.conv2d(a[None, None].double(), k[None, None].double(), stride=stride)[0, 0].float()


def sliding_attention(seq, dim, window, block=64, bounds=False):
    """Attention of every position to itself and the `window - 1` positions before it; blocks of keys out of its reach
    are skipped: the loop over blocks starts with 0, or, with `bounds`, with the first that counts; it is as long as
    what is left of the sequence, if that is anything, with `bounds` "clamped"."""

    @T.prim_func
    def sliding_attention_kernel(
        Q: T.Tensor((seq, dim), "float32"),
        K: T.Tensor((seq, dim), "float32"),
        V: T.Tensor((seq, dim), "float32"),
        Out: T.Tensor((seq, dim), "float32"),
    ):
        with T.Kernel(T.ceildiv(seq, block), threads=32) as bx:
            q = T.alloc_shared((block, dim), "float32")
            k = T.alloc_shared((block, dim), "float32")
            v = T.alloc_shared((block, dim), "float32")
            p = T.alloc_shared((block, block), "float32")
            scores = T.alloc_fragment((block, block), "float32")
            out = T.alloc_fragment((block, dim), "float32")
            total = T.alloc_fragment((block,), "float32")
            part = T.alloc_fragment((block,), "float32")
            T.copy(Q[bx * block : (bx + 1) * block, :], q)
            T.clear(out)
            T.clear(total)
            start = T.max(0, (bx * block - window) // block)
            skipped = 0 if bounds is True else start
            blocks = bx + 1 - skipped
            if bounds == "clamped":
                skipped = T.max(0, bx * block - window) // block
                blocks = T.max(T.ceildiv(T.min(seq, (bx + 1) * block), block) - skipped, 0)
            for ko in T.serial(start if bounds is True else 0, blocks):
                T.copy(K[(ko + skipped) * block : (ko + skipped + 1) * block, :], k)
                T.copy(V[(ko + skipped) * block : (ko + skipped + 1) * block, :], v)
                T.clear(scores)
                T.gemm(q, k, scores, transpose_B=True)
                for i, j in T.Parallel(block, block):
                    behind = bx * block + i - ((ko + skipped) * block + j)
                    scores[i, j] = T.if_then_else(behind >= 0 and behind < window, T.exp(scores[i, j]), 0)
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(block):
                    total[i] += part[i]
                T.copy(scores, p)
                T.gemm(p, v, out)
            for i, j in T.Parallel(block, dim):
                out[i, j] = out[i, j] / total[i]
            T.copy(out, Out[bx * block : (bx + 1) * block, :])

    return sliding_attention_kernel


def sliding_attention_reference(q, k, v, window):
    behind = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    scores = (q.double() @ k.double().T).masked_fill((behind < 0) | (behind >= window), -torch.inf)
    return (scores.softmax(-1) @ v.double()).float()


def periodic_neighbours(height, width):
    """The sum of the eight neighbours of every place, on a plane that goes around in both dims."""

    @T.prim_func
    def periodic_neighbours_kernel(A: T.Tensor((height, width), "float32"), out: T.Tensor((height, width), "float32")):
        with T.Kernel(height, threads=128) as y:
            for x in T.Parallel(width):
                total = T.alloc_var("float32")
                total = -A[y, x]
                for r in T.serial(3):
                    for c in T.serial(3):
                        total += A[(y + r + height - 1) % height, (x + c - 1) % width]
                out[y, x] = total

    return periodic_neighbours_kernel


def periodic_neighbours_reference(a):
    """What moves by one in each direction, added up."""
    moves = [(r, c) for r in (-1, 0, 1) for c in (-1, 0, 1) if (r, c) != (0, 0)]
    return torch.stack([a.roll(move, (0, 1)) for move in moves]).sum(0)


def upsample(height, width, factor=2):
    """Every element `factor` times in both dims, as `F.interpolate` does by default."""

    @T.prim_func
    def upsample_kernel(
        A: T.Tensor((height, width), "float32"), out: T.Tensor((height * factor, width * factor), "float32")
    ):
        with T.Kernel(height * factor, threads=128) as y:
            for x in T.Parallel(width * factor):
                out[y, x] = A[y // factor, x // factor]

    return upsample_kernel


def upsample_reference(a, factor=2):
    """torch's, of one picture."""
    return F.interpolate(a[None, None], scale_factor=factor)[0, 0]


def escape_times(height, width, most=20):
    """How often z * z + c stays within a circle of radius 2, for the complex number c of every place."""

    @T.prim_func
    def escape_times_kernel(C: T.Tensor((height, width, 2), "float32"), out: T.Tensor((height, width), "int32")):
        with T.Kernel(height, threads=128) as row:
            for j in T.Parallel(width):
                x, y, old = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
                count = T.alloc_var("int32")
                x = 0.0
                y = 0.0
                count = 0
                while T.And(count < most, x * x + y * y < 4.0):
                    old = x
                    x = x * x - y * y + C[row, j, 0]
                    y = 2.0 * old * y + C[row, j, 1]
                    count = count + 1
                out[row, j] = count

    return escape_times_kernel


def escape_times_reference(c, most=20):
    """The same of all places at once."""
    x, y = torch.zeros_like(c[..., 0]), torch.zeros_like(c[..., 0])
    count = torch.zeros(c.shape[:2], dtype=torch.int32)
    for _ in range(most):
        inside = x * x + y * y < 4
        following = x * x - y * y + c[..., 0], 2 * x * y + c[..., 1]
        x, y = torch.where(inside, following[0], x), torch.where(inside, following[1], y)
        count += inside
    return count


def max_pool(batch, channels, height, width, block=32, dtype="float32"):
    """`out[b, c, y, x]` is the largest of the 3 x 3 elements of `data` around `[b, c, 2 * y, 2 * x]`; a program has
    `block` elements of the result, one after the other in memory."""
    out_height, out_width = -(-height // 2), -(-width // 2)
    total = batch * channels * out_height * out_width

    @T.prim_func
    def max_pool_kernel(
        data: T.Tensor((batch, channels, height, width), dtype),
        out: T.Tensor((batch, channels, out_height, out_width), dtype),
    ):
        with T.Kernel(T.ceildiv(total, block), threads=128) as bx:
            for i in T.Parallel(block):
                at = bx * block + i
                largest = T.alloc_var(dtype)
                if at < total:
                    x = at % out_width
                    y = at // out_width % out_height
                    c = at // out_width // out_height % channels
                    b = at // out_width // out_height // channels
                    largest = -T.infinity(dtype)
                    for dy, dx in T.grid(3, 3):
                        inside = T.And(y * 2 + dy - 1 >= 0, x * 2 + dx - 1 >= 0)
                        if T.And(inside, T.And(y * 2 + dy - 1 < height, x * 2 + dx - 1 < width)):
                            largest = T.max(largest, data[b, c, y * 2 + dy - 1, x * 2 + dx - 1])
                    out[b, c, y, x] = largest

    return max_pool_kernel


def max_pool_reference(data):
    return F.max_pool2d(data, 3, 2, 1)
