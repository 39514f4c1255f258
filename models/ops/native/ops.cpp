// The small operations between the linear layers, each one pass over its rows: norms, SwiGLU, rotary positions,
// rows of the encoder's into those of the decoder.
// bf16 or float in memory, float arithmetic. Values are rounded where the plain torch forms (reference.py) round
// them, so that results differ only by the order of the sums over a row.
//
// A row is computed by one thread, in one order: its result depends on nothing else in the batch.

#include <cmath>
#include <cstring>
#include <vector>

#include "recorded.h"
#include "rows.h"

namespace mmserve {
namespace {

constexpr int64_t kSerial = 128 << 10;  // numbers that one thread handles before waking others would pay

// Sum of body(i, lanes) over a row of n, in four chains so that no addition waits for the one before it.
template <class Body> inline __attribute__((always_inline)) float summed(int64_t n, Body body) {
    Floats chain[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes)
        for (int c = 0; c < 4; ++c) chain[c] += body(i + c * kLanes, kLanes);
    for (; i + kLanes <= n; i += kLanes) chain[0] += body(i, kLanes);
    if (i < n) chain[1] += body(i, int(n - i));
    return sum((chain[0] + chain[1]) + (chain[2] + chain[3]));
}

inline float inverse_root(float squares, int64_t n, float eps) {
    return 1.0f / std::sqrt(squares / float(n) + eps);
}

template <class T> float inverse_rms(const T* x, int64_t n, float eps) {
    const float squares = summed(n, [&](int64_t i, int lanes) {
        const Floats v = part(x + i, lanes);
        return v * v;
    });
    return inverse_root(squares, n, eps);
}

template <class T> void scaled(const T* x, const T* weight, T* out, int64_t n, float scale) {
    along(n, [&](int64_t i, int lanes) {
        const Floats normed = rounded(part(x + i, lanes) * scale, x);
        put(out + i, normed * part(weight + i, lanes), lanes);
    });
}

template <class T> void add_into(const T* x, T* total, int64_t n) {
    along(n, [&](int64_t i, int lanes) { put(total + i, part(x + i, lanes) + part(total + i, lanes), lanes); });
}

// out = norm of x; with ``residual``, x is added to it first and out is the norm of the sum.
template <class T>
void rms_norm(const T* x, int64_t stride, T* residual, const T* weight, T* out, int64_t rows, int64_t n, float eps) {
#pragma omp parallel for schedule(static) if (rows * n > kSerial)
    for (int64_t r = 0; r < rows; ++r) {
        const T* row = x + r * stride;
        if (residual) {
            add_into(row, residual + r * n, n);
            row = residual + r * n;
        }
        scaled(row, weight, out + r * n, n, inverse_rms(row, n, eps));
    }
}

// The lanes beyond the first ``lanes`` as 0.
inline Floats only(Floats x, int lanes) {
    float all_lanes[kLanes];
    store(all_lanes, x);
    return part(all_lanes, lanes);
}

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, T* out, int64_t n, float eps) {
    const float mean = summed(n, [&](int64_t i, int lanes) { return part(x + i, lanes); }) / float(n);
    const float squares = summed(n, [&](int64_t i, int lanes) {
        const Floats away = only(part(x + i, lanes) - mean, lanes);
        return away * away;
    });
    const float scale = inverse_root(squares, n, eps);
    along(n, [&](int64_t i, int lanes) {
        const Floats normed = (part(x + i, lanes) - mean) * scale;
        put(out + i, normed * part(weight + i, lanes) + part(bias + i, lanes), lanes);
    });
}

template <class T>
void layer_norm(const T* x, int64_t stride, const T* weight, const T* bias, T* out, int64_t rows, int64_t n, float eps) {
#pragma omp parallel for schedule(static) if (rows * n > kSerial)
    for (int64_t r = 0; r < rows; ++r) layer_norm_row(x + r * stride, weight, bias, out + r * n, n, eps);
}

// out [rows, n] = silu(gate) * up of rows [gate | up] of 2 n numbers.
template <class T> void silu_and_mul(const T* x, int64_t stride, T* out, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static) if (rows * n > kSerial / 4)
    for (int64_t r = 0; r < rows; ++r) {
        const T *gate = x + r * stride, *up = gate + n;
        along(n, [&](int64_t i, int lanes) {
            const Floats g = part(gate + i, lanes);
            const Floats silu = rounded(g / (1.0f + exp(-g)), x);
            put(out + r * n + i, silu * part(up + i, lanes), lanes);
        });
    }
}

// One head: its norm if there is a weight, then x * cos + roll(x, dim / 2) * sin, which is rounded once.
template <class T, class Table>
void rotate_head(T* x, const T* weight, float eps, const Table* cos, const Table* sin, int64_t dim, float* head) {
    const float scale = weight ? inverse_rms(x, dim, eps) : 1.0f;
    along(dim, [&](int64_t i, int lanes) {
        Floats v = part(x + i, lanes);
        if (weight) v = rounded(rounded(v * scale, x) * part(weight + i, lanes), x);
        put(head + i, v, lanes);
    });
    const int64_t half = dim / 2;
    along(half, [&](int64_t i, int lanes) {
        const Floats a = part(head + i, lanes), b = part(head + half + i, lanes);
        put(x + i, a * part(cos + i, lanes) + b * part(sin + i, lanes), lanes);
        put(x + half + i, b * part(cos + half + i, lanes) + a * part(sin + half + i, lanes), lanes);
    });
}

// Heads [rows, heads, dim] in place, the rows ``stride`` apart; weight [heads, dim] or none; tables [rows, dim].
template <class T, class Table>
void rotate(T* x, int64_t stride, int64_t rows, int64_t heads, int64_t dim, const T* weight, float eps,
            const Table* cos, const Table* sin) {
#pragma omp parallel if (rows * heads * dim > kSerial)
    {
        std::vector<float> head(dim);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t h = 0; h < heads; ++h)
                rotate_head(x + r * stride + h * dim, weight ? weight + h * dim : nullptr, eps, cos + r * dim,
                            sin + r * dim, dim, head.data());
    }
}

// Rows of values become, or with ``add`` are added to, those that ``rows`` tells of target; negative ones nowhere.
template <class T>
void scatter(T* target, int64_t stride, const int64_t* rows, const T* values, int64_t values_stride, int64_t count,
             int64_t n, int64_t add) {
#pragma omp parallel for schedule(static) if (count * n > kSerial)
    for (int64_t i = 0; i < count; ++i) {
        if (rows[i] < 0) continue;
        T* row = target + rows[i] * stride;
        if (add) add_into(values + i * values_stride, row, n);
        else std::memcpy(row, values + i * values_stride, n * sizeof(T));
    }
}

}  // namespace
}  // namespace mmserve

// Strides count numbers, not bytes. Rows of results lie one after another.
#define FORMS(T, NAME)                                                                                              \
    MMSERVE_EXPORT void rms_norm_##NAME(const T* x, int64_t stride, T* residual, const T* weight, T* out,           \
                                        int64_t rows, int64_t n, float eps) {                                       \
        mmserve::rms_norm(x, stride, residual, weight, out, rows, n, eps);                                          \
    }                                                                                                               \
    MMSERVE_EXPORT void layer_norm_##NAME(const T* x, int64_t stride, const T* weight, const T* bias, T* out,       \
                                          int64_t rows, int64_t n, float eps) {                                     \
        mmserve::layer_norm(x, stride, weight, bias, out, rows, n, eps);                                            \
    }                                                                                                               \
    MMSERVE_EXPORT void silu_and_mul_##NAME(const T* x, int64_t stride, T* out, int64_t rows, int64_t n) {          \
        mmserve::silu_and_mul(x, stride, out, rows, n);                                                             \
    }                                                                                                               \
    MMSERVE_EXPORT void scatter_##NAME(T* target, int64_t stride, const int64_t* rows, const T* values,             \
                                       int64_t values_stride, int64_t count, int64_t n, int64_t add) {              \
        mmserve::scatter(target, stride, rows, values, values_stride, count, n, add);                               \
    }                                                                                                               \
    MMSERVE_EXPORT void rotate_##NAME##_bf16(T* x, int64_t stride, int64_t rows, int64_t heads, int64_t dim,        \
                                             const T* weight, float eps, const mmserve::bf16* cos,                  \
                                             const mmserve::bf16* sin) {                                            \
        mmserve::rotate(x, stride, rows, heads, dim, weight, eps, cos, sin);                                        \
    }                                                                                                               \
    MMSERVE_EXPORT void rotate_##NAME##_f32(T* x, int64_t stride, int64_t rows, int64_t heads, int64_t dim,         \
                                            const T* weight, float eps, const float* cos, const float* sin) {       \
        mmserve::rotate(x, stride, rows, heads, dim, weight, eps, cos, sin);                                        \
    }                                                                                                               \
    MMSERVE_RECORDED(rms_norm_##NAME)                                                                               \
    MMSERVE_RECORDED(layer_norm_##NAME)                                                                             \
    MMSERVE_RECORDED(silu_and_mul_##NAME)                                                                           \
    MMSERVE_RECORDED(scatter_##NAME)                                                                                \
    MMSERVE_RECORDED(rotate_##NAME##_bf16)                                                                          \
    MMSERVE_RECORDED(rotate_##NAME##_f32)

FORMS(float, f32)
FORMS(mmserve::bf16, bf16)
