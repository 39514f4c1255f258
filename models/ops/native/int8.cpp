// Linear layers with int8 weights (a scale for each output channel) and int8 activations (quantised here, a scale
// for each row and group of inputs). models/ops/quantized.py has the formulas in plain torch.
//
// Weights lie in blocks of 32 channels, [n / 32][k / 4][32][4], padded with zeros: one step of four inputs is 128
// bytes that the dot product reads as they come, and a block is one run of memory. Each sum over a group is exact,
// and the groups are added in order, so that a result depends neither on the other rows nor on the threads.

#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "activations.h"
#include "rows.h"

namespace {

using namespace mmserve;

constexpr int kBlock = 32;                  // channels of a block
constexpr int64_t kStep = 4 * kBlock;       // bytes of a block for four inputs
constexpr int64_t kChunkBytes = 768 << 10;  // activations that stay in the cache while all weights pass by
constexpr int64_t kAhead = 64 * kStep;      // bytes of weights to fetch in advance
constexpr int64_t kSerialBytes = 64 << 10;  // fewer activations are quantised before the threads start

// acc + the products of four inputs with four codes of each lane's channel. ``kOffset`` is what packing adds to
// the codes because the instruction wants one side unsigned; the sums of the inputs take it out again.
#if defined(__AVX512VNNI__)
constexpr int kRows = 12, kOffset = 128;
constexpr const char* kPath = "avx512_vnni";
struct Codes { Ints w; };
inline Codes read_codes(const void* from) { return {load<Ints>(from)}; }
inline Ints dot(Ints acc, Codes w, int32_t x) {
    return as<Ints>(_mm512_dpbusd_epi32(as<__m512i>(acc), as<__m512i>(w.w), _mm512_set1_epi32(x)));
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr int kRows = 6, kOffset = 128;
constexpr const char* kPath = "avx_vnni";
struct Codes { Ints w; };
inline Codes read_codes(const void* from) { return {load<Ints>(from)}; }
inline Ints dot(Ints acc, Codes w, int32_t x) {
    return as<Ints>(_mm256_dpbusd_avx_epi32(as<__m256i>(acc), as<__m256i>(w.w), _mm256_set1_epi32(x)));
}
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#if defined(__AVX512BW__)
constexpr int kRows = 10;
constexpr const char* kPath = "avx512";
typedef int16_t Shorts __attribute__((vector_size(64)));
inline Ints pairs(Shorts a, Shorts b) { return as<Ints>(_mm512_madd_epi16(as<__m512i>(a), as<__m512i>(b))); }
#else
constexpr int kRows = 4;
constexpr const char* kPath = "avx2";
typedef int16_t Shorts __attribute__((vector_size(32)));
inline Ints pairs(Shorts a, Shorts b) { return as<Ints>(_mm256_madd_epi16(as<__m256i>(a), as<__m256i>(b))); }
#endif
constexpr int kOffset = 0;
struct Codes { Shorts even, odd; };  // 16 bits each: products of bytes in pairs would saturate
inline Codes split(Ints four) { return {(as<Shorts>(four) << 8) >> 8, as<Shorts>(four) >> 8}; }
inline Codes read_codes(const void* from) { return split(load<Ints>(from)); }
inline Ints dot(Ints acc, Codes w, int32_t x) {
    const Codes four = split(Ints{} + x);
    return acc + pairs(w.even, four.even) + pairs(w.odd, four.odd);
}
#else
constexpr int kRows = 4, kOffset = 0;
constexpr const char* kPath = "portable";
struct Codes { Ints w; };
inline Codes read_codes(const void* from) { return {load<Ints>(from)}; }
inline Ints dot(Ints acc, Codes w, int32_t x) {
    for (int i = 0; i < 4; i++) acc += ((w.w << (24 - 8 * i)) >> 24) * int8_t(x >> (8 * i));
    return acc;
}
#endif

// A packed weight; int8.py has the same structure. ``group`` is a multiple of 16.
struct Weight {
    const uint8_t* codes;
    const float* scales;  // of n channels, rounded up to whole blocks
    int64_t n, k, group;
    int64_t steps() const { return (k + 3) / 4; }
    int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
    int64_t groups() const { return (k + group - 1) / group; }
    const uint8_t* block(int64_t i) const { return codes + i * steps() * kStep; }
};

// ---------------------------------------------------------------- quantising

// Rounded where it stands: the compiler may not make it part of a fused multiply-add here and not there.
inline Floats product(Floats a, float b) {
    Floats c = a * b;
#if defined(__x86_64__)
    asm("" : "+v"(c));
#elif defined(__aarch64__)
    asm("" : "+w"(c));
#else
    asm("" : "+m"(c));
#endif
    return c;
}

// a * b + c, rounded once where the CPU can, twice where it cannot: the same for any number of rows.
inline Floats fused(Floats a, float b, Floats c) {
#if defined(__AVX512F__)
    return as<Floats>(_mm512_fmadd_ps(as<__m512>(a), _mm512_set1_ps(b), as<__m512>(c)));
#elif defined(__FMA__) && defined(__AVX2__)
    return as<Floats>(_mm256_fmadd_ps(as<__m256>(a), _mm256_set1_ps(b), as<__m256>(c)));
#else
    return product(a, b) + c;
#endif
}

// The largest magnitude, by its bits: these order floats, infinity above all numbers and NaN above infinity.
template <class T> float largest(const T* x, int64_t count) {
    Words most{};
    along(count, [&](int64_t i, int lanes) {
        const Words bits = as<Words>(part(x + i, lanes)) & 0x7fffffff;
        most = bits > most ? bits : most;
    });
    uint32_t top = 0;
    for (int lane = 0; lane < kLanes; lane++) top = std::max(top, uint32_t(most[lane]));
    return as<float>(top);
}

struct Quantised {
    float scale;
    int32_t sum;  // of the codes
};

// codes = round(x * (127 / max|x|)), ties to even; the scale is max|x| / 127. All codes are 0 where no float holds
// 127 / max: for zeros, whose scale is 0, and for infinities and NaN, whose scale makes the results NaN.
// Whole vectors are written: behind the last code there must be room for kLanes - 1 more.
template <class T> Quantised quantise(const T* x, int64_t count, int8_t* codes) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    constexpr float shift = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to whole numbers
    constexpr float most_of_all = 3.40282347e38f;
    const float most = largest(x, count), inverse = 127.0f / most;
    if (!(most <= most_of_all && inverse <= most_of_all)) {
        std::fill(codes, codes + count, int8_t(0));
        return {most <= most_of_all ? 0.0f : __builtin_nanf(""), 0};
    }
    Ints sums{};
    along(count, [&](int64_t i, int lanes) {
        const Ints whole = as<Ints>(product(part(x + i, lanes), inverse) + shift) - as<int32_t>(shift);
        store(codes + i, __builtin_convertvector(whole, Bytes));
        sums += whole;
    });
    int32_t sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += sums[lane];
    return {most / 127.0f, sum};
}

// Activations of a chunk of rows, quantised: [rows][stride], [rows][groups], [rows][groups].
struct Rows {
    int8_t* codes;
    float* scales;
    int32_t* sums;  // of the codes, times kOffset
    int64_t stride;
};

template <class T> void quantise_row(const Weight& w, const T* x, int64_t row, const Rows& to) {
    const int64_t groups = w.groups();
    int8_t* codes = to.codes + row * to.stride;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t from = g * w.group, count = std::min(w.group, w.k - from);
        const Quantised found = quantise(x + from, count, codes + from);
        to.scales[row * groups + g] = found.scale;
        to.sums[row * groups + g] = kOffset * found.sum;
    }
    std::fill(codes + w.k, codes + 4 * w.steps(), int8_t(0));
}

// ---------------------------------------------------------------- products

constexpr int kVectors = kLanes == 4 ? 1 : 2;  // side by side in registers
constexpr int kWide = kVectors * kLanes;       // channels of a block at a time

// y[M][kBlock] (+)= scale * (codes of the rows . codes of the block) over one group of ``steps`` * 4 inputs.
template <int M>
void multiply(const uint8_t* w, const int8_t* x, int64_t stride, int64_t steps, const float* scales,
              const int32_t* sums, int64_t groups, bool first, float* y) {
    for (int part = 0; part < kBlock; part += kWide) {
        Ints acc[M][kVectors];
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) acc[m][v] = Ints{} - sums[m * groups];
        const uint8_t* from = w + 4 * part;
        const int8_t* three[(M + 2) / 3];  // every third row: the two behind it are a stride away
        for (int i = 0; i < (M + 2) / 3; i++) three[i] = x + 3 * i * stride;
        for (int64_t s = 0; s < steps; s++, from += kStep) {
            Codes codes[kVectors];
            for (int line = 0; line < kStep; line += 64) __builtin_prefetch(from + kAhead + line);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) codes[v] = read_codes(from + 4 * kLanes * v);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                int32_t four;
                std::memcpy(&four, three[m / 3] + m % 3 * stride + 4 * s, 4);
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; v++) acc[m][v] = dot(acc[m][v], codes[v], four);
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) {
                float* to = y + m * kBlock + part + v * kLanes;
                const Floats dots = __builtin_convertvector(acc[m][v], Floats);
                store(to, fused(dots, scales[m * groups], first ? Floats{} : load<Floats>(to)));
            }
        }
    }
}

using Multiply = void (*)(const uint8_t*, const int8_t*, int64_t, int64_t, const float*, const int32_t*, int64_t, bool,
                          float*);
template <int... M> constexpr Multiply multiply_by_height(int height, std::integer_sequence<int, M...>) {
    constexpr Multiply all_heights[] = {multiply<M + 1>...};
    return all_heights[height - 1];
}

// One row of a block: out = act(y * scales + bias) for ``count`` channels.
template <class T>
inline void finish(const float* y, const float* scales, const T* bias, int act, int64_t count, T* out) {
    along(count, [&](int64_t i, int lanes) {
        Floats sum = load<Floats>(y + i) * load<Floats>(scales + i);
        if (bias) sum += part(bias + i, lanes);
        put(out + i, activated(sum, act), lanes);
    });
}

// ``height`` rows from ``begin`` times one block.
template <class T>
void tile(const Weight& w, int64_t block, const Rows& x, int64_t begin, int height, const T* bias, int act, T* out) {
    alignas(64) float y[kRows * kBlock];
    const Multiply product = multiply_by_height(height, std::make_integer_sequence<int, kRows>{});
    const int64_t steps = w.steps(), groups = w.groups();
    const uint8_t* codes = w.block(block);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t from = g * w.group / 4, count = std::min(w.group / 4, steps - from), at = begin * groups + g;
        product(codes + from * kStep, x.codes + begin * x.stride + 4 * from, x.stride, count, x.scales + at,
                x.sums + at, groups, g == 0, y);
    }
    const int64_t channel = block * kBlock, channels = std::min<int64_t>(kBlock, w.n - channel);
    for (int m = 0; m < height; m++)
        finish(y + m * kBlock, w.scales + channel, bias ? bias + channel : nullptr, act, channels,
               out + (begin + m) * w.n + channel);
}

// Memory of the calling thread for the activations of one chunk; it grows to the largest chunk seen, which is bounded
// by kChunkBytes for all but the longest rows. Rows stand an odd number of cache lines apart, or the lines that are
// read together would have one place in the cache.
Rows scratch(const Weight& w, int64_t rows) {
    static thread_local std::vector<int8_t> codes;
    static thread_local std::vector<float> scales;
    static thread_local std::vector<int32_t> sums;
    const int64_t stride = ((w.k + 63) / 64 | 1) * 64;
    const size_t bytes = rows * stride, counts = rows * w.groups();
    if (codes.size() < bytes) codes.resize(bytes);
    if (scales.size() < counts) scales.resize(counts), sums.resize(counts);
    return {codes.data(), scales.data(), sums.data(), stride};
}

// All channels of ``rows`` rows, which are split into tiles of nearly equal height. A task is one block for a share
// of the tiles: for all of them where there are enough blocks for the threads, so that each block is read once.
template <class T>
void chunk(const Weight& w, const T* x, int64_t stride, int64_t rows, const T* bias, int act, T* out, int threads) {
    const Rows to = scratch(w, rows);
    const int64_t tiles = (rows + kRows - 1) / kRows, blocks = w.blocks(), wanted = 4 * int64_t(threads);
    const int64_t shares = std::min(tiles, blocks >= wanted ? 1 : (wanted + blocks - 1) / blocks);
    const int64_t at_once = std::max<int64_t>(1, blocks * shares / (8 * int64_t(threads)));
    const bool serial = rows * w.k * int64_t(sizeof(T)) <= kSerialBytes;
    if (serial)
        for (int64_t r = 0; r < rows; r++) quantise_row(w, x + r * stride, r, to);
#pragma omp parallel num_threads(threads)
    {
        if (!serial) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) quantise_row(w, x + r * stride, r, to);
        }
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t task = 0; task < blocks * shares; task++) {
            const int64_t share = task % shares, last = (share + 1) * tiles / shares;
            for (int64_t t = share * tiles / shares; t < last; t++) {
                const int64_t begin = t * rows / tiles, end = (t + 1) * rows / tiles;
                tile(w, task / shares, to, begin, int(end - begin), bias, act, out);
            }
        }
    }
}

template <class T>
void linear(const Weight& w, const T* x, int64_t stride, int64_t rows, const T* bias, int act, T* out, int threads) {
    const int64_t fit = std::max<int64_t>(8, kChunkBytes / w.k / kRows) * kRows;
    if (rows * w.n * w.k < (1 << 17)) threads = 1;  // done before another thread wakes
    for (int64_t done = 0; done < rows; done += fit)
        chunk(w, x + done * stride, stride, std::min(fit, rows - done), bias, act, out + done * w.n, threads);
}

template <class T>
void pack(const Weight& w, const T* weight, int64_t stride, uint8_t* codes, float* scales, int threads) {
    const int64_t steps = w.steps();
#pragma omp parallel for num_threads(threads)
    for (int64_t block = 0; block < w.blocks(); block++) {
        std::vector<int8_t> row(4 * steps + kLanes);
        uint8_t* to = codes + block * steps * kStep;
        for (int64_t i = 0; i < kBlock; i++) {
            const int64_t channel = block * kBlock + i;
            std::fill(row.begin(), row.end(), int8_t(0));
            scales[channel] = channel < w.n ? quantise(weight + channel * stride, w.k, row.data()).scale : 0.0f;
            for (int64_t j = 0; j < 4 * steps; j++) to[j / 4 * kStep + 4 * i + j % 4] = uint8_t(row[j] + kOffset);
        }
    }
}

template <class T> void rows(const Weight& w, const int64_t* ids, int64_t count, T* out, int threads) {
#pragma omp parallel for num_threads(count > 8 ? threads : 1)
    for (int64_t i = 0; i < count; i++) {
        const uint8_t* from = w.block(ids[i] / kBlock) + 4 * (ids[i] % kBlock);
        const float scale = w.scales[ids[i]];
        for (int64_t j = 0; j < w.k; j++) {
            const int code = kOffset ? from[j / 4 * kStep + j % 4] - kOffset : int8_t(from[j / 4 * kStep + j % 4]);
            if constexpr (sizeof(T) == 4) out[i * w.k + j] = code * scale;
            else out[i * w.k + j] = narrow(code * scale);
        }
    }
}

}  // namespace

// ``wide``: values are float, else bf16. Pointers are to memory that the caller keeps until the call returns.

MMSERVE_EXPORT const char* int8_path() { return kPath; }

MMSERVE_EXPORT int64_t int8_block() { return kBlock; }

// Quantise and pack a weight of w->n rows of w->k values, ``stride`` values apart, into what w points at.
MMSERVE_EXPORT void int8_pack(const Weight* w, const void* weight, int64_t stride, int wide, int threads) {
    uint8_t* codes = const_cast<uint8_t*>(w->codes);
    float* scales = const_cast<float*>(w->scales);
    if (wide) pack(*w, static_cast<const float*>(weight), stride, codes, scales, threads);
    else pack(*w, static_cast<const bf16*>(weight), stride, codes, scales, threads);
}

// out [rows][n] = act(x @ w.T + bias), rows of x ``stride`` values apart; bias may be null.
MMSERVE_EXPORT void int8_linear(const Weight* w, const void* x, int64_t stride, int64_t rows, const void* bias,
                                int act, void* out, int wide, int threads) {
    if (wide)
        linear(*w, static_cast<const float*>(x), stride, rows, static_cast<const float*>(bias), act,
               static_cast<float*>(out), threads);
    else
        linear(*w, static_cast<const bf16*>(x), stride, rows, static_cast<const bf16*>(bias), act,
               static_cast<bf16*>(out), threads);
}

// out [count][k] = the rows ``ids`` of the weight, as their codes tell them; false, and nothing, if one is not there.
MMSERVE_EXPORT bool int8_rows(const Weight* w, const int64_t* ids, int64_t count, void* out, int wide, int threads) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w->n) return false;
    if (wide) rows(*w, ids, count, static_cast<float*>(out), threads);
    else rows(*w, ids, count, static_cast<bf16*>(out), threads);
    return true;
}
