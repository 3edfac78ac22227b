// Gelu by its approximation with tanh, x * sigmoid(z) for z = x * (a + b * x * x), and its gradient: each element once
// through the caches. Elements don't know of each other, so parts of a tensor give the bits of the whole.
#pragma once

#define MT_GELU_A 1.5957691216057308f
#define MT_GELU_B 0.07135481282622099f

MT_INLINE float mt_gelu_sigmoid(float x, float square) {
  float z = x * mt_multiply_add(MT_GELU_B, square, MT_GELU_A);
  return 1.0f / (1.0f + mt_exp_float32(-z));
}

extern "C" __attribute__((visibility("default"))) void mt_gelu(const float *__restrict__ x, float *__restrict__ y,
                                                               int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = x[i] * mt_gelu_sigmoid(x[i], x[i] * x[i]);
}

extern "C" __attribute__((visibility("default"))) void mt_gelu_backward(const float *__restrict__ seed,
                                                                        const float *__restrict__ x,
                                                                        float *__restrict__ dx, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float square = x[i] * x[i], s = mt_gelu_sigmoid(x[i], square);
    float slope = mt_multiply_add(3.0f * MT_GELU_B, square, MT_GELU_A);
    dx[i] = seed[i] * mt_multiply_add(x[i] * (s * (1.0f - s)), slope, s);
  }
}
