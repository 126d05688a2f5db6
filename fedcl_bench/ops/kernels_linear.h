/* Training of stacked clients that have layers of their own, in the order and with the roundings of PyTorch's and MKL's
   operations on this kind of processor: products and sums are one step (FMA) where it has one. */

/* ---- Adam ---- */

/* Before the first step there are no moments, and after the last one needs them. */
static inline __attribute__((always_inline)) void adam_of(
        float *restrict value, const float *restrict gradient, float *restrict first, float *restrict second, int64_t n,
        float share1, float keep2, float share2, float root, float eps, float rate, int begins, int ends) {
    for (int64_t i = 0; i < n; i++) {
        const float g = gradient[i], old1 = begins ? 0 : first[i], old2 = begins ? 0 : second[i];
        const float new1 = FMA(share1, g - old1, old1), new2 = FMA(share2 * g, g, old2 * keep2);
        value[i] += rate * new1 / (sqrtf(new2) / root + eps);
        if (!ends) { first[i] = new1; second[i] = new2; }
    }
}

void adam(int64_t tensors, float *const *values, const float *const *gradients, float *const *firsts,
          float *const *seconds, const int64_t *numbers, const double *rates, double beta1, double beta2, double eps,
          int64_t step, int64_t ends) {
    const float share1 = (float)(1 - beta1), keep2 = (float)beta2, share2 = (float)(1 - beta2),
                root = (float)sqrt(1 - pow(beta2, (double)step));
    for (int64_t t = 0; t < tensors; t++) {
        const float rate = (float)(-rates[t] / (1 - pow(beta1, (double)step)));
#define ADAM(begins, ends) adam_of(values[t], gradients[t], firsts[t], seconds[t], numbers[t], share1, keep2, share2, \
                                   root, (float)eps, rate, begins, ends)
        if (step == 1) ADAM(1, 0);
        else if (ends) ADAM(0, 1);
        else ADAM(0, 0);
#undef ADAM
    }
}

/* ---- linear layers: small matrix products, for which calling a library costs as much as they do ---- */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#else
#pragma STDC FP_CONTRACT ON
#endif

/* A block of results that stays in registers: so many rows, of so many vectors. */
#define ROWS 6
#if defined(__AVX512F__) || defined(__aarch64__)  /* 32 registers */
#define MOST 4
#else
#define MOST 2
#endif

typedef Vector_float Vector;
enum { WIDE = WIDE_float };

static inline int64_t whole_vectors(int64_t n) { return (n + WIDE - 1) / WIDE * WIDE; }

static inline void store(float *to, Vector vector, int64_t n) {
    if (n >= WIDE) {
        *(Vector *)to = vector;
        return;
    }
    float numbers[WIDE];
    memcpy(numbers, &vector, sizeof vector);
    for (int64_t some = WIDE / 2, at = 0; some; some /= 2)
        if (n & some) {
            for (int64_t i = 0; i < some; i++) to[at + i] = numbers[at + i];
            at += some;
        }
}

/* result[i] = start[i] + the sum over r of left[i * of_row + r * of_inner] * right[r], for rows of whole vectors of
   which the first columns are stored. */
#define BLOCK(NAME, ROWS, VECTORS) \
static inline __attribute__((always_inline)) void NAME##_##VECTORS( \
        int64_t columns, int64_t inner, const float *left, int64_t of_row, int64_t of_inner, const float *right, \
        int64_t right_row, const float *start, float *result, int64_t result_row) { \
    Vector sum[ROWS][VECTORS] = {0}; \
    for (int64_t r = 0; r < inner; r++) { \
        Vector factor[VECTORS]; \
        UNROLL for (int v = 0; v < VECTORS; v++) factor[v] = *(const Vector *)(right + r * right_row + v * WIDE); \
        UNROLL for (int i = 0; i < ROWS; i++) \
            UNROLL for (int v = 0; v < VECTORS; v++) sum[i][v] += left[i * of_row + r * of_inner] * factor[v]; \
    } \
    UNROLL for (int i = 0; i < ROWS; i++) \
        UNROLL for (int v = 0; v < VECTORS; v++) { \
            if (start) sum[i][v] += start[i]; \
            store(result + i * result_row + v * WIDE, sum[i][v], columns - v * WIDE); \
        } \
}

/* The last rows may be computed twice, so that all are in blocks. */
#define PANEL(VECTORS) \
BLOCK(block, ROWS, VECTORS) \
BLOCK(one_row, 1, VECTORS) \
static __attribute__((noinline)) void panel_##VECTORS( \
        int64_t rows, int64_t columns, int64_t inner, const float *left, int64_t of_row, int64_t of_inner, \
        const float *right, int64_t right_row, const float *start, float *result, int64_t result_row) { \
    for (int64_t i = 0, step = rows < ROWS ? 1 : ROWS; i < rows; i += step) { \
        const int64_t at = i + step <= rows ? i : rows - step; \
        const float *from = start ? start + at : NULL; \
        if (step == 1) \
            one_row_##VECTORS(columns, inner, left + at * of_row, of_row, of_inner, right, right_row, from, \
                              result + at * result_row, result_row); \
        else \
            block_##VECTORS(columns, inner, left + at * of_row, of_row, of_inner, right, right_row, from, \
                            result + at * result_row, result_row); \
    } \
}
PANEL(1)
PANEL(2)
PANEL(3)
PANEL(4)

static void product(int64_t rows, int64_t columns, int64_t inner, const float *left, int64_t of_row, int64_t of_inner,
                    const float *right, int64_t right_row, const float *start, float *result, int64_t result_row) {
    static void (*const panels[])(int64_t, int64_t, int64_t, const float *, int64_t, int64_t, const float *, int64_t,
                                  const float *, float *, int64_t) = {panel_1, panel_2, panel_3, panel_4};
    for (int64_t j = 0, vectors; j < columns; j += vectors * WIDE) {
        const int64_t left_over = whole_vectors(columns - j) / WIDE, panels_left = (left_over + MOST - 1) / MOST;
        vectors = (left_over + panels_left - 1) / panels_left;
        panels[vectors - 1](rows, columns - j, inner, left, of_row, of_inner, right + j, right_row, start, result + j,
                            result_row);
    }
}

static inline void transpose_square(const float *from, int64_t from_row, float *to, int64_t to_row) {
    typedef int32_t Fours __attribute__((vector_size(16)));
    Quarter_float row[4], pair[4];
    UNROLL for (int i = 0; i < 4; i++) memcpy(&row[i], from + i * from_row, sizeof row[i]);
    UNROLL for (int i = 0; i < 2; i++) {
        pair[i] = PICK(Fours, row[i], row[i + 2], 0, 4, 1, 5);
        pair[i + 2] = PICK(Fours, row[i], row[i + 2], 2, 6, 3, 7);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        row[2 * i] = PICK(Fours, pair[2 * i], pair[2 * i + 1], 0, 4, 1, 5);
        row[2 * i + 1] = PICK(Fours, pair[2 * i], pair[2 * i + 1], 2, 6, 3, 7);
    }
    UNROLL for (int i = 0; i < 4; i++) memcpy(to + i * to_row, &row[i], sizeof row[i]);
}

static void transpose(const float *from, int64_t rows, int64_t columns, int64_t from_row, float *to, int64_t to_row) {
    if (rows < 4 || columns < 4) {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++) to[j * to_row + i] = from[i * from_row + j];
        return;
    }
    for (int64_t i = 0; i < rows; i += 4)  /* the last square overlaps the one before */
        for (int64_t j = 0; j < columns; j += 4) {
            const int64_t row = i + 4 <= rows ? i : rows - 4, column = j + 4 <= columns ? j : columns - 4;
            transpose_square(from + row * from_row + column, from_row, to + column * to_row + row, to_row);
        }
}

/* Numbers with room for a vector behind them: what is read there is not stored. After these there are so many more. */
static const float *with_room(const float *from, int64_t numbers, int64_t more, float *room) {
    return more < WIDE ? memcpy(room, from, numbers * sizeof *room) : from;
}

/* Below, of each client: inputs (n, in), weight (out, in), whose first number lies of_weight after that of the client
   before, bias (out) or NULL, gradient (n, out). They return 0, or -1 without memory. */

/* result (n, out) = inputs weight^T + bias */
int linear(const float *inputs, const float *weight, int64_t of_weight, const float *bias, int64_t clients, int64_t n,
           int64_t in, int64_t out, float *result) {
    const int64_t row = whole_vectors(n);
    float *turned = calloc((in + out) * row + 1, sizeof *turned), *made = turned + in * row;
    for (int64_t c = 0; c < clients && turned; c++) {
        transpose(inputs + c * n * in, n, in, in, turned, row);
        product(out, row, in, weight + c * of_weight, in, 1, turned, row, bias ? bias + c * out : NULL, made, row);
        transpose(made, out, n, row, result + c * n * out, out);
    }
    free(turned);
    return turned ? 0 : -1;
}

/* Given the gradient of what linear returns: to_inputs (n, used), of the first inputs, = gradient times the first columns
   of weight; to_weight (out, in) = gradient^T inputs; to_bias (out), the sums of gradient. The first and the last may be
   NULL. */
int linear_back(const float *gradient, const float *inputs, const float *weight, int64_t of_weight, int64_t clients,
                int64_t n, int64_t in, int64_t out, int64_t used, float *to_inputs, float *to_weight, float *to_bias) {
    float *room = calloc((n > out ? n : out) * in + WIDE, sizeof *room);
    for (int64_t c = 0; c < clients && room; c++) {
        const float *mine = gradient + c * n * out;
        if (to_inputs)
            product(n, used, out, mine, out, 1,
                    with_room(weight + c * of_weight, out * in, (clients - 1 - c) * of_weight, room), in, NULL,
                    to_inputs + c * n * used, used);
        product(out, in, n, mine, 1, out,
                with_room(inputs + c * n * in, n * in, (clients - 1 - c) * n * in, room), in, NULL,
                to_weight + c * out * in, in);
        if (to_bias) position_sums(mine, n, out, to_bias + c * out);
    }
    free(room);
    return room ? 0 : -1;
}

/* ---- similarities ---- */

/* Products are added up in blocks of so many, as in MKL's on this kind of processor. */
#define DEPTH 192
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE_ROWS 14
#else
#define TILE_ROWS 6
#endif
enum { TILE = 2, TILE_COLUMNS = TILE * WIDE };

/* result[i] (+)= the sum over r of left[r * TILE_ROWS + i] * right[r], for rows of TILE_COLUMNS numbers. */
static __attribute__((noinline)) void tile(int64_t inner, const float *left, const float *right, int begins,
                                           float *result) {
    Vector sum[TILE_ROWS][TILE] = {0};
    for (int64_t r = 0; r < inner; r++) {
        Vector factor[TILE];
        UNROLL for (int v = 0; v < TILE; v++) factor[v] = *(const Vector *)(right + r * TILE_COLUMNS + v * WIDE);
        UNROLL for (int i = 0; i < TILE_ROWS; i++)
            UNROLL for (int v = 0; v < TILE; v++) sum[i][v] += left[r * TILE_ROWS + i] * factor[v];
    }
    UNROLL for (int i = 0; i < TILE_ROWS; i++)
        UNROLL for (int v = 0; v < TILE; v++) {
            Vector *to = (Vector *)(result + i * TILE_COLUMNS + v * WIDE);
            if (begins) *to = sum[i][v];
            else *to += sum[i][v];
        }
}

/* result (n_queries, n) = products of queries (n_queries, d) and rows (n, d), each by its row's length; -inf where both
   are of one owner. Returns 0, or -1 without memory. */
int similarities(const float *queries, const int64_t *owners, int64_t n_queries, const float *rows,
                 const float *lengths, const int64_t *row_owners, int64_t n, int64_t d, float *result) {
    const int64_t padded = (n_queries + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    float *left = calloc(padded * d + 1, sizeof *left), *right = calloc(DEPTH * TILE_COLUMNS, sizeof *right),
          *made = malloc(padded * TILE_COLUMNS * sizeof *made + 1);
    const int ready = left && right && made;
    for (int64_t i = 0; i < n_queries && ready; i += TILE_ROWS)
        transpose(queries + i * d, n_queries - i < TILE_ROWS ? n_queries - i : TILE_ROWS, d, d, left + i * d, TILE_ROWS);
    for (int64_t j = 0; j < n && ready; j += TILE_COLUMNS) {
        const int64_t columns = n - j < TILE_COLUMNS ? n - j : TILE_COLUMNS;
        for (int64_t from = 0; from < d; from += DEPTH) {
            const int64_t inner = d - from < DEPTH ? d - from : DEPTH;
            transpose(rows + j * d + from, columns, inner, d, right, TILE_COLUMNS);
            for (int64_t i = 0; i < padded; i += TILE_ROWS)
                tile(inner, left + i * d + from * TILE_ROWS, right, from == 0, made + i * TILE_COLUMNS);
        }
        for (int64_t i = 0; i < n_queries; i++)
            for (int64_t c = 0; c < columns; c++) {
                const float length = lengths[j + c] < 1e-12f ? 1e-12f : lengths[j + c];
                result[i * n + j + c] = row_owners[j + c] == owners[i] ? -INFINITY : made[i * TILE_COLUMNS + c] / length;
            }
    }
    free(left); free(right); free(made);
    return ready ? 0 : -1;
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
