// Kernels called by a recording: each has a second entry, NAME_recorded, that takes its arguments as words.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace mmserve {

using Word = uint64_t;  // a pointer, a whole number, or the bits of a float

template <class T> inline T argument(Word word) {
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(word);
    else if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<int64_t>(word));
    else {
        static_assert(std::is_same_v<T, float>, "no kernel takes anything else");
        const uint32_t bits = static_cast<uint32_t>(word);
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
}

template <class R, class... A, size_t... I>
inline bool call(R (*kernel)(A...), const Word* words, std::index_sequence<I...>) {
    if constexpr (std::is_same_v<R, bool>) return kernel(argument<A>(words[I])...);
    else return kernel(argument<A>(words[I])...), true;
}

template <class R, class... A> inline bool call(R (*kernel)(A...), const Word* words) {
    return call(kernel, words, std::index_sequence_for<A...>());
}

}  // namespace mmserve

// False where the kernel says that it could not.
#define MMSERVE_RECORDED(NAME) \
    MMSERVE_EXPORT bool NAME##_recorded(const mmserve::Word* words) { return mmserve::call(NAME, words); }
