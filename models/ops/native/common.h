// What the kernels share: vectors of the CPU's own width, bf16, exp. One source for every CPU by the compiler's
// vector types: + - * and comparisons work lane by lane, and a scalar operand stands in every lane.

#pragma once

#include <cstdint>
#include <cstring>

#define MMSERVE_EXPORT extern "C" __attribute__((visibility("default")))

namespace mmserve {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using bf16 = uint16_t;  // the upper half of a float's bits
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef bf16 Halves __attribute__((vector_size(2 * kLanes)));

// A vector from or to memory of any alignment.
template <class V> inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V> inline void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }

inline Floats all(float x) { return Floats{} + x; }

// The same bits as another type of the same size.
template <class To, class From> inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From), "other sizes are other values");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float widen(bf16 x) { return as<float>(uint32_t(x) << 16); }
inline Floats widen(Halves x) { return as<Floats>(__builtin_convertvector(x, Words) << 16); }

// To the nearest bf16, ties to even; a NaN stays one.
inline bf16 narrow(float x) {
    const uint32_t bits = as<uint32_t>(x);
    return x != x ? bf16((bits >> 16) | 0x40) : bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline Halves narrow(Floats x) {
    const Words bits = as<Words>(x), upper = bits >> 16;
    const Words rounded = (bits + 0x7fff + (upper & 1)) >> 16;
    return __builtin_convertvector(x != x ? (upper | 0x40) : rounded, Halves);
}

// exp within 2 units in the last place: 2^n * exp(r), |r| <= ln(2) / 2, a Taylor polynomial for exp(r).
// 0 below -87.3 and infinity above 88.37, where the last power of two that fits would be exceeded.
inline Floats exp(Floats x) {
    constexpr float low = -87.3f, high = 88.37f, shift = 12582912.0f;  // 1.5 * 2^23: its last bit is worth 1
    const Floats inside = x < low ? all(low) : (x > high ? all(high) : x);
    const Floats shifted = inside * 1.44269504f + shift, n = shifted - shift;
    const Floats r = inside - n * 0.693359375f + n * 2.12194440e-4f;  // ln(2) in two parts
    Floats p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Words power = (as<Words>(shifted) - as<uint32_t>(shift) + 127) << 23;
    const Floats y = p * as<Floats>(power);
    return x < low ? Floats{} : (x > high ? all(__builtin_inff()) : y);
}

}  // namespace mmserve
