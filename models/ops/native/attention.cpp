// Attention for the CPU: softmax(q k^T / sqrt(dim)) v, bf16 or float in memory, float arithmetic.
//
// Keys and values are read where they lie: the tokens of a context stand in runs of rows (of the paged KV pool, or
// of one packed batch), so neither a prefix shared by requests nor a scattered table is copied.
//
// One query (a decode step): bounded by reading keys and values once, which all query heads of a KV head share.
// Contexts are cut at fixed multiples of kCut tokens, whose results are merged in their order.
//
// Many queries (prompts, pictures): tiles of up to kTile columns, each a query of one head, go over blocks of kKeys
// keys with a running maximum and sum (online softmax, https://arxiv.org/abs/1805.02867, as FlashAttention tiles
// it, https://arxiv.org/abs/2205.14135). All is transposed, queries side by side in the lanes:
//     S [keys, columns] = K Q^T,    O^T [dim, columns] += V^T P
// Then both products take K and V row by row as they lie in memory, as the operand that is broadcast, and maxima
// and sums run down the lanes with nothing to reduce across them.
//
// Blocks and cuts stand at fixed tokens of a context and every sum has one order: a query's result depends neither
// on what else is in the batch, nor on the threads, nor on where its context lies.

#include <cmath>
#include <utility>
#include <vector>

#include "recorded.h"
#include "rows.h"

namespace mmserve {
namespace {

constexpr int kPanel = 3 * kLanes;      // columns of a product: three vectors
constexpr int kTile = 192;              // columns that share each block of keys, whole panels of them
constexpr int kKeys = 64;               // keys of a block
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 8;                // rows of a product: 24 sums, of 32 registers
#else
constexpr int kRows = 4;
#endif
constexpr int kCut = 512;               // tokens of a context that one thread attends to in a decode step
constexpr int64_t kSerial = 512 << 10;  // multiplications that one thread does before waking others would pay
constexpr int kAhead = 16;              // tokens to fetch in advance
constexpr float kNothing = -__builtin_inff();
static_assert(kTile % kPanel == 0, "a tile is whole panels");

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// 2^x for x <= 0, within 4 units in the last place: just 1 for 0 and just 0 for minus infinity; below -126, where
// floats lose precision, something less than 2^-126. Scores are scaled by log2(e), so that this is all that softmax
// needs. 2^n * 2^r, |r| <= 1/2: n is added to the exponent of a polynomial for 2^r, whose largest error is 1e-7.
// Comparisons are such that a NaN stays one.
inline Floats weight(Floats x) {
    constexpr float low = -127.0f, shift = 12582912.0f;  // 1.5 * 2^23: its last bit is worth 1
    const Floats inside = most_of(all(low), x);
    const Floats shifted = inside + shift;
    const Floats r = inside - (shifted - shift);
    Floats p = r * 0.001326472717f + 0.009671512642f;
    p = p * r + 0.05550733743f;
    p = p * r + 0.2402224209f;
    p = p * r + 0.6931469776f;
    p = p * r + 1.0f;
    return as<Floats>(as<Words>(p) + (as<Words>(shifted) << 23));
}

}  // namespace

// ---- what the caller tells (attention.py has the same fields) ---------------------------------------------------

// The queries of one request or segment and what they see.
struct Context {
    int64_t row, rows;    // its queries: rows [row, row + rows) of q and of the result
    int64_t keys, seen;   // tokens in all; how many of them the first query sees
    int64_t run, runs;    // its entries among the runs
};
// From token ``first`` of a context on, until the next run begins, tokens lie in rows ``row``, row + 1, ...
struct Run {
    int64_t first, row;
};
// Rows of heads: head h of row r at data + r * row + h * head, counted in numbers.
struct Heads {
    void* data;
    int64_t row, head;
};
struct Job {
    Heads q, k, v, out;
    int64_t heads, kv_heads, dim;
    int64_t causal;       // query i of a context sees its first ``seen + i`` tokens; otherwise each sees all
    int64_t contexts;
    const Context* context;
    const Run* run;
};
// One step over the paged pool: ``job`` without its rows, which each layer brings. Row r of the step is stored in
// slot[r], or nowhere if that is negative: then it is padding, answered by 0.
struct Step {
    Job job;
    int64_t rows;
    const int64_t* slot;
    void* pool;           // [layers, 2, kv_heads, slots, dim]
    int64_t slots;
};

namespace {

template <class T> inline T* at(const Heads& x, int64_t row, int64_t head) {
    return static_cast<T*>(x.data) + row * x.row + head * x.head;
}

template <class T> inline void fetch(const T* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
}

// What queries are multiplied by, so that 2^score is a weight: log2(e) / sqrt(dim).
inline float query_scale(int64_t dim) { return 1.44269504f / std::sqrt(float(dim)); }

// The rows of tokens [first, first + count) of a context.
void locate(const Job& job, const Context& context, int64_t first, int64_t count, int64_t* rows) {
    const Run *begin = job.run + context.run, *end = begin + context.runs;
    const Run* run = std::upper_bound(begin, end, first, [](int64_t t, const Run& r) { return t < r.first; }) - 1;
    for (int64_t i = 0; i < count; ++i) {
        if (run + 1 < end && first + i >= run[1].first) ++run;
        rows[i] = run->row + first + i - run->first;
    }
}

// ---- one query: a cut of its context ----------------------------------------------------------------------------

// What a thread needs again and again; only grows.
struct Scratch {
    std::vector<float> floats;
    std::vector<int64_t> rows;
    float* of(size_t count) {
        if (floats.size() < count) floats.resize(count);
        return floats.data();
    }
};
thread_local Scratch scratch;

// scores[g][i] of N keys for all queries of the group; q [group, dim] is scaled.
template <int N, class T>
void score(const T* const* keys, const float* q, int64_t group, int64_t dim, float* wide, float* scores) {
    const int64_t width = up(dim, kLanes);
    for (int k = 0; k < N; ++k)
        along(dim, [&](int64_t i, int lanes) { store(wide + k * width + i, part(keys[k] + i, lanes)); });
    for (int64_t g = 0; g < group; ++g) {
        Floats sums[N] = {};
        for (int64_t i = 0; i < width; i += kLanes) {
            const Floats query = load<Floats>(q + g * width + i);
            for (int k = 0; k < N; ++k) sums[k] += query * load<Floats>(wide + k * width + i);
        }
        for (int k = 0; k < N; ++k) scores[g * kCut + k] = sum(sums[k]);
    }
}

// out[g][columns] += weights[g][t] * values[t][columns] over ``count`` tokens, N vectors of columns and G queries.
template <int G, int N, class T>
void mix(const T* const* values, const float* weights, int64_t count, int64_t column, int lanes, float* out,
         int64_t width) {
    Floats sums[G][N] = {};
    for (int64_t t = 0; t < count; ++t) {
        if (column == 0) fetch(values[std::min(t + kAhead, count - 1)], width);
        Floats v[N];
        for (int n = 0; n < N; ++n)
            v[n] = N == 1 ? part(values[t] + column, lanes) : read(values[t] + column + n * kLanes);
        for (int g = 0; g < G; ++g)
            for (int n = 0; n < N; ++n) sums[g][n] += weights[g * kCut + t] * v[n];
    }
    for (int g = 0; g < G; ++g)
        for (int n = 0; n < N; ++n) store(out + g * width + column + n * kLanes, sums[g][n]);
}

template <int G, class T>
void mix_columns(const T* const* values, const float* weights, int64_t count, int64_t dim, float* out) {
    const int64_t width = up(dim, kLanes);
    int64_t column = 0;
    for (; column + 4 * kLanes <= dim; column += 4 * kLanes)
        mix<G, 4>(values, weights, count, column, kLanes, out, width);
    for (; column < dim; column += kLanes)
        mix<G, 1>(values, weights, count, column, int(std::min<int64_t>(kLanes, dim - column)), out, width);
}

template <class T>
void mix_group(const T* const* values, const float* weights, int64_t group, int64_t count, int64_t dim, float* out) {
    const int64_t width = up(dim, kLanes);
    for (; group >= 4; group -= 4, weights += 4 * kCut, out += 4 * width)
        mix_columns<4>(values, weights, count, dim, out);
    if (group == 3) mix_columns<3>(values, weights, count, dim, out);
    if (group == 2) mix_columns<2>(values, weights, count, dim, out);
    if (group == 1) mix_columns<1>(values, weights, count, dim, out);
}

// 2^(scores - their maximum), in place; lanes beyond ``count`` become 0.
struct Softmax {
    float most, total;
};
Softmax exponentials(float* scores, int64_t count) {
    for (int64_t i = count; i < up(count, kLanes); ++i) scores[i] = kNothing;
    Floats most = all(kNothing), total{};
    for (int64_t i = 0; i < count; i += kLanes) most = most_of(most, load<Floats>(scores + i));
    float lane[kLanes], highest = kNothing;
    store(lane, most);
    for (float x : lane) highest = x > highest ? x : highest;
    for (int64_t i = 0; i < count; i += kLanes) {
        const Floats w = weight(load<Floats>(scores + i) - highest);
        store(scores + i, w);
        total += w;
    }
    return {highest, sum(total)};
}

// Floats that a cut of a context leaves for each query of a group: its result times its sum, its maximum, its sum.
inline int64_t cut_size(int64_t dim) { return up(dim, kLanes) + 2; }

template <class T> void scaled_queries(const Job& job, int64_t row, int64_t kv_head, float* q) {
    const int64_t group = job.heads / job.kv_heads, width = up(job.dim, kLanes);
    const float scale = query_scale(job.dim);
    for (int64_t g = 0; g < group; ++g) {
        const T* from = at<T>(job.q, row, kv_head * group + g);
        along(job.dim, [&](int64_t i, int lanes) { store(q + g * width + i, part(from + i, lanes) * scale); });
    }
}

// Tokens [first, first + kCut) of a context for the group of ``kv_head``; the parts go to ``out``.
template <class T>
void attend_cut(const Job& job, const Context& context, int64_t kv_head, int64_t first, float* out) {
    const int64_t group = job.heads / job.kv_heads, width = up(job.dim, kLanes), size = cut_size(job.dim);
    const int64_t count = std::min<int64_t>(kCut, context.keys - first);
    float* q = scratch.of(2 * group * width + group * kCut + 4 * width);
    float *mixed = q + group * width, *scores = mixed + group * width, *wide = scores + group * kCut;
    int64_t rows[kCut];
    const T* token[kCut];
    locate(job, context, first, count, rows);
    scaled_queries<T>(job, context.row, kv_head, q);
    for (int64_t t = 0; t < count; ++t) token[t] = at<T>(job.k, rows[t], kv_head);
    int64_t t = 0;
    for (; t + 4 <= count; t += 4) {
        for (int k = 0; k < 4; ++k) fetch(token[std::min(t + kAhead + k, count - 1)], job.dim);
        score<4>(token + t, q, group, job.dim, wide, scores + t);
    }
    for (; t < count; ++t) score<1>(token + t, q, group, job.dim, wide, scores + t);
    for (int64_t g = 0; g < group; ++g) {
        const Softmax found = exponentials(scores + g * kCut, count);
        out[g * size + width] = found.most;
        out[g * size + width + 1] = found.total;
    }
    for (int64_t i = 0; i < count; ++i) token[i] = at<T>(job.v, rows[i], kv_head);
    mix_group(token, scores, group, count, job.dim, mixed);
    for (int64_t g = 0; g < group; ++g) std::copy_n(mixed + g * width, width, out + g * size);
}

// The result of a query head from its cuts, ``stride`` floats apart.
template <class T> void merge(const float* cuts, int64_t count, int64_t stride, int64_t dim, T* out) {
    const int64_t width = up(dim, kLanes);
    float most = kNothing, total = 0.0f;
    for (int64_t c = 0; c < count; ++c) {
        const float x = cuts[c * stride + width];
        most = x > most ? x : most;
    }
    std::vector<float> share(count, 1.0f);
    for (int64_t c = 0; c < count; ++c) {
        if (count > 1) share[c] = std::exp2(cuts[c * stride + width] - most);
        total += share[c] * cuts[c * stride + width + 1];
    }
    const float scale = 1.0f / total;
    along(dim, [&](int64_t i, int lanes) {
        Floats x{};
        for (int64_t c = 0; c < count; ++c) x += share[c] * load<Floats>(cuts + c * stride + i);
        put(out + i, x * scale, lanes);
    });
}

// ---- many queries: a tile against blocks of keys -----------------------------------------------------------------

// c[R, N vectors] (+)= sum over k < depth of a[r, k] * b[k, N vectors]. Rows of b and c are kPanel numbers long.
template <int R, int N>
void product(const float* a, int64_t row, int64_t step, const float* b, float* c, int64_t depth, bool onto) {
    Floats sums[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) sums[r][n] = onto ? load<Floats>(c + r * kPanel + n * kLanes) : Floats{};
    for (int64_t k = 0; k < depth; ++k) {
        Floats column[N];
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) column[n] = load<Floats>(b + k * kPanel + n * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
            for (int n = 0; n < N; ++n) sums[r][n] += a[r * row + k * step] * column[n];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) store(c + r * kPanel + n * kLanes, sums[r][n]);
}

// The same for any number of rows, a multiple of kRows, and up to three vectors. ``next`` parts groups of rows of a.
void product(const float* a, int64_t next, int64_t row, int64_t step, const float* b, float* c, int64_t rows,
             int vectors, int64_t depth, bool onto) {
    for (int64_t r = 0; r < rows; r += kRows, a += next, c += kRows * kPanel) {
        if (vectors == 3) product<kRows, 3>(a, row, step, b, c, depth, onto);
        if (vectors == 2) product<kRows, 2>(a, row, step, b, c, depth, onto);
        if (vectors == 1) product<kRows, 1>(a, row, step, b, c, depth, onto);
    }
}

// kLanes rows of kLanes numbers become columns: swaps squares of half the size, then of a quarter ...
inline void transpose(Floats* x) {
#if defined(__clang__)
    float from[kLanes][kLanes];
    std::memcpy(from, x, sizeof from);
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < kLanes; ++j) x[i][j] = from[j][i];
#else
#pragma GCC unroll 4
    for (int half = kLanes / 2; half; half /= 2) {
        Ints low, high;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            low[i] = i & half ? kLanes + i - half : i;
            high[i] = i & half ? kLanes + i : i + half;
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            if (i & half) continue;
            const Floats a = x[i], b = x[i + half];
            x[i] = __builtin_shuffle(a, b, low);
            x[i + half] = __builtin_shuffle(a, b, high);
        }
    }
#endif
}

// A tile of columns: queries [first, first + queries) of a context for all heads of a group.
template <class T> class Tile {
public:
    Tile(const Job& job, const Context& context, int64_t kv_head, int64_t first, int64_t queries)
        : job_(job), context_(context), kv_head_(kv_head), first_(first), group_(job.heads / job.kv_heads),
          columns_(queries * group_), dim_(job.dim), padded_(up(job.dim, kRows)) {
        const int64_t panels = up(columns_, kPanel) / kPanel, width = up(dim_, kLanes);
        float* next = scratch.of(panels * kPanel * (width + padded_ + 2) + kKeys * (width + padded_ + kPanel));
        const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
        queries_ = take(panels * width * kPanel);
        mixed_ = take(panels * padded_ * kPanel);
        keys_ = take(kKeys * width);
        values_ = take(kKeys * padded_);
        scores_ = take(kKeys * kPanel);
        most_ = take(panels * kPanel);
        total_ = take(panels * kPanel);
        std::fill_n(mixed_, panels * padded_ * kPanel, 0.0f);
        std::fill_n(most_, panels * kPanel, kNothing);
        std::fill_n(total_, panels * kPanel, 0.0f);
    }

    void run() {
        read_queries();
        const int64_t last = sees(columns_ - 1);
        for (int64_t first = 0; first < last; first += kKeys) {
            const int64_t count = std::min<int64_t>(kKeys, last - first);
            read_block(first, count);
            for (int64_t c = 0; c < columns_; c += kPanel) {
                const int64_t seen = sees(std::min(c + kPanel, columns_) - 1) - first;
                if (seen > 0) attend(c, first, std::min(count, seen));
            }
        }
        write_result();
    }

private:
    // How many tokens the query of a column sees.
    int64_t sees(int64_t column) const {
        return job_.causal ? context_.seen + first_ + column / group_ : context_.keys;
    }
    int vectors(int64_t panel) const {
        return int(up(std::min<int64_t>(kPanel, columns_ - panel), kLanes) / kLanes);
    }
    int64_t row(int64_t column) const { return context_.row + first_ + column / group_; }
    int64_t head(int64_t column) const { return kv_head_ * group_ + column % group_; }

    // Scaled, side by side: a panel is [dim, kPanel].
    void read_queries() {
        const int64_t width = up(dim_, kLanes);
        const float scale = query_scale(dim_);
        for (int64_t c = 0; c < columns_; c += kLanes) {
            float* panel = queries_ + c / kPanel * width * kPanel + c % kPanel;
            const int64_t count = std::min<int64_t>(kLanes, columns_ - c);
            along(dim_, [&](int64_t i, int lanes) {
                Floats square[kLanes] = {};
                for (int64_t j = 0; j < count; ++j)
                    square[j] = part(at<T>(job_.q, row(c + j), head(c + j)) + i, lanes) * scale;
                transpose(square);
                for (int d = 0; d < kLanes; ++d) store(panel + (i + d) * kPanel, square[d]);
            });
        }
    }

    // Keys as rows; values in groups of kRows dimensions, [dim / kRows][keys][kRows], each read in one sweep.
    void read_block(int64_t first, int64_t count) {
        const int64_t width = up(dim_, kLanes);
        int64_t rows[kKeys];
        locate(job_, context_, first, count, rows);
        for (int64_t t = 0; t < count; ++t) {
            const T *key = at<T>(job_.k, rows[t], kv_head_), *value = at<T>(job_.v, rows[t], kv_head_);
            along(dim_, [&](int64_t i, int lanes) {
                store(keys_ + t * width + i, part(key + i, lanes));
                float numbers[kLanes];
                store(numbers, part(value + i, lanes));
                for (int64_t d = 0; d < kLanes && i + d < padded_; d += kRows)
                    std::memcpy(values_ + (i + d) * kKeys + t * kRows, numbers + d, kRows * sizeof(float));
            });
        }
        std::fill_n(keys_ + count * width, (up(count, kRows) - count) * width, 0.0f);
    }

    void attend(int64_t panel, int64_t first, int64_t count) {
        const int64_t width = up(dim_, kLanes);
        const int n = vectors(panel);
        product(keys_, kRows * width, width, 1, queries_ + panel * width, scores_, up(count, kRows), n, dim_, false);
        float* mixed = mixed_ + panel * padded_;
        for (int i = 0; i < n; ++i) soften(panel + i * kLanes, first, count, scores_ + i * kLanes, mixed + i * kLanes);
        product(values_, kRows * kKeys, 1, kRows, scores_, mixed, padded_, n, count, true);
    }

    // One vector of columns: scores become weights, and what was mixed before shrinks to the new maximum.
    void soften(int64_t column, int64_t first, int64_t count, float* scores, float* mixed) {
        if (job_.causal && first + count > sees(column)) hide(column, first, count, scores);
        const Floats before = load<Floats>(most_ + column);
        Floats most = before, total{};
        for (int64_t t = 0; t < count; ++t) most = most_of(most, load<Floats>(scores + t * kPanel));
        for (int64_t t = 0; t < count; ++t) {
            const Floats w = weight(load<Floats>(scores + t * kPanel) - most);
            store(scores + t * kPanel, w);
            total += w;
        }
        const Floats shrink = weight(before - most);
        store(most_ + column, most);
        store(total_ + column, load<Floats>(total_ + column) * shrink + total);
        if (first == 0 || std::memcmp(&before, &most, sizeof most) == 0) return;  // nothing shrinks
        for (int64_t d = 0; d < padded_; ++d) store(mixed + d * kPanel, load<Floats>(mixed + d * kPanel) * shrink);
    }

    void hide(int64_t column, int64_t first, int64_t count, float* scores) {
        float seen[kLanes];
        for (int i = 0; i < kLanes; ++i) seen[i] = float(sees(std::min(column + i, columns_ - 1)) - first);
        const Floats limit = load<Floats>(seen);
        for (int64_t t = 0; t < count; ++t) {
            const Floats x = load<Floats>(scores + t * kPanel);
            store(scores + t * kPanel, all(float(t)) < limit ? x : all(kNothing));
        }
    }

    void write_result() {
        for (int64_t c = 0; c < columns_; c += kLanes) {
            const float* panel = mixed_ + c / kPanel * padded_ * kPanel + c % kPanel;
            const int64_t count = std::min<int64_t>(kLanes, columns_ - c);
            const Floats scale = 1.0f / load<Floats>(total_ + c);
            along(dim_, [&](int64_t i, int lanes) {
                Floats square[kLanes] = {};
                for (int d = 0; d < lanes; ++d) square[d] = load<Floats>(panel + (i + d) * kPanel) * scale;
                transpose(square);
                for (int64_t j = 0; j < count; ++j)
                    put(at<T>(job_.out, row(c + j), head(c + j)) + i, square[j], lanes);
            });
        }
    }

    const Job& job_;
    const Context& context_;
    const int64_t kv_head_, first_, group_, columns_, dim_, padded_;
    float *queries_, *mixed_, *keys_, *values_, *scores_, *most_, *total_;
};

// ---- a whole job -------------------------------------------------------------------------------------------------

// What one thread does at a time: tokens [first, first + kCut) for a single query, or a tile of queries from
// ``first`` on, of one KV head. ``parts`` is where a context of several cuts leaves those of this one.
struct Piece {
    const Context* context;
    int64_t kv_head, first, parts;
};

class Work {
public:
    explicit Work(const Job& job)
        : job_(job), group_(job.heads / job.kv_heads) {
        for (int64_t c = 0; c < job.contexts; ++c)
            if (!single(job.context[c])) add_tiles(job.context[c]);  // the longest pieces first
        for (int64_t c = 0; c < job.contexts; ++c)
            if (single(job.context[c])) add_cuts(job.context[c]);
        parts_.resize(used_);
    }

    template <class T> void run() {
        const int64_t count = int64_t(pieces_.size());
#pragma omp parallel for schedule(dynamic, 1) if (count > 1 && products_ > kSerial)
        for (int64_t i = 0; i < count; ++i) piece<T>(pieces_[i]);
        const int64_t merges = int64_t(split_.size());
#pragma omp parallel for schedule(static) if (used_ > kSerial / 8)
        for (int64_t i = 0; i < merges; ++i) join<T>(split_[i], parts_.data() + split_[i].parts);
    }

private:
    bool single(const Context& context) const { return job_.causal && context.rows == 1; }
    int64_t cuts(const Context& context) const { return up(context.keys, kCut) / kCut; }
    int64_t size() const { return group_ * cut_size(job_.dim); }

    // Queries of a tile: as many in each as divides them evenly, in whole vectors.
    int64_t tile(const Context& context) const {
        const int64_t tiles = up(context.rows * group_, kTile) / kTile;
        const int64_t columns = up(up(context.rows * group_, tiles) / tiles, kLanes);
        return std::max<int64_t>(1, columns / group_);
    }

    // The last tile sees most: it comes first, so that no thread is left with it at the end.
    void add_tiles(const Context& context) {
        if (context.rows == 0) return;
        const int64_t step = tile(context);
        for (int64_t first = (context.rows - 1) / step * step; first >= 0; first -= step)
            for (int64_t h = 0; h < job_.kv_heads; ++h) pieces_.push_back({&context, h, first, 0});
        products_ += context.rows * context.keys * job_.dim * job_.heads * 2;
    }

    void add_cuts(const Context& context) {
        const int64_t count = cuts(context);
        for (int64_t h = 0; h < job_.kv_heads; ++h) {
            if (count > 1) split_.push_back({&context, h, 0, used_});
            for (int64_t c = 0; c < count; ++c) {
                pieces_.push_back({&context, h, c * kCut, used_});
                used_ += count > 1 ? size() : 0;
            }
        }
        products_ += context.keys * job_.dim * job_.heads * 2;
    }

    template <class T> void piece(const Piece& piece) {
        const Context& context = *piece.context;
        if (!single(context)) {
            const int64_t queries = std::min(tile(context), context.rows - piece.first);
            Tile<T>(job_, context, piece.kv_head, piece.first, queries).run();
        } else if (cuts(context) > 1) {
            attend_cut<T>(job_, context, piece.kv_head, piece.first, parts_.data() + piece.parts);
        } else {
            std::vector<float> parts(size());
            attend_cut<T>(job_, context, piece.kv_head, piece.first, parts.data());
            join<T>(piece, parts.data());
        }
    }

    template <class T> void join(const Piece& piece, const float* parts) {
        for (int64_t g = 0; g < group_; ++g)
            merge(parts + g * cut_size(job_.dim), cuts(*piece.context), size(), job_.dim,
                  at<T>(job_.out, piece.context->row, piece.kv_head * group_ + g));
    }

    const Job& job_;
    const int64_t group_;
    int64_t products_ = 0, used_ = 0;
    std::vector<Piece> pieces_, split_;
    std::vector<float> parts_;
};

// New keys and values go to their slots; the results of padding become 0.
template <class T> void store_rows(const Step& step, const Job& job, const Heads& k, const Heads& v) {
    const size_t size = job.dim * sizeof(T);
#pragma omp parallel for schedule(static) if (step.rows * job.kv_heads * job.dim > kSerial / 8)
    for (int64_t r = 0; r < step.rows; ++r) {
        const int64_t slot = step.slot[r];
        for (int64_t h = 0; slot >= 0 && h < job.kv_heads; ++h) {
            std::memcpy(at<T>(job.k, slot, h), at<T>(k, r, h), size);
            std::memcpy(at<T>(job.v, slot, h), at<T>(v, r, h), size);
        }
        if (slot < 0) std::memset(at<T>(job.out, r, 0), 0, job.heads * size);
    }
}

template <class T>
void attend_step(const Step& step, int64_t layer, int64_t heads, const Heads& q, const Heads& k, const Heads& v,
                 void* out) {
    Job job = step.job;
    const int64_t head = step.slots * job.dim, side = job.kv_heads * head;
    job.heads = heads;
    job.q = q;
    job.k = {static_cast<T*>(step.pool) + 2 * layer * side, job.dim, head};
    job.v = {static_cast<T*>(step.pool) + (2 * layer + 1) * side, job.dim, head};
    job.out = {out, heads * job.dim, job.dim};
    store_rows<T>(step, job, k, v);
    Work(job).run<T>();
}

}  // namespace
}  // namespace mmserve

// Heads of new rows lie one after another; their rows are q_row, k_row and v_row numbers apart. ``out`` is dense.
#define FORMS(T, NAME)                                                                                              \
    MMSERVE_EXPORT void attend_##NAME(const mmserve::Job* job) { mmserve::Work(*job).run<T>(); }                    \
    MMSERVE_EXPORT void attend_step_##NAME(const mmserve::Step* step, int64_t layer, int64_t heads, void* q,        \
                                           int64_t q_row, void* k, int64_t k_row, void* v, int64_t v_row,           \
                                           void* out) {                                                             \
        const int64_t dim = step->job.dim;                                                                          \
        mmserve::attend_step<T>(*step, layer, heads, {q, q_row, dim}, {k, k_row, dim}, {v, v_row, dim}, out);       \
    }                                                                                                               \
    MMSERVE_RECORDED(attend_##NAME)                                                                                 \
    MMSERVE_RECORDED(attend_step_##NAME)

FORMS(float, f32)
FORMS(mmserve::bf16, bf16)
