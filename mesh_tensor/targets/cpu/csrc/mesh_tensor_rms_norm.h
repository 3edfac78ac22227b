// Rows divided by their root mean square, each element times a weight: a row is read twice, from a cache the second time.
// Rows don't know of each other, so parts of them give the bits of the whole.
#pragma once

// Sums of squares that don't wait for each other.
#define MT_SQUARES (2 * MT_VECTOR_BYTES / 4)

extern "C" __attribute__((visibility("default"))) void mt_rms_norm(const float *__restrict__ x,
                                                                   const float *__restrict__ weight,
                                                                   float *__restrict__ y, int64_t width, float epsilon,
                                                                   int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float *in = x + row * width;
    float *out = y + row * width, squares[MT_SQUARES] = {}, sum = 0;
    int64_t j = 0;
    for (; j + MT_SQUARES <= width; j += MT_SQUARES)
      for (int k = 0; k < MT_SQUARES; ++k) squares[k] += in[j + k] * in[j + k];
    for (; j < width; ++j) sum += in[j] * in[j];
    if (j)
      for (int half = MT_SQUARES / 2; half; half /= 2)
        for (int k = 0; k < half; ++k) squares[k] += squares[k + half];
    sum += squares[0];
    const float rate = 1.0f / __builtin_sqrtf(sum / (float)width + epsilon);
    for (int64_t i = 0; i < width; ++i) out[i] = in[i] * rate * weight[i];
  }
}
