// The law of a row, and the token that coupled noise draws from it, each in as few passes over the vocabulary as there can be.
#include <cmath>

#include "simd.h"

using namespace rheo;

namespace {

constexpr int64_t MANY = 1 << 15;  // numbers: with fewer, starting threads costs more than they bring

constexpr int64_t GOLDEN = (int64_t)0x9E3779B97F4A7C15ull, FIRST = (int64_t)0xBF58476D1CE4E5B9ull, SECOND = (int64_t)0x94D049BB133111EBull;

// engine.law.keys.mix, of 8 keys
inline __m512i mix(__m512i x) {
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), _mm512_set1_epi64(FIRST));
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), _mm512_set1_epi64(SECOND));
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

// -log1p(-v), v = (k + 1/2) / 2^52 as engine.law.keys.gumbel has it: exponential noise, whose -log is Gumbel noise
inline __m512 exponential(__m512i low, __m512i high) {
  const __m256 a = _mm512_cvtepi64_ps(_mm512_srli_epi64(low, 12)), b = _mm512_cvtepi64_ps(_mm512_srli_epi64(high, 12));
  __m512 v = _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
  v = _mm512_mul_ps(_mm512_add_ps(v, _mm512_set1_ps(0.5f)), _mm512_set1_ps(0x1p-52f));
  v = _mm512_min_ps(v, _mm512_set1_ps(1.0f - 0x1p-24f));
  // log1p(-v) = log(u) * -v / (u - 1) with u = 1 - v rounded: the rounding of u cancels (Kahan)
  const __m512 u = _mm512_sub_ps(_mm512_set1_ps(1.0f), v), w = _mm512_sub_ps(_mm512_set1_ps(1.0f), u);
  const __mmask16 tiny = _mm512_cmp_ps_mask(w, _mm512_setzero_ps(), _CMP_EQ_OQ);
  const __m512 e = _mm512_div_ps(_mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), log_positive(u)), v), w);
  return _mm512_mask_mov_ps(e, tiny, v);
}

}  // namespace

// token_B: argmax of log p + Gumbel noise, as argmax of p / exponential noise; the smallest one on a tie.
// p_BV: fp32, rows `stride` apart. key_B: of each row's noise.
extern "C" void rheo_token(const float* p_BV, int64_t stride, const int64_t* key_B, int64_t* token_B, int64_t num_rows, int64_t vocab, int threads) {
#pragma omp parallel for num_threads(threads) if (num_rows > 1 && num_rows * vocab > MANY)
  for (int64_t row = 0; row < num_rows; row++) {
    const float* p = p_BV + row * stride;
    const uint64_t key = (uint64_t)key_B[row];
    const uint64_t base = key ^ (key >> 32);
    alignas(64) int64_t first[8];
    for (int i = 0; i < 8; i++) first[i] = (int64_t)(base + (uint64_t)(i + 1) * (uint64_t)GOLDEN);
    __m512i low = _mm512_load_si512(first), high = _mm512_add_epi64(low, _mm512_set1_epi64((int64_t)(8 * (uint64_t)GOLDEN)));
    const __m512i step = _mm512_set1_epi64((int64_t)(16 * (uint64_t)GOLDEN));
    __m512 best = _mm512_set1_ps(-1.0f);
    __m512i best_index = _mm512_setzero_si512(), index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t i = 0; i < vocab; i += 16) {
      const __mmask16 some = vocab - i >= 16 ? 0xffff : (__mmask16)((1u << (vocab - i)) - 1);
      const __m512 ratio = _mm512_div_ps(_mm512_maskz_loadu_ps(some, p + i), exponential(mix(low), mix(high)));
      const __mmask16 better = _mm512_mask_cmp_ps_mask(some, ratio, best, _CMP_GT_OQ);
      best = _mm512_mask_mov_ps(best, better, ratio);
      best_index = _mm512_mask_mov_epi32(best_index, better, index);
      index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
      low = _mm512_add_epi64(low, step);
      high = _mm512_add_epi64(high, step);
    }
    const float largest = _mm512_reduce_max_ps(best);
    const __mmask16 is_largest = _mm512_cmp_ps_mask(best, _mm512_set1_ps(largest), _CMP_EQ_OQ);
    token_B[row] = _mm512_mask_reduce_min_epi32(is_largest, best_index);
  }
}

// p_BV = softmax(logits / temperature), fp32. Temperatures are above 0. A row whose largest logit is not finite, or which holds NaN, becomes
// zeros.
extern "C" void rheo_softmax(const float* logits_BV, int64_t stride, const float* temperature_B, float* p_BV, int64_t num_rows, int64_t vocab, int threads) {
#pragma omp parallel for num_threads(threads) if (num_rows > 1 && num_rows * vocab > MANY)
  for (int64_t row = 0; row < num_rows; row++) {
    const float* z = logits_BV + row * stride;
    float* p = p_BV + row * vocab;
    const auto mask = [&](int64_t i) { return vocab - i >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (vocab - i)) - 1); };
    const __m512 none = _mm512_set1_ps(-INFINITY);
    __m512 largest = none;
    __mmask16 is_nan = 0;
    for (int64_t i = 0; i < vocab; i += 16) {
      const __m512 x = _mm512_mask_loadu_ps(none, mask(i), z + i);
      is_nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      largest = _mm512_max_ps(largest, x);
    }
    const float top = _mm512_reduce_max_ps(largest);
    if (is_nan || !std::isfinite(top)) {
      std::memset(p, 0, vocab * sizeof(float));
      continue;
    }
    const __m512 shift = _mm512_set1_ps(top), temperature = _mm512_set1_ps(temperature_B[row]);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < vocab; i += 16) {
      const __m512 scaled = _mm512_div_ps(_mm512_sub_ps(_mm512_mask_loadu_ps(none, mask(i), z + i), shift), temperature);
      const __mmask16 counts = _mm512_cmp_ps_mask(scaled, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);  // less is below fp32's normal numbers
      const __m512 weight = _mm512_maskz_mov_ps(counts, exp_negative(scaled));
      sum = _mm512_add_ps(sum, weight);
      _mm512_mask_storeu_ps(p + i, mask(i), weight);
    }
    const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
    for (int64_t i = 0; i < vocab; i += 16) _mm512_mask_storeu_ps(p + i, mask(i), _mm512_mul_ps(_mm512_maskz_loadu_ps(mask(i), p + i), share));
  }
}
