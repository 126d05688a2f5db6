/* Every kernel on random sizes, to be run under sanitizers: none may read or write beyond what it is given. */

#include "../fedcl_bench/kernels/kernels.c"

#include <stdio.h>

static uint64_t state = 1;
static void *held[4096];
static int n_held = 0;

static int64_t below(int64_t n) {
    state += GAMMA;
    return (int64_t)(mix(state) % (uint64_t)n);
}

static void *make(int64_t n, size_t size) { return held[n_held++] = malloc(n * size); }

#define INTEGERS(n) ((int64_t *)make(n, sizeof(int64_t)))

static float *floats(int64_t n) {
    float *result = make(n, sizeof *result);
    for (int64_t i = 0; i < n; i++) result[i] = 1e-3f * (float)(below(2000) - 1000);
    return result;
}

/* Clients of at most p positives with k negatives each, among m items; d numbers per row. Returns what failed. */
static const char *round_of(int64_t clients, int64_t p, int64_t k, int64_t m, int64_t d, int64_t size) {
    const int64_t n = p * (1 + k), batches = (n + size - 1) / size;
    int64_t *keys = INTEGERS(clients), *count = INTEGERS(clients), *own = INTEGERS(clients), *users = INTEGERS(clients);
    int64_t *indptr = INTEGERS(clients + 1), *values = INTEGERS(clients * p), *others = INTEGERS(clients);
    indptr[0] = 0;
    for (int64_t c = 0; c < clients; c++) {
        keys[c] = below(INT64_MAX);
        users[c] = c;
        count[c] = 1 + below(p);
        own[c] = k * count[c];
        indptr[c + 1] = indptr[c] + count[c];
        for (int64_t j = 0, item = 0; j < count[c]; j++) values[indptr[c] + j] = item += item < m - 3 ? below(3) : 0;
    }
    int32_t *gap = make(clients * p, 4);
    int64_t *positives = INTEGERS(clients * p), *items = INTEGERS(clients * n);
    for (int64_t i = 0; i < clients * p; i++)
        positives[i] = values[indptr[i / p] + (i % p < count[i / p] ? i % p : 0)];
    int64_t *ascending = INTEGERS(clients * p);
    for (int64_t i = 0; i < clients * p; i++)
        ascending[i] = i % p && positives[i] < ascending[i - 1] ? ascending[i - 1] : positives[i];
    for (int64_t c = 0; c < clients; c++) {
        int64_t different = 0;
        for (int64_t j = 0; j < p; j++) gap[c * p + j] = INT32_MAX;
        for (int64_t j = 0; j < p; j++)
            if (j == 0 || ascending[c * p + j] != ascending[c * p + j - 1]) {
                gap[c * p + different] = (int32_t)(ascending[c * p + j] - different);
                different++;
            }
        others[c] = m - different;
    }
    for (int64_t i = 0; i < clients * n; i++) items[i] = i % n < p ? ascending[i / n * p + i % n] : -1;
    int64_t distinct = below(2) ? k : 0;
    for (int64_t c = 0; c < clients; c++) if (others[c] < k) distinct = 0;
    if (negatives((uint64_t *)keys, own, others, gap, p, ascending, p, clients, n - p, distinct, items + p, n))
        return "negatives";
    for (int64_t i = 0; i < clients * n; i++) if (items[i] < 0 || items[i] >= m) return "negatives";

    int64_t *canonical = INTEGERS(clients * n);
    int32_t *order = make(clients * n, 4);
    uint8_t *positive = make(n, 1);
    for (int64_t i = 0; i < clients * n; i++) canonical[i] = i % n;
    if (group((uint64_t *)keys, 0, NULL, own, NULL, clients, n - p, size, order)) return "group of pairs";
    if (group((uint64_t *)keys, p, count, own, canonical, clients, n, size, order)) return "group";
    for (int64_t j = 0; j < n; j++) positive[j] = j < p;

    float *table = floats(m * d), *share = floats(clients), *loss = floats(clients), *constants = floats(clients);
    float *weights = floats(clients * n), *to = floats(clients * d), *slopes = floats(clients * n);
    float *steps = floats(clients * n * batches), *past = floats(clients * batches * d), *vectors = floats(clients * d);
    for (int64_t b = 0; b < batches; b++) {
        const int64_t start = b * size, end = start + size < n ? start + size : n;
        if (inner_batch_float(table, items, n, vectors, b % 2 ? constants : NULL, steps, past, batches, b, b % 3 != 1,
                              order, start, end, share, positive, 0, clients, n, d, loss, b % 3 ? to : NULL,
                              b % 2 ? constants : NULL))
            return "inner_batch";
    }
    for (int64_t c = 0; c < clients; c++) users[c] = below(n + 1);
    add_outer_float(table, items, below(2) ? users : NULL, steps, past, batches, clients, n, d);
    const int64_t epochs = 1 + below(3), turns = 1 + below(2), updates = epochs * batches;
    const uint8_t both[] = {3}, alternating[] = {1, 2};
    uint64_t *shuffles = make(epochs, 8);
    for (int64_t e = 0; e < epochs; e++) shuffles[e] = (uint64_t)below(INT64_MAX);
    const int64_t listed = below(6), listing = listed ? below(clients + 1) : 0, slots = n + listed;
    const int64_t wide = listing && below(2) ? (m + 63) / 64 * 64 : 0;
    int64_t *lists = INTEGERS(listing * listed), *replayed = INTEGERS(clients * listed);
    uint8_t *chosen = make(listing * listed, 1);
    uint64_t *draws = make(updates * turns, 8);
    for (int64_t i = 0; i < listing * listed; i++) lists[i] = below(m), chosen[i] = (uint8_t)below(2);
    for (int64_t i = 0; i < updates * turns; i++) draws[i] = (uint64_t)below(INT64_MAX);
    float *rates = floats(3 * updates), *all_steps = floats(clients * slots * updates);
    float *all_past = floats(clients * updates * d), *moved = floats(clients * d), *moved_constants = floats(clients);
    int64_t *held_items = INTEGERS(clients * slots), *n_held = INTEGERS(clients), *samples = INTEGERS(clients * n);
    uint8_t *positives_of = make(clients * slots, 1);
    double *losses = make(clients, sizeof *losses);
    for (int64_t c = 0; c < clients; c++) users[c] = clients - 1 - c;
    for (int asked = 0; asked < 2; asked++)
        if (inner_round_float(asked ? floats(updates * m * d) : table, asked ? updates : 1,
                              below(2) ? floats(updates) : NULL, below(m + 1), below(2) ? vectors : NULL, NULL,
                              below(clients + 1), floats(2), lists, floats(listing * listed), floats(listing),
                              below(2) ? chosen : NULL, listing, listed, below(2), 0.01, draws,
                              wide ? floats(wide * d) : NULL, wide, vectors, below(2) ? constants : NULL, rates, shuffles,
                              turns == 1 ? both : alternating, 7, m, d, k, distinct, epochs, size, turns, users, ascending, count,
                              keys, others, gap, clients, p, p, batches, updates, held_items, n_held,
                              asked ? samples : NULL, asked ? replayed : NULL, asked ? positives_of : NULL, all_steps, all_past, moved,
                              moved_constants, losses))
            return "inner_round";
    for (int64_t i = 0; i < clients * n; i++)
        if (samples[i] < 0 || samples[i] >= n_held[i / n]) return "samples of inner_round";
    for (int64_t i = 0; i < clients * listed; i++)
        if (replayed[i] < 0 || replayed[i] >= n_held[i / listed]) return "lists of inner_round";
    for (int64_t i = 0; i < clients * slots; i++)
        if (held_items[i] < 0 || held_items[i] >= m) return "slots of inner_round";
    add_outer_float(table, held_items, n_held, all_steps, all_past, updates, clients, slots, d);
    mixed((uint64_t *)keys, clients);
    row_products_float(table, items, vectors, constants, clients, n, d, weights);
    const int64_t entries = 1 + below(9), nearest = 1 + below(entries);
    uint8_t *filled = make(clients * entries, 1);
    for (int64_t i = 0; i < clients * entries; i++) filled[i] = (uint8_t)below(2);
    int64_t *numbers = INTEGERS(clients * nearest * m);
    if (nearest_float(floats(clients * entries * m), floats(clients * m), filled, clients, entries, m, nearest,
                      floats(clients * nearest * m), numbers))
        return "nearest";
    for (int64_t i = 0; i < clients * nearest * m; i++) if (numbers[i] < 0 || numbers[i] >= entries) return "nearest";
    row_sums_float(table, items, weights, clients, n, d, to);
    weighted_bce(weights, weights, weights, clients, n, loss, slopes);
    ranks_float(weights, users, canonical, n, clients, below(2), n_held);
    return NULL;
}

/* The ranks of all of some scores. Returns what failed. */
static const char *ranks_of(int64_t rows, int64_t n) {
    int32_t *rank = make(rows * n, 4);
    if (all_ranks_float(floats(rows * n), rows, n, rank)) return "all_ranks";
    for (int64_t i = 0; i < rows * n; i++)
        if (rank[i] < 1 || rank[i] > n) return "ranks of all_ranks";
    return NULL;
}

int main(void) {
    const int64_t dims[] = {1, 5, 16, 32, 33, 64};
    for (int trial = 0; trial < 100; trial++) {
        const char *failed = round_of(1 + below(5), 1 + below(trial % 5 ? 20 : 90), 1 + below(4), 300 + below(200), dims[trial % 6],
                                      1 + below(60));
        if (!failed) failed = ranks_of(1 + below(40), 1 + below(280));
        if (failed) {
            fprintf(stderr, "%s\n", failed);
            return 1;
        }
        while (n_held) free(held[--n_held]);
    }
    return 0;
}
