// Statistics and sketch of a tensor in one pass: the compiled twin of moments.py, chunks.py and sketch.py. And the
// difference of two, row by row: that of align/row_sums.py.
//
// Guarantees: counts, min, max and the sketch have the bits of the plain path; sums are taken in double.
// Nothing is allocated and no state is kept but the table of signs, so any thread may call at any time.
// kernel_build.py compiles this for the machine, and passes K, BLOCK, BLOCKS, LENGTHS and the seeds of sketch.py.

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

constexpr int64_t lengths[] = {LENGTHS};
constexpr int64_t half = lengths[0];  // what the first folding step leaves of a block
constexpr int64_t chunk_size = int64_t(BLOCK) * BLOCKS;
uint8_t position_signs[BLOCKS][BLOCK];  // 128 for a minus

// Mirrored by kernel_build.py. Sums of integers are high * 2^32 + low.
struct Totals {
    int64_t n, nan, posinf, neginf, zeros;
    double low, high, sum, abs_sum, sq_sum, quad_sum;
    int64_t int_low, int_high;  // of uint64 the bits
    int64_t sum_high, sum_low, abs_high, abs_low;
};
const Totals nothing = {0, 0, 0, 0, 0, INFINITY, -INFINITY, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};

struct Part {
    const void* data;
    int64_t n, kind;
};

inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

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

// -- Folding ---------------------------------------------------------------------------------------

// Folds n <= BLOCK values into out [half], of which the first min(n, K) are the result.
template <class T>
void fold(T* __restrict out, const T* __restrict x, int64_t n, const uint8_t* __restrict signs) {
    const int64_t over = n > half ? n - half : 0, kept = n - over;
#pragma omp simd
    for (int64_t i = 0; i < over; i++) out[i] = x[i] + signed_by(x[half + i], signs[half + i]);
    std::memcpy(out + over, x + over, size_t(kept - over) * sizeof(T));
    n = kept;
    for (const int64_t length : lengths) {
        if (n <= length) continue;
#pragma omp simd
        for (int64_t i = 0; i < n - length; i++) out[i] += signed_by(out[length + i], signs[length + i]);
        n = length;
    }
}

// Folds a block into its row: the first min(n, K) of row [K].
template <class T>
void fold_block(double* row, const T* x, int64_t n, int64_t block) {
    T folded[half];
    fold(folded, x, n, position_signs[block]);
    for (int64_t i = 0; i < least(n, int64_t(K)); i++) row[i] = double(folded[i]);
}

// Adds the rows of a chunk of n values, laid end to end, to the sketch [K], unless they are not finite.
bool add_rows(double* __restrict sketch, double* __restrict rows, int64_t n, int64_t chunk) {
    const int64_t over = n % BLOCK;
    n = n / BLOCK * K + least(over, int64_t(K));
    for (int64_t q = 0; q * K < n; q++) {
        if (!chunk && !q) continue;
        const uint32_t seed = mix(uint32_t(SEED_BLOCK) + uint32_t(chunk * BLOCKS + q));
        double* row = rows + q * K;
        const int64_t count = least(n - q * K, int64_t(K));
#pragma omp simd
        for (int64_t p = 0; p < count; p++) row[p] = signed_by(row[p], uint8_t(mix(seed + uint32_t(p)) >> 31 << 7));
    }
    for (const int64_t length : lengths) {
        if (n <= length) continue;
#pragma omp simd
        for (int64_t i = 0; i < n - length; i++) rows[i] += rows[length + i];
        n = length;
    }
    double zero = 0;
    for (int64_t i = 0; i < n; i++) zero += rows[i] - rows[i];
    if (zero != 0) return false;
    for (int64_t i = 0; i < n; i++) sketch[i] += rows[i];
    return true;
}

void finish(float* out, const double* sketch) {
    const double most = 3.4028234663852886e38;
    for (int k = 0; k < K; k++) {
        double x = std::isnan(sketch[k]) ? 0.0 : sketch[k];
        x = x > most ? most : x < -most ? -most : x;
        out[k] = float(x + 0.0);
    }
}

// -- Moments ---------------------------------------------------------------------------------------

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

// -- Kinds of values -------------------------------------------------------------------------------

// Each reads a block: `read` takes it into the totals and returns what is to be folded, `widen` only gives its values.

template <class T>
struct Floats {
    using Input = T;
    using Folded = T;
    T spare[BLOCK];
    const T* widen(const T* x, int64_t) { return x; }
    const T* read(Totals& t, const T* x, int64_t n) { return add_floats(t, x, n, spare); }
};

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

template <class Half>
struct Halves {
    using Input = uint16_t;
    using Folded = float;
    float spare[BLOCK], wide[BLOCK];
    const float* widen(const uint16_t* x, int64_t n) {
        Half::widen(wide, x, n);
        return wide;
    }
    const float* read(Totals& t, const uint16_t* x, int64_t n) { return add_floats(t, widen(x, n), n, spare); }
};

template <class T>
struct Whole {
    using Input = T;
    using Folded = double;
    double wide[BLOCK];
    const double* widen(const T* x, int64_t n) {
        for (int64_t i = 0; i < n; i++) wide[i] = double(x[i]);
        return wide;
    }
    const double* read(Totals& t, const T* x, int64_t n) {
        add_integers(t, x, n, wide);
        return wide;
    }
};

// A tensor of n contiguous values of one kind, or the part of one that begins with a chunk.
template <class Kind>
struct Values {
    using Input = typename Kind::Input;
    const Input* data;
    int64_t n;

    int64_t count(int64_t block) const { return least(n - block * BLOCK, int64_t(BLOCK)); }

    // One block, with its row [K] where a sketch is wanted.
    void read(Totals& t, double* row, int64_t block) const {
        Kind kind;
        const auto* clean = kind.read(t, data + block * BLOCK, count(block));
        if (row) fold_block(row, clean, count(block), block % BLOCKS);
    }

    // Adds the rows of the chunk that begins with this block; `chunk` is its number in the whole tensor.
    void fold(double* sketch, double* rows, int64_t block, int64_t chunk) const {
        const int64_t size = least(n - block * BLOCK, chunk_size);
        if (add_rows(sketch, rows, size, chunk)) return;
        Kind kind;  // sums beyond 3.4e38: in double
        double wide[BLOCK];
        for (int64_t q = 0; q * BLOCK < size; q++) {
            const auto* read = kind.widen(data + (block + q) * BLOCK, count(block + q));
            for (int64_t i = 0; i < count(block + q); i++) wide[i] = read[i] - read[i] == 0 ? double(read[i]) : 0.0;
            fold_block(rows + q * K, wide, count(block + q), q);
        }
        add_rows(sketch, rows, size, chunk);
    }

    // False where fourth powers leave the range of double.
    static bool is_within(const Totals& t) {
        if (!std::is_same<Input, double>::value) return true;
        const double largest = greatest(-t.low, t.high);
        return t.low > t.high || largest == 0 || (largest > 1e-70 && largest < 1e70);
    }
};

// False where the plain path has to do it.
template <class Kind>
bool add(Totals& t, double* sketch, const void* data, int64_t n, int64_t chunk) {
    const Values<Kind> values = {static_cast<const typename Kind::Input*>(data), n};
    double rows[BLOCKS * K];
    for (int64_t block = 0; block * BLOCK < n; block++) {
        const int64_t q = block % BLOCKS;
        values.read(t, sketch ? rows + q * K : nullptr, block);
        if (q < BLOCKS - 1 && (block + 1) * BLOCK < n) continue;
        if (!values.is_within(t)) return false;
        if (sketch) values.fold(sketch, rows, block - q, chunk + block / BLOCKS);
    }
    return true;
}

using Add = bool (*)(Totals&, double*, const void*, int64_t, int64_t);
// In the order of kernel_build.py, but for kinds of one byte, which go by codes.
constexpr Add kinds[] = {
    add<Floats<float>>,  add<Halves<Bfloat16>>, add<Halves<Float16>>, add<Floats<double>>,  add<Whole<int16_t>>,
    add<Whole<int32_t>>, add<Whole<int64_t>>,   add<Whole<uint16_t>>, add<Whole<uint32_t>>, add<Whole<uint64_t>>,
};

// -- Differences -----------------------------------------------------------------------------------

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

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void dispatch_trace_init() {
    for (uint32_t q = 0; q < BLOCKS; q++)
        for (uint32_t p = 0; p < BLOCK; p++)
            position_signs[q][p] = uint8_t(mix(uint32_t(SEED_POSITION) + q * BLOCK + p) >> 31 << 7);
}

// Takes in n contiguous values that begin with a chunk. totals: running; sketch: running [K], or null.
// Returns 0 where the plain path has to do it; totals and sketch are then of no use.
EXPORT int dispatch_trace_add(const void* data, int64_t n, int64_t kind, int64_t chunk, Totals* totals, double* sketch) {
    Ieee ieee;
    return kinds[kind](*totals, sketch, data, n, chunk);
}

// Takes in values of 8 bits, by how often each code occurs. values: [256], of each code, 0 where not finite.
// Returns as dispatch_trace_add.
EXPORT int dispatch_trace_add_codes(const uint8_t* data, int64_t n, int64_t chunk, const float* values,
                                    int64_t* counts, double* sketch) {
    Ieee ieee;
    float wide[BLOCK];
    for (int64_t begin = 0; begin < n; begin += chunk_size, chunk++) {
        const int64_t size = least(n - begin, chunk_size);
        double rows[BLOCKS * K];
        for (int64_t q = 0; q * BLOCK < size; q++) {
            const uint8_t* x = data + begin + q * BLOCK;
            const int64_t count = least(size - q * BLOCK, int64_t(BLOCK));
            uint32_t tables[4][256] = {};  // in one table equal codes in a row would wait for each other
            for (int64_t i = 0; i < count; i++) tables[i & 3][x[i]]++;
            for (int c = 0; c < 256; c++) counts[c] += int64_t(tables[0][c]) + tables[1][c] + tables[2][c] + tables[3][c];
            if (!sketch) continue;
            for (int64_t i = 0; i < count; i++) wide[i] = values[x[i]];
            fold_block(rows + q * K, wide, count, q);
        }
        if (sketch && !add_rows(sketch, rows, size, chunk)) return 0;
    }
    return 1;
}

// Rounds sums [K] to what is stored: float32, saturated, without negative zeros.
EXPORT void dispatch_trace_finish(float* out, const double* sketch) { finish(out, sketch); }

// Whole tensors at once. totals: [count]; sketches: [count, K] or null; done: [count], 0 as in dispatch_trace_add.
EXPORT void dispatch_trace_add_many(const Part* parts, int64_t count, Totals* totals, float* sketches, uint8_t* done) {
    Ieee ieee;
    for (int64_t i = 0; i < count; i++) {
        double sketch[K] = {};
        totals[i] = nothing;
        done[i] = kinds[parts[i].kind](totals[i], sketches ? sketch : nullptr, parts[i].data, parts[i].n, 0);
        if (sketches) finish(sketches + i * K, sketch);
    }
}

// Squared L2 norms of target - ref, and of ref, for each row of two contiguous [rows, width]. Elements of which one is
// not below `extreme` in size are left out. Returns how many of those differ in kind (NaN, or by sign); -1 where these
// kinds of values are not compared here.
EXPORT int64_t dispatch_trace_compare(const void* ref, int64_t ref_kind, const void* target, int64_t target_kind,
                                      int64_t rows, int64_t width, double extreme, double* errors, double* norms) {
    Ieee ieee;
    const Compare compare = compare_of(ref_kind, target_kind);
    return compare ? compare(ref, target, rows, width, extreme, errors, norms) : -1;
}
