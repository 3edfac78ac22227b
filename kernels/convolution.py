"""Two-dimensional convolution as a product of matrices: the patches of the images times the kernel, one row per pixel
of the result. The kernel and the result are used as matrices, which is what they are in memory."""

import tilelang.language as T
import torch


def convolution_2d(
    N, C, H, W, F, size=3, stride=1, dilation=1, padding=1, block_M=64, block_N=64, block_K=32, dtype="float32"
):
    """`out[n, y, x, f] = sum_hwc data[n, y * stride + h * dilation - padding, x * stride + w * dilation - padding, c] *
    kernel[h, w, c, f]`, with zeros outside the image."""
    OH = (H + 2 * padding - dilation * (size - 1) - 1) // stride + 1
    OW = (W + 2 * padding - dilation * (size - 1) - 1) // stride + 1

    @T.prim_func
    def convolution_2d_kernel(
        data: T.Tensor((N, H, W, C), dtype),
        kernel: T.Tensor((size, size, C, F), dtype),
        out: T.Tensor((N, OH, OW, F), dtype),
    ):
        with T.Kernel(T.ceildiv(F, block_N), T.ceildiv(N * OH * OW, block_M), threads=128) as (bx, by):
            patches = T.alloc_shared((block_M, block_K), dtype)
            weights = T.alloc_shared((block_K, block_N), dtype)
            result = T.alloc_fragment((block_M, block_N), "float32")
            kernel_flat = T.Tensor((size * size * C, F), dtype, kernel.data)
            out_flat = T.Tensor((N * OH * OW, F), dtype, out.data)
            T.clear(result)
            for ko in T.Pipelined(T.ceildiv(size * size * C, block_K), num_stages=2):
                T.im2col(data, patches, by, ko, size, stride, dilation, padding)
                T.copy(kernel_flat[ko * block_K, bx * block_N], weights)
                T.gemm(patches, weights, result)
            T.copy(result, out_flat[by * block_M, bx * block_N])

    return convolution_2d_kernel


def convolution_2d_reference(data, kernel, stride=1, dilation=1, padding=1):
    """The same in torch, computed in double precision."""
    images, weights = data.double().permute(0, 3, 1, 2), kernel.double().permute(3, 2, 0, 1)
    result = torch.conv2d(images, weights, stride=stride, dilation=dilation, padding=padding)
    return result.permute(0, 2, 3, 1).contiguous().to(data.dtype)
