// Numbers by their bits, and the 16-bit formats.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace {

template <class To, class From>
inline To bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits");
    To bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

template <class T>
using Bits = typename std::conditional<sizeof(T) == 4, uint32_t, uint64_t>::type;

// x, negated where sign is 128: multiplying by +-1 gives the same bits.
template <class T>
inline T signed_by(T x, uint8_t sign) {
    return bits_of<T>(Bits<T>(bits_of<Bits<T>>(x) ^ (Bits<T>(sign) << (8 * sizeof(T) - 8))));
}

template <class T>
inline T least(T a, T b) {
    return a < b ? a : b;
}

template <class T>
inline T greatest(T a, T b) {
    return a > b ? a : b;
}

// Subnormal numbers are values like any others, also where the program has them flushed to zero.
struct Ieee {
#if defined(__SSE__)
    unsigned before = _mm_getcsr();
    explicit Ieee(unsigned mode = 0x1F80) { _mm_setcsr(mode); }
    ~Ieee() { _mm_setcsr(before); }
#else
    explicit Ieee(unsigned = 0) {}
#endif
};
constexpr unsigned FLUSHED = 0x9F80;  // results that are subnormal become zero; some processors are slow with them

// Values of 16 bits as floats.
struct Bfloat16 {
    static void widen(float* __restrict wide, const uint16_t* __restrict x, int64_t n) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) wide[i] = bits_of<float>(uint32_t(x[i]) << 16);
    }
};

inline float float16_value(uint16_t x) {
    const uint32_t size = x & 0x7FFFu, sign = uint32_t(x & 0x8000u) << 16;
    const float value = bits_of<float>(size << 13) * 0x1p112f;  // between the exponents' biases; exact
    return bits_of<float>((size < 0x7C00u ? bits_of<uint32_t>(value) : size << 13 | 0x7F800000u) | sign);
}

struct Float16 {
    static void widen(float* __restrict wide, const uint16_t* __restrict x, int64_t n) {
        int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
        for (; i < n; i++) wide[i] = float16_value(x[i]);
    }
};

}  // namespace
