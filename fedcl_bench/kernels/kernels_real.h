/* Loops of kernels.c for numbers of type REAL, as wide as INTEGER. */

enum { NAME(WIDE) = BYTES / sizeof(REAL), NAME(VECTORS) = LANES / NAME(WIDE) };

typedef REAL NAME(Vector) __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
typedef REAL NAME(Half) __attribute__((vector_size(LANES / 2 * sizeof(REAL)), may_alias));
typedef REAL NAME(Quarter) __attribute__((vector_size(LANES / 4 * sizeof(REAL)), may_alias));

#define AT(numbers) (*(NAME(Vector) *)(numbers))
#define FROM(numbers) (*(const NAME(Vector) *)(numbers))

/* Of LANES numbers: one half is added to the other until one number is left. */
static inline REAL NAME(sum)(const NAME(Vector) *numbers) {
    NAME(Vector) lanes[NAME(VECTORS)];
    UNROLL for (int v = 0; v < NAME(VECTORS); v++) lanes[v] = numbers[v];
    UNROLL for (int n = NAME(VECTORS) / 2; n; n /= 2)
        UNROLL for (int v = 0; v < n; v++) lanes[v] += lanes[v + n];
    if (NAME(WIDE) == 2) return lanes[0][0] + lanes[0][1];
    union { NAME(Vector) all; NAME(Half) half[2]; NAME(Quarter) quarter[2]; } of = {lanes[0]};
    if (NAME(WIDE) == 16) of.half[0] += of.half[1];
    if (NAME(WIDE) >= 8) of.quarter[0] += of.quarter[1];
    const NAME(Quarter) last = of.quarter[0];
    return (last[0] + last[2]) + (last[1] + last[3]);
}

/* lanes += products of LANES numbers each */
static inline __attribute__((always_inline)) void NAME(multiply)(NAME(Vector) *lanes, const REAL *a, const REAL *b) {
    UNROLL for (int v = 0; v < NAME(VECTORS); v++) lanes[v] += FROM(a + v * NAME(WIDE)) * FROM(b + v * NAME(WIDE));
}

static inline REAL NAME(dot)(const REAL *a, const REAL *b, int64_t d) {
    NAME(Vector) lanes[NAME(VECTORS)] = {0};
    int64_t k = 0;
    for (; k + LANES <= d; k += LANES) NAME(multiply)(lanes, a + k, b + k);
    REAL result = NAME(sum)(lanes);
    for (; k < d; k++) result += a[k] * b[k];
    return result;
}

/* to += factor * from */
static inline void NAME(add)(REAL *restrict to, REAL factor, const REAL *restrict from, int64_t d) {
    int64_t k = 0;
    for (; k + NAME(WIDE) <= d; k += NAME(WIDE)) AT(to + k) += factor * FROM(from + k);
    for (; k < d; k++) to[k] += factor * from[k];
}

/* to += the sum of factors times rows; m at most LANES */
static inline __attribute__((always_inline)) void NAME(add_rows)(REAL *to, const REAL *factors, const REAL *const *rows,
                                                                 int m, int64_t d) {
    int64_t k = 0;
    for (; k + NAME(WIDE) <= d; k += NAME(WIDE)) {
        NAME(Vector) sum = AT(to + k);
        for (int l = 0; l < m; l++) sum += factors[l] * FROM(rows[l] + k);
        AT(to + k) = sum;
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

/* The k smallest distances of each item to the entries that are there, in ascending order; of equal ones the first. */
int NAME(nearest)(const REAL *products, const REAL *lengths, const uint8_t *filled, int64_t clients, int64_t n, int64_t m,
                  int64_t k, REAL *distances, int64_t *entries) {
    REAL *best = malloc(k * BLOCK * sizeof *best);
    INTEGER *at = malloc(k * BLOCK * sizeof *at);
    for (int64_t c = 0; best && at && c < clients; c++)
        for (int64_t start = 0; start < m; start += BLOCK) {
            const int64_t width = m - start < BLOCK ? m - start : BLOCK;
            for (int64_t i = 0; i < k * BLOCK; i++) best[i] = INFINITY, at[i] = 0;
            for (int64_t j = 0; j < n; j++) {
                if (!filled[c * n + j]) continue;
                REAL next[BLOCK] = {0};
                INTEGER number[BLOCK];
                for (int64_t i = 0; i < width; i++) {
                    const REAL distance = products[(c * n + j) * m + start + i] + lengths[c * m + start + i];
                    next[i] = distance < 0 ? 0 : distance;
                }
                for (int i = 0; i < BLOCK; i++) number[i] = (INTEGER)j;
                for (int64_t level = 0; level < k; level++)  /* each passes on what is farther */
                    for (int i = 0; i < BLOCK; i++) {
                        const REAL kept = best[level * BLOCK + i], other = next[i];
                        const INTEGER its = at[level * BLOCK + i], others = number[i];
                        const int nearer = (other < kept) | ((other == kept) & (others < its));
                        best[level * BLOCK + i] = nearer ? other : kept;
                        at[level * BLOCK + i] = nearer ? others : its;
                        next[i] = nearer ? kept : other;
                        number[i] = nearer ? its : others;
                    }
            }
            for (int64_t level = 0; level < k; level++)
                for (int64_t i = 0; i < width; i++) {
                    distances[(c * k + level) * m + start + i] = best[level * BLOCK + i];
                    entries[(c * k + level) * m + start + i] = at[level * BLOCK + i];
                }
        }
    const int failed = !(best && at);
    free(best);
    free(at);
    return failed;
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

/* to += the sum of n factors times rows that lie one after the other */
static inline __attribute__((always_inline)) void NAME(add_products)(REAL *restrict to, const REAL *factors,
                                                                     const REAL *rows, int64_t n, int64_t d) {
    enum { AT_ONCE = 2 * NAME(VECTORS) };
    int64_t k = 0;
    for (; k + AT_ONCE * NAME(WIDE) <= d; k += AT_ONCE * NAME(WIDE)) {
        NAME(Vector) sum[AT_ONCE];
        UNROLL for (int v = 0; v < AT_ONCE; v++) sum[v] = AT(to + k + v * NAME(WIDE));
        for (int64_t p = 0; p < n; p++)
            UNROLL for (int v = 0; v < AT_ONCE; v++) sum[v] += factors[p] * FROM(rows + p * d + k + v * NAME(WIDE));
        UNROLL for (int v = 0; v < AT_ONCE; v++) AT(to + k + v * NAME(WIDE)) = sum[v];
    }
    for (int64_t p = 0; p < n; p++) NAME(add)(to + k, factors[p], rows + p * d + k, d - k);
}

static inline __attribute__((always_inline)) void NAME(add_outer_of)(
        REAL *table, const int64_t *items, const int64_t *held, const REAL *steps, const REAL *vectors, int64_t updates,
        int64_t clients, int64_t n_slots, int64_t d) {
    for (int64_t c = 0; c < clients; c++) {
        const int64_t *item = items ? items + c * n_slots : NULL, slots = held ? held[c] : n_slots;
        const REAL *step = steps + c * n_slots * updates, *vector = vectors + c * updates * d;
        for (int64_t s = 0; s < slots; s++, step += updates) {
            if (item && s + AHEAD < slots)
                FETCH(table + item[s + AHEAD] * d, d * sizeof(REAL));
            else if (item && c + 1 < clients && s + AHEAD - slots < n_slots)
                FETCH(table + item[n_slots + s + AHEAD - slots] * d, d * sizeof(REAL));
            int64_t p = 0;
            if (!held) while (p < updates && step[p] == 0) p++;
            if (p < updates) NAME(add_products)(table + (item ? item[s] : s) * d, step, vector, updates, d);
        }
    }
}

void NAME(add_outer)(REAL *table, const int64_t *items, const int64_t *held, const REAL *steps, const REAL *vectors,
                     int64_t updates, int64_t clients, int64_t n_slots, int64_t d) {
    FOR_DIMENSION(NAME(add_outer_of)(table, items, held, steps, vectors, updates, clients, n_slots, DIMENSION))
}

/* What of a client's list takes part in a local batch. */
typedef struct {
    int64_t n;
    int32_t *slot;
    REAL *target;
    REAL weight;
} NAME(Replayed);

/* One client's local batch of logits that are inner products; returns its loss.

   item: of each slot, or NULL: all, in order
   row: slots by local batch, of which this one has those from start to stop
   soft: further slots, each once, with a target and a weight of its own
   steps, past, done: by what updates so far have moved rows: the slot's row by steps[slot * updates + p] * past[p]
   positive: whether a slot's item is a positive
   moved: room for 2 * done numbers
   to: gradient of the vector, or NULL
   by_slot: to which the slopes of slots are added, each in steps of updates, or NULL
   slopes: their sum, or NULL */
static inline __attribute__((always_inline)) REAL NAME(batch_of)(
        const REAL *table, const int64_t *item, const int32_t *row, int64_t start, int64_t stop,
        const NAME(Replayed) *soft, const REAL *vector, REAL constant, const REAL *steps, const REAL *past,
        int64_t updates, int64_t done, REAL share, const uint8_t *positive, int64_t d, REAL *moved, REAL *to,
        REAL *by_slot, REAL *slopes) {
    REAL *back = moved + done;
    NAME(Vector) losses[NAME(VECTORS)] = {0};
    for (int64_t p = 0; p < done; p++) {
        moved[p] = NAME(dot)(past + p * d, vector, d);
        back[p] = 0;
    }
    if (to) memset(to, 0, d * sizeof *to);
    if (slopes) *slopes = 0;
    for (int64_t k = start, m; k < stop + soft->n; k += m) {
        const int64_t after = k - stop, left = after < 0 ? -after : soft->n - after;
        const int32_t *slots = after < 0 ? row + k : soft->slot + after;
        m = left < BLOCK ? left : BLOCK;
        const int64_t whole = (m + LANES - 1) / LANES * LANES;
        const REAL *held[BLOCK] = {0}, *step[BLOCK];
        REAL score[BLOCK], target[BLOCK], weight[BLOCK], slope[BLOCK];
        for (int l = 0; l < m; l++) {
            const int64_t slot = slots[l], ahead = l + AHEAD;
            if (item && ahead < left) FETCH(table + item[slots[ahead]] * d, d * sizeof(REAL));
            held[l] = table + (item ? item[slot] : slot) * d;
            step[l] = steps + slot * updates;
            target[l] = after < 0 ? positive[slot] : soft->target[after + l];
            weight[l] = after < 0 ? share : soft->weight;
        }
        for (int l = m; l < whole; l++) {
            held[l] = held[0];
            target[l] = weight[l] = 0;
        }
        for (int l = 0; l < whole; l++) score[l] = NAME(dot)(held[l], vector, d) + constant;
        if (done)
            for (int l = 0; l < m; l++)
                for (int64_t p = 0; p < done; p++) score[l] += step[l][p] * moved[p];
        for (int l = m; l < whole; l++) score[l] = 0;
        for (int l = 0; l < whole; l += LANES)
            NAME(cross_entropies)(score + l, target + l, weight + l, (REAL *)losses, slope + l);
        if (to)
            for (int l = 0; l < m; l += LANES) {
                if (l + LANES <= m) NAME(add_rows)(to, slope + l, held + l, LANES, d);
                else NAME(add_rows)(to, slope + l, held + l, m - l, d);
            }
        for (int64_t p = 0; p < done; p++) {
            REAL sum = back[p];
            for (int l = 0; l < m; l++) sum += slope[l] * step[l][p];
            back[p] = sum;
        }
        if (slopes) for (int l = 0; l < m; l++) *slopes += slope[l];
        if (by_slot) for (int l = 0; l < m; l++) by_slot[slots[l] * updates] += slope[l];
    }
    if (to) for (int64_t p = 0; p < done; p++) NAME(add)(to, back[p], past + p * d, d);
    return NAME(sum)(losses);
}

static __attribute__((noinline)) REAL NAME(batch)(
        const REAL *table, const int64_t *item, const int32_t *row, int64_t start, int64_t stop,
        const NAME(Replayed) *soft, const REAL *vector, REAL constant, const REAL *steps, const REAL *past,
        int64_t updates, int64_t done, REAL share, const uint8_t *positive, int64_t d, REAL *moved, REAL *to,
        REAL *by_slot, REAL *slopes) {
    FOR_DIMENSION(return NAME(batch_of)(table, item, row, start, stop, soft, vector, constant, steps, past, updates, done,
                                        share, positive, DIMENSION, moved, to, by_slot, slopes))
}

/* Returns 0, or -1 without memory. */
int NAME(inner_batch)(const REAL *table, const int64_t *items, int64_t n_slots, const REAL *vectors,
                      const REAL *constants, REAL *steps, const REAL *past, int64_t updates, int64_t done,
                      int64_t moves, const int32_t *order, int64_t start, int64_t end, const REAL *share,
                      const uint8_t *positive, int64_t positive_stride, int64_t clients, int64_t n, int64_t d,
                      REAL *loss, REAL *to_vectors, REAL *to_constants) {
    REAL *moved = malloc((2 * done + 1) * sizeof *moved);
    const NAME(Replayed) none = {0};
    for (int64_t c = 0; c < clients && moved; c++) {
        const int64_t *item = items ? items + c * n_slots : NULL;
        const int32_t *row = order + c * n;
        REAL *step = steps + c * n_slots * updates, *by_slot = moves ? step + done : NULL;
        if (by_slot) for (int64_t s = 0; s < n_slots; s++) by_slot[s * updates] = 0;
        loss[c] = NAME(batch)(table, item, row, start, stop_of(row, start, end), &none, vectors + c * d,
                              constants ? constants[c] : 0, step, past + c * updates * d, updates, done, share[c],
                              positive + c * positive_stride, d, moved, to_vectors ? to_vectors + c * d : NULL, by_slot,
                              to_constants ? to_constants + c : NULL);
    }
    free(moved);
    return moved ? 0 : -1;
}

/* Write the slots of n items, which are new ones if a client has none yet; returns how many it then holds.

   slot_of: of each item that it holds, -1 for others */
static __attribute__((noinline)) int64_t NAME(slots_of)(const int64_t *wanted, int64_t n, int64_t held,
                                                        int32_t *slot_of, int64_t *item, int64_t *result,
                                                        const REAL *table, int64_t d) {
    for (int64_t i = 0; i < n; i++) {
        const int32_t before = slot_of[wanted[i]], slot = before < 0 ? (int32_t)held : before;
        FETCH(table + wanted[i] * d, d * sizeof(REAL));
        slot_of[wanted[i]] = slot;
        item[held] = wanted[i];
        result[i] = slot;
        held += before < 0;
    }
    return held;
}

static __attribute__((noinline)) void NAME(scale)(REAL *values, int64_t n, int64_t stride, REAL factor) {
    for (int64_t i = 0; i < n; i++) values[i * stride] *= factor;
}

/* A client's items as slots, and its samples in them; returns how many there are. */
static inline int64_t NAME(lay_out)(const REAL *table, const int64_t *positives, int64_t count, int64_t width,
                                    const int64_t *negatives, int64_t drawn, int64_t n, const int64_t *list,
                                    int64_t listed, int64_t d, int32_t *slot_of, int64_t *item, int64_t *sample,
                                    int64_t *replay, uint8_t *positive) {
    const int64_t known = NAME(slots_of)(positives, count, 0, slot_of, item, sample, table, d);
    int64_t held = NAME(slots_of)(negatives, drawn, known, slot_of, item, sample + width, table, d);
    if (list) held = NAME(slots_of)(list, listed, held, slot_of, item, replay, table, d);
    else memset(replay, 0, listed * sizeof *replay);
    for (int64_t i = count; i < width; i++) sample[i] = 0;
    for (int64_t i = width + drawn; i < n; i++) sample[i] = 0;
    for (int64_t s = 0; s < held; s++) slot_of[item[s]] = -1;
    for (int64_t s = held; s < n + listed; s++) item[s] = item[0];
    for (int64_t s = 0; s < n + listed; s++) positive[s] = s < known;
    return held;
}

/* Memory for training clients one after the other, of at most so many positives, gaps and updates each. */
typedef struct {
    Deal deal;
    Draws draws;
    int64_t *negative, *sample, *replay;
    int32_t *slot_of, *row, *slot;
    uint64_t *key;
    uint8_t *positive;
    REAL *numbers, *target, *score;
    int dealt, drawn;
} NAME(Room);

static int NAME(room_begin)(NAME(Room) *room, int64_t n_items, int64_t d, int64_t each, int64_t size, int64_t width,
                            int64_t n_gaps, int64_t updates, int64_t listed, int64_t scored) {
    const int64_t n = width * (1 + each);
    room->negative = malloc((width * each + 1) * sizeof *room->negative);
    room->sample = malloc((2 * n + 1) * sizeof *room->sample);  /* of a client and of the one after it */
    room->replay = malloc((2 * listed + 1) * sizeof *room->replay);
    room->positive = malloc(2 * (n + listed) + 1);
    room->slot = malloc((listed + 1) * sizeof *room->slot);
    room->key = malloc((listed + 1) * sizeof *room->key);
    room->target = malloc((listed + 1) * sizeof *room->target);
    room->score = malloc((scored + 1) * sizeof *room->score);
    room->slot_of = malloc((n_items + 1) * sizeof *room->slot_of);
    room->row = malloc((n + 1) * sizeof *room->row);
    room->numbers = malloc((2 * updates + 2 * d + 1) * sizeof *room->numbers);
    room->dealt = deal_begin(&room->deal, n, size);
    room->drawn = draws_begin(&room->draws, n_gaps, width * each);
    if (room->slot_of) memset(room->slot_of, -1, n_items * sizeof *room->slot_of);
    return room->negative && room->sample && room->replay && room->positive && room->slot_of && room->row && room->slot
           && room->key && room->target && room->score && room->numbers && room->dealt && room->drawn;
}

static void NAME(room_end)(NAME(Room) *room) {
    deal_end(&room->deal); draws_end(&room->draws);
    free(room->negative); free(room->sample); free(room->replay); free(room->positive); free(room->slot_of);
    free(room->row); free(room->slot); free(room->key); free(room->target); free(room->score); free(room->numbers);
}

/* Before an update of rows, what is left of those before it: of items below known, a factor. */
static __attribute__((noinline)) void NAME(keep)(REAL *steps, const int64_t *item, int64_t n, int64_t updates,
                                                 int64_t done, int64_t known, REAL factor) {
    for (int64_t s = 0; s < n; s++)
        if (item[s] < known) for (int64_t p = 0; p < done; p++) steps[s * updates + p] *= factor;
}

/* Lists whose scores the first users train to probabilities; chosen may be NULL: all items take part. With columns, the
   item table with a column per item (padded to a multiple of BLOCK), how many do is drawn: F3CRec's Eqs. 2 to 4. */
typedef struct {
    const int64_t *items;
    const REAL *targets, *weights;
    const uint8_t *chosen;
    int64_t users, n, mean;
    double eps;
    const uint64_t *keys;  /* of each update, without the client */
    const REAL *columns;
    int64_t wide;
} NAME(Lists);

/* Scores of all items: inner products with the vector, and by what a client's updates have moved those that it holds. */
static __attribute__((noinline)) void NAME(score_all)(const NAME(Lists) *lists, const REAL *vector, int64_t d,
                                                      const int64_t *item, int64_t held, const REAL *steps,
                                                      const REAL *past, int64_t updates, int64_t done, REAL *moved,
                                                      REAL *score) {
    enum { AT_ONCE = BLOCK / NAME(WIDE) };
    for (int64_t i = 0; i < lists->wide; i += BLOCK) {
        NAME(Vector) sum[AT_ONCE] = {0};
        for (int64_t k = 0; k < d; k++)
            UNROLL for (int v = 0; v < AT_ONCE; v++)
                sum[v] += vector[k] * FROM(lists->columns + k * lists->wide + i + v * NAME(WIDE));
        UNROLL for (int v = 0; v < AT_ONCE; v++) AT(score + i + v * NAME(WIDE)) = sum[v];
    }
    for (int64_t p = 0; p < done; p++) moved[p] = NAME(dot)(past + p * d, vector, d);
    for (int64_t s = 0; s < held && done; s++)
        for (int64_t p = 0; p < done; p++) score[item[s]] += steps[s * updates + p] * moved[p];
}

/* How many items of a list of n take part: floor(exp(-eps D) n), D = sum_k |rank of the k-th - k|. */
static __attribute__((noinline)) int64_t NAME(replay_size)(const int64_t *list, int64_t n, double eps, const REAL *score,
                                                           int64_t n_items) {
    int64_t shift = 0;
    for (int64_t k = 0; k < n; k++) {
        const REAL mine = score[list[k]];
        int32_t higher = 0;
        for (int64_t i = 0; i < n_items; i++) higher += score[i] > mine;
        shift += higher < k ? k - higher : higher - k;
    }
    return (int64_t)floor(exp(-eps * (double)shift) * (double)n);
}

/* What of a known user's list takes part in an update: of those chosen, the first `most` by random keys. */
static void NAME(replay)(const NAME(Lists) *lists, int64_t user, const int64_t *slots, uint64_t stream, int64_t most,
                         uint64_t *key, NAME(Replayed) *result) {
    const int64_t n = lists->n;
    const uint8_t *chosen = lists->chosen ? lists->chosen + user * n : NULL;
    if (most < n) for (int64_t k = 0; k < n; k++) key[k] = mix(stream + (uint64_t)(k + 1) * GAMMA) >> 1;
    result->n = 0;
    for (int64_t k = 0; k < n; k++) {
        int64_t before = 0;
        if (most < n) for (int64_t j = 0; j < n; j++) before += key[j] < key[k] || (key[j] == key[k] && j < k);
        if (before >= most || (chosen && !chosen[k])) continue;
        result->slot[result->n] = (int32_t)slots[k];
        result->target[result->n++] = lists->targets[user * n + k];
    }
    result->weight = lists->weights[user] / (lists->mean && result->n ? (REAL)result->n : 1);
}

/* Rounds of clients whose logits are inner products: see ops.py. Clients draw from the streams of their names, and
   may have fewer batches than others. samples and positives_of may be NULL: nobody asks. Rows are those of one table in
   all batches, or of one in each. kept, near and near_constants may be NULL: nothing is kept near anything; pulls has
   two weights. Lists are those of NAME(Lists), of which there may be none; replayed, their slots, may be NULL. each:
   negatives per positive; distinct: the same where these are all different, or 0. Returns 0, or -1 without memory. */
int NAME(inner_round)(const REAL *tables, int64_t n_tables, const REAL *kept, int64_t known, const REAL *near,
                      const REAL *near_constants, int64_t n_near, const REAL *pulls, const int64_t *lists,
                      const REAL *targets, const REAL *weights, const uint8_t *chosen, int64_t listing, int64_t listed,
                      int64_t mean, double eps, const uint64_t *keys, const REAL *columns, int64_t wide,
                      const REAL *vectors,
                      const REAL *constants, const REAL *rates, const uint64_t *shuffles, const uint8_t *turns,
                      uint64_t draws, int64_t n_items, int64_t d, int64_t each, int64_t distinct, int64_t epochs,
                      int64_t size, int64_t n_turns, const int64_t *users,
                      const int64_t *positives, const int64_t *count, const int64_t *names, const int64_t *others,
                      const int32_t *gaps, int64_t clients, int64_t width, int64_t n_gaps, int64_t batches,
                      int64_t updates, int64_t *items, int64_t *held, int64_t *samples, int64_t *replayed,
                      uint8_t *positives_of, REAL *steps, REAL *past, REAL *moved_vectors, REAL *moved_constants,
                      double *loss) {
    NAME(Room) room;
    const int ready = NAME(room_begin)(&room, n_items, d, each, size, width, n_gaps, updates, listed, wide);
    const int64_t n = width * (1 + each), slots = n + listed;
    const NAME(Lists) list = {lists, targets, weights, chosen, listing, listed, mean, eps, keys, columns, wide};
    NAME(Replayed) soft = {0, room.slot, room.target, 0};
    REAL *vector = room.numbers + 2 * updates, *to = vector + d;
#define SAMPLES_OF(c) (samples ? samples + (c) * n : room.sample + (c) % 2 * n)
#define REPLAYED_OF(c) (replayed ? replayed + (c) * listed : room.replay + (c) % 2 * listed)
#define POSITIVE_OF(c) (positives_of ? positives_of + (c) * slots : room.positive + (c) % 2 * slots)
    for (int64_t c = 0; c < clients && ready; c++) {
        for (int64_t next = c ? c + 1 : 0; next <= c + 1 && next < clients; next++) {  /* whose rows are fetched */
            draw(&room.draws, of_client(draws, names[next]), (uint64_t)others[next], gaps + next * n_gaps, n_gaps,
                 count[next] * each, distinct, room.negative);
            held[next] = NAME(lay_out)(tables, positives + next * width, count[next], width, room.negative,
                                       count[next] * each, n, users[next] < listing ? lists + users[next] * listed
                                       : NULL, listed, d, room.slot_of, items + next * slots, SAMPLES_OF(next),
                                       REPLAYED_OF(next), POSITIVE_OF(next));
            FETCH(vectors + users[next] * d, d * sizeof(REAL));
        }
        const int64_t number = count[c] * (1 + each), own_batches = (number + size - 1) / size;
        const int64_t *item = items + c * slots;
        REAL *step = steps + c * slots * updates, *before = past + c * updates * d;
        REAL *moved = moved_vectors + c * d, moved_constant = 0, slopes;
        REAL constant = constants ? constants[users[c]] : 0;
        double total = 0;
        int64_t done = 0;
        memset(step, 0, slots * updates * sizeof *step);
        memset(moved, 0, d * sizeof *moved);
        memcpy(vector, vectors + users[c] * d, d * sizeof *vector);
        for (int64_t e = 0; e < epochs; e++) {
            double epoch = 0;
            deal_out(&room.deal, of_client(shuffles[e], names[c]), count[c], width, number, SAMPLES_OF(c), size,
                     room.row);
            for (int64_t b = 0; b < own_batches; b++) {
                const int64_t start = b * size, stop = start + size < number ? start + size : number;
                const REAL share = 1 / (REAL)(stop - start), *rate = rates + 3 * (e * batches + b);
                const REAL *table = tables + (n_tables > 1 ? e * batches + b : 0) * n_items * d;
                for (int64_t t = 0; t < n_turns; t++) {
                    const int of_vectors = turns[t] & 1, of_rows = turns[t] & 2;
                    soft.n = 0;
                    if (users[c] < listing) {
                        const int64_t update = (e * batches + b) * n_turns + t;
                        int64_t most = listed;
                        if (columns) {
                            NAME(score_all)(&list, vector, d, item, held[c], step, before, updates, done, room.numbers,
                                            room.score);
                            most = NAME(replay_size)(lists + users[c] * listed, listed, eps, room.score, n_items);
                        }
                        NAME(replay)(&list, users[c], REPLAYED_OF(c), of_client(keys[update], names[c]), most, room.key,
                                     &soft);
                    }
                    if (of_rows) memcpy(before + done * d, vector, d * sizeof *vector);
                    const REAL batch_loss = NAME(batch)(
                        table, item, room.row, start, stop, &soft, vector, constant, step, before,
                        updates, done, share, POSITIVE_OF(c), d, room.numbers, of_vectors ? to : NULL,
                        of_rows ? step + done : NULL, constants ? &slopes : NULL);
                    if (t == 0) epoch += batch_loss;
                    if (of_vectors) {
                        if (near && users[c] < n_near)
                            for (int64_t k = 0; k < d; k++) to[k] += pulls[0] * (vector[k] - near[users[c] * d + k]);
                        if (near_constants && users[c] < n_near)
                            slopes += pulls[1] * (constant - near_constants[users[c]]);
                        for (int64_t k = 0; k < d; k++) to[k] *= rate[0];
                        for (int64_t k = 0; k < d; k++) { vector[k] += to[k]; moved[k] += to[k]; }
                    }
                    if (of_vectors && constants) { constant += slopes * rate[1]; moved_constant += slopes * rate[1]; }
                    if (of_rows && kept)
                        NAME(keep)(step, item, held[c], updates, done, known, kept[e * batches + b]);
                    if (of_rows) NAME(scale)(step + done++, held[c], updates, rate[2]);
                }
            }
            total += epoch;
        }
        memset(before + done * d, 0, (updates - done) * d * sizeof *before);
        if (constants) moved_constants[c] = moved_constant;
        loss[c] = total / (double)(own_batches * epochs > 1 ? own_batches * epochs : 1);
    }
#undef SAMPLES_OF
#undef REPLAYED_OF
#undef POSITIVE_OF
    NAME(room_end)(&room);
    return ready ? 0 : -1;
}

/* A column's score as bits that, read as an unsigned number, are the larger the lower it is; -0 is 0, and what is no
   number has the smallest. */
typedef struct { INTEGER key; int32_t column; } NAME(Keyed);

static inline INTEGER NAME(key)(REAL score) {
    const union { REAL real; INTEGER bits; } of = {score + 0};
    const INTEGER most = (INTEGER)(~(uint64_t)0 >> (65 - 8 * sizeof(REAL)));
    return score != score ? 0 : of.bits < 0 ? of.bits : of.bits ^ most;
}

/* The 1-based rank of each column among all of its row, of equal scores the first column first; n below 2^31. Sorts by
   one digit of the keys after the other, from the last. Returns 0, or -1 without memory. */
int NAME(all_ranks)(const REAL *scores, int64_t rows, int64_t n, int32_t *result) {
    enum { DIGIT = 11, DIGITS = 1 << DIGIT, PASSES = (8 * sizeof(REAL) + DIGIT - 1) / DIGIT };
    NAME(Keyed) *from = malloc((n + 1) * sizeof *from), *to = malloc((n + 1) * sizeof *to);
    int32_t (*starts)[DIGITS] = malloc(PASSES * sizeof *starts);
    const int ready = from && to && starts;
    for (int64_t i = 0; i < rows && ready; i++) {
        memset(starts, 0, PASSES * sizeof *starts);
        for (int64_t j = 0; j < n; j++) {
            const INTEGER key = NAME(key)(scores[i * n + j]);
            from[j] = (NAME(Keyed)){key, (int32_t)j};
            UNROLL for (int p = 0; p < PASSES; p++) starts[p][(key >> p * DIGIT) & (DIGITS - 1)]++;
        }
        for (int p = 0; p < PASSES; p++) {
            for (int32_t digit = 0, start = 0; digit < DIGITS; digit++) {
                const int32_t count = starts[p][digit];
                starts[p][digit] = start;
                start += count;
            }
            for (int64_t j = 0; j < n; j++) to[starts[p][(from[j].key >> p * DIGIT) & (DIGITS - 1)]++] = from[j];
            NAME(Keyed) *sorted = to;
            to = from;
            from = sorted;
        }
        for (int64_t j = 0; j < n; j++) result[i * n + from[j].column] = (int32_t)(j + 1);
    }
    free(from); free(to); free(starts);
    return ready ? 0 : -1;
}

/* The 1-based rank of each wanted column in its row: how many score higher, and with first_before how many of equal score
   stand before it. */
void NAME(ranks)(const REAL *scores, const int64_t *rows, const int64_t *items, int64_t n, int64_t wanted,
                 int64_t first_before, int64_t *result) {
    for (int64_t p = 0; p < wanted; p++) {
        const REAL *row = scores + rows[p] * n, mine = row[items[p]];
        const int64_t before = first_before ? items[p] : 0;
        int32_t higher = 0;
        for (int64_t i = 0; i < before; i++) higher += row[i] >= mine;
        for (int64_t i = before; i < n; i++) higher += row[i] > mine;
        result[p] = 1 + higher;
    }
}

#include "kernels_cosine.h"

#undef AT
#undef FROM
