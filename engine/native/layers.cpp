// What stands between the matrix products of a Llama layer, with transformers' roundings to bf16.
#include "simd.h"

using namespace rheo;

namespace {

// out = round(x / rms(x)) * weight over `size` channels, a multiple of 16.
inline void normalise(const bf16* x, const bf16* weight, bf16* out, int64_t size, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) {
    const __m512 v = load_bf16(x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / size + eps));
  for (int64_t i = 0; i < size; i += 16)
    store_bf16(out + i, _mm512_mul_ps(load_bf16(weight + i), round_bf16(_mm512_mul_ps(load_bf16(x + i), scale))));
}

// Rotary positions of one head: channel i turns with channel i + D/2.
inline void rotate(bf16* x, const bf16* cos, const bf16* sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const __m512 low = load_bf16(x + i), high = load_bf16(x + half + i);
    const __m512 turned_low = round_bf16(_mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), high), load_bf16(sin + i)));
    const __m512 turned_high = round_bf16(_mm512_mul_ps(low, load_bf16(sin + half + i)));
    store_bf16(x + i, _mm512_add_ps(round_bf16(_mm512_mul_ps(low, load_bf16(cos + i))), turned_low));
    store_bf16(x + half + i, _mm512_add_ps(round_bf16(_mm512_mul_ps(high, load_bf16(cos + half + i))), turned_high));
  }
}

constexpr int64_t MANY = 1 << 14;  // channels: with fewer, starting threads costs more than they bring

}  // namespace

// x += delta (where there is one), out = norm(x). All [N, size].
extern "C" void rheo_add_norm(bf16* x, const bf16* delta, const bf16* weight, bf16* out, int64_t num_tokens, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (num_tokens * size > MANY)
  for (int64_t n = 0; n < num_tokens; n++) {
    bf16* row = x + n * size;
    if (delta)
      for (int64_t i = 0; i < size; i += 16) store_bf16(row + i, _mm512_add_ps(load_bf16(row + i), load_bf16(delta + n * size + i)));
    normalise(row, weight, out + n * size, size, eps);
  }
}

// In place: heads of x [N, stride], from the first on, are normed (where there is a weight) and rotated.
extern "C" void rheo_rotate(bf16* x, int64_t stride, const bf16* cos_ND, const bf16* sin_ND, const bf16* norm, float eps, int64_t num_tokens,
                            int64_t heads, int64_t head_dim, int threads) {
#pragma omp parallel for num_threads(threads) if (num_tokens * heads * head_dim > MANY)
  for (int64_t n = 0; n < num_tokens; n++)
    for (int64_t head = 0; head < heads; head++) {
      bf16* row = x + n * stride + head * head_dim;
      if (norm) normalise(row, norm, row, head_dim, eps);
      rotate(row, cos_ND + n * head_dim, sin_ND + n * head_dim, head_dim);
    }
}

// out [N, size] = silu(gate) * up, both in x [N, 2 * size], one behind the other.
extern "C" void rheo_silu_mul(const bf16* x, bf16* out, int64_t num_tokens, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (num_tokens * size > MANY)
  for (int64_t n = 0; n < num_tokens; n++)
    for (int64_t i = 0; i < size; i += 16) {
      const __m512 gate = load_bf16(x + 2 * n * size + i), up = load_bf16(x + (2 * n + 1) * size + i);
      // exp of a negative number either way: 1 / (1 + e^-|g|), and its complement below 0
      const __m512 e = exp_negative(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)));
      const __m512 one = _mm512_set1_ps(1.0f);
      const __mmask16 below = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ);
      const __m512 sigmoid = _mm512_div_ps(_mm512_mask_mov_ps(one, below, e), _mm512_add_ps(one, e));
      store_bf16(out + n * size + i, _mm512_mul_ps(round_bf16(_mm512_mul_ps(gate, sigmoid)), up));
    }
}
