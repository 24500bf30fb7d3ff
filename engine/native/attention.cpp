// Attention of packed new tokens to their rows' cached keys and values, in bf16 with sums in fp32: a block of keys is laid out for the
// processor's bf16 products once, and serves all queries of the row that share the key head.
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

using namespace rheo;

namespace {

constexpr int KEYS = 64;     // in a block, which is a page of the cache
constexpr int TOGETHER = 4;  // queries whose sums are in registers at once
constexpr int MOST = 48;     // queries of one task: their sums stay in the processor's first cache
constexpr int64_t MANY = 1 << 14;  // pairs of query and key: with fewer, starting threads costs more than they bring

// What engine.native.attention writes for each row. number: of its line in the table of pages. offset: of its visibility, [count, width];
// negative: causal.
struct Row {
  int64_t number, prefix, start, count, width, offset, place;
};

struct Query {
  const bf16* vector;
  bf16* out;
  const uint8_t* visible;  // of the keys behind the prefix; null: all up to `reach`
  int reach;               // keys at most
};

inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

// Keys [n, D] -> [n / 16][D / 2] vectors of 16 keys' pairs of channels.
template <int D>
void lay_out_keys(const bf16* key, int n, int32_t* out) {
  for (int block = 0; block < (n + 15) / 16; block++)
    for (int half = 0; half < D / 32; half++) {
      __m512i r[16];
      for (int i = 0; i < 16; i++)
        r[i] = block * 16 + i < n ? _mm512_loadu_si512(key + (block * 16 + i) * D + half * 32) : _mm512_setzero_si512();
      transpose(r);
      for (int i = 0; i < 16; i++) _mm512_store_si512(out + (block * (D / 2) + half * 16 + i) * 16, r[i]);
    }
}

// Values [n, D] -> [n / 2][D / 16] vectors of 16 channels' pairs of keys.
template <int D>
void lay_out_values(const bf16* value, int n, int32_t* out) {
  alignas(64) int16_t order[2][32];
  for (int i = 0; i < 32; i++)
    for (int half = 0; half < 2; half++) order[half][i] = half * 16 + i / 2 + (i % 2) * 32;
  const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
  for (int t = 0; t < n; t += 2)
    for (int part = 0; part < D / 32; part++) {
      const __m512i a = _mm512_loadu_si512(value + t * D + part * 32);
      const __m512i b = t + 1 < n ? _mm512_loadu_si512(value + (t + 1) * D + part * 32) : _mm512_setzero_si512();
      int32_t* to = out + (t / 2 * (D / 16) + part * 2) * 16;
      _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(to + 16, _mm512_permutex2var_epi16(a, high, b));
    }
}

// Which of 16 keys from `first` on a query sees.
inline __mmask16 find_visible(const Query& query, int first, int prefix) {
  if (first + 16 <= std::min(prefix, query.reach)) return 0xffff;
  __mmask16 seen = 0;
  for (int i = 0; i < 16 && first + i < query.reach; i++) {
    const int key = first + i;
    seen |= (__mmask16)(key < prefix || !query.visible || query.visible[key - prefix]) << i;
  }
  return seen;
}

// Softmax over blocks as they come (Milakov and Gimelshein 2018): sums are relative to the largest score so far.
template <int D>
void attend(const Query* queries, int num_queries, const bf16* key, const bf16* value, const int64_t* pages,
            int64_t page_stride, int num_keys, int prefix, float scale) {
  alignas(64) static thread_local int32_t keys[KEYS * D / 2], values[KEYS * D / 2];
  alignas(64) static thread_local float sums[MOST][D];
  alignas(64) float score[TOGETHER][KEYS];
  alignas(64) bf16 weight[TOGETHER][KEYS];
  float largest[MOST], total[MOST];
  bool is_broken[MOST] = {};  // a score was no number: so is the output, as elsewhere
  const __m512 none = _mm512_set1_ps(-INFINITY);
  std::fill_n(largest, num_queries, -INFINITY);
  std::fill_n(total, num_queries, 0.0f);
  std::memset(sums, 0, sizeof(sums[0]) * num_queries);
  for (int start = 0; start < num_keys; start += KEYS) {
    const int n = std::min(KEYS, num_keys - start), num_blocks = (n + 15) / 16;
    const int64_t page = pages[start / KEYS] * page_stride;
    lay_out_keys<D>(key + page, n, keys);
    lay_out_values<D>(value + page, n, values);
    for (int first = 0; first < num_queries; first += TOGETHER) {
      const int some = std::min(TOGETHER, num_queries - first);
      const int32_t* vectors[TOGETHER];
      for (int a = 0; a < TOGETHER; a++) vectors[a] = (const int32_t*)queries[first + std::min(a, some - 1)].vector;
      for (int block = 0; block < num_blocks; block++) {
        __m512 dot[TOGETHER];
        for (int a = 0; a < TOGETHER; a++) dot[a] = _mm512_setzero_ps();
        for (int d = 0; d < D / 2; d++) {
          const __m512bh pair = (__m512bh)_mm512_load_si512(keys + (block * (D / 2) + d) * 16);
          for (int a = 0; a < TOGETHER; a++) dot[a] = _mm512_dpbf16_ps(dot[a], pair, (__m512bh)_mm512_set1_epi32(vectors[a][d]));
        }
        for (int a = 0; a < some; a++) {
          const __mmask16 seen = find_visible(queries[first + a], start + block * 16, prefix);
          const __m512 x = _mm512_mul_ps(dot[a], _mm512_set1_ps(scale));
          is_broken[first + a] |= _mm512_mask_cmp_ps_mask(seen, _mm512_abs_ps(x), _mm512_set1_ps(INFINITY), _CMP_NLT_UQ) != 0;
          _mm512_store_ps(score[a] + block * 16, _mm512_mask_mov_ps(none, seen, x));
        }
      }
      float shrink[TOGETHER];
      std::memset(weight, 0, sizeof(weight));
      for (int a = 0; a < some; a++) {
        const int q = first + a;
        __m512 top = _mm512_load_ps(score[a]);
        for (int block = 1; block < num_blocks; block++) top = _mm512_max_ps(top, _mm512_load_ps(score[a] + block * 16));
        const float now = std::max(largest[q], _mm512_reduce_max_ps(top));
        shrink[a] = 1.0f;
        if (now == -INFINITY) continue;
        shrink[a] = std::exp(largest[q] - now);
        largest[q] = now;
        __m512 sum = _mm512_setzero_ps();
        for (int block = 0; block < num_blocks; block++) {
          const __m512 x = _mm512_load_ps(score[a] + block * 16);
          const __mmask16 seen = _mm512_cmp_ps_mask(x, none, _CMP_NEQ_UQ);
          const __m512 w = _mm512_maskz_mov_ps(seen, exp_negative(_mm512_sub_ps(x, _mm512_set1_ps(now))));
          sum = _mm512_add_ps(sum, w);
          store_bf16(weight[a] + block * 16, w);
        }
        total[q] = total[q] * shrink[a] + _mm512_reduce_add_ps(sum);
      }
      for (int part = 0; part < D / 16; part += 2) {
        __m512 c[TOGETHER][2];
        for (int a = 0; a < TOGETHER; a++)
          for (int g = 0; g < 2; g++)
            c[a][g] = a < some ? _mm512_mul_ps(_mm512_load_ps(sums[first + a] + (part + g) * 16), _mm512_set1_ps(shrink[a]))
                               : _mm512_setzero_ps();
        for (int t = 0; t < (n + 1) / 2; t++)
          for (int g = 0; g < 2; g++) {
            const __m512bh pair = (__m512bh)_mm512_load_si512(values + (t * (D / 16) + part + g) * 16);
            for (int a = 0; a < TOGETHER; a++)
              c[a][g] = _mm512_dpbf16_ps(c[a][g], (__m512bh)_mm512_set1_epi32(((const int32_t*)weight[a])[t]), pair);
          }
        for (int a = 0; a < some; a++)
          for (int g = 0; g < 2; g++) _mm512_store_ps(sums[first + a] + (part + g) * 16, c[a][g]);
      }
    }
  }
  for (int q = 0; q < num_queries; q++) {
    const __m512 share = _mm512_set1_ps(is_broken[q] ? NAN : total[q] > 0 ? 1.0f / total[q] : 0.0f);
    for (int part = 0; part < D / 16; part++) store_bf16(queries[q].out + part * 16, _mm512_mul_ps(_mm512_load_ps(sums[q] + part * 16), share));
  }
}

}  // namespace

// Keys and values of the new tokens into the cache [pages, kv_heads, KEYS, D]; x_NKD: tokens `stride` apart.
extern "C" void rheo_store(const bf16* key_NKD, int64_t key_stride, const bf16* value_NKD, int64_t value_stride, bf16* key, bf16* value,
                           int64_t page_stride, int64_t head_stride, const int64_t* table, int64_t table_width, const Row* rows,
                           int64_t num_rows, int kv_heads, int head_dim) {
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t j = 0; j < rows[r].count; j++) {
      const int64_t place = rows[r].place + j, from = rows[r].start + j;
      const int64_t page = table[rows[r].number * table_width + place / KEYS];
      for (int head = 0; head < kv_heads; head++) {
        const int64_t to = page * page_stride + head * head_stride + place % KEYS * head_dim;
        std::memcpy(key + to, key_NKD + from * key_stride + head * head_dim, head_dim * sizeof(bf16));
        std::memcpy(value + to, value_NKD + from * value_stride + head * head_dim, head_dim * sizeof(bf16));
      }
    }
}

// out_NHD: contiguous. query_NHD: tokens `stride` apart. head_dim: 64 or 128.
extern "C" void rheo_attend(const bf16* query_NHD, int64_t stride, bf16* out_NHD, const bf16* key, const bf16* value, int64_t page_stride,
                            int64_t head_stride, const int64_t* table, int64_t table_width, const Row* rows, int64_t num_rows,
                            const uint8_t* visible, int heads, int kv_heads, int head_dim, float scale, int threads) {
  struct Task {
    const Row* row;
    int head;  // of keys and values
    int64_t first, count;
  };
  const int group = heads / kv_heads;
  const int64_t most = std::max(1, MOST / group);
  std::vector<Task> tasks;
  int64_t num_pairs = 0;
  for (int64_t r = 0; r < num_rows; r++) num_pairs += rows[r].count * heads * (rows[r].prefix + std::max(rows[r].count, rows[r].width));
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t first = 0; first < rows[r].count; first += most)
      for (int head = 0; head < kv_heads; head++) tasks.push_back({rows + r, head, first, std::min(most, rows[r].count - first)});
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (num_pairs > MANY)
  for (size_t t = 0; t < tasks.size(); t++) {
    const Task task = tasks[t];
    const Row& row = *task.row;
    const int64_t* pages = table + row.number * table_width;
    const bf16* keys = key + task.head * head_stride;
    const bf16* values = value + task.head * head_stride;
    for (int first = 0; first < group; first += MOST) {  // a group beyond MOST heads in parts
      Query queries[MOST];
      int n = 0, num_keys = 0;
      for (int64_t j = task.first; j < task.first + task.count; j++)
        for (int g = first; g < std::min(group, first + MOST); g++) {
          const int64_t token = row.start + j, head = (int64_t)task.head * group + g;
          Query query{query_NHD + token * stride + head * head_dim, out_NHD + (token * heads + head) * head_dim, nullptr, (int)(row.prefix + j + 1)};
          if (row.offset >= 0) {
            query.visible = visible + row.offset + j * row.width;
            int64_t reach = row.width;
            while (reach > 0 && !query.visible[reach - 1]) reach--;
            query.reach = (int)(row.prefix + reach);
          }
          num_keys = std::max(num_keys, query.reach);
          queries[n++] = query;
        }
      if (head_dim == 64)
        attend<64>(queries, n, keys, values, pages, page_stride, num_keys, (int)row.prefix, scale);
      else
        attend<128>(queries, n, keys, values, pages, page_stride, num_keys, (int)row.prefix, scale);
    }
  }
}
