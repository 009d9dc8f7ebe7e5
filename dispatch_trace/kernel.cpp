// Statistics and sketch of a tensor in one pass: the compiled twin of moments.py, chunks.py and sketch.py. And the
// difference of two.
//
// Guarantees: counts, min, max and the sketch have the bits of the plain path, sums agree to 1e-6 of `abs_sum`.
// Nothing is allocated and no state is kept but the table of signs, so any thread may call at any time.
// kernel_build.py compiles this for the machine, and passes K, BLOCK, BLOCKS, LENGTHS and the seeds of sketch.py.
#include "kernel_compare.h"
#include "kernel_moments.h"
#include "kernel_sketch.h"

namespace {

struct Part {
    const void* data;
    int64_t n, kind;
};

// Each reads a block: `read` takes it into the totals and returns what is to be folded, `widen` only gives its values.

template <class T>
struct Floats {
    using Input = T;
    using Folded = T;
    T spare[BLOCK];
    const T* widen(const T* x, int64_t) { return x; }
    const T* read(Totals& t, const T* x, int64_t n) { return add_floats(t, x, n, spare); }
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
