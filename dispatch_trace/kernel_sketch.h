// The fold of sketch.py, block by block.
#pragma once

#include "kernel_numbers.h"

namespace {

constexpr int64_t lengths[] = {LENGTHS};
constexpr int64_t half = lengths[0];  // what the first folding step leaves of a block
constexpr int64_t chunk_size = int64_t(BLOCK) * BLOCKS;
uint8_t position_signs[BLOCKS][BLOCK];  // 128 for a minus

inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

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

}  // namespace
