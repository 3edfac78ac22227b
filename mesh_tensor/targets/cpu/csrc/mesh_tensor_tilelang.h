// Block products for code that TileLang generates on its own: see targets/cpu/tilelang_gemm.py.
#pragma once

#include "mesh_tensor_cpu.h"
#include "mesh_tensor_gemm.h"

MT_GEMM(mt_gemm_float32_float32_float32, float, float, float, float, float, float, float)
MT_GEMM(mt_gemm_float64_float64_float64, double, double, double, double, double, double, double)
