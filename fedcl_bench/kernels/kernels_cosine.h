/* Pooled cosine scores of all items by clients' own tables, and Adam on these tables, for numbers of type REAL: see
   ops.py. Where tables are one for all clients, ``apart`` is 0. */

enum { NAME(ROWS) = 8 };  /* scored at once */

/* Slopes of scores below this count as 0. They move nothing beside Adam's eps, but numbers that are no longer normal
   take a hundred times as long. */
static const REAL NAME(LEAST) = (REAL)1e-20;

/* What a client's dropout multiplies an item's row with (see sequential.Dropout.of_rows); word: room for d numbers. */
static void NAME(row_factors)(uint64_t key, int64_t item, int64_t threshold, int64_t d, uint64_t *word, REAL *factor) {
    const int64_t words = (d + 3) / 4;
    const uint64_t before = ((uint64_t)1 << 52) + (uint64_t)(item * words) + 1;
    for (int64_t w = 0; w < words; w++) word[w] = mix(key + (before + (uint64_t)w) * GAMMA);
    const Pattern *pattern = (const Pattern *)word;
    const REAL kept = (REAL)(65536.0 / (65536 - threshold > 1 ? (double)(65536 - threshold) : 1.0));
    for (int64_t k = 0; k < d; k++) factor[k] = pattern[k] >= threshold - 32768 ? kept : 0;
}

/* Products of some rows with the vectors of a client, which lie across: number k of all, then number k + 1. */
static inline void NAME(row_by_vector)(const REAL *const *rows, const REAL *across, int64_t d, int64_t width,
                                       REAL *result) {
    for (int64_t l = 0; l < width; l += LANES) {
        NAME(Vector) sum[NAME(ROWS)][NAME(VECTORS)] = {0};
        for (int64_t k = 0; k < d; k++)
            UNROLL for (int v = 0; v < NAME(VECTORS); v++) {
                const NAME(Vector) numbers = FROM(across + k * width + l + v * NAME(WIDE));
                UNROLL for (int r = 0; r < NAME(ROWS); r++) sum[r][v] += numbers * rows[r][k];
            }
        UNROLL for (int r = 0; r < NAME(ROWS); r++)
            UNROLL for (int v = 0; v < NAME(VECTORS); v++)
                AT(result + r * width + l + v * NAME(WIDE)) = sum[r][v];
    }
}

/* Returns 0, or -1 without memory. */
int NAME(cosine_scores)(const REAL *table, int64_t apart, const int64_t *keys, int64_t threshold, const REAL *across,
                        const uint8_t *mask, double best, const REAL *each, int64_t clients, int64_t n, int64_t d,
                        int64_t vectors, int64_t width, REAL *scores, REAL *lengths, int32_t *where) {
    uint64_t *word = malloc((d + 1) * sizeof *word);
    REAL *factor = malloc(d * sizeof *factor), *kept = malloc(NAME(ROWS) * (d + width) * sizeof *kept);
    REAL *product = kept + NAME(ROWS) * d;
    const int ready = word && factor && kept;
    for (int64_t c = 0; c < clients && ready; c++)
        for (int64_t i = 0; i < n; i += NAME(ROWS)) {
            const int64_t m = n - i < NAME(ROWS) ? n - i : NAME(ROWS);
            const REAL *rows[NAME(ROWS)];
            for (int64_t r = 0; r < NAME(ROWS); r++) {
                rows[r] = r < m ? table + c * apart + (i + r) * d : rows[0];
                if (!threshold || r >= m) continue;
                REAL *to = kept + r * d;
                NAME(row_factors)((uint64_t)keys[c], i + r, threshold, d, word, factor);
                for (int64_t k = 0; k < d; k++) to[k] = rows[r][k] * factor[k];
                rows[r] = to;
            }
            NAME(row_by_vector)(rows, across + c * d * width, d, width, product);
            for (int64_t r = 0; r < m; r++) {
                const REAL *mine = product + r * width, square = NAME(dot)(rows[r], rows[r], d);
                const REAL length = square > (REAL)1e-24 ? NAME(root)(square) : (REAL)1e-12;
                REAL sum = 0, largest = -INFINITY;
                int32_t at = 0;
                for (int64_t v = 0; v < vectors; v++) {
                    const int higher = mask[c * vectors + v] && mine[v] > largest;
                    sum += mine[v];
                    largest = higher ? mine[v] : largest;
                    at = higher ? (int32_t)v : at;
                }
                lengths[c * n + i + r] = length;
                where[c * n + i + r] = at;
                scores[c * n + i + r] = ((REAL)best * largest + each[c] * sum) / length;
            }
        }
    free(word); free(factor); free(kept);
    return ready ? 0 : -1;
}

/* A step of Adam on n numbers; a number of ``to`` may be that of ``from``. rule: see ops.py. */
static void NAME(adam)(const REAL *from, REAL *to, REAL *restrict first, REAL *restrict second,
                       const REAL *restrict gradient, int64_t n, const double *rule, int fresh) {
    const REAL ahead = (REAL)rule[0], decay = (REAL)rule[1], share = (REAL)rule[2], rate = (REAL)rule[3];
    const REAL scale = (REAL)rule[4], eps = (REAL)rule[5];
    IVDEP for (int64_t i = 0; i < n; i++) {
        const REAL g = gradient[i], m = fresh ? 0 : first[i], v = fresh ? 0 : second[i];
        const REAL now = m + (g - m) * ahead, squares = v * decay + g * g * share;
        first[i] = now;
        second[i] = squares;
        to[i] = from[i] - rate * (now / (NAME(root)(squares) * scale + eps));
    }
}

/* The client that a row's gradient is of. */
typedef struct {
    const REAL *vectors, *mean, *of_scores, *scores, *lengths;
    const int32_t *where;
    REAL best, *of_vectors, *of_mean;  /* the last two NULL: not asked for */
    uint64_t key, *word;
    int64_t threshold, d;
    REAL *factor;
} NAME(Client);

/* Of an item's row, given that of its score; adds to those of the vectors. */
static void NAME(row_gradient)(const NAME(Client) *client, int64_t item, const REAL *restrict row,
                               REAL *restrict gradient) {
    const int64_t d = client->d;
    const REAL slope = client->of_scores[item] / client->lengths[item], most = slope * client->best;
    if (slope < NAME(LEAST) && slope > -NAME(LEAST)) {
        memset(gradient, 0, d * sizeof *gradient);
        return;
    }
    const REAL back = slope * client->scores[item] / client->lengths[item];
    const REAL *vector = client->vectors + client->where[item] * d, *mean = client->mean;
    REAL *restrict factor = client->factor, *restrict of_mean = client->of_mean;
    if (client->threshold) NAME(row_factors)(client->key, item, client->threshold, d, client->word, factor);
    for (int64_t k = 0; k < d; k++) gradient[k] = most * vector[k] + slope * mean[k];
    for (int64_t k = 0; k < d; k++) gradient[k] = (gradient[k] - back * row[k] * factor[k]) * factor[k];
    if (!of_mean) return;
    REAL *restrict of_vector = client->of_vectors + client->where[item] * d;
    for (int64_t k = 0; k < d; k++) {
        const REAL number = slope * row[k] * factor[k];
        of_mean[k] += number;
        of_vector[k] += number;
    }
}

/* Returns 0, or -1 without memory. */
int NAME(cosine_adam)(const REAL *from, int64_t apart, REAL *to, REAL *first, REAL *second, int64_t fresh,
                      const double *rule, const int64_t *keys, int64_t threshold, const REAL *vectors, double best,
                      const REAL *each, const REAL *of_scores, const REAL *scores, const REAL *lengths,
                      const int32_t *where, const int64_t *held, const REAL *of_held, int64_t clients, int64_t n,
                      int64_t d, int64_t count, int64_t copies, REAL *of_vectors) {
    int32_t *copy = malloc((n + copies + 1) * sizeof *copy), *next = copy + n;
    uint64_t *word = malloc((d + 1) * sizeof *word);
    REAL *room = malloc((3 + NAME(ROWS)) * d * sizeof *room), *mean = room, *of_mean = room + d, *factor = room + 2 * d;
    REAL *gradient = room + 3 * d;
    const int ready = copy && word && room;
    for (int64_t k = 0; k < d && ready; k++) factor[k] = 1;
    for (int64_t i = 0; i < n && ready; i++) copy[i] = -1;
    for (int64_t c = 0; c < clients && ready; c++) {
        const int64_t *mine = held + c * copies;
        const REAL *rows = from + c * apart, *vector = vectors + c * count * d;
        REAL *row_to = to + c * n * d, *m = first + c * n * d, *v = second + c * n * d;
        REAL *of_vector = of_held ? NULL : of_vectors + c * count * d;
        const NAME(Client) client = {vector, mean, of_scores + c * n, scores + c * n, lengths + c * n, where + c * n,
                                     (REAL)best, of_vector, of_held ? NULL : of_mean, (uint64_t)keys[c], word,
                                     threshold, d, factor};
        memset(mean, 0, 2 * d * sizeof *mean);
        for (int64_t p = 0; p < count; p++) NAME(add)(mean, each[c], vector + p * d, d);
        for (int64_t j = 0; j < copies; j++) {
            next[j] = copy[mine[j]];
            copy[mine[j]] = (int32_t)j;
        }
        if (of_held) {
            for (int64_t j = 0; j < copies; j++) {
                const int64_t i = mine[j], at = i * d;
                if (copy[i] != j) continue;
                NAME(row_gradient)(&client, i, rows + at, gradient);
                for (int32_t l = (int32_t)j; l >= 0; l = next[l])
                    NAME(add)(gradient, 1, of_held + (c * copies + l) * d, d);
                NAME(adam)(rows + at, row_to + at, m + at, v + at, gradient, d, rule, (int)fresh);
            }
        } else {
            memset(of_vector, 0, count * d * sizeof *of_vector);
            for (int64_t i = 0, begin = 0; i < n; i++) {  /* rows from begin on wait for their step */
                NAME(row_gradient)(&client, i, rows + i * d, gradient + (i - begin) * d);
                const int held_back = copy[i] >= 0;
                if (!held_back && i + 1 - begin < NAME(ROWS) && i + 1 < n) continue;
                const int64_t at = begin * d;
                NAME(adam)(rows + at, row_to + at, m + at, v + at, gradient, (i + !held_back) * d - at, rule,
                           (int)fresh);
                begin = i + 1;
            }
            for (int64_t p = 0; p < count; p++)
                for (int64_t k = 0; k < d; k++)
                    of_vector[p * d + k] = of_vector[p * d + k] * (REAL)best + each[c] * of_mean[k];
        }
        for (int64_t j = 0; j < copies; j++) copy[mine[j]] = -1;
    }
    free(copy); free(word); free(room);
    return ready ? 0 : -1;
}
