// The difference of two tensors, row by row: the compiled twin of align/row_sums.py.
#pragma once

#include "kernel_numbers.h"

namespace {

constexpr int64_t compared_at_once = 1024;  // small enough for the nearest cache, which reads them several times

// Each kind of values: `widen` gives n <= compared_at_once of them as floats or doubles. `size` is an integer that
// grows with the absolute value, infinities and NaN largest; `limit` that from which on it is not below `extreme`.
struct OfFloat32 {
    using Input = float;
    using Size = uint32_t;
    const float* widen(const float* x, int64_t) { return x; }
    static Size size(float x) { return bits_of<uint32_t>(x) & 0x7FFFFFFFu; }
    static Size limit(double extreme) {
        const float near = float(extreme);
        return size(double(near) < extreme ? std::nextafterf(near, INFINITY) : near);
    }
};

inline uint16_t limit_of(Bfloat16, double extreme) { return uint16_t((OfFloat32::limit(extreme) + 0xFFFFu) >> 16); }
inline uint16_t limit_of(Float16, double) { return 0x7C00u; }  // no finite one is that large

template <class Kind>
struct OfHalf {
    using Input = uint16_t;
    using Size = uint16_t;
    float wide[compared_at_once];
    const float* widen(const uint16_t* x, int64_t n) {
        Kind::widen(wide, x, n);
        return wide;
    }
    static Size size(uint16_t x) { return x & 0x7FFFu; }
    static Size limit(double extreme) { return limit_of(Kind(), extreme); }
};

using OfBfloat16 = OfHalf<Bfloat16>;
using OfFloat16 = OfHalf<Float16>;

struct OfFloat64 {
    using Input = double;
    using Size = uint64_t;
    const double* widen(const double* x, int64_t) { return x; }
    static Size size(double x) { return bits_of<uint64_t>(x) & 0x7FFFFFFFFFFFFFFFull; }
    static Size limit(double extreme) { return size(extreme); }
};

template <class T>
struct OfInteger {
    using Input = T;
    using Size = uint8_t;
    double wide[compared_at_once];
    const double* widen(const T* x, int64_t n) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) wide[i] = double(x[i]);
        return wide;
    }
    static Size size(T) { return 0; }
    static Size limit(double) { return 1; }
};

template <class A>
bool is_within(const typename A::Input* x, int64_t n, double extreme) {
    typename A::Size largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; i++) largest = A::size(x[i]) > largest ? A::size(x[i]) : largest;
    return largest < A::limit(extreme);
}

// What an element that is out of bounds stands for; 0 where it is within.
inline double place(double x, double extreme) {
    return std::fabs(x) < extreme ? 0.0 : x != x ? 2.0 : x < 0 ? -1.0 : 1.0;
}

template <class R, class T>
void add_within(const R* r, const T* t, int64_t n, double& error, double& norm) {
    double errors = 0, norms = 0;
#pragma omp simd reduction(+ : errors, norms)
    for (int64_t i = 0; i < n; i++) {
        const double a = double(r[i]), d = double(t[i]) - a;
        errors += d * d;
        norms += a * a;
    }
    error += errors;
    norm += norms;
}

// The same of n values that had 16 bits, in single precision, where that is as good: squares of such values are exact
// in it, and what is lost in a sum of so few is 1e-5 of it at most.
inline bool add_halves(const float* r, const float* t, int64_t n, double& error, double& norm) {
    float errors = 0, norms = 0;
#pragma omp simd reduction(+ : errors, norms)
    for (int64_t i = 0; i < n; i++) {
        const float d = t[i] - r[i];
        errors += d * d;
        norms += r[i] * r[i];
    }
    const auto is_plain = [](float x) { return x > 0x1p-80f && x < 0x1p100f; };
    if (!is_plain(errors) || !is_plain(norms)) return false;
    error += double(errors);
    norm += double(norms);
    return true;
}

template <class Kind>
struct IsHalf : std::false_type {};
template <class Kind>
struct IsHalf<OfHalf<Kind>> : std::true_type {};

// The same, one at a time, of elements some of which are out of bounds: those count by place.
template <class R, class T>
int64_t add_some(const R* r, const T* t, int64_t n, double extreme, double& error, double& norm) {
    int64_t odd = 0;
    for (int64_t i = 0; i < n; i++) {
        const double a = double(r[i]), b = double(t[i]), d = b - a;
        const double first = place(a, extreme), second = place(b, extreme);
        odd += first != second;
        if (first != 0 || second != 0) continue;
        error += d * d;
        norm += a * a;
    }
    return odd;
}

template <class A, class B>
int64_t compare_rows(const void* ref, const void* target, int64_t rows, int64_t width, double extreme, double* errors,
                     double* norms) {
    A first;
    B second;
    const auto* r = static_cast<const typename A::Input*>(ref);
    const auto* t = static_cast<const typename B::Input*>(target);
    int64_t odd = 0;
    for (int64_t row = 0; row < rows; row++) {
        double error = 0, norm = 0;
        for (int64_t begin = 0; begin < width; begin += compared_at_once) {
            const int64_t n = least(width - begin, compared_at_once);
            const auto* a = first.widen(r, n);
            const auto* b = second.widen(t, n);
            if (!is_within<A>(r, n, extreme) || !is_within<B>(t, n, extreme)) {
                odd += add_some(a, b, n, extreme, error, norm);
            } else {
                bool done = false;
                if constexpr (IsHalf<A>::value && IsHalf<B>::value) done = add_halves(a, b, n, error, norm);
                if (!done) add_within(a, b, n, error, norm);
            }
            r += n, t += n;
        }
        errors[row] = error;
        norms[row] = norm;
    }
    return odd;
}

using Compare = int64_t (*)(const void*, const void*, int64_t, int64_t, double, double*, double*);

template <class A>
Compare compare_floats(int64_t target) {
    constexpr Compare found[] = {compare_rows<A, OfFloat32>, compare_rows<A, OfBfloat16>, compare_rows<A, OfFloat16>,
                                 compare_rows<A, OfFloat64>};
    return found[target];
}

template <class T>
constexpr Compare compare_whole = compare_rows<OfInteger<T>, OfInteger<T>>;

Compare compare_of(int64_t ref, int64_t target) {
    constexpr Compare whole[] = {compare_whole<int16_t>,  compare_whole<int32_t>,  compare_whole<int64_t>,
                                 compare_whole<uint16_t>, compare_whole<uint32_t>, compare_whole<uint64_t>,
                                 compare_whole<int8_t>,   compare_whole<uint8_t>};
    if (ref > 3 || target > 3) return ref == target ? whole[ref - 4] : nullptr;
    switch (ref) {
        case 0: return compare_floats<OfFloat32>(target);
        case 1: return compare_floats<OfBfloat16>(target);
        case 2: return compare_floats<OfFloat16>(target);
        default: return compare_floats<OfFloat64>(target);
    }
}

}  // namespace
