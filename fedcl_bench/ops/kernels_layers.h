/* What session backbones do between their linear layers, in single precision, added up in the order of PyTorch's
   operations on this kind of processor. */

#define PARTS 4  /* sums that are kept beside each other where many numbers are added up */
#define MOST_ADDED 16  /* numbers that a sum takes before it is added to that of those before */

#define ROWS_AT_ONCE 8  /* rows whose sums do not wait for each other */

/* Of some rows of d numbers, the sums; or those of their products with other rows; or those of the squares of what is
   left when each is less its mean, which is stored. d < 8 PARTS MOST_ADDED */
static inline __attribute__((always_inline)) void sums_of(const float *rows, int64_t n, int64_t d, const float *others,
                                                          const float *means, float *stored, float *total) {
    float lanes[ROWS_AT_ONCE][8] = {{0}};
    const int64_t vectors = d / 8;
    for (int64_t r = 0; r < n; r++) {
        const float *numbers = rows + r * d;
        float *to = means ? stored + r * d : NULL;
        Half_float sum[PARTS] = {{0}};
        int64_t v = 0;
#define ADD(part, at) do { \
            Half_float some_; \
            memcpy(&some_, numbers + (at) * 8, sizeof some_); \
            if (others) { \
                Half_float other_; \
                memcpy(&other_, others + r * d + (at) * 8, sizeof other_); \
                some_ *= other_; \
            } \
            if (means) { \
                some_ -= means[r]; \
                memcpy(to + (at) * 8, &some_, sizeof some_); \
                some_ *= some_; \
            } \
            sum[part] += some_; \
        } while (0)
        for (; v + PARTS <= vectors; v += PARTS)
            UNROLL for (int p = 0; p < PARTS; p++) ADD(p, v + p);
        for (; v < vectors; v++) ADD(0, v);
#undef ADD
        UNROLL for (int p = 1; p < PARTS; p++) sum[0] += sum[p];
        memcpy(lanes[r], sum, sizeof lanes[r]);
        total[r] = 0;
        for (int64_t k = vectors * 8; k < d; k++) {
            float left = others ? numbers[k] * others[r * d + k] : numbers[k];
            if (means) to[k] = left -= means[r];
            total[r] += means ? left * left : left;
        }
    }
    for (int l = 0; l < 8; l++)
        UNROLL for (int r = 0; r < ROWS_AT_ONCE; r++) total[r] += lanes[r][l];
}

static inline void scaled(float *restrict normed, float by, const float *restrict weight, const float *restrict bias,
                          int64_t d, float *restrict result) {
    for (int64_t k = 0; k < d; k++) {
        normed[k] *= by;
        result[k] = FMA(normed[k], weight[k], bias[k]);
    }
}

static inline void scaled_here(float *restrict normed, float by, const float *restrict weight,
                               const float *restrict bias, int64_t d) {
    for (int64_t k = 0; k < d; k++) normed[k] = FMA(normed[k] * by, weight[k], bias[k]);
}

/* result = weight (x - mean) scale + bias over the last dimension of x (clients, n, d), where the parameters of a client
   lie of_weight and of_bias after those of the one before; normed, mean and scale may be NULL. */
void layer_norm(const float *x, const float *weight, int64_t of_weight, const float *bias, int64_t of_bias,
                int64_t clients, int64_t n, int64_t d, double eps, float *result, float *normed, float *mean,
                float *scale) {
    for (int64_t at = 0; at < clients * n; at += ROWS_AT_ONCE) {
        const int64_t some = clients * n - at < ROWS_AT_ONCE ? clients * n - at : ROWS_AT_ONCE;
        float *kept = (normed ? normed : result) + at * d, middle[ROWS_AT_ONCE] = {0}, by[ROWS_AT_ONCE] = {0};
        sums_of(x + at * d, some, d, NULL, NULL, NULL, middle);
        for (int r = 0; r < ROWS_AT_ONCE; r++) middle[r] /= (float)d;
        sums_of(x + at * d, some, d, NULL, middle, kept, by);
        for (int r = 0; r < ROWS_AT_ONCE; r++) by[r] = 1 / sqrtf(by[r] / (float)d + (float)eps);
        for (int64_t r = 0; r < some; r++) {
            const int64_t c = (at + r) / n;
            const float *factor = weight + c * of_weight, *plus = bias + c * of_bias;
            if (normed) scaled(kept + r * d, by[r], factor, plus, d, result + (at + r) * d);
            else scaled_here(kept + r * d, by[r], factor, plus, d);
        }
        if (mean) memcpy(mean + at, middle, some * sizeof *mean);
        if (scale) memcpy(scale + at, by, some * sizeof *scale);
    }
}

static inline __attribute__((always_inline)) Half_float row_of(const float *rows, const float *times, int64_t at) {
    Half_float row, factor;
    memcpy(&row, rows + at, sizeof row);
    if (!times) return row;
    memcpy(&factor, times + at, sizeof factor);
    return row * factor;
}

/* The sums of vectors over rows that lie step apart, each times other rows if there are any. */
static inline __attribute__((always_inline)) void sums_of_rows(const float *rows, const float *times, int64_t n,
                                                               int64_t step, int vectors, Half_float *sum) {
    Half_float before[PARTS] = {{0}};
    UNROLL for (int v = 0; v < vectors; v++) sum[v] = (Half_float){0};
    for (int64_t i = 0; i < n;) {
        const int64_t stop = i + MOST_ADDED < n ? i + MOST_ADDED : n;
        for (; i < stop; i++)
            UNROLL for (int v = 0; v < vectors; v++) sum[v] += row_of(rows, times, i * step + v * 8);
        if (i % MOST_ADDED == 0)
            UNROLL for (int v = 0; v < vectors; v++) { before[v] += sum[v]; sum[v] = (Half_float){0}; }
    }
    UNROLL for (int v = 0; v < vectors; v++) sum[v] += before[v];
}

/* The same of one vector, in parts of every so many rows. */
static inline __attribute__((always_inline)) Half_float sum_in_parts(const float *rows, const float *times, int64_t n,
                                                                     int64_t step) {
    Half_float sum[PARTS];
    const int64_t each = n / PARTS;
    UNROLL for (int p = 0; p < PARTS; p++)
        sums_of_rows(rows + p * step, times ? times + p * step : NULL, each, PARTS * step, 1, sum + p);
    for (int64_t i = each * PARTS; i < n; i++) sum[0] += row_of(rows, times, i * step);
    UNROLL for (int p = 1; p < PARTS; p++) sum[0] += sum[p];
    return sum[0];
}

/* result (d) = the sums of n rows; n < MOST_ADDED^2 */
static __attribute__((always_inline)) inline void sum_positions(const float *rows, const float *times, int64_t n,
                                                                int64_t d, float *result) {
    int64_t k = 0;
    for (; k + 8 * PARTS <= d; k += 8 * PARTS) {
        Half_float sum[PARTS];
        sums_of_rows(rows + k, times ? times + k : NULL, n, d, PARTS, sum);
        memcpy(result + k, sum, sizeof sum);
    }
    for (; k + 8 <= d; k += 8) {
        const Half_float sum = sum_in_parts(rows + k, times ? times + k : NULL, n, d);
        memcpy(result + k, &sum, sizeof sum);
    }
    if (k < d) {  /* the last eight, of which some are there already; fewer are written beside zeros */
        float padded[2][d < 8 ? MOST_ADDED * MOST_ADDED * 8 : 1], last[8];
        for (int64_t i = 0; i < n && d < 8; i++)
            for (int l = 0; l < 8; l++) {
                padded[0][i * 8 + l] = l < d ? rows[i * d + l] : 0;
                padded[1][i * 8 + l] = l < d && times ? times[i * d + l] : 0;
            }
        const Half_float sum = d < 8 ? sum_in_parts(padded[0], times ? padded[1] : NULL, n, 8)
                                     : sum_in_parts(rows + d - 8, times ? times + d - 8 : NULL, n, d);
        memcpy(last, &sum, sizeof sum);
        memcpy(result + k, d < 8 ? last : last + 8 - (d - k), (d - k) * sizeof *last);
    }
}

/* Not to be compiled as products that are added are. */
static __attribute__((noinline)) void position_sums(const float *rows, int64_t n, int64_t d, float *result) {
    sum_positions(rows, NULL, n, d, result);
}

/* Gradients of what layer_norm was given, and that of normed, given that of its result. */
void layer_norm_back(const float *gradient, const float *normed, const float *weight, int64_t of_weight,
                     int64_t clients, int64_t n, int64_t d, float *to_normed, float *to_weight, float *to_bias) {
    for (int64_t c = 0; c < clients; c++) {
        const float *of_client = gradient + c * n * d, *factor = weight + c * of_weight;
        for (int64_t i = 0; i < n; i++) {
            const float *restrict from = of_client + i * d;
            float *restrict to = to_normed + (c * n + i) * d;
            for (int64_t k = 0; k < d; k++) to[k] = from[k] * factor[k];
        }
        sum_positions(of_client, normed + c * n * d, n, d, to_weight + c * d);
        sum_positions(of_client, NULL, n, d, to_bias + c * d);
    }
}

/* result = x times scale where the client's stream says that an entry is kept, 0 elsewhere; x (clients, n). Its numbers
   begin at first and decide about four entries each. Returns 0, or -1 without memory. */
int dropout(const float *x, const uint64_t *keys, int64_t first, int64_t clients, int64_t n, int64_t limit, double scale,
            float *result, uint8_t *kept) {
    const int64_t words = (n + 3) / 4;
    uint64_t *number = malloc((words + 1) * sizeof *number);
    int16_t *pattern = malloc((words + 1) * sizeof *number);
    const int ready = number && pattern;
    const float factor = (float)scale;
    for (int64_t c = 0; c < clients && ready; c++) {
        for (int64_t w = 0; w < words; w++) number[w] = mix(keys[c] + (uint64_t)(first + w + 1) * GAMMA);
        memcpy(pattern, number, words * sizeof *number);
        for (int64_t i = 0; i < n; i++) {
            const int keep = pattern[i] >= limit;
            kept[c * n + i] = keep;
            result[c * n + i] = x[c * n + i] * (keep ? factor : 0);
        }
    }
    free(number); free(pattern);
    return ready ? 0 : -1;
}

void dropout_back(const float *gradient, const uint8_t *kept, int64_t n, double scale, float *result) {
    const float factor = (float)scale;
    for (int64_t i = 0; i < n; i++) result[i] = gradient[i] * (kept[i] ? factor : 0);
}

/* positive, negative (clients, n) = products of outputs (clients, n, d) with the second to last of n + 1 rows, and with n
   rows after them. */
void target_logits(const float *outputs, const float *rows, int64_t clients, int64_t n, int64_t d, float *positive,
                   float *negative) {
    for (int64_t c = 0; c < clients; c++)
        for (int64_t at = 0; at < n; at += ROWS_AT_ONCE) {
            const float *mine = outputs + (c * n + at) * d, *row = rows + (c * (2 * n + 1) + 1 + at) * d;
            const int64_t some = n - at < ROWS_AT_ONCE ? n - at : ROWS_AT_ONCE;
            float sum[ROWS_AT_ONCE] = {0};
            sums_of(row, some, d, mine, NULL, NULL, sum);
            memcpy(positive + c * n + at, sum, some * sizeof *sum);
            sums_of(row + n * d, some, d, mine, NULL, NULL, sum);
            memcpy(negative + c * n + at, sum, some * sizeof *sum);
        }
}

/* Gradients of what target_logits was given, given those of what it wrote. */
void target_logits_back(const float *of_positive, const float *of_negative, const float *outputs, const float *rows,
                        int64_t clients, int64_t n, int64_t d, float *to_outputs, float *to_rows) {
    for (int64_t c = 0; c < clients; c++) {
        memset(to_rows + c * (2 * n + 1) * d, 0, d * sizeof *to_rows);
        for (int64_t i = c * n; i < (c + 1) * n; i++) {
            const int64_t row = i + c * (n + 1) + 1;
            const float p = of_positive[i], q = of_negative[i], *restrict mine = outputs + i * d;
            const float *restrict yes = rows + row * d, *restrict no = yes + n * d;
            float *restrict to = to_outputs + i * d, *restrict to_yes = to_rows + row * d, *restrict to_no = to_yes + n * d;
            for (int64_t k = 0; k < d; k++) {
                to[k] = p * yes[k] + q * no[k];
                to_yes[k] = p * mine[k];
                to_no[k] = q * mine[k];
            }
        }
    }
}
