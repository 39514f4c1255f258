// y = act(x @ W^T + b) with weights that stay bf16 in memory. Where the CPU multiplies pairs of bf16 (AVX512_BF16)
// they go into its instruction; elsewhere they are widened to float32 on their way into the sums.
//
// W [outputs, inputs] is packed into panels of 32 outputs, [panels][steps] lines of 16 words:
//
//     widened  a step is one input, one line: word j holds output j in its lower half and output j + 16 in its
//              upper half, so that a shift and a mask widen both
//     pairs    a step is two inputs, two lines: word j of the first holds both for output j, of the second for
//              output j + 16
//
// Up to kRows rows of x read each panel once, as it lies in memory; more find it in the cache.
//
// Every element of y is one chain of fused multiply-adds over the steps in their order, whatever the number of rows,
// of threads and the path: a row's result does not depend on what else is in the batch.

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <utility>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "activations.h"
#include "common.h"
#include "recorded.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mmserve {
namespace {

#if defined(__AVX512BF16__)
constexpr int kStepInputs = 2;
#else
constexpr int kStepInputs = 1;
#endif
constexpr int kLine = 16;            // words: what memory gives at once
constexpr int kWidth = 2 * kLine;    // outputs of a panel
constexpr int kStep = kStepInputs * kLine;     // words of a panel for one step
constexpr int kRun = 16;             // steps of one row of x that lie together when x is laid out for the kernel
constexpr int kRunLines = kRun * kStepInputs;  // of a panel
constexpr int kDepth = 384;          // steps between two visits to the sums; a multiple of kRun
constexpr int kAhead = 64;           // lines of a panel to fetch in advance where one pass reads it: a page of memory
constexpr int kGroup = 4;            // panels that a thread takes at a time when there are many rows
constexpr int kOwnRows = 64;         // up to here each thread lays x out for itself instead of waiting for others
constexpr long kAlone = 128 << 10;   // weights * (1 + rows / 16) up to which other threads cost more than they do
constexpr long kPieceWords = 384 << 10;  // of x that are laid out at once: more would not stay in the cache
constexpr long kSliceWords = 96 << 10;   // of x that one panel after the other may pass through
#if defined(__AVX512F__)
constexpr int kRows = 14, kWholeRows = 14;  // of x in the kernel: 28 vectors of sums, of 32 registers
#elif defined(__AVX2__)
constexpr int kRows = 6, kWholeRows = 3;    // the second: with all outputs of a panel at once
#else
constexpr int kRows = 8, kWholeRows = 1;
#endif

// Memory that only grows, for what a thread needs again in its next call.
template <class T> class Scratch {
public:
    ~Scratch() { std::free(memory_); }
    T* of(size_t count) {
        static_assert(sizeof(T) == 4);
        if (count > size_) {
            std::free(memory_);
            size_ = 0;
            memory_ = static_cast<T*>(std::aligned_alloc(64, (count * 4 + 63) / 64 * 64));
            if (!memory_) std::abort();
            size_ = count;
        }
        return memory_;
    }

private:
    T* memory_ = nullptr;
    size_t size_ = 0;
};

struct Call {
    const bf16* x;
    long stride, rows, inputs;
    const uint32_t* panels;
    long outputs;
    const bf16* bias;
    int act;
    bf16* y;
    long count() const { return (outputs + kWidth - 1) / kWidth; }
    long steps() const { return (inputs + kStepInputs - 1) / kStepInputs; }
    const uint32_t* panel(long p) const { return panels + p * steps() * kStep; }
};

// ---- the kernel ------------------------------------------------------------------------------------------------

// The weights of a step for the outputs of vectors at ``low`` and, kLine further on, ``high``; and how one row's
// value of x, a word, multiplies them into sums.
#if defined(__AVX512BF16__)
struct Weights {
    __m512bh low, high;
    explicit Weights(const uint32_t* w) : low(load<__m512bh>(w)), high(load<__m512bh>(w + kLine)) {}
    void add(uint32_t x, Floats& to_low, Floats& to_high) const {
        const __m512bh both = as<__m512bh>(_mm512_set1_epi32(int(x)));
        to_low = as<Floats>(_mm512_dpbf16_ps(as<__m512>(to_low), low, both));
        to_high = as<Floats>(_mm512_dpbf16_ps(as<__m512>(to_high), high, both));
    }
};
#else
struct Weights {
    Floats low, high;
    explicit Weights(const uint32_t* w) {
        const Words words = load<Words>(w);
        low = as<Floats>(words << 16);
        high = as<Floats>(words & 0xffff0000u);
    }
    void add(uint32_t x, Floats& to_low, Floats& to_high) const {
        const float value = as<float>(x);
        to_low += value * low;
        to_high += value * high;
    }
};
#endif

// What a pass over a slice of weights fetches from memory meanwhile: ``each`` lines for every kRun steps.
struct Fetch {
    const uint32_t* at;
    int each;
};

// sums[R, 32] += x[R, depth] @ w[depth, V * 2 * kLanes], from nothing if ``first``. x lies in runs
// [depth / 16][R][16], depth in steps.
template <int R, int V> void tile(const uint32_t* x, const uint32_t* w, float* sums, long depth, bool first, Fetch fetch) {
    Floats low[R][V], high[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const float* at = sums + r * kWidth + v * kLanes;
            low[r][v] = first ? Floats{} : load<Floats>(at);
            high[r][v] = first ? Floats{} : load<Floats>(at + kLine);
        }
    const auto step = [&](const uint32_t* at) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Weights weights(w + v * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) weights.add(at[r * kRun], low[r][v], high[r][v]);
        }
        w += kStep;
    };
    for (; depth >= kRun; depth -= kRun, x += R * kRun) {
        for (int i = 0; i < fetch.each; ++i, fetch.at += kLine) __builtin_prefetch(fetch.at);
#pragma GCC unroll 4
        for (int k = 0; k < kRun; ++k) step(x + k);
    }
    for (int k = 0; k < depth; ++k) step(x + k);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            float* at = sums + r * kWidth + v * kLanes;
            store(at, low[r][v]);
            store(at + kLine, high[r][v]);
        }
}

using Tile = void (*)(const uint32_t*, const uint32_t*, float*, long, bool, Fetch);

template <int V, int... R> constexpr std::array<Tile, sizeof...(R)> tiles(std::integer_sequence<int, R...>) {
    return {tile<R + 1, V>...};
}
constexpr int kParts = kLine / kLanes;  // passes over the 32 outputs of a panel, as many as the vectors hold
constexpr auto kTiles = tiles<1>(std::make_integer_sequence<int, kRows>());
constexpr auto kWholeTiles = tiles<kParts>(std::make_integer_sequence<int, kWholeRows>());

// A slice of a panel, read by the first of ``passes`` from memory and by the others from the cache; those fetch what
// comes ``next``, each its share, so that memory is never waited for while there is something to compute.
struct Slice {
    const uint32_t *w, *next;
    long depth, passes;
    Fetch fetch(long pass) const {
        if (passes == 1) return {w + kAhead * kLine, kRunLines};
        const int each = int((kRunLines + passes - 1) / passes);
        return {next + pass * each * (depth / kRun) * kLine, pass * each < kRunLines ? each : 0};
    }
};

// Passes over a slice for ``blocks`` blocks of altogether ``rows`` rows.
inline long passes(long rows, long blocks) { return rows <= kWholeRows ? 1 : blocks * kParts; }

// Block ``b`` of the rows times a slice.
inline void multiply(long rows, long b, const uint32_t* x, const Slice& s, float* sums, bool first) {
    if (s.passes == 1) {
        kWholeTiles[rows - 1](x, s.w, sums, s.depth, first, s.fetch(0));
        return;
    }
    for (int i = 0; i < kParts; ++i) {
        const int v = i * kLanes;
        kTiles[rows - 1](x, s.w + v, sums + v, s.depth, first, s.fetch(b * kParts + i));
    }
}

// ---- rows of x -------------------------------------------------------------------------------------------------

// Rows in blocks of nearly equal size, each at most kRows.
struct Blocks {
    long rows, count;
    explicit Blocks(long rows) : rows(rows), count((rows + kRows - 1) / kRows) {}
    long start(long block) const { return block * rows / count; }
    long size(long block) const { return start(block + 1) - start(block); }
};

inline long padded(long steps) { return (steps + kRun - 1) / kRun * kRun; }

// ``inputs`` numbers of a row as words of steps.
inline void put_steps(const bf16* from, long inputs, uint32_t* to) {
#if defined(__AVX512BF16__)
    if (inputs % 2) to[inputs / 2] = 0;
    std::memcpy(to, from, inputs * sizeof(bf16));
#else
    for (long k = 0; k < inputs; ++k) to[k] = uint32_t(from[k]) << 16;
#endif
}

// Block ``b`` of x as words of steps, at ``to`` + its first row * padded(steps): [steps / 16][its rows][16].
void lay_out(const Call& c, const Blocks& blocks, long b, uint32_t* to) {
    constexpr long inputs = kRun * kStepInputs;
    const long first = blocks.start(b), size = blocks.size(b);
    to += first * padded(c.steps());
    for (long r = 0; r < size; ++r) {
        const bf16* from = c.x + (first + r) * c.stride;
        uint32_t* at = to + r * kRun;
        long k = 0;
        for (; k + inputs <= c.inputs; k += inputs, at += size * kRun) put_steps(from + k, inputs, at);
        put_steps(from + k, c.inputs - k, at);
    }
}

// ---- from sums to y ---------------------------------------------------------------------------------------------

// Bias, activation and the one rounding of the sums [rows, 32] of panel ``p`` into y, from row ``first`` on.
void finish(const Call& c, long p, const float* sums, long first, long rows) {
    const long begin = p * kWidth, width = std::min<long>(kWidth, c.outputs - begin);
    alignas(64) float bias[kWidth] = {};
    if (c.bias) for (long j = 0; j < width; ++j) bias[j] = widen(c.bias[begin + j]);
    for (long r = 0; r < rows; ++r) {
        alignas(64) bf16 line[kWidth];
        for (int j = 0; j < kWidth; j += kLanes) {
            const Floats sum = load<Floats>(sums + r * kWidth + j) + load<Floats>(bias + j);
            store(line + j, narrow(activated(sum, c.act)));
        }
        bf16* to = c.y + (first + r) * c.outputs + begin;
        std::memcpy(to, line, width * sizeof(bf16));
    }
}

// Panels begin to end, one after the other or ``sideways``: kDepth steps of all of them, then the next kDepth,
// so that the slice of x stays in the cache. ``sums`` has room for the rows of one panel, or of all.
void multiply_panels(const Call& c, const Blocks& blocks, const uint32_t* x, float* sums, long begin, long end,
                     bool sideways) {
    const long all = c.steps(), row = padded(all), tiles = c.rows * kWidth;
    const long group = sideways ? end - begin : 1;
    for (; begin < end; begin += group) {
        for (long k = 0; k < all; k += kDepth) {
            const long depth = std::min<long>(kDepth, all - k);
            for (long p = begin; p < begin + group; ++p) {
                const uint32_t* w = c.panel(p) + k * kStep;
                const uint32_t* next = w + (group > 1 ? all : depth) * kStep;
                const Slice slice{w, next, depth, passes(c.rows, blocks.count)};
                for (long b = 0; b < blocks.count; ++b) {
                    const long first = blocks.start(b), size = blocks.size(b);
                    float* at = sums + (p - begin) * tiles + first * kWidth;
                    multiply(size, b, x + first * row + k * size, slice, at, k == 0);
                    if (k + depth == all) finish(c, p, at, first, size);
                }
            }
        }
    }
}

thread_local Scratch<uint32_t> own_x;
thread_local Scratch<float> own_sums;

// One piece of the rows. Threads take a few panels at a time, so that one that is held up holds up no other.
void run(const Call& c, int threads) {
    const Blocks blocks(c.rows);
    const long count = c.count(), words = c.rows * padded(c.steps());
    const bool shared = c.rows > kOwnRows, sideways = words > kSliceWords;
    const long grain = std::clamp<long>(count / (threads * 8), 1, c.rows <= kOwnRows ? 16 : kGroup);
    uint32_t* together = shared ? own_x.of(words) : nullptr;
    std::atomic<long> taken{0};
#pragma omp parallel num_threads(threads)
    {
        uint32_t* x = shared ? together : own_x.of(words);
        if (shared) {
#pragma omp for schedule(dynamic)
            for (long b = 0; b < blocks.count; ++b) lay_out(c, blocks, b, x);
        } else {
            for (long b = 0; b < blocks.count; ++b) lay_out(c, blocks, b, x);
        }
        float* sums = own_sums.of(c.rows * kWidth * (sideways ? grain : 1));
        for (long p; (p = taken.fetch_add(grain)) < count;)
            multiply_panels(c, blocks, x, sums, p, std::min(p + grain, count), sideways);
    }
}

// Whole large pages within memory that nobody has touched yet: fewer misses of the table of addresses.
void ask_for_large_pages(void* memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = 2 << 20;
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t begin = (at + page - 1) / page * page, end = (at + bytes) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

}  // namespace
}  // namespace mmserve

using namespace mmserve;

// Inputs that are multiplied at a time: 2 where the CPU's own instruction takes them as bf16.
MMSERVE_EXPORT int linear_step_inputs() { return kStepInputs; }

// Whole panels of 32 outputs: weight [outputs, inputs] -> [ceil(outputs / 32), inputs rounded up to steps, 32], zeros
// behind the last.
MMSERVE_EXPORT void linear_pack(const bf16* weight, long outputs, long inputs, bf16* panels, int threads) {
    const long count = (outputs + kWidth - 1) / kWidth, whole = (inputs + kStepInputs - 1) / kStepInputs * kStepInputs;
    ask_for_large_pages(panels, count * whole * kWidth * sizeof(bf16));
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < count; ++p) {
        const long width = std::min<long>(kWidth, outputs - p * kWidth);
        const bf16* from = weight + p * kWidth * inputs;
        bf16* to = panels + p * kWidth * whole;
        for (long k = 0; k < whole; ++k)
            for (int j = 0; j < kWidth; ++j) {
                const bf16 value = j < width && k < inputs ? from[j * inputs + k] : bf16(0);
                if (kStepInputs == 1) to[k * kWidth + j % kLine * 2 + j / kLine] = value;
                else to[k / 2 * 2 * kWidth + j * 2 + k % 2] = value;
            }
    }
}

// y [rows, outputs] = act(x @ weight.T + bias), x [rows, inputs] with ``stride`` elements from row to row; bias may
// be null. y lies in one piece.
MMSERVE_EXPORT void linear_run(const bf16* x, long stride, long rows, long inputs, const bf16* panels, long outputs,
                               const bf16* bias, int act, bf16* y, int threads) {
    if (outputs * inputs * (1 + rows / 16) <= kAlone) threads = 1;
    const long most = std::clamp<long>(kPieceWords / inputs, 8 * kRows, 36 * kRows);
    const long pieces = (rows + most - 1) / most;
    for (long i = 0; i < pieces; ++i) {
        const long first = i * rows / pieces, end = (i + 1) * rows / pieces;
        run({x + first * stride, stride, end - first, inputs, reinterpret_cast<const uint32_t*>(panels), outputs,
             bias, act, y + first * outputs},
            threads);
    }
}

MMSERVE_RECORDED(linear_run)
