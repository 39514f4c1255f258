// Makes recorded calls of kernels again, one after the other.

#include "common.h"
#include "recorded.h"

struct Call {
    bool (*kernel)(const mmserve::Word*);
    const mmserve::Word* words;
};

// How many calls succeeded: all, or those before the first whose kernel says that it could not.
MMSERVE_EXPORT int64_t replay(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (!calls[i].kernel(calls[i].words)) return i;
    return count;
}
