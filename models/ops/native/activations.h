// What the linear layers apply to their sums.

#pragma once

#include "common.h"

namespace mmserve {

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

// x * Phi(x). erfc(z) = t * exp(-z^2 + P(t)), t = 1 / (1 + z / 2); P by Chebyshev interpolation, 8e-7 relative.
inline Floats gelu(Floats x) {
    constexpr float p[] = {-1.26544058f, 0.997983456f, 0.397944033f, -0.0533622168f,
                           0.376357377f, -1.03015518f, 0.768512785f, -0.191840470f};
    const Floats z = (x < 0.0f ? -x : x) * 0.707106781f, t = 1.0f / (1.0f + 0.5f * z);
    Floats sum = t * p[7] + p[6];
    for (int i = 5; i >= 0; --i) sum = sum * t + p[i];
    const Floats tail = 0.5f * t * exp(sum - z * z);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

// 0.5 x (1 + tanh(u)) = x * sigmoid(2 u)
inline Floats gelu_tanh(Floats x) { return x * sigmoid(1.59576912f * x * (1.0f + 0.044715f * x * x)); }

// The numbers are those of ACTS in linear.py, which int8.py uses too.
inline Floats activated(Floats x, int act) {
    switch (act) {
        case 1: return gelu(x);
        case 2: return gelu_tanh(x);
        case 3: return x * sigmoid(x);
        case 4: return x * sigmoid(1.702f * x);
        default: return x;
    }
}

}  // namespace mmserve
