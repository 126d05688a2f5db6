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

/* to += the sum of factors times rows; m at most LANES */
static inline __attribute__((always_inline)) void NAME(add_rows)(REAL *to, const REAL *factors, const REAL *const *rows,
                                                                 int m, int64_t d) {
    int64_t k = 0;
    for (; k + LANES <= d; k += LANES) {
        NAME(Lanes) sum = *(NAME(Lanes) *)(to + k);
        for (int l = 0; l < m; l++) sum += factors[l] * *(const NAME(Lanes) *)(rows[l] + k);
        *(NAME(Lanes) *)(to + k) = sum;
    }
    for (; k < d; k++)
        for (int l = 0; l < m; l++) to[k] += factors[l] * rows[l][k];
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
        for (int64_t j = 0; j < n; j += LANES) {
            const REAL *rows[LANES];
            int m = 0;
            for (; m < LANES && j + m < n; m++) {
                const int64_t at = c * n + j + m;
                if (at + AHEAD < clients * n) FETCH(table + items[at + AHEAD] * d, d * sizeof(REAL));
                rows[m] = table + items[at] * d;
            }
            NAME(add_rows)(result + c * d, factors + c * n + j, rows, m, d);
        }
}

static inline __attribute__((always_inline)) int NAME(add_outer_of)(
        REAL *table, const int64_t *items, const int32_t *order, int64_t updates, const int64_t *starts,
        const int64_t *ends, const REAL *const *steps, const REAL *const *vectors, int64_t clients, int64_t n_slots,
        int64_t n, int64_t d) {
    uint8_t *done = malloc(n_slots + 1);
    if (!done) return -1;
    for (int64_t c = 0; c < clients; c++) {
        const int64_t *item = items ? items + c * n_slots : NULL;
#define ITEM(slot) (item ? item[slot] : (slot))
        for (int64_t p = 0; p < updates; p++) {
            const REAL *step = steps[p] + c * n_slots, *vector = vectors[p] + c * d;
            if (starts[p] < 0) {
                for (int64_t s = 0; s < n_slots; s++)
                    if (step[s] != 0) NAME(add)(table + ITEM(s) * d, step[s], vector, d);
                continue;
            }
            const int32_t *row = order + c * n, *row_after = row + n;
            const int64_t stop = stop_of(row, starts[p], ends[p]);
            memset(done, 0, n_slots);
            for (int64_t k = starts[p]; k < stop; k++) {
                const int64_t slot = row[k], ahead = k + AHEAD, next = ahead - stop;
                if (ahead < n && row[ahead] >= 0)
                    FETCH(table + ITEM(row[ahead]) * d, d * sizeof(REAL));
                else if (item && c + 1 < clients && next < n && row_after[next] >= 0)
                    FETCH(table + items[(c + 1) * n_slots + row_after[next]] * d, d * sizeof(REAL));
                if (done[slot]) continue;
                done[slot] = 1;
                NAME(add)(table + ITEM(slot) * d, step[slot], vector, d);
            }
        }
    }
    free(done);
#undef ITEM
    return 0;
}

/* Returns 0, or -1 without memory. */
int NAME(add_outer)(REAL *table, const int64_t *items, const int32_t *order, int64_t updates, const int64_t *starts,
                    const int64_t *ends, const REAL *const *steps, const REAL *const *vectors, int64_t clients,
                    int64_t n_slots, int64_t n, int64_t d) {
    FOR_DIMENSION(return NAME(add_outer_of)(table, items, order, updates, starts, ends, steps, vectors, clients,
                                            n_slots, n, DIMENSION))
}

static inline __attribute__((always_inline)) int NAME(inner_batch_of)(
        const REAL *table, const int64_t *items, int64_t n_slots, const REAL *vectors, const REAL *constants,
        int64_t updates, const REAL *const *steps, const REAL *const *past, const int32_t *order, int64_t start,
        int64_t end, const REAL *share, const uint8_t *positive, int64_t positive_stride, int64_t clients, int64_t n,
        int64_t d, REAL *loss, REAL *to_vectors, REAL *to_constants, REAL *step) {
    REAL *moved = malloc((2 * updates + 1) * sizeof *moved), *back = moved + updates;
    if (!moved) return -1;
    for (int64_t c = 0; c < clients; c++) {
        const REAL *vector = vectors + c * d, constant = constants ? constants[c] : 0;
        const int32_t *row = order + c * n, *row_after = row + n;
        const int64_t stop = stop_of(row, start, end);
        REAL *to = to_vectors ? to_vectors + c * d : NULL, *own = step ? step + c * n_slots : NULL, slope_sum = 0;
        NAME(Lanes) losses = {0};
        for (int64_t p = 0; p < updates; p++) {
            moved[p] = NAME(dot)(past[p] + c * d, vector, d);
            back[p] = 0;
        }
        if (to) memset(to, 0, d * sizeof *to);
        if (own) memset(own, 0, n_slots * sizeof *own);
        for (int64_t k = start; k < stop; k += LANES) {
            const REAL *held[LANES];
            REAL score[LANES] = {0}, target[LANES] = {0}, weight[LANES] = {0}, slope[LANES];
            int m = 0;
            for (; m < LANES && k + m < stop; m++) {
                const int64_t slot = row[k + m], ahead = k + m + AHEAD, next = start + ahead - stop;
                held[m] = table + (items ? items[c * n_slots + slot] : slot) * d;
                if (items && ahead < stop)
                    FETCH(table + items[c * n_slots + row[ahead]] * d, d * sizeof(REAL));
                else if (items && c + 1 < clients && next < end && row_after[next] >= 0)
                    FETCH(table + items[(c + 1) * n_slots + row_after[next]] * d, d * sizeof(REAL));
                score[m] = NAME(dot)(held[m], vector, d) + constant;
                for (int64_t p = 0; p < updates; p++) score[m] += steps[p][c * n_slots + slot] * moved[p];
                target[m] = positive[c * positive_stride + slot];
                weight[m] = share[c];
            }
            NAME(cross_entropies)(score, target, weight, (REAL *)&losses, slope);
            if (to) NAME(add_rows)(to, slope, held, m, d);
            for (int l = 0; l < m; l++) {
                const int64_t slot = row[k + l];
                if (own) own[slot] += slope[l];
                for (int64_t p = 0; p < updates; p++) back[p] += slope[l] * steps[p][c * n_slots + slot];
                slope_sum += slope[l];
            }
        }
        if (to) for (int64_t p = 0; p < updates; p++) NAME(add)(to, back[p], past[p] + c * d, d);
        if (to_constants) to_constants[c] = slope_sum;
        loss[c] = NAME(sum)(losses);
    }
    free(moved);
    return 0;
}

/* Returns 0, or -1 without memory. */
int NAME(inner_batch)(const REAL *table, const int64_t *items, int64_t n_slots, const REAL *vectors,
                      const REAL *constants, int64_t updates, const REAL *const *steps, const REAL *const *past,
                      const int32_t *order, int64_t start, int64_t end, const REAL *share, const uint8_t *positive,
                      int64_t positive_stride, int64_t clients, int64_t n, int64_t d, REAL *loss, REAL *to_vectors,
                      REAL *to_constants, REAL *step) {
    FOR_DIMENSION(return NAME(inner_batch_of)(table, items, n_slots, vectors, constants, updates, steps, past, order,
                                              start, end, share, positive, positive_stride, clients, n, DIMENSION,
                                              loss, to_vectors, to_constants, step))
}

void NAME(ranks)(const REAL *scores, const int64_t *items, int64_t clients, int64_t n, int64_t listed,
                 int64_t *result) {
    for (int64_t c = 0; c < clients; c++)
        for (int64_t k = 0; k < listed; k++) {
            const REAL *row = scores + c * n, mine = row[items[c * listed + k]];
            int32_t higher = 0;
            for (int64_t i = 0; i < n; i++) higher += row[i] > mine;
            result[c * listed + k] = 1 + higher;
        }
}
