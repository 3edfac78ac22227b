// c[i, j] += sum over k of a[i, k] * b[k, j] over a block, for any strides and dtypes. Sums are kept in `Sum`.
//
// A tile of ROWS x WIDTH sums stays in registers. Panels of b are packed, so that they are read in order, unless that
// gains nothing; a is read in place, or converted a few rows at a time where it isn't of type `Sum`. A `C` of 16 bits
// is rounded once per DEPTH.
//
// What no product of a kernel has takes no time of its compiler: MT_WHOLE_ROWS, that all have a multiple of 8 rows, and
// MT_NO_TURNS, that rows of none of their operands are read as columns.
#pragma once

#ifndef MT_WHOLE_ROWS
#define MT_WHOLE_ROWS 0
#endif

// What of the nearest cache may be one operand's.
#define MT_NEAREST_BYTES 16384

// Sums of products may use fused multiply-add; nothing else may (-ffp-contract=off).
#if defined(__clang__)
#define MT_FUSED __attribute__((noinline))
#define MT_FUSED_BODY _Pragma("clang fp contract(fast)")
#else
#define MT_FUSED __attribute__((noinline, optimize("fp-contract=fast")))
#define MT_FUSED_BODY
#endif

template <typename A, typename B> struct mt_same { static const bool value = false; };
template <typename A> struct mt_same<A, A> { static const bool value = true; };

template <typename Sum> struct mt_tile {
  static const int LANES = MT_VECTOR_BYTES / sizeof(Sum);
  static const int WIDTH = 2 * LANES;
  static const int ROWS = MT_VECTOR_BYTES == 64 ? 8 : 4;
  static const int DEPTH = 256;
  typedef Sum vector __attribute__((vector_size(MT_VECTOR_BYTES)));
  typedef Sum unaligned __attribute__((vector_size(MT_VECTOR_BYTES), aligned(sizeof(Sum)), may_alias));
};

template <typename Sum, int ROWS>
MT_FUSED static void mt_gemm_tile(const Sum *a, int64_t a_m, int64_t a_k, const Sum *b, int64_t b_k, Sum *c, int64_t c_m,
                                  int64_t depth, bool load) {
  MT_FUSED_BODY
  typedef typename mt_tile<Sum>::vector vector;
  typedef typename mt_tile<Sum>::unaligned unaligned;
  const int lanes = mt_tile<Sum>::LANES;
  vector left[ROWS], right[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    left[r] = load ? (vector) * (const unaligned *)(c + r * c_m) : vector{};
    right[r] = load ? (vector) * (const unaligned *)(c + r * c_m + lanes) : vector{};
  }
  for (int64_t p = 0; p < depth; ++p) {
    vector b_left = (vector) * (const unaligned *)(b + p * b_k);
    vector b_right = (vector) * (const unaligned *)(b + p * b_k + lanes);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      Sum x = a[r * a_m + p * a_k];
      left[r] += x * b_left;
      right[r] += x * b_right;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    *(unaligned *)(c + r * c_m) = (unaligned)left[r];
    *(unaligned *)(c + r * c_m + lanes) = (unaligned)right[r];
  }
}

// `rows` rows (at most ROWS) of the tile, in steps that are powers of two.
template <typename Sum, int ROWS>
static inline void mt_gemm_rows(int rows, const Sum *a, int64_t a_m, int64_t a_k, const Sum *b, int64_t b_k, Sum *c,
                                int64_t c_m, int64_t depth, bool load) {
  if (rows >= ROWS) {
    mt_gemm_tile<Sum, ROWS>(a, a_m, a_k, b, b_k, c, c_m, depth, load);
    rows -= ROWS, a += ROWS * a_m, c += ROWS * c_m;
  }
  if constexpr (ROWS > 1 && !MT_WHOLE_ROWS) {
    if (rows) mt_gemm_rows<Sum, ROWS / 2>(rows, a, a_m, a_k, b, b_k, c, c_m, depth, load);
  }
}

// Copies blocks of LANES x LANES values, rows of `in` to columns of `out`, in registers: log2(LANES) times, the values of
// row i and of row i + LANES / 2 are dealt out in turns.
#if defined(MT_SHUFFLES) && !defined(MT_NO_TURNS)
template <int LANES, int HALF, typename Vector> static inline Vector mt_in_turns(Vector x, Vector y) {
  const int a = HALF * (LANES / 2), b = a + LANES;
  if constexpr (LANES == 16)
    return __builtin_shufflevector(x, y, a, b, a + 1, b + 1, a + 2, b + 2, a + 3, b + 3, a + 4, b + 4, a + 5, b + 5,
                                   a + 6, b + 6, a + 7, b + 7);
  else if constexpr (LANES == 8)
    return __builtin_shufflevector(x, y, a, b, a + 1, b + 1, a + 2, b + 2, a + 3, b + 3);
  else if constexpr (LANES == 4)
    return __builtin_shufflevector(x, y, a, b, a + 1, b + 1);
  else
    return __builtin_shufflevector(x, y, a, b);
}

template <typename T> static void mt_turn(const T *in, int64_t in_row, T *out, int64_t out_row) {
  typedef typename mt_tile<T>::vector vector;
  typedef typename mt_tile<T>::unaligned unaligned;
  const int LANES = mt_tile<T>::LANES;
  vector rows[LANES], dealt[LANES];
#pragma GCC unroll 16
  for (int r = 0; r < LANES; ++r) rows[r] = (vector) * (const unaligned *)(in + r * in_row);
#pragma GCC unroll 4
  for (int times = 1; times < LANES; times *= 2) {
#pragma GCC unroll 8
    for (int r = 0; r < LANES / 2; ++r) {
      dealt[2 * r] = mt_in_turns<LANES, 0>(rows[r], rows[r + LANES / 2]);
      dealt[2 * r + 1] = mt_in_turns<LANES, 1>(rows[r], rows[r + LANES / 2]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < LANES; ++r) rows[r] = dealt[r];
  }
#pragma GCC unroll 16
  for (int r = 0; r < LANES; ++r) *(unaligned *)(out + r * out_row) = (unaligned)rows[r];
}
#endif

// Copies rows x columns values, as `To`, into `out` with rows `out_width` apart; the columns up to `width` become 0.
template <typename To, typename From>
MT_INLINE void mt_pack(const From *in, int64_t in_row, int64_t in_column, To *out, int64_t out_width, int64_t rows,
                       int64_t columns, int64_t width) {
  int64_t turned_rows = 0, turned_columns = 0;
#if defined(MT_SHUFFLES) && !defined(MT_NO_TURNS)
  if constexpr (mt_same<To, From>::value) {
    const int LANES = mt_tile<To>::LANES;
    if (in_row == 1) turned_rows = rows - rows % LANES, turned_columns = columns - columns % LANES;
    for (int64_t r = 0; r < turned_rows; r += LANES)
      for (int64_t j = 0; j < turned_columns; j += LANES)
        mt_turn(in + r + j * in_column, in_column, out + r * out_width + j, out_width);
  }
#endif
  for (int64_t r = 0; r < rows; ++r) {
    int64_t first = r < turned_rows ? turned_columns : 0;
    if (in_column == 1 && columns == width) {
      for (int64_t j = 0; j < width; ++j) out[r * out_width + j] = mt_as<To>(in[r * in_row + j]);
    } else if (in_column == 1) {
      for (int64_t j = first; j < columns; ++j) out[r * out_width + j] = mt_as<To>(in[r * in_row + j]);
    } else {
      for (int64_t j = first; j < columns; ++j) out[r * out_width + j] = mt_as<To>(in[r * in_row + j * in_column]);
    }
    for (int64_t j = columns; j < width; ++j) out[r * out_width + j] = (To)0;
  }
}

// Asks for `width` values in each of the rows begin ... end - 1. Nothing is read: the addresses may be anywhere.
template <typename T>
static inline void mt_ask_for(const T *in, int64_t in_row, int64_t begin, int64_t end, int64_t width) {
  for (int64_t r = begin; r < end; ++r)
    for (size_t byte = 0; byte < width * sizeof(T); byte += 64)
      __builtin_prefetch((const char *)(in + r * in_row) + byte);
}

// Whether the rows of a panel of b can be read where they lie, and no worse: no row of a reads them a second time, or
// they stay in the nearest cache. What a product also writes is packed first.
template <typename T>
static inline bool mt_panel_stays(const T *b, int64_t b_k, int64_t b_n, int64_t depth, const T *c, int64_t c_m,
                                  int64_t c_n, int64_t m, int64_t n) {
  int64_t rows_of_b = (depth - 1) * b_k + mt_tile<T>::WIDTH, of_c = (m - 1) * c_m + (n - 1) * c_n + 1;
  bool near = m <= mt_tile<T>::ROWS || depth * b_k * (int64_t)sizeof(T) <= MT_NEAREST_BYTES;
  return b_n == 1 && near && b_k > 0 && c_m >= 0 && c_n >= 0 && (b + rows_of_b <= c || c + of_c <= b);
}

template <typename A, typename B, typename C, typename Sum>
static void mt_gemm_own(const A *a, const B *b, C *c, int64_t m, int64_t n, int64_t k, int64_t a_m, int64_t a_k,
                    int64_t b_k, int64_t b_n, int64_t c_m, int64_t c_n, int32_t clear) {
  const int WIDTH = mt_tile<Sum>::WIDTH, ROWS = mt_tile<Sum>::ROWS, DEPTH = mt_tile<Sum>::DEPTH;
  alignas(64) Sum panel[DEPTH * WIDTH], edge[ROWS * WIDTH], converted[mt_same<A, Sum>::value ? 1 : ROWS * DEPTH];
  for (int64_t p0 = 0; p0 == 0 || p0 < k; p0 += DEPTH) {
    int64_t depth = k - p0 < DEPTH ? k - p0 : DEPTH;
    bool load = p0 > 0 || !clear;
    for (int64_t j0 = 0; j0 < n; j0 += WIDTH) {
      int64_t columns = n - j0 < WIDTH ? n - j0 : WIDTH;
      const B *b_panel = b + p0 * b_k + j0 * b_n;
      const Sum *y = panel;
      int64_t y_k = WIDTH;
      if (mt_same<B, Sum>::value && mt_same<C, Sum>::value && columns == WIDTH &&
          mt_panel_stays<Sum>((const Sum *)b_panel, b_k, b_n, depth, (const Sum *)c, c_m, c_n, m, n))
        y = (const Sum *)b_panel, y_k = b_k;
      else
        mt_pack(b_panel, b_k, b_n, panel, WIDTH, depth, columns, WIDTH);
      for (int64_t i0 = 0; i0 < m; i0 += ROWS) {
        // The next panel comes near while this one is worked on: b's rows may be far apart, each in a page of its own.
        if (n - j0 > WIDTH && b_n == 1 && y == panel)
          mt_ask_for(b_panel + WIDTH, b_k, depth * i0 / m, depth * (i0 + ROWS < m ? i0 + ROWS : m) / m, WIDTH);
        int rows = (int)(m - i0 < ROWS ? m - i0 : ROWS);
        const A *a_rows = a + i0 * a_m + p0 * a_k;
        C *c_tile = c + i0 * c_m + j0 * c_n;
        const Sum *x = (const Sum *)a_rows;
        int64_t x_m = a_m, x_k = a_k;
        if constexpr (!mt_same<A, Sum>::value) {
          mt_pack(a_rows, a_m, a_k, converted, DEPTH, rows, depth, depth);
          x = converted, x_m = DEPTH, x_k = 1;
        }
        if (mt_same<C, Sum>::value && c_n == 1 && columns == WIDTH) {
          mt_gemm_rows<Sum, ROWS>(rows, x, x_m, x_k, y, y_k, (Sum *)c_tile, c_m, depth, load);
        } else {
          if (load) mt_pack(c_tile, c_m, c_n, edge, WIDTH, rows, columns, WIDTH);
          mt_gemm_rows<Sum, ROWS>(rows, x, x_m, x_k, y, y_k, edge, WIDTH, depth, load);
          for (int r = 0; r < rows; ++r)
            for (int64_t j = 0; j < columns; ++j) c_tile[r * c_m + j * c_n] = mt_as<C>(edge[r * WIDTH + j]);
        }
      }
    }
  }
}

template <typename A, typename B, typename C, typename Sum>
static void mt_gemm(const A *a, const B *b, C *c, int64_t m, int64_t n, int64_t k, int64_t a_m, int64_t a_k,
                    int64_t b_k, int64_t b_n, int64_t c_m, int64_t c_n, int32_t clear) {
  mt_gemm_own<A, B, C, Sum>(a, b, c, m, n, k, a_m, a_k, b_k, b_n, c_m, c_n, clear);
}

// BLAS in place of the above, where a block lies as it asks for. It is kept to the calling thread.
#if defined(MT_BLAS)
typedef void (*mt_sgemm_function)(const char *, const char *, const int32_t *, const int32_t *, const int32_t *,
                                  const float *, const float *, const int32_t *, const float *, const int32_t *,
                                  const float *, float *, const int32_t *);
static mt_sgemm_function mt_sgemm;
static int (*mt_set_threads)(int);

extern "C" __attribute__((visibility("default"))) void mesh_tensor_set_blas(void *sgemm, void *set_threads) {
  mt_sgemm = (mt_sgemm_function)sgemm, mt_set_threads = (int (*)(int))set_threads;
}

// BLAS's results may depend on alignment: blocks begin at multiples of 64 bytes.
MT_INLINE bool mt_blas_takes(const float *p, int64_t across, int64_t along, int64_t length) {
  return (size_t)p % 64 == 0 && along == 1 && across >= length && across > 0 && across < ((int64_t)1 << 31);
}

// BLAS goes by columns: c' = b' a'.
template <>
void mt_gemm<float, float, float, float>(const float *a, const float *b, float *c, int64_t m, int64_t n, int64_t k,
                                         int64_t a_m, int64_t a_k, int64_t b_k, int64_t b_n, int64_t c_m, int64_t c_n,
                                         int32_t clear) {
  bool a_rows = mt_blas_takes(a, a_m, a_k, k), a_columns = mt_blas_takes(a, a_k, a_m, m);
  bool b_rows = mt_blas_takes(b, b_k, b_n, n), b_columns = mt_blas_takes(b, b_n, b_k, k);
  bool fits = (a_rows || a_columns) && (b_rows || b_columns) && mt_blas_takes(c, c_m, c_n, n);
  if (!mt_sgemm || !fits || m == 0 || n == 0 || k == 0) {
    mt_gemm_own<float, float, float, float>(a, b, c, m, n, k, a_m, a_k, b_k, b_n, c_m, c_n, clear);
    return;
  }
  int32_t sizes[] = {(int32_t)n, (int32_t)m, (int32_t)k}, ld_c = (int32_t)c_m;
  int32_t ld_b = (int32_t)(b_rows ? b_k : b_n), ld_a = (int32_t)(a_rows ? a_m : a_k);
  float alpha = 1.0f, beta = clear ? 0.0f : 1.0f;
  int threads = mt_set_threads(1);
  mt_sgemm(b_rows ? "N" : "T", a_rows ? "N" : "T", sizes, sizes + 1, sizes + 2, &alpha, b, &ld_b, a, &ld_a, &beta, c,
           &ld_c);
  mt_set_threads(threads);
}
#endif

// A function of that name for C: pointers as the generated code has them.
#define MT_GEMM(name, A, B, C, Sum, StoredA, StoredB, StoredC) \
  extern "C" { \
  MT_INLINE void name(StoredA *a, StoredB *b, StoredC *c, int64_t m, int64_t n, int64_t k, int64_t a_m, int64_t a_k, \
                      int64_t b_k, int64_t b_n, int64_t c_m, int64_t c_n, int32_t clear) { \
    mt_gemm<A, B, C, Sum>((const A *)a, (const B *)b, (C *)c, m, n, k, a_m, a_k, b_k, b_n, c_m, c_n, clear); \
  } \
  }
