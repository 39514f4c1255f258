// Rows of float or bf16 numbers, read and written as vectors of floats; the last vector may be partly filled.

#pragma once

#include <algorithm>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "common.h"

namespace mmserve {

inline Floats read(const float* from) { return load<Floats>(from); }
inline void write(float* to, Floats x) { store(to, x); }
#if defined(__AVX512F__)
// What GCC makes of the vector types' conversions is twice as long: it goes by halves.
inline Floats widened(__m256i x) { return as<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m256i narrowed(Floats x) {
    const Words bits = as<Words>(x), upper = bits >> 16;
    const Words nearest = (bits + 0x7fff + (upper & 1)) >> 16;
    return _mm512_cvtepi32_epi16(as<__m512i>(x != x ? (upper | 0x40) : nearest));
}
inline Floats read(const bf16* from) { return widened(load<__m256i>(from)); }
inline void write(bf16* to, Floats x) { store(to, narrowed(x)); }
#else
inline Floats read(const bf16* from) { return widen(load<Halves>(from)); }
inline void write(bf16* to, Floats x) { store(to, narrow(x)); }
#endif

// The first n lanes, 0 < n < kLanes; those that are not read are 0.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline Floats read(const float* from, int n) {
    return as<Floats>(_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), from));
}
inline Floats read(const bf16* from, int n) {
    return widened(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), from));
}
#else
inline Floats read(const float* from, int n) {
    Floats x{};
    std::memcpy(&x, from, n * sizeof *from);
    return x;
}
inline Floats read(const bf16* from, int n) {
    Halves x{};
    std::memcpy(&x, from, n * sizeof *from);
    return widen(x);
}
#endif
inline void write(float* to, Floats x, int n) { std::memcpy(to, &x, n * sizeof *to); }
inline void write(bf16* to, Floats x, int n) {
    bf16 lane[kLanes];
    write(lane, x);
    std::memcpy(to, lane, n * sizeof *to);
}

// All of a row of n numbers: ``body(i, lanes)`` for the vectors at i = 0, kLanes, ...; only the last may have fewer.
template <class Body> inline __attribute__((always_inline)) void along(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
    if (i < n) body(i, int(n - i));
}
template <class T> inline Floats part(const T* from, int lanes) {
    return lanes == kLanes ? read(from) : read(from, lanes);
}
template <class T> inline void put(T* to, Floats x, int lanes) {
    if (lanes == kLanes) write(to, x);
    else write(to, x, lanes);
}

// What is left of x after it was kept as a T.
inline Floats rounded(Floats x, const float*) { return x; }
inline Floats rounded(Floats x, const bf16*) {
    const Words bits = as<Words>(x), nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return as<Floats>(x != x ? bits : nearest);
}

// The larger of each lane; b where one of them is no number.
inline Floats most_of(Floats a, Floats b) {
#if defined(__AVX512F__)
    return as<Floats>(_mm512_max_ps(as<__m512>(a), as<__m512>(b)));
#else
    return a > b ? a : b;
#endif
}

// Always in the same order, halves onto halves.
inline float sum(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(as<__m512>(x));
#else
    float lane[kLanes];
    store(lane, x);
    for (int half = kLanes / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
#endif
}

}  // namespace mmserve
