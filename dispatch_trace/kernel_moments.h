// Sums, bounds and counts of a block of values, as moments.py has them.
#pragma once

#include "kernel_numbers.h"

namespace {

// Mirrored by kernel_build.py. Sums of integers are high * 2^32 + low.
struct Totals {
    int64_t n, nan, posinf, neginf, zeros;
    double low, high, sum, abs_sum, sq_sum, quad_sum;
    int64_t int_low, int_high;  // of uint64 the bits
    int64_t sum_high, sum_low, abs_high, abs_low;
};
const Totals nothing = {0, 0, 0, 0, 0, INFINITY, -INFINITY, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};

// As `add_floats`, one at a time; gives a copy with zeros for what is not finite.
template <class T>
void add_odd(Totals& t, const T* x, int64_t n, T* __restrict clean) {
    double sum = 0, abs_sum = 0, sq_sum = 0, quad_sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const T value = x[i];
        t.nan += value != value;
        t.posinf += value == T(INFINITY);
        t.neginf += value == T(-INFINITY);
        const bool finite = value - value == 0;
        clean[i] = finite ? value : T(0);
        if (!finite) continue;
        const double d = double(value), square = d * d;
        t.zeros += value == 0;
        t.low = least(d, t.low);
        t.high = greatest(d, t.high);
        sum += d;
        abs_sum += std::fabs(d);
        sq_sum += square;
        quad_sum += square * square;
    }
    t.n += n;
    t.sum += sum;
    t.abs_sum += abs_sum;
    t.sq_sum += sq_sum;
    t.quad_sum += quad_sum;
}

// What is added up of a block of floats, and its bounds.
template <class T>
struct Sums {
    double sum, abs_sum, sq_sum, quad_sum;
    T low, high;
    int64_t zeros;
};

template <class T>
Sums<T> sums_of(const T* x, int64_t n) {
    double sum = 0, abs_sum = 0, sq_sum = 0, quad_sum = 0;
    T low = T(INFINITY), high = T(-INFINITY);
    Bits<T> zeros = 0;
#pragma omp simd reduction(+ : sum, abs_sum, sq_sum, quad_sum, zeros) reduction(min : low) reduction(max : high)
    for (int64_t i = 0; i < n; i++) {
        const double d = double(x[i]), square = d * d;
        sum += d;
        abs_sum += std::fabs(d);
        sq_sum += square;
        quad_sum += square * square;
        zeros += x[i] == 0;
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    return {sum, abs_sum, sq_sum, quad_sum, low, high, int64_t(zeros)};
}

// The same in single precision, of eight at a time: what is lost in such a sum is less than 5e-7 of that of the sizes.
// Where the largest is not too small, what vanishes of the fourth powers does not count either.
constexpr int64_t LANES = 8, FEW = 8 * LANES;
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Bools __attribute__((vector_size(4 * LANES)));

#if defined(__AVX__)
inline Lanes least(Lanes a, Lanes b) { return Lanes(_mm256_min_ps(__m256(a), __m256(b))); }
inline Lanes greatest(Lanes a, Lanes b) { return Lanes(_mm256_max_ps(__m256(a), __m256(b))); }
#else
inline Lanes least(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes greatest(Lanes a, Lanes b) { return a > b ? a : b; }
#endif

inline bool single_is_enough(const Sums<float>& found) {
    const float largest = greatest(-found.low, found.high);
    return (largest > 0x1p-20f && largest < 0x1p30f) || largest == 0;
}

struct Bounds {
    Lanes low, high;
    Bools zeros;
};

// Sums of FEW values, lane by lane: of themselves, their sizes, squares and fourth powers.
inline void add_few(Lanes* __restrict sums, Bounds& bounds, const float* x) {
    Lanes sum = {}, abs_sum = {}, sq_sum = {}, quad_sum = {};
    Bounds b = bounds;
    for (int64_t j = 0; j < FEW; j += LANES) {
        Lanes d;
        std::memcpy(&d, x + j, sizeof(d));
        const Lanes square = d * d;
        sum += d;
        abs_sum += Lanes(Bools(d) & 0x7FFFFFFF);
        sq_sum += square;
        quad_sum += square * square;
        b.zeros -= d == 0;
        b.low = least(d, b.low);
        b.high = greatest(d, b.high);
    }
    sums[0] = sum;
    sums[1] = abs_sum;
    sums[2] = sq_sum;
    sums[3] = quad_sum;
    bounds = b;
}

Sums<float> single_sums_of(const float* x, int64_t n) {
    double sums[4 * LANES] = {};
    Lanes part[4];
    float parts[4 * LANES];
    Bounds bounds = {Lanes{} + INFINITY, Lanes{} - INFINITY, {}};
    const Ieee flushed(FLUSHED);
    int64_t i = 0;
    for (; i + FEW <= n; i += FEW) {
        add_few(part, bounds, x + i);
        std::memcpy(parts, part, sizeof(parts));
#pragma omp simd
        for (int64_t k = 0; k < 4 * LANES; k++) sums[k] += double(parts[k]);
    }
    Sums<float> found = sums_of(x + i, n - i);
    for (int64_t k = 0; k < LANES; k++) {
        found.sum += sums[k];
        found.abs_sum += sums[LANES + k];
        found.sq_sum += sums[2 * LANES + k];
        found.quad_sum += sums[3 * LANES + k];
        found.zeros += bounds.zeros[k];
        found.low = least(bounds.low[k], found.low);
        found.high = greatest(bounds.high[k], found.high);
    }
    return found;
}

inline Sums<double> sums_in_range(const double* x, int64_t n) { return sums_of(x, n); }

inline Sums<float> sums_in_range(const float* x, int64_t n) {
    const Sums<float> found = single_sums_of(x, n);
    return single_is_enough(found) ? found : sums_of(x, n);
}

// Adds n floats; returns them, or spare where some had to be replaced by zeros.
template <class T>
const T* add_floats(Totals& t, const T* x, int64_t n, T* spare) {
    const Sums<T> found = sums_in_range(x, n);
    if (found.abs_sum - found.abs_sum != 0) {  // not finite, as one of them at least
        add_odd(t, x, n, spare);
        return spare;
    }
    t.n += n;
    t.zeros += found.zeros;
    t.low = least(double(found.low), t.low);
    t.high = greatest(double(found.high), t.high);
    t.sum += found.sum;
    t.abs_sum += found.abs_sum;
    t.sq_sum += found.sq_sum;
    t.quad_sum += found.quad_sum;
    return x;
}

// Adds n integers; gives them as doubles.
template <class T>
void add_integers(Totals& t, const T* __restrict x, int64_t n, double* __restrict wide) {
    constexpr int shift = sizeof(T) == 8 ? 32 : 0;  // 64 bits are summed in halves, the others as they are
    double sq_sum = 0, quad_sum = 0;
    int64_t zeros = 0, sum_high = 0, sum_low = 0, abs_high = 0, abs_low = 0;
    T low = x[0], high = x[0];
#pragma omp simd reduction(+ : sq_sum, quad_sum, zeros, sum_high, sum_low, abs_high, abs_low) \
    reduction(min : low) reduction(max : high)
    for (int64_t i = 0; i < n; i++) {
        const double d = double(x[i]), square = d * d;
        const uint64_t size = std::is_signed<T>::value && x[i] < 0 ? -uint64_t(x[i]) : uint64_t(x[i]);
        wide[i] = d;
        sq_sum += square;
        quad_sum += square * square;
        zeros += x[i] == 0;
        sum_high += shift ? int64_t(x[i] >> shift) : 0;
        sum_low += shift ? int64_t(uint64_t(x[i]) & 0xFFFFFFFFu) : int64_t(x[i]);
        abs_high += int64_t(size >> 32);
        abs_low += int64_t(size & 0xFFFFFFFFu);
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    if (!t.n || low < T(t.int_low)) t.int_low = int64_t(low);
    if (!t.n || high > T(t.int_high)) t.int_high = int64_t(high);
    t.n += n;
    t.zeros += zeros;
    t.sq_sum += sq_sum;
    t.quad_sum += quad_sum;
    t.sum_high += sum_high;
    t.sum_low += sum_low;
    t.abs_high += abs_high;
    t.abs_low += abs_low;
}

}  // namespace
