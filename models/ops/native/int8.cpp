// Linear layers with int8 weights (a scale for each output channel) and int8 activations (quantised here, a scale
// for each row and group of inputs). models/ops/quantized.py has the formulas in plain torch.
//
// Weights lie in blocks of 32 channels, [n / 32][k / kInputs][32][kInputs], padded with zeros: one step of four or two
// inputs is 128 or 64 bytes that the dot product reads as they come, and a block is one run of memory. Each sum over
// a group is exact, and the groups are added in order, so that a result depends neither on the other rows nor on the
// threads.

#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "activations.h"
#include "recorded.h"
#include "rows.h"

namespace {

using namespace mmserve;

constexpr int kBlock = 32;                  // channels of a block
constexpr int64_t kChunkBytes = 768 << 10;  // activations that stay in the cache while all weights pass by
constexpr int64_t kSerialBytes = 64 << 10;  // fewer activations are quantised before the threads start

// By instructions: kInputs of a step, whose codes of activations take 4 bytes as ``Code``s; ``dot``, acc + the
// products of a step's inputs with the codes of each lane's channel; kOffset, what packing adds to the codes of
// weights because the instruction wants one side unsigned (the sums of the inputs take it out again).
#if defined(__AVX512VNNI__)
constexpr int kRows = 12, kInputs = 4, kOffset = 128;
constexpr const char* kPath = "avx512_vnni";
using Code = int8_t;
using Codes = Ints;
inline Codes read_codes(const void* from) { return load<Ints>(from); }
inline Ints dot(Ints acc, Codes w, int32_t x) {
    return as<Ints>(_mm512_dpbusd_epi32(as<__m512i>(acc), as<__m512i>(w), _mm512_set1_epi32(x)));
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr int kRows = 6, kInputs = 4, kOffset = 128;
constexpr const char* kPath = "avx_vnni";
using Code = int8_t;
using Codes = Ints;
inline Codes read_codes(const void* from) { return load<Ints>(from); }
inline Ints dot(Ints acc, Codes w, int32_t x) {
    return as<Ints>(_mm256_dpbusd_avx_epi32(as<__m256i>(acc), as<__m256i>(w), _mm256_set1_epi32(x)));
}
#elif defined(__AVX512BW__)
constexpr int kRows = 10, kInputs = 2, kOffset = 0;  // in 16 bits: pairs of products of bytes would saturate
constexpr const char* kPath = "avx512";
using Code = int16_t;
using Codes = __m512i;
inline Codes read_codes(const void* from) { return _mm512_cvtepi8_epi16(load<__m256i>(from)); }
inline Ints dot(Ints acc, Codes w, int32_t x) { return acc + as<Ints>(_mm512_madd_epi16(w, _mm512_set1_epi32(x))); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kRows = 6, kInputs = 2, kOffset = 0;
constexpr const char* kPath = "avx2";
using Code = int16_t;
using Codes = __m256i;
inline Codes read_codes(const void* from) { return _mm256_cvtepi8_epi16(load<__m128i>(from)); }
inline Ints dot(Ints acc, Codes w, int32_t x) { return acc + as<Ints>(_mm256_madd_epi16(w, _mm256_set1_epi32(x))); }
#else
constexpr int kRows = 4, kInputs = 4, kOffset = 0;
constexpr const char* kPath = "portable";
using Code = int8_t;
using Codes = Ints;
inline Codes read_codes(const void* from) { return load<Ints>(from); }
inline Ints dot(Ints acc, Codes w, int32_t x) {
    for (int i = 0; i < 4; i++) acc += ((w << (24 - 8 * i)) >> 24) * int8_t(x >> (8 * i));
    return acc;
}
#endif
static_assert(kInputs * sizeof(Code) == 4, "one element of a vector of 32 bits holds a step's activations");

constexpr int64_t kStep = kInputs * kBlock;  // bytes of a block for the inputs of a step

// A packed weight; int8.py has the same structure. ``group`` is a multiple of 16.
struct Weight {
    const uint8_t* codes;
    const float* scales;  // of n channels, rounded up to whole blocks
    int64_t n, k, group;
    int64_t steps() const { return (k + kInputs - 1) / kInputs; }
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
template <class T, class C> Quantised quantise(const T* x, int64_t count, C* codes) {
    typedef C Some __attribute__((vector_size(kLanes * sizeof(C))));
    constexpr float shift = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to whole numbers
    constexpr float most_of_all = 3.40282347e38f;
    const float most = largest(x, count), inverse = 127.0f / most;
    if (!(most <= most_of_all && inverse <= most_of_all)) {
        std::fill(codes, codes + count, C(0));
        return {most <= most_of_all ? 0.0f : __builtin_nanf(""), 0};
    }
    Ints sums{};
    along(count, [&](int64_t i, int lanes) {
        const Ints whole = as<Ints>(product(part(x + i, lanes), inverse) + shift) - as<int32_t>(shift);
        store(codes + i, __builtin_convertvector(whole, Some));
        sums += whole;
    });
    int32_t sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += sums[lane];
    return {most / 127.0f, sum};
}

// Activations of a chunk of rows, quantised: [rows][stride], [rows][groups], [rows][groups].
struct Rows {
    Code* codes;
    float* scales;
    int32_t* sums;  // of the codes, times kOffset
    int64_t stride;
};

template <class T> void quantise_row(const Weight& w, const T* x, int64_t row, const Rows& to) {
    const int64_t groups = w.groups();
    Code* codes = to.codes + row * to.stride;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t from = g * w.group, count = std::min(w.group, w.k - from);
        const Quantised found = quantise(x + from, count, codes + from);
        to.scales[row * groups + g] = found.scale;
        to.sums[row * groups + g] = kOffset * found.sum;
    }
    std::fill(codes + w.k, codes + kInputs * w.steps(), Code(0));
}

// ---------------------------------------------------------------- products

constexpr int kVectors = kLanes == 4 ? 1 : 2;  // side by side in registers
constexpr int kWide = kVectors * kLanes;       // channels of a block at a time

// What a pass over the weights of a group fetches from memory meanwhile: ``lines`` of the cache for every kStretch
// steps.
struct Fetch {
    const uint8_t* at;
    int64_t lines;
};
constexpr int64_t kStretch = 16, kLine = 64;
constexpr int64_t kParts = kBlock / kWide;  // passes over a group, each for as many channels as vectors hold

// y[M][kBlock] (+)= scale * (codes of the rows . codes of the block) over one group of ``steps`` * kInputs inputs.
template <int M>
void multiply(const uint8_t* w, const Code* x, int64_t stride, int64_t steps, const float* scales,
              const int32_t* sums, int64_t groups, bool first, Fetch fetch, float* y) {
    for (int part = 0; part < kBlock; part += kWide) {
        Ints acc[M][kVectors];
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) acc[m][v] = Ints{} - sums[m * groups];
        const uint8_t* from = w + kInputs * part;
        const Code* three[(M + 2) / 3];  // every third row: the two behind it are a stride away
        for (int i = 0; i < (M + 2) / 3; i++) three[i] = x + 3 * i * stride;
        const auto step = [&](int64_t s) __attribute__((always_inline)) {
            Codes codes[kVectors];
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) codes[v] = read_codes(from + kInputs * kLanes * v);
            from += kStep;
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                int32_t inputs;
                std::memcpy(&inputs, three[m / 3] + m % 3 * stride + kInputs * s, 4);
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; v++) acc[m][v] = dot(acc[m][v], codes[v], inputs);
            }
        };
        int64_t s = 0;
        for (; s + kStretch <= steps; s += kStretch) {
            for (int64_t i = 0; i < fetch.lines; i++, fetch.at += kLine) __builtin_prefetch(fetch.at);
#pragma GCC unroll 4
            for (int i = 0; i < kStretch; i++) step(s + i);
        }
        for (; s < steps; s++) step(s);
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

using Multiply = void (*)(const uint8_t*, const Code*, int64_t, int64_t, const float*, const int32_t*, int64_t, bool,
                          Fetch, float*);
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

// Which of ``count`` tiles of rows that pass by one block of weights, one after the other.
struct Turn {
    int64_t index, count;
};

// The first tile reads the block from memory and the others find it in the cache. A tile alone fetches what is its
// own in advance, by one group; several fetch the next block, each its share, so that memory is never waited for
// while there is something to compute.
inline Fetch fetched(const Weight& w, const uint8_t* group, int64_t steps, Turn turn) {
    constexpr int64_t all = kStretch * kStep / kLine;
    const int64_t each = (all + turn.count * kParts - 1) / (turn.count * kParts), done = turn.index * kParts * each;
    const uint8_t* from = group + (turn.count == 1 ? steps : w.steps()) * kStep;
    return {from + done * (steps / kStretch) * kLine, done < all ? each : 0};
}

// ``height`` rows from ``begin`` times one block.
template <class T>
void tile(const Weight& w, int64_t block, Turn turn, const Rows& x, int64_t begin, int height, const T* bias, int act,
          T* out) {
    alignas(64) float y[kRows * kBlock];
    const Multiply product = multiply_by_height(height, std::make_integer_sequence<int, kRows>{});
    const int64_t steps = w.steps(), groups = w.groups(), group = w.group / kInputs;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t from = g * group, count = std::min(group, steps - from), at = begin * groups + g;
        const uint8_t* codes = w.block(block) + from * kStep;
        product(codes, x.codes + begin * x.stride + kInputs * from, x.stride, count, x.scales + at, x.sums + at,
                groups, g == 0, fetched(w, codes, count, turn), y);
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
    static thread_local std::vector<Code> codes;
    static thread_local std::vector<float> scales;
    static thread_local std::vector<int32_t> sums;
    constexpr int64_t line = kLine / sizeof(Code);
    const int64_t stride = ((w.k + line - 1) / line | 1) * line;
    const size_t all = rows * stride, counts = rows * w.groups();
    if (codes.size() < all) codes.resize(all);
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
            const int64_t share = task % shares, first = share * tiles / shares, last = (share + 1) * tiles / shares;
            for (int64_t t = first; t < last; t++) {
                const int64_t begin = t * rows / tiles, end = (t + 1) * rows / tiles;
                tile(w, task / shares, {t - first, last - first}, to, begin, int(end - begin), bias, act, out);
            }
        }
    }
}

template <class T>
void linear(const Weight& w, const T* x, int64_t stride, int64_t rows, const T* bias, int act, T* out, int threads) {
    const int64_t fit = std::max<int64_t>(8, kChunkBytes / int64_t(sizeof(Code)) / w.k / kRows) * kRows;
    if (rows * w.n * w.k < (1 << 17)) threads = 1;  // done before another thread wakes
    for (int64_t done = 0; done < rows; done += fit)
        chunk(w, x + done * stride, stride, std::min(fit, rows - done), bias, act, out + done * w.n, threads);
}

template <class T>
void pack(const Weight& w, const T* weight, int64_t stride, uint8_t* codes, float* scales, int threads) {
    const int64_t steps = w.steps();
#pragma omp parallel for num_threads(threads)
    for (int64_t block = 0; block < w.blocks(); block++) {
        std::vector<int8_t> row(kInputs * steps + kLanes);
        uint8_t* to = codes + block * steps * kStep;
        for (int64_t i = 0; i < kBlock; i++) {
            const int64_t channel = block * kBlock + i;
            std::fill(row.begin(), row.end(), int8_t(0));
            scales[channel] = channel < w.n ? quantise(weight + channel * stride, w.k, row.data()).scale : 0.0f;
            for (int64_t j = 0; j < kInputs * steps; j++)
                to[j / kInputs * kStep + kInputs * i + j % kInputs] = uint8_t(row[j] + kOffset);
        }
    }
}

template <class T> void rows(const Weight& w, const int64_t* ids, int64_t count, T* out, int threads) {
#pragma omp parallel for num_threads(count > 8 ? threads : 1)
    for (int64_t i = 0; i < count; i++) {
        const uint8_t* from = w.block(ids[i] / kBlock) + kInputs * (ids[i] % kBlock);
        const float scale = w.scales[ids[i]];
        for (int64_t j = 0; j < w.k; j++) {
            const uint8_t packed = from[j / kInputs * kStep + j % kInputs];
            const int code = kOffset ? packed - kOffset : int8_t(packed);
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

MMSERVE_RECORDED(int8_linear)
MMSERVE_RECORDED(int8_rows)
