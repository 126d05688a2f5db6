/* Loops of kernels.c for numbers of type REAL. */

typedef REAL NAME(Lanes) __attribute__((vector_size(LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
typedef REAL NAME(Half) __attribute__((vector_size(LANES / 2 * sizeof(REAL))));
typedef REAL NAME(Quarter) __attribute__((vector_size(LANES / 4 * sizeof(REAL))));

static inline REAL NAME(sum)(NAME(Lanes) lanes) {
    union { NAME(Lanes) all; NAME(Half) half[2]; } whole = {lanes};
    union { NAME(Half) all; NAME(Quarter) half[2]; } part = {whole.half[0] + whole.half[1]};
    NAME(Quarter) last = part.half[0] + part.half[1];
    return (last[0] + last[2]) + (last[1] + last[3]);
}

void NAME(batch_weights)(const int32_t *order, int64_t from, int64_t to, const REAL *share, int64_t clients, int64_t n,
                         int64_t n_slots, REAL *result) {
    memset(result, 0, clients * n_slots * sizeof *result);
    for (int64_t c = 0; c < clients; c++) {
        REAL *row = result + c * n_slots;
        for (int64_t k = from; k < to && order[c * n + k] >= 0; k++) row[order[c * n + k]] += share[c];
    }
}

static inline REAL NAME(dot)(const REAL *a, const REAL *b, int64_t d) {
    NAME(Lanes) lanes = {0};
    int64_t k = 0;
    for (; k + LANES <= d; k += LANES) lanes += *(const NAME(Lanes) *)(a + k) * *(const NAME(Lanes) *)(b + k);
    REAL result = NAME(sum)(lanes);
    for (; k < d; k++) result += a[k] * b[k];
    return result;
}

/* to += factor * from */
static inline void NAME(add)(REAL *restrict to, REAL factor, const REAL *restrict from, int64_t d) {
    int64_t k = 0;
    for (; k + LANES <= d; k += LANES) *(NAME(Lanes) *)(to + k) += factor * *(const NAME(Lanes) *)(from + k);
    for (; k < d; k++) to[k] += factor * from[k];
}

void NAME(row_products)(const REAL *table, const int64_t *items, const REAL *vectors, const REAL *constants,
                        int64_t clients, int64_t n, int64_t d, REAL *result) {
    for (int64_t c = 0; c < clients; c++) {
        const REAL constant = constants ? constants[c] : 0;
        for (int64_t j = 0; j < n; j++) {
            if (c * n + j + AHEAD < clients * n) FETCH(table + items[c * n + j + AHEAD] * d, d * sizeof(REAL));
            result[c * n + j] = NAME(dot)(table + items[c * n + j] * d, vectors + c * d, d) + constant;
        }
    }
}

void NAME(row_sums)(const REAL *table, const int64_t *items, const REAL *factors, int64_t clients, int64_t n, int64_t d,
                    REAL *result) {
    memset(result, 0, clients * d * sizeof *result);
    for (int64_t c = 0; c < clients; c++)
        for (int64_t j = 0; j < n; j++) {
            if (c * n + j + AHEAD < clients * n) FETCH(table + items[c * n + j + AHEAD] * d, d * sizeof(REAL));
            if (factors[c * n + j] != 0)
                NAME(add)(result + c * d, factors[c * n + j], table + items[c * n + j] * d, d);
        }
}

void NAME(add_products)(REAL *table, const int64_t *items, const REAL *factors, const REAL *vectors, int64_t clients,
                        int64_t n, int64_t d) {
    for (int64_t c = 0; c < clients; c++)
        for (int64_t j = 0; j < n; j++) {
            if (c * n + j + AHEAD < clients * n) FETCH(table + items[c * n + j + AHEAD] * d, d * sizeof(REAL));
            if (factors[c * n + j] != 0)
                NAME(add)(table + items[c * n + j] * d, factors[c * n + j], vectors + c * d, d);
        }
}
