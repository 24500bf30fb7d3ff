// What the kernels share: bf16 is uint16_t here, and vectors are 16 floats wide.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace rheo {

using bf16 = uint16_t;

inline __m512 load_bf16(const bf16* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

inline void store_bf16(bf16* x, __m512 y) { _mm256_storeu_si256((__m256i*)x, (__m256i)_mm512_cvtneps_pbh(y)); }

// y as it is after a round trip through bf16.
inline __m512 round_bf16(__m512 y) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(y)), 16));
}

// exp(x) for x <= 0, within 2 ulp (the polynomial is Cephes' expf); below -87 it is that of -87.
inline __m512 exp_negative(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// log(x) for normal x > 0, within 2 ulp away from 1 (Cephes' logf).
inline __m512 log_positive(__m512 x) {
  const __m512 half = _mm512_set1_ps(0.70710678f);
  __m512 e = _mm512_add_ps(_mm512_getexp_ps(x), _mm512_set1_ps(1.0f));
  __m512 m = _mm512_mul_ps(_mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero), _mm512_set1_ps(0.5f));  // [0.5, 1)
  const __mmask16 low = _mm512_cmp_ps_mask(m, half, _CMP_LT_OQ);
  e = _mm512_mask_sub_ps(e, low, e, _mm512_set1_ps(1.0f));
  m = _mm512_mask_add_ps(m, low, m, m);
  const __m512 t = _mm512_sub_ps(m, _mm512_set1_ps(1.0f));
  const __m512 t2 = _mm512_mul_ps(t, t);
  __m512 p = _mm512_set1_ps(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                  -2.4999993993e-1f, 3.3333331174e-1f})
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(c));
  p = _mm512_mul_ps(_mm512_mul_ps(p, t), t2);
  p = _mm512_fmadd_ps(e, _mm512_set1_ps(-2.12194440e-4f), p);
  p = _mm512_fnmadd_ps(_mm512_set1_ps(0.5f), t2, p);
  return _mm512_fmadd_ps(e, _mm512_set1_ps(0.693359375f), _mm512_add_ps(t, p));
}

}  // namespace rheo
