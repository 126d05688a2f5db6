/* Inner loops of local training on the processor; ops.py says what each is given and returns.

   Whole numbers come out as from PyTorch's operations, to the bit. Floating-point numbers are computed in an order that
   is written out here, in lanes, so that they do not depend on the width of a processor's registers: compile without
   contraction of products and sums (-ffp-contract=off) and without any "fast" mathematics. */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-vectorize", "vect-cost-model=dynamic")  /* as in -O3, which takes more than twice as long */
#endif

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* A digest of the sources that this is built from: see setup.py. */
const char *sources(void) { return SOURCES; }

#define LANES 16  /* partial sums of a sum; their number, unlike that of a register's, is part of the result */

/* How many bytes registers hold. Wider vectors would go through memory. */
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

#define UNROLL _Pragma("GCC unroll 16")  /* keeps arrays of vectors in registers */
#define BLOCK (4 * LANES)  /* samples of a client, whose operations do not wait for each other */
#define AHEAD 24  /* rows of tables asked for before they are needed */

/* ---- counter-based random numbers: see rng.py ---- */

static const uint64_t GAMMA = 0x9E3779B97F4A7C15ULL;

static inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

void mixed(uint64_t *numbers, int64_t n) {
    for (int64_t i = 0; i < n; i++) numbers[i] = mix(numbers[i]);
}

/* The key of a client's stream, given the key without it. */
static inline uint64_t of_client(uint64_t key, int64_t name) { return mix(key + (uint64_t)(name + 1) * GAMMA); }

typedef int32_t Ints __attribute__((vector_size(BYTES), aligned(4), may_alias));

enum { INTS = BYTES / sizeof(int32_t), RANKED = 4 * INTS };

#define STRIDE 16  /* where there are many gaps, draws are compared with one of so many first */
#define MOST_COMPARED 128  /* numbers that each draw is compared with, rather than searched among */

/* How many of n ascending numbers are at most r, without branches to mispredict. */
static inline int64_t at_most(const int32_t *ascending, int64_t n, int32_t r) {
    const int32_t *low = ascending;
    while (n > 1) {
        const int64_t half = n / 2;
        low += half & -(int64_t)(low[half - 1] <= r);
        n -= half;
    }
    return low - ascending + (n == 1 && *low <= r);
}

/* Memory for drawing a client's negatives. */
typedef struct {
    int32_t *gaps, *last;  /* padded to a multiple of STRIDE, and the last of each so many */
    int32_t *drawn, *rank;  /* padded to a multiple of RANKED */
} Draws;

static int draws_begin(Draws *draws, int64_t n_gaps, int64_t most) {
    draws->gaps = malloc((n_gaps + STRIDE) * sizeof(int32_t));
    draws->last = malloc((n_gaps / STRIDE + 1) * sizeof(int32_t));
    draws->drawn = malloc((most + RANKED) * sizeof(int32_t));
    draws->rank = malloc((most + RANKED) * sizeof(int32_t));
    return draws->gaps && draws->last && draws->drawn && draws->rank;
}

static void draws_end(Draws *draws) {
    free(draws->gaps); free(draws->last); free(draws->drawn); free(draws->rank);
}

/* For each number drawn, how many of n others are at most it. */
static inline void ranks_among(const int32_t *others, int64_t n, const int32_t *drawn, int64_t draws, int32_t *rank) {
    if (n > MOST_COMPARED) {
        for (int64_t i = 0; i < draws; i++) rank[i] = (int32_t)at_most(others, n, drawn[i]);
        return;
    }
    for (int64_t i = 0; i < draws; i += RANKED) {
        Ints r[4], count[4] = {{0}};
        UNROLL for (int v = 0; v < 4; v++) r[v] = *(const Ints *)(drawn + i + v * INTS);
        for (int64_t j = 0; j < n; j++)
            UNROLL for (int v = 0; v < 4; v++) count[v] -= r[v] >= others[j];
        UNROLL for (int v = 0; v < 4; v++) *(Ints *)(rank + i + v * INTS) = count[v];
    }
}

/* Make draws all different, so many after the other: the j-th of them counts what the j before it have left, which are
   kept in taken in ascending order. */
static void keep_apart(int32_t *drawn, int64_t draws, int64_t distinct, int32_t *taken) {
    for (int64_t i = 0; i < draws; i++) {
        const int64_t j = i % distinct;
        int64_t before = 0;
        while (before < j && drawn[i] >= taken[before]) { drawn[i]++; before++; }
        memmove(taken + before + 1, taken + before, (j - before) * sizeof *taken);
        taken[before] = drawn[i];
    }
}

/* The first draws of a stream from a client's other items, which are counted between its positives; distinct: so many
   after the other are all different, or 0. */
static __attribute__((noinline)) void draw(Draws *room, uint64_t key, uint64_t others, const int32_t *gaps,
                                           int64_t n_gaps, int64_t draws, int64_t distinct, int64_t *result) {
    int32_t *drawn = room->drawn, *rank = room->rank;
    for (int64_t i = 0; i < draws; i++) {
        const uint64_t before = distinct ? (uint64_t)(i % distinct) : 0, left = others > before ? others - before : 1;
        drawn[i] = (int32_t)(((mix(key + (uint64_t)(i + 1) * GAMMA) >> 32) * left) >> 32);
    }
    if (distinct) keep_apart(drawn, draws, distinct, rank);
    for (int64_t i = draws; i < draws + RANKED; i++) drawn[i] = 0;
    while (n_gaps && gaps[n_gaps - 1] == INT32_MAX) n_gaps--;
    if (n_gaps <= MOST_COMPARED / 2) {
        ranks_among(gaps, n_gaps, drawn, draws, rank);
        for (int64_t i = 0; i < draws; i++) result[i] = (int64_t)drawn[i] + rank[i];
        return;
    }
    int32_t *padded = room->gaps, *last = room->last;
    const int64_t blocks = n_gaps / STRIDE;  /* whole ones */
    memcpy(padded, gaps, n_gaps * sizeof *gaps);
    for (int64_t j = n_gaps; j < (blocks + 1) * STRIDE; j++) padded[j] = INT32_MAX;
    for (int64_t b = 0; b < blocks; b++) last[b] = gaps[b * STRIDE + STRIDE - 1];
    ranks_among(last, blocks, drawn, draws, rank);
    for (int64_t i = 0; i < draws; i++) {
        const int32_t r = drawn[i], *low = padded + (int64_t)rank[i] * STRIDE;
        UNROLL for (int step = STRIDE / 2; step; step /= 2) low += step & -(low[step - 1] <= r);
        result[i] = r + (low - padded);
    }
}

/* Returns 0, or -1 without memory. */
int negatives(const uint64_t *keys, const int64_t *wanted, const int64_t *others, const int32_t *gaps, int64_t n_gaps,
              const int64_t *positives, int64_t width, int64_t clients, int64_t n, int64_t distinct, int64_t *result,
              int64_t stride) {
    Draws draws;
    const int ready = draws_begin(&draws, n_gaps, n);
    for (int64_t c = 0; c < clients && ready; c++) {
        int64_t *row = result + c * stride, mine = wanted[c] < n ? wanted[c] : n;
        draw(&draws, keys[c], (uint64_t)others[c], gaps + c * n_gaps, n_gaps, mine, distinct, row);
        for (int64_t i = mine; i < n; i++) row[i] = positives[c * width];
    }
    draws_end(&draws);
    return ready ? 0 : -1;
}

/* ---- local batches ---- */

/* Memory for dealing a client's samples out to local batches. */
typedef struct {
    uint64_t *key;
    int32_t *begin, *number, *between;
    int64_t *next;
} Deal;

/* Of so many samples' buckets, which hold four each. */
static int bits_of_buckets(int64_t samples) {
    int bits = 1;
    while (((int64_t)4 << bits) < samples) bits++;
    return bits;
}

static int deal_begin(Deal *deal, int64_t samples, int64_t size) {
    const int64_t buckets = (int64_t)1 << bits_of_buckets(samples);
    deal->key = malloc((samples + 1) * sizeof *deal->key);
    deal->begin = malloc((buckets + 1) * sizeof *deal->begin);
    deal->number = malloc(buckets * sizeof *deal->number);
    deal->between = malloc((samples + 1) * sizeof *deal->between);
    deal->next = malloc((samples / size + 2) * sizeof *deal->next);
    return deal->key && deal->begin && deal->number && deal->between && deal->next;
}

static void deal_end(Deal *deal) {
    free(deal->key); free(deal->begin); free(deal->number); free(deal->between); free(deal->next);
}

/* Write the slots of a client's samples by local batch: those in the first columns, and those in the columns from head
   on. */
static __attribute__((noinline)) void deal_out(Deal *deal, uint64_t stream, int64_t first, int64_t head,
                                               int64_t samples, const int64_t *slot, int64_t size, int32_t *row) {
/* The column of a client's i-th sample, and what stands for it in the result. */
#define COLUMN(i) ((i) < first ? (i) : (i) - first + head)
#define SLOT(i) ((int32_t)(slot ? slot[COLUMN(i)] : COLUMN(i)))
    if (samples <= size) {  /* one local batch */
        for (int64_t i = 0; i < samples; i++) row[i] = SLOT(i);
        return;
    }
    /* Keys are uniform, so buckets of their upper bits hold few each; only in those across which a local batch ends are
       keys compared. */
    const int bits = bits_of_buckets(samples), buckets = 1 << bits;
    uint64_t *key = deal->key;
    int32_t *begin = deal->begin, *number = deal->number, *between = deal->between;
    memset(begin, 0, (buckets + 1) * sizeof *begin);
    for (int64_t i = 0; i < samples; i++) key[i] = mix(stream + (uint64_t)(i + 1) * GAMMA) >> 1;
    for (int64_t i = 0; i < samples; i++) begin[(key[i] >> (63 - bits)) + 1]++;
    int64_t low = 0, left = size;  /* the local batch that a bucket begins in, and how many more it takes */
    for (int b = 0; b < buckets; b++) {
        const int32_t held = begin[b + 1];
        begin[b + 1] += begin[b];
        if (held <= left) {
            number[b] = (int32_t)low;
            left -= held;
        } else {
            number[b] = -1;
            low = (begin[b + 1] - 1) / size;
            left = (low + 1) * size - begin[b + 1];
        }
        if (left == 0) { low++; left = size; }
    }
    const int64_t batches = (samples + size - 1) / size;
    int64_t *next = deal->next;
    for (int64_t i = 0; i < samples; i++) {  /* -1 - number: how many of a bucket have been listed */
        const int64_t bucket = key[i] >> (63 - bits);
        if (number[bucket] < 0) between[begin[bucket] - 1 - number[bucket]--] = (int32_t)i;
    }
    for (int64_t b = 0; b < batches; b++) next[b] = b * size;
    for (int64_t i = 0; i < samples; i++) {
        const int64_t bucket = key[i] >> (63 - bits);
        int64_t batch = number[bucket];
        if (batch < 0) {
            int64_t rank = begin[bucket];
            for (int64_t o = begin[bucket]; o < begin[bucket + 1]; o++) {
                const int64_t other = between[o];
                rank += key[other] < key[i] || (key[other] == key[i] && other < i);
            }
            batch = rank / size;
        }
        row[next[batch]++] = SLOT(i);
    }
#undef COLUMN
#undef SLOT
}

/* Returns 0, or -1 without memory. */
int group(const uint64_t *keys, int64_t head, const int64_t *head_count, const int64_t *tail_count,
          const int64_t *slots, int64_t clients, int64_t n, int64_t size, int32_t *result) {
    Deal deal;
    const int ready = deal_begin(&deal, n, size);
    for (int64_t c = 0; c < clients && ready; c++) {
        const int64_t first = head_count ? head_count[c] : 0, samples = first + tail_count[c];
        int32_t *row = result + c * n;
        for (int64_t i = samples; i < n; i++) row[i] = -1;
        deal_out(&deal, keys[c], first, head, samples, slots ? slots + c * n : NULL, size, row);
    }
    deal_end(&deal);
    return ready ? 0 : -1;
}

/* ---- cross-entropy ---- */

typedef float Floats __attribute__((vector_size(BYTES), aligned(4), may_alias));

static inline Floats either(Ints condition, Floats yes, Floats no) {
    return (Floats)((condition & (Ints)yes) | (~condition & (Ints)no));
}

/* e^x for x <= 0: 2^k e^r with |r| <= log(2) / 2, the Taylor polynomial of degree 7 (error below 1e-8). */
static inline Floats exp_negative(Floats x) {
    Floats least = (Floats){0} - 87.0f;
    x = either(x < least, least, x);
    Ints k = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
    Floats whole = __builtin_convertvector(k, Floats), r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats p = r * 1.98412698e-4f + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (Floats)((k + 127) << 23);
}

/* log(1 + t) for 0 <= t <= 1: 2 artanh(s), s = t / (2 + t) <= 1/3. */
static inline Floats log_one_plus(Floats t) {
    Floats s = t / (t + 2.0f), q = s * s;
    Floats p = q * (1.0f / 15.0f) + 1.0f / 13.0f;
    p = p * q + 1.0f / 11.0f;
    p = p * q + 1.0f / 9.0f;
    p = p * q + 1.0f / 7.0f;
    p = p * q + 1.0f / 5.0f;
    p = p * q + 1.0f / 3.0f;
    p = p * q + 1.0f;
    return s * p * 2.0f;
}

/* weight (softplus(score) - score target) */
static inline Floats cross_entropy(Floats score, Floats target, Floats weight, Floats *slope) {
    Floats zero = {0};
    Ints below = score < zero;
    Floats t = exp_negative(either(below, score, -score)), share = 1.0f / (t + 1.0f);
    *slope = (either(below, t * share, share) - target) * weight;
    return (either(below, zero, score) + log_one_plus(t) - score * target) * weight;
}

/* Of LANES scores; losses are added up by lane. */
static inline void cross_entropies_float(const float *scores, const float *targets, const float *weights, float *loss,
                                         float *slopes) {
    UNROLL for (int l = 0; l < LANES; l += BYTES / 4)
        *(Floats *)(loss + l) += cross_entropy(*(const Floats *)(scores + l), *(const Floats *)(targets + l),
                                               *(const Floats *)(weights + l), (Floats *)(slopes + l));
}

static inline void cross_entropies_double(const double *scores, const double *targets, const double *weights,
                                          double *loss, double *slopes) {
    for (int l = 0; l < LANES; l++) {
        double t = exp(-fabs(scores[l])), share = 1.0 / (1.0 + t);
        slopes[l] = ((scores[l] < 0.0 ? t * share : share) - targets[l]) * weights[l];
        loss[l] += ((scores[l] > 0.0 ? scores[l] : 0.0) + log1p(t) - scores[l] * targets[l]) * weights[l];
    }
}

/* ---- in single and double precision ---- */

/* Where a client's samples of a local batch end. */
static inline int64_t stop_of(const int32_t *row, int64_t start, int64_t end) {
    while (end > start && row[end - 1] < 0) end--;
    return end;
}

/* A macro: GCC drops calls of functions that do nothing else. */
#define FETCH(row, bytes) do { \
        for (size_t byte_ = 0; byte_ < (size_t)(bytes); byte_ += 64) __builtin_prefetch((const char *)(row) + byte_); \
    } while (0)

#define IVDEP _Pragma("GCC ivdep")  /* no number of a loop depends on one of an earlier turn */

typedef int16_t Pattern __attribute__((may_alias));

static inline float root_float(float x) { return sqrtf(x); }
static inline double root_double(double x) { return sqrt(x); }

/* Usual dimensions are compiled for themselves, in single precision. */
#define FOR_DIMENSION(statement) \
    switch (d) { \
        case 16: { enum { DIMENSION = 16 }; statement; break; } \
        case 32: { enum { DIMENSION = 32 }; statement; break; } \
        case 64: { enum { DIMENSION = 64 }; statement; break; } \
        default: { const int64_t DIMENSION = d; statement; } \
    }

#define REAL float
#define INTEGER int32_t
#define NAME(name) name##_float
#include "kernels_real.h"
#undef REAL
#undef INTEGER
#undef NAME
#undef FOR_DIMENSION
#define FOR_DIMENSION(statement) { const int64_t DIMENSION = d; statement; }
#define REAL double
#define INTEGER int64_t
#define NAME(name) name##_double
#include "kernels_real.h"

void weighted_bce(const float *scores, const float *targets, const float *weights, int64_t clients, int64_t n,
                  float *loss, float *slopes) {
    for (int64_t c = 0; c < clients; c++) {
        const int64_t start = c * n, whole = start + n / LANES * LANES, left = n % LANES;
        Vector_float sum[VECTORS_float] = {0};
        for (int64_t j = start; j < whole; j += LANES)
            cross_entropies_float(scores + j, targets + j, weights + j, (float *)sum, slopes + j);
        if (left) {
            float score[LANES] = {0}, target[LANES] = {0}, weight[LANES] = {0}, slope[LANES];
            memcpy(score, scores + whole, left * 4);
            memcpy(target, targets + whole, left * 4);
            memcpy(weight, weights + whole, left * 4);
            cross_entropies_float(score, target, weight, (float *)sum, slope);
            memcpy(slopes + whole, slope, left * 4);
        }
        loss[c] = sum_float(sum);
    }
}
