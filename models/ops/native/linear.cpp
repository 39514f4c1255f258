// y = act(x @ W^T + b): weights stay bf16 in memory and are widened to float32 on their way into the sums.
//
// W [outputs, inputs] is packed into panels of 32 outputs: [panels][inputs] rows of 16 words, where word j holds
// output j in its lower half and output j + 16 in its upper half, so that a shift and a mask widen both. Up to
// kRows rows of x read each panel once, as it lies in memory; more find it in the cache.
//
// Every element of y is one chain of fused multiply-adds over k = 0, 1, 2 ... whatever the number of rows, of
// threads and the path: a row's result does not depend on what else is in the batch.

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "activations.h"
#include "common.h"
#include "recorded.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mmserve {
namespace {

constexpr int kPairs = 16;           // words in a row of a panel
constexpr int kWidth = 2 * kPairs;   // outputs of a panel
constexpr int kRun = 16;             // inputs of one row of x that lie together when x is laid out for the kernel
constexpr int kDepth = 384;          // inputs between two visits to the sums; a multiple of kRun
constexpr int kAhead = 64;           // rows of a panel to fetch in advance where one pass reads it: a page of memory
constexpr int kGroup = 4;            // panels that a thread takes at a time when there are many rows
constexpr int kOwnRows = 64;         // up to here each thread lays x out for itself instead of waiting for others
constexpr long kAlone = 128 << 10;   // weights * (1 + rows / 16) up to which other threads cost more than they do
constexpr long kPieceFloats = 384 << 10;  // of x that are laid out at once: more would not stay in the cache
constexpr long kSliceFloats = 96 << 10;   // of x that one panel after the other may pass through
#if defined(__AVX512F__)
constexpr int kRows = 14, kWholeRows = 14;  // of x in the kernel: 28 vectors of sums, of 32 registers
#elif defined(__AVX2__)
constexpr int kRows = 6, kWholeRows = 3;    // the second: with all outputs of a panel at once
#else
constexpr int kRows = 8, kWholeRows = 1;
#endif

// Memory that only grows, for what a thread needs again in its next call.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }
    float* of(size_t floats) {
        if (floats > size_) {
            std::free(memory_);
            size_ = 0;
            memory_ = static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
            if (!memory_) std::abort();
            size_ = floats;
        }
        return memory_;
    }

private:
    float* memory_ = nullptr;
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
    const uint32_t* panel(long p) const { return panels + p * inputs * kPairs; }
};

// ---- the kernel ------------------------------------------------------------------------------------------------

struct Pair {
    Floats low, high;
};

inline Pair widen_pairs(const uint32_t* w) {
    const Words words = load<Words>(w);
    return {as<Floats>(words << 16), as<Floats>(words & 0xffff0000u)};
}

// What a pass over a slice of weights fetches from memory meanwhile: ``each`` rows for every kRun that it computes.
struct Fetch {
    const uint32_t* at;
    int each;
};

// sums[R, 32] += x[R, depth] @ w[depth, V * 2 * kLanes], from nothing if ``first``. x lies in runs
// [depth / 16][R][16].
template <int R, int V> void tile(const float* x, const uint32_t* w, float* sums, long depth, bool first, Fetch fetch) {
    Floats low[R][V], high[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const float* at = sums + r * kWidth + v * kLanes;
            low[r][v] = first ? Floats{} : load<Floats>(at);
            high[r][v] = first ? Floats{} : load<Floats>(at + kPairs);
        }
    const auto step = [&](const float* at) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Pair pair = widen_pairs(w + v * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const float value = at[r * kRun];
                low[r][v] += value * pair.low;
                high[r][v] += value * pair.high;
            }
        }
        w += kPairs;
    };
    for (; depth >= kRun; depth -= kRun, x += R * kRun) {
        for (int i = 0; i < fetch.each; ++i, fetch.at += kPairs) __builtin_prefetch(fetch.at);
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
            store(at + kPairs, high[r][v]);
        }
}

using Tile = void (*)(const float*, const uint32_t*, float*, long, bool, Fetch);

template <int V, int... R> constexpr std::array<Tile, sizeof...(R)> tiles(std::integer_sequence<int, R...>) {
    return {tile<R + 1, V>...};
}
constexpr int kParts = kPairs / kLanes;  // passes over the 32 outputs of a panel, as many as the vectors hold
constexpr auto kTiles = tiles<1>(std::make_integer_sequence<int, kRows>());
constexpr auto kWholeTiles = tiles<kParts>(std::make_integer_sequence<int, kWholeRows>());

// A slice of a panel, read by the first of ``passes`` from memory and by the others from the cache; those fetch what
// comes ``next``, each its share, so that memory is never waited for while there is something to compute.
struct Slice {
    const uint32_t *w, *next;
    long depth, passes;
    Fetch fetch(long pass) const {
        if (passes == 1) return {w + kAhead * kPairs, kRun};
        const int each = int((kRun + passes - 1) / passes);
        return {next + pass * each * (depth / kRun) * kPairs, pass * each < kRun ? each : 0};
    }
};

// Passes over a slice for ``blocks`` blocks of altogether ``rows`` rows.
inline long passes(long rows, long blocks) { return rows <= kWholeRows ? 1 : blocks * kParts; }

// Block ``b`` of the rows times a slice.
inline void multiply(long rows, long b, const float* x, const Slice& s, float* sums, bool first) {
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

inline long padded(long inputs) { return (inputs + kRun - 1) / kRun * kRun; }

// Block ``b`` of x, widened, at ``to`` + its first row * padded(inputs): [inputs / 16][its rows][16].
void lay_out(const Call& c, const Blocks& blocks, long b, float* to) {
    const long first = blocks.start(b), size = blocks.size(b);
    to += first * padded(c.inputs);
    for (long r = 0; r < size; ++r) {
        const bf16* from = c.x + (first + r) * c.stride;
        float* at = to + r * kRun;
        long k = 0;
        for (; k + kRun <= c.inputs; k += kRun, at += size * kRun)
            for (int i = 0; i < kRun; i += kLanes) store(at + i, widen(load<Halves>(from + k + i)));
        for (; k < c.inputs; ++k) at[k % kRun] = widen(from[k]);
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

// Panels begin to end, one after the other or ``sideways``: kDepth inputs of all of them, then the next kDepth,
// so that the slice of x stays in the cache. ``sums`` has room for the rows of one panel, or of all.
void multiply_panels(const Call& c, const Blocks& blocks, const float* x, float* sums, long begin, long end,
                     bool sideways) {
    const long row = padded(c.inputs), tiles = c.rows * kWidth;
    const long group = sideways ? end - begin : 1;
    for (; begin < end; begin += group) {
        for (long k = 0; k < c.inputs; k += kDepth) {
            const long depth = std::min<long>(kDepth, c.inputs - k);
            for (long p = begin; p < begin + group; ++p) {
                const uint32_t* w = c.panel(p) + k * kPairs;
                const uint32_t* next = group > 1 ? w + c.inputs * kPairs : w + depth * kPairs;
                const Slice slice{w, next, depth, passes(c.rows, blocks.count)};
                for (long b = 0; b < blocks.count; ++b) {
                    const long first = blocks.start(b), size = blocks.size(b);
                    float* at = sums + (p - begin) * tiles + first * kWidth;
                    multiply(size, b, x + first * row + k * size, slice, at, k == 0);
                    if (k + depth == c.inputs) finish(c, p, at, first, size);
                }
            }
        }
    }
}

thread_local Scratch own_x, own_sums;

// One piece of the rows. Threads take a few panels at a time, so that one that is held up holds up no other.
void run(const Call& c, int threads) {
    const Blocks blocks(c.rows);
    const long count = c.count(), floats = c.rows * padded(c.inputs);
    const bool shared = c.rows > kOwnRows, sideways = floats > kSliceFloats;
    const long grain = std::clamp<long>(count / (threads * 8), 1, c.rows <= kOwnRows ? 16 : kGroup);
    float* together = shared ? own_x.of(floats) : nullptr;
    std::atomic<long> taken{0};
#pragma omp parallel num_threads(threads)
    {
        float* x = shared ? together : own_x.of(floats);
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

// Whole panels of 32 outputs: weight [outputs, inputs] -> [ceil(outputs / 32), inputs, 32], zeros behind the last.
MMSERVE_EXPORT void linear_pack(const bf16* weight, long outputs, long inputs, bf16* panels, int threads) {
    const long count = (outputs + kWidth - 1) / kWidth;
    ask_for_large_pages(panels, count * inputs * kWidth * sizeof(bf16));
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < count; ++p) {
        const long width = std::min<long>(kWidth, outputs - p * kWidth);
        const bf16* from = weight + p * kWidth * inputs;
        bf16* to = panels + p * kWidth * inputs;
        for (long k = 0; k < inputs; ++k)
            for (int j = 0; j < kWidth; ++j)
                to[k * kWidth + j % kPairs * 2 + j / kPairs] = j < width ? from[j * inputs + k] : bf16(0);
    }
}

// y [rows, outputs] = act(x @ weight.T + bias), x [rows, inputs] with ``stride`` elements from row to row; bias may
// be null. y lies in one piece.
MMSERVE_EXPORT void linear_run(const bf16* x, long stride, long rows, long inputs, const bf16* panels, long outputs,
                               const bf16* bias, int act, bf16* y, int threads) {
    if (outputs * inputs * (1 + rows / 16) <= kAlone) threads = 1;
    const long most = std::clamp<long>(kPieceFloats / inputs, 8 * kRows, 36 * kRows);
    const long pieces = (rows + most - 1) / most;
    for (long i = 0; i < pieces; ++i) {
        const long first = i * rows / pieces, end = (i + 1) * rows / pieces;
        run({x + first * stride, stride, end - first, inputs, reinterpret_cast<const uint32_t*>(panels), outputs,
             bias, act, y + first * outputs},
            threads);
    }
}

MMSERVE_RECORDED(linear_run)
