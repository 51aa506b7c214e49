// The network's step on a CPU: linear layers over packed weights, attention that reads rows where
// they lie, and the pass that strings them together.
//
// One decoded token reads every weight once, so the speed of a step is the speed of memory: weights
// lie in the order in which they are read, and a batch reads them once. Sums are float32 (with int8
// weights whole numbers first), and every one of them runs in one order, so that a token's numbers
// do not depend on its neighbours in the batch. (They do depend, in the last bits, on whether it is
// its sequence's only one in the step: a single query is attended in another way than several.)
//
// This file is compiled once per instruction set; the compiler makes its vectors from WIDTH floats.

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the first of a pair is the lower half of its word"
#endif

#if defined(__AVX512F__)
#define WIDTH       16
#define MOST_TOKENS 6 // tokens of a tile: sums, weights and a token's number fit the registers
#elif defined(__AVX__)
#define WIDTH       8
#define MOST_TOKENS 6
#else
#define WIDTH       4
#define MOST_TOKENS 3
#endif

#define LANES     16              // outputs of a panel
#define VECTORS   (LANES / WIDTH) // vectors of a panel
#define GROUP     4               // panels that a thread works on together
#define BLOCK     256             // inputs of the weights that all tokens read before the next ones
#define TILES     43              // tiles of tokens that share a reading of the weights
#define FEW(type) ((type) == INT8 ? 12 : 24) // tokens that read a panel from one end to the other
#define WIDE      (GROUP * LANES)            // outputs that a thread works on together
#define STRIDE    4                          // inputs of a layer come in multiples of it
#define KEYS      64                         // keys of a block of attention
#define ROWS      4                          // rows whose values are added to an output at once
#define AHEAD     4                          // rows that are asked for before their turn, whole
#define FAR       16                         // and where a head's part of each is copied
#define QUERIES   256                        // queries of a block of attention
#define SPINS     2000                       // looks at a phase before a thread lets others run
#define LARGEST   32767.0f    // an input in int16: BLOCK products with int8 fit 32 bits
#define SHIFT     12582912.0f // 1.5 * 2^23: added, it leaves a whole number in the low bits
#define INLINE    static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t Word __attribute__((may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH)));
typedef int8_t Bytes __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
typedef float Four __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

// Types of weights, and what a layer's inputs become for them: with int8 weights int16, in steps of
// each token's own; bfloat16 with BFLOAT16_BOTH; else they stay float32. INT16 is what int8 weights
// become on their way.
enum type { FLOAT32, BFLOAT16, INT8, BFLOAT16_BOTH, INT16 };
static const int SIZES[] = {4, 2, 1, 2}; // of those that panels are of
enum activation { NONE, GELU_TANH, GELU, RELU };

// A linear layer of `n` outputs and `k` inputs, a multiple of STRIDE. `panels` holds LANES outputs
// after another: for every input the weights of all of them; of all types but float32 the two of a
// pair of inputs lie together. Outputs beyond n are zero. `scale` (int8 only) is an output's own;
// `bias` may be absent.
struct linear {
    const char *panels;
    const float *scale, *bias;
    int32_t n, k, type;
};

struct norm {
    const float *weight, *bias;
};

struct layer {
    struct norm ln_1, ln_2;
    struct linear c_attn, attn_proj, c_fc, mlp_proj;
};

struct model {
    const struct layer *layers;
    const float *wpe; // (n_ctx, d_model)
    struct norm ln_f; // absent where the blocks normalise what they add to
    struct linear wte;
    int32_t n_layer, d_model, d_ff, activation, norm_first;
    float epsilon;
};

// The packed tokens of a step. Sequence i has tokens queries[i] to queries[i + 1], which are the
// last ones of its rows[keys[i]] to rows[keys[i + 1]]; n_keys is the longest one's rows.
struct batch {
    const int32_t *tokens, *positions, *write, *queries, *keys, *rows;
    int32_t n_tokens, n_sequences, n_keys;
};

// Where a layer's rows lie: keys and values, each (rows, n_kv_head, d_head), float32 or bfloat16.
struct pool {
    char *keys, *values;
    int32_t type, n_head, n_kv_head, d_head;
};

// The threads of a pass share the chunks of one phase after another: whoever is free takes the next
// chunk, and a phase is over when its chunks are done. So nobody waits, until the end of the pass,
// for a thread that the system has put aside, unless it holds a chunk.
struct phase {
    _Alignas(64) atomic_int taken;
    atomic_int done;
};

// One thread in its walk through the phases.
struct member {
    struct phase *phase;
    float *scratch; // its own
};

// Takes a chunk of the phase: its number, or -1 once all `n` are done, and with it the next phase.
static int next_chunk(struct member *me, int n) {
    int chunk = atomic_fetch_add(&me->phase->taken, 1);
    if (chunk < n)
        return chunk;
    for (int spins = 0; atomic_load_explicit(&me->phase->done, memory_order_acquire) < n; spins++)
        if (spins > SPINS)
            sched_yield();
        else
            PAUSE();
    me->phase++;
    return -1;
}

// Says that a chunk is done.
static void finish_chunk(struct member *me) {
    atomic_fetch_add_explicit(&me->phase->done, 1, memory_order_release);
}

#define FOR_CHUNKS(me, chunk, n) for (int chunk; (chunk = next_chunk(me, n)) >= 0; finish_chunk(me))

INLINE float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// To the nearest, ties to even; what is not a number stays none.
INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits = as_bits(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return x != x ? 0x7fc0 : rounded;
}

INLINE float number(const char *row, int type, long i) {
    return type == BFLOAT16 ? as_float((uint32_t)((const uint16_t *)row)[i] << 16)
                            : ((const float *)row)[i];
}

// WIDTH numbers from the i-th on.
INLINE Floats numbers(const char *row, int type, long i) {
    if (type == BFLOAT16)
        return (Floats)(__builtin_convertvector(*(const Halves *)(row + i * 2), Words) << 16);
    return *(const Floats *)(row + i * 4);
}

INLINE float total(Floats x) {
    Four sum = __builtin_shufflevector(x, x, 0, 1, 2, 3);
#if WIDTH >= 8
    sum += __builtin_shufflevector(x, x, 4, 5, 6, 7);
#endif
#if WIDTH == 16
    sum += __builtin_shufflevector(x, x, 8, 9, 10, 11);
    sum += __builtin_shufflevector(x, x, 12, 13, 14, 15);
#endif
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// e^x, x up to 88, by 2^n and a polynomial of the rest (Cephes, expf); x below -87 counts as -87.
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + SHIFT;
    float n = shifted - SHIFT;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * as_float((as_bits(shifted) + 127) << 23);
}

INLINE float activate(float x, int activation) {
    switch (activation) {
    case RELU: return x < 0.0f ? 0.0f : x;
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case GELU_TANH: { // 0.5 x (1 + tanh u) = x / (1 + e^-2u)
        float u = 0.79788456f * (x + 0.044715f * x * x * x);
        u = u < -44.0f ? -44.0f : u;
        return x / (1.0f + exponential(-2.0f * u));
    }
    default: return x;
    }
}

static void activate_all(float *x, int n, int activation) {
    if (activation == NONE)
        return;
    if (activation == GELU_TANH)
#pragma omp simd
        for (int i = 0; i < n; i++)
            x[i] = activate(x[i], GELU_TANH);
    else
        for (int i = 0; i < n; i++)
            x[i] = activate(x[i], activation);
}

INLINE int round_up(int n, int to) { return (n + to - 1) / to * to; }

INLINE long panel_bytes(const struct linear *l) { return (long)l->k * LANES * SIZES[l->type]; }

// Inputs are handed to the sums as words of 32 bits: one number, or the two of a pair.
INLINE int together(int type) { return type == FLOAT32 || type == BFLOAT16 ? 1 : 2; }

// Words that are worked on in one go: both of a pair that is read at once.
INLINE int words_at_once(int type) { return type == BFLOAT16 ? 2 : 1; }

// The weights of word `at` + `u` for `p` panels; of bfloat16 `u` tells which of a pair.
INLINE void load(int p, int type, const char *w, long panel, long at, int u,
                 Words weights[GROUP * VECTORS]) {
#pragma GCC unroll 16
    for (int j = 0; j < p * VECTORS; j++) {
        const char *block = w + j / VECTORS * panel;
        long lane = j % VECTORS * WIDTH;
        if (type == BFLOAT16) {
            Words two = *(const Words *)(block + (at * LANES + lane * 2) * 2);
            weights[j] = u ? (Words)(two & 0xffff0000) : (Words)(two << 16);
        } else if (type == INT8) {
            weights[j] = (Words) __builtin_convertvector(
                *(const Bytes *)(block + ((at + u) * LANES + lane) * 2), Shorts);
        } else {
            weights[j] = *(const Words *)(block + ((at + u) * LANES + lane) * 4);
        }
    }
}

// Sums plus a word of inputs times weights, of pairs of int16.
INLINE Ints add_whole(Ints sums, Words x, Words w) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
#elif defined(__AVX512BW__)
    return sums + (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#elif defined(__AVX2__)
    return sums + (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#elif defined(__SSE2__) && WIDTH == 4
    return sums + (Ints)_mm_madd_epi16((__m128i)x, (__m128i)w);
#else
    return sums + ((Ints)x >> 16) * ((Ints)w >> 16) +
           ((Ints)(x << 16) >> 16) * ((Ints)(w << 16) >> 16);
#endif
}

// The same of numbers, in pairs of bfloat16 or one by one.
INLINE Floats add_numbers(int type, Floats sums, Word x, Words w) {
    if (type != BFLOAT16_BOTH)
        return sums + as_float(x) * (Floats)w;
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)(x - (Words){0}), (__m512bh)w);
#else
    sums += as_float(x << 16) * (Floats)(w << 16);
    return sums + as_float(x & 0xffff0000) * (Floats)(w & 0xffff0000);
#endif
}

INLINE int are_whole(int type) { return type == INT8 || type == INT16; }

// Tokens are worked on in tiles of as equal a size as can be: these are the tiles `begin` to `end`
// of all those that `n_tokens` make. What a tile reads one after another lies so: `x` holds the
// words of its m tokens' inputs as (words, m).
struct tiles {
    const Word *x;
    int n_tokens, begin, end;
};

INLINE int n_tiles(int n_tokens) { return (n_tokens + MOST_TOKENS - 1) / MOST_TOKENS; }

// The first token of a tile.
INLINE int tile_start(int n_tokens, int tile) { return (long)n_tokens * tile / n_tiles(n_tokens); }

#define FOR_TILES(tiles, at, m)                                                                    \
    for (int tile = (tiles).begin, at, m;                                                          \
         tile < (tiles).end && (at = tile_start((tiles).n_tokens, tile),                           \
                               m = tile_start((tiles).n_tokens, tile + 1) - at);                   \
         tile++)

// (m, k) becomes (k, m).
INLINE void interleave(const float *x, int m, int k, Word *to) {
    for (int j = 0; j < k; j++)
        for (int i = 0; i < m; i++)
            *to++ = as_bits(x[(long)i * k + j]);
}

// The step between a token's inputs in int16, of which the largest becomes LARGEST. It is no number
// where one of them is none.
static float int16_step(const float *x, int k) {
    float most = 0.0f, none = 0.0f;
#pragma omp simd reduction(max : most) reduction(+ : none)
    for (int i = 0; i < k; i++) {
        float size = fabsf(x[i]);
        most = size > most ? size : most;
        none += x[i] * 0.0f;
    }
    return most / LARGEST + none;
}

// As `interleave`, of pairs, for layers that take them; and each token's step.
INLINE void interleave_pairs(int type, const float *x, int m, int k, Word *to, float *steps) {
    for (int i = 0; i < m; i++, x += k) {
        uint16_t part[BLOCK];
        float step = type == INT8 ? int16_step(x, k) : 1.0f;
        float rate = step > 1e-30f ? 1.0f / step : 0.0f;
        steps[i] = step;
        for (int from = 0; from < k; from += BLOCK) {
            int n = k - from < BLOCK ? k - from : BLOCK;
#pragma omp simd
            for (int j = 0; j < n; j++)
                part[j] = type == INT8 ? (uint16_t)as_bits(x[from + j] * rate + SHIFT)
                                       : to_bfloat16(x[from + j]);
            for (int j = 0; j < n; j += 2)
                to[(long)(from + j) / 2 * m + i] = part[j] | (uint32_t)part[j + 1] << 16;
        }
    }
}

// Weights of the inputs of so many words, in panels that lie `panel` bytes apart. Those that lie
// far off are asked for a block before their turn: whenever words are worked on, `pace` bytes from
// `next` on.
struct block {
    const char *panels;
    long panel;
    int words, pace;
    const char *next;
};

// y (m, ldy) += x (words, m) times the first `p` panels of a block.
INLINE void product(int m, int p, int type, int far, const Word *x, struct block b, float *y,
                    long ldy) {
    Words weights[GROUP * VECTORS];
    Floats sums[MOST_TOKENS][GROUP * VECTORS];
    Ints whole[MOST_TOKENS][GROUP * VECTORS]; // sums of whole numbers
    int once = words_at_once(type);
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 16
        for (int j = 0; j < p * VECTORS; j++)
            if (are_whole(type))
                whole[i][j] = (Ints){0};
            else
                sums[i][j] = (Floats){0};
#pragma GCC unroll 1 // more would spill the sums
    for (long at = 0; at < b.words; at += once) {
        if (far && p == 1) {
            __builtin_prefetch(b.next, 0, 2);
            b.next += b.pace;
        }
#pragma GCC unroll 4
        for (int u = 0; u < once; u++, x += m) {
            load(p, type, b.panels, b.panel, at, u, weights);
#pragma GCC unroll 8
            for (int i = 0; i < m; i++)
#pragma GCC unroll 16
                for (int j = 0; j < p * VECTORS; j++)
                    if (are_whole(type))
                        whole[i][j] = add_whole(whole[i][j], x[i] - (Words){0}, weights[j]);
                    else
                        sums[i][j] = add_numbers(type, sums[i][j], x[i], weights[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 16
        for (int j = 0; j < p * VECTORS; j++)
            *(Floats *)(y + i * ldy + j * WIDTH) +=
                are_whole(type) ? __builtin_convertvector(whole[i][j], Floats) : sums[i][j];
}

// As many panels at once as the registers hold beside the sums of m tokens.
#if WIDTH == 16
#define PANELS(m) 4
#elif WIDTH == 8
#define PANELS(m) ((m) == 1 ? 4 : (m) <= 3 ? 2 : 1)
#else
#define PANELS(m) ((m) == 1 ? 2 : 1)
#endif

// The same for n panels.
INLINE void products(int m, int type, int far, const Word *x, struct block b, float *y, long ldy,
                     int n) {
    for (; n >= PANELS(m); n -= PANELS(m)) {
        product(m, PANELS(m), type, far, x, b, y, ldy);
        b.panels += PANELS(m) * b.panel;
        y += PANELS(m) * LANES;
    }
    for (; n > 0; n--) {
        product(m, 1, type, far, x, b, y, ldy);
        b.panels += b.panel;
        y += LANES;
    }
}

INLINE void multiply(int type, int far, int m, const Word *x, struct block b, float *y, long ldy,
                     int n) {
    switch (m) {
#define CASE(m)                                                                                    \
    case m: products(m, type, far, x, b, y, ldy, n); break
        CASE(1);
        CASE(2);
        CASE(3);
#if MOST_TOKENS == 6
        CASE(4);
        CASE(5);
        CASE(6);
#endif
    }
}

// Compiled once per type of weights, and for those that are near.
#define MULTIPLY(name, type, far)                                                                  \
    static void name(int m, const Word *x, struct block b, float *y, long ldy, int n) {            \
        multiply(type, far, m, x, b, y, ldy, n);                                                   \
    }
MULTIPLY(multiply_near, FLOAT32, 0)
MULTIPLY(multiply_near_int16, INT16, 0)
MULTIPLY(multiply_near_bfloat16_both, BFLOAT16_BOTH, 0)
MULTIPLY(multiply_float32, FLOAT32, 1)
MULTIPLY(multiply_bfloat16, BFLOAT16, 1)
MULTIPLY(multiply_int8, INT8, 1)
MULTIPLY(multiply_bfloat16_both, BFLOAT16_BOTH, 1)

// A layer's weights for a panel of its outputs, from an input on.
INLINE const char *weights(const struct linear *l, int panel, int from) {
    return l->panels + panel * panel_bytes(l) + (long)from * LANES * SIZES[l->type];
}

INLINE int block_inputs(const struct linear *l, int from) {
    return l->k - from < BLOCK ? l->k - from : BLOCK;
}

// The weights that are read after `n` panels' block from an input on.
INLINE const char *weights_after(const struct linear *l, int panel, int n, int from) {
    return from + BLOCK < l->k ? weights(l, panel, from + BLOCK) : weights(l, panel + n, 0);
}

// A panel's weights of so many words, as they are multiplied.
INLINE void widen(int type, const char *w, int words, Word *to) {
    Words weights[GROUP * VECTORS];
    for (int at = 0; at < words; at += 2)
#pragma GCC unroll 2
        for (int u = 0; u < 2; u++) {
            load(1, type, w, 0, at, u, weights);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++)
                *(Words *)(to + (at + u) * LANES + j * WIDTH) = weights[j];
        }
}

// A tile's words, from an input on.
INLINE const Word *tile_words(const struct linear *l, struct tiles tiles, int at, int m, int from) {
    int pair = together(l->type);
    return tiles.x + (long)at * (l->k / pair) + from / pair * m;
}

// sums (tokens, WIDE) += x W^T for `n` panels from `panel` on, by a block of inputs.
static void add_block(const struct linear *l, struct tiles tiles, int from, int panel, int n,
                      float *sums) {
    int first = tile_start(tiles.n_tokens, tiles.begin), share = tiles.end - tiles.begin;
    int pair = together(l->type);
    struct block b = {weights(l, panel, from), panel_bytes(l), block_inputs(l, from) / pair};
    b.next = weights_after(l, panel, n, from);
    // What is used up at a time; each tile asks for a part of what comes next.
    b.pace = words_at_once(l->type) * pair * LANES * SIZES[l->type] / share;
    FOR_TILES(tiles, at, m) {
        const Word *x = tile_words(l, tiles, at, m, from);
        float *y = sums + (at - first) * WIDE;
        switch (l->type) {
        case FLOAT32: multiply_float32(m, x, b, y, WIDE, n); break;
        case BFLOAT16: multiply_bfloat16(m, x, b, y, WIDE, n); break;
        case INT8: multiply_int8(m, x, b, y, WIDE, n); break;
        case BFLOAT16_BOTH: multiply_bfloat16_both(m, x, b, y, WIDE, n); break;
        }
        b.next += (long)b.words * pair * LANES * SIZES[l->type] / share;
    }
}

// The same for one panel and many tokens: they all read the block out of the nearest cache, while
// the one that is `next` comes nearer.
static void add_block_to_many(const struct linear *l, struct tiles tiles, int from, int panel,
                              const char *next, float *sums) {
    uint32_t near[BLOCK * LANES];
    int pair = together(l->type);
    struct block b = {(const char *)near, 0, block_inputs(l, from) / pair};
    int first = tile_start(tiles.n_tokens, tiles.begin);
    int lines = BLOCK * SIZES[l->type] / 4, n = tiles.end - tiles.begin, line = 0;
    const char *w = weights(l, panel, from);
    switch (l->type) {
    case FLOAT32: widen(FLOAT32, w, b.words, near); break;
    case BFLOAT16: widen(BFLOAT16, w, b.words, near); break;
    case INT8: widen(INT8, w, b.words, near); break;
    default: b.panels = w; // already as they are multiplied
    }
    FOR_TILES(tiles, at, m) {
        const Word *x = tile_words(l, tiles, at, m, from);
        float *y = sums + (at - first) * WIDE;
        for (; line < lines * (tile + 1 - tiles.begin) / n; line++)
            __builtin_prefetch(next + line * 64, 0, 2);
        switch (l->type) {
        case INT8: multiply_near_int16(m, x, b, y, WIDE, 1); break;
        case BFLOAT16_BOTH: multiply_near_bfloat16_both(m, x, b, y, WIDE, 1); break;
        default: multiply_near(m, x, b, y, WIDE, 1);
        }
    }
}

// sums (tokens, WIDE) = x W^T for `n` panels from `panel` on.
static void multiply_panels(const struct linear *l, struct tiles tiles, int panel, int n,
                            float *sums) {
    int tokens = tile_start(tiles.n_tokens, tiles.end) - tile_start(tiles.n_tokens, tiles.begin);
    memset(sums, 0, tokens * WIDE * sizeof *sums);
    if (tokens > FEW(l->type)) { // a block of all the tokens' inputs stays near, too
        for (int from = 0; from < l->k; from += BLOCK)
            for (int p = 0; p < n; p++)
                add_block_to_many(l, tiles, from, panel + p,
                                  p + 1 < n ? weights(l, panel + p + 1, from)
                                            : weights_after(l, panel, n, from),
                                  sums + p * LANES);
        return;
    }
    int step = PANELS(tokens) == 1 ? 1 : n;
    for (int p = 0; p < n; p += step)
        for (int from = 0; from < l->k; from += BLOCK)
            add_block(l, tiles, from, panel + p, step, sums + p * LANES);
}

// to (n) = activation(sum * step * scale + bias), or to += sum * step * scale + bias, for the
// outputs of a layer from `first` on.
static void finish(const struct linear *l, int first, int n, float *sum, float step, int onto,
                   int activation, float *to) {
    if (l->scale)
#pragma omp simd
        for (int j = 0; j < n; j++)
            sum[j] *= step * l->scale[first + j];
    if (l->bias)
#pragma omp simd
        for (int j = 0; j < n; j++)
            sum[j] += l->bias[first + j];
    if (onto)
#pragma omp simd
        for (int j = 0; j < n; j++)
            sum[j] += to[j];
    activate_all(sum, n, activation);
    memcpy(to, sum, n * sizeof *to);
}

// y (n_tokens, ldy) = activation(x W^T + bias), or y += x W^T + bias; x (n_tokens, k), `packed` as
// large. Two phases.
static void linear(struct member *me, const struct linear *l, const float *x, int n_tokens,
                   Word *packed, float *y, long ldy, int onto, int activation) {
    float sums[TILES * MOST_TOKENS * WIDE];
    int all = n_tiles(n_tokens), groups = (all + TILES - 1) / TILES, pair = together(l->type);
    int as_is = n_tokens == 1 && pair == 1;
    float *steps = (float *)(packed + (long)n_tokens * (l->k / pair)); // pairs leave room
    struct tiles tiles = {as_is ? (const Word *)x : packed, n_tokens, 0, all};
    FOR_CHUNKS(me, tile, as_is ? 0 : all) {
        long at = tile_start(n_tokens, tile);
        int m = tile_start(n_tokens, tile + 1) - at;
        Word *to = packed + at * (l->k / pair);
        if (l->type == INT8)
            interleave_pairs(INT8, x + at * l->k, m, l->k, to, steps + at);
        else if (l->type == BFLOAT16_BOTH)
            interleave_pairs(BFLOAT16_BOTH, x + at * l->k, m, l->k, to, steps + at);
        else
            interleave(x + at * l->k, m, l->k, to);
    }
    FOR_CHUNKS(me, chunk, round_up(l->n, WIDE) / WIDE * groups) {
        int first = chunk / groups * WIDE, n = first + WIDE < l->n ? WIDE : l->n - first;
        tiles.begin = (long)all * (chunk % groups) / groups;
        tiles.end = (long)all * (chunk % groups + 1) / groups;
        multiply_panels(l, tiles, first / LANES, round_up(n, LANES) / LANES, sums);
        int begin = tile_start(n_tokens, tiles.begin), end = tile_start(n_tokens, tiles.end);
        for (int t = begin; t < end; t++)
            finish(l, first, n, sums + (t - begin) * WIDE, pair == 1 ? 1.0f : steps[t], onto,
                   activation, y + t * ldy + first);
    }
}

// Layer norm of every token (Ba et al., arXiv:1607.06450); `to` may be `x`. A phase.
static void normalise(struct member *me, const struct norm *norm, const float *x, int n_tokens,
                      int d, float epsilon, float *to) {
    FOR_CHUNKS(me, t, n_tokens) {
        const float *row = x + (long)t * d;
        float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < d; i++)
            sum += row[i];
        float mean = sum / d;
#pragma omp simd reduction(+ : squares)
        for (int i = 0; i < d; i++)
            squares += (row[i] - mean) * (row[i] - mean);
        float rate = 1.0f / sqrtf(squares / d + epsilon);
#pragma omp simd
        for (int i = 0; i < d; i++)
            to[(long)t * d + i] = (row[i] - mean) * rate * norm->weight[i] + norm->bias[i];
    }
}

// Token embedding out of its panels, plus position. A phase.
static void embed(struct member *me, const struct model *m, const struct batch *b, float *x) {
    const struct linear *wte = &m->wte;
    int beside = wte->type == FLOAT32 ? 1 : 2; // inputs whose weights lie together
    FOR_CHUNKS(me, t, b->n_tokens) {
        int token = b->tokens[t];
        if (token < 0 || token >= wte->n) { // the others of the batch are not to suffer for it
            for (int i = 0; i < m->d_model; i++)
                x[(long)t * m->d_model + i] = NAN;
            continue;
        }
        const char *panel = wte->panels + token / LANES * panel_bytes(wte);
        const float *position = m->wpe + (long)b->positions[t] * m->d_model;
        float scale = wte->scale ? wte->scale[token] : 1.0f;
        for (int i = 0; i < m->d_model; i++) {
            long at = (long)(i / beside * LANES + token % LANES) * beside + i % beside;
            float weight = wte->type == INT8
                               ? ((const int8_t *)panel)[at]
                               : number(panel, wte->type == FLOAT32 ? FLOAT32 : BFLOAT16, at);
            x[(long)t * m->d_model + i] = weight * scale + position[i];
        }
    }
}

// What the scores of one query become: their softmax, not yet divided by the sum, which is
// returned.
INLINE float weigh(float *scores, int n, float most) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) {
        scores[i] = exponential(scores[i] - most);
        sum += scores[i];
    }
    return sum;
}

INLINE float largest(const float *scores, int n, float most) {
#pragma omp simd reduction(max : most)
    for (int i = 0; i < n; i++)
        most = scores[i] > most ? scores[i] : most;
    return most;
}

// q . k over `d` numbers.
INLINE float dot(const float *q, const char *keys, int type, long key, int d) {
    Floats sums = {0};
    float rest = 0.0f;
    int i = 0;
    for (; i + WIDTH <= d; i += WIDTH)
        sums += *(const Floats *)(q + i) * numbers(keys, type, key + i);
    for (; i < d; i++)
        rest += q[i] * number(keys, type, key + i);
    return total(sums) + rest;
}

// out += weights[0] v + ... + weights[n - 1] v, in this order, over `d` numbers of the values at
// `places`.
INLINE void add_values(int n, const float *weights, const char *values, int type,
                       const long *places, int d, float *out) {
    int i = 0;
    for (; i + WIDTH <= d; i += WIDTH) {
        Floats sum = *(const Floats *)(out + i);
#pragma GCC unroll 4
        for (int r = 0; r < n; r++)
            sum += weights[r] * numbers(values, type, places[r] + i);
        *(Floats *)(out + i) = sum;
    }
    for (; i < d; i++)
        for (int r = 0; r < n; r++)
            out[i] += weights[r] * number(values, type, places[r] + i);
}

// Asks for a part of a row before it is needed: rows may lie anywhere, where no processor guesses.
INLINE void fetch(const char *row, int type, long place, int n) {
    for (long at = 0; at < (long)n * SIZES[type]; at += 64)
        __builtin_prefetch(row + place * SIZES[type] + at);
}

// One query of the heads that read key heads `first` to `last`, over all `n` rows: a row is read
// once for all of them, from one end to the other. `scores` (heads, n) is scratch.
INLINE void attend_one(const struct pool *p, int type, const float *q, const int32_t *rows, int n,
                       int first, int last, float *scores, float *out) {
    int d = p->d_head, shared = p->n_head / p->n_kv_head, begin = first * shared;
    int heads = (last - first) * shared;
    long width = (long)p->n_kv_head * d, place = (long)first * d;
    float rate = 1.0f / sqrtf(d);
    q += begin * d;
    out += begin * d;
    for (int r = 0; r < n; r++) {
        if (r + AHEAD < n)
            fetch(p->keys, type, rows[r + AHEAD] * width + place, (last - first) * d);
        for (int h = 0, turn = 0, key = 0; h < heads; h++) {
            scores[(long)h * n + r] =
                rate * dot(q + h * d, p->keys, type, rows[r] * width + place + key * d, d);
            if (++turn == shared)
                turn = 0, key++;
        }
    }
    for (int h = 0; h < heads; h++) {
        float *s = scores + (long)h * n;
        float sum = weigh(s, n, largest(s, n, s[0]));
        for (int r = 0; r < n; r++)
            s[r] /= sum;
    }
    memset(out, 0, (long)heads * d * sizeof *out);
    for (int r = 0; r < n; r += ROWS) {
        int m = n - r < ROWS ? n - r : ROWS;
        long places[ROWS];
        for (int i = 0; i < m; i++) {
            places[i] = rows[r + i] * width + place;
            if (r + i + AHEAD < n)
                fetch(p->values, type, rows[r + i + AHEAD] * width + place, (last - first) * d);
        }
        for (int h = 0, turn = 0; h < heads; h++) {
            const float *weights = scores + (long)h * n + r;
            if (m == ROWS)
                add_values(ROWS, weights, p->values, type, places, d, out + h * d);
            else
                add_values(m, weights, p->values, type, places, d, out + h * d);
            if (++turn == shared) {
                turn = 0;
                for (int i = 0; i < m; i++)
                    places[i] += d;
            }
        }
    }
}

// Copies `n` rows of a key head into tiles: keys as (d, keys of the tile), tile after tile, and
// values as (n, numbers of the tile).
INLINE void copy_rows(const struct pool *p, int type, const int32_t *rows, int n, int n_ahead,
                      int head, struct tiles of_keys, struct tiles of_values, Word *keys,
                      Word *values) {
    int d = p->d_head;
    long width = (long)p->n_kv_head * d;
    FOR_TILES(of_keys, first, n_rows)
    for (int r = 0; r < n_rows; r++) {
        long row = rows[first + r] * width + head * d;
        if (first + r + FAR < n_ahead) {
            long next = rows[first + r + FAR] * width + head * d;
            fetch(p->keys, type, next, d);
            fetch(p->values, type, next, d);
        }
        for (int i = 0; i < d; i++)
            keys[(long)first * d + i * n_rows + r] = as_bits(number(p->keys, type, row + i));
        FOR_TILES(of_values, at, m)
        for (int i = 0; i < m; i++)
            values[(long)at * n + (first + r) * m + i] =
                as_bits(number(p->values, type, row + at + i));
    }
}

// What the scores (n, LANES) of a panel of queries become, each lane's first seen[lane] ones: their
// exponentials above the lane's greatest so far, `most`; the others count nothing. `kept` says what
// earlier sums are worth now, `total` is one of them.
INLINE void weigh_panel(float *scores, int n, const int *seen, float *most, float *total,
                        float *kept) {
    float now[LANES], sums[LANES] = {0};
    memcpy(now, most, sizeof now);
    for (int r = 0; r < n; r++)
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            float score = scores[r * LANES + l];
            score = r < seen[l] ? score : -INFINITY;
            now[l] = score > now[l] ? score : now[l];
        }
    for (int r = 0; r < n; r++)
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            float weight = exponential(scores[r * LANES + l] - now[l]);
            weight = r < seen[l] ? weight : 0.0f;
            scores[r * LANES + l] = weight;
            sums[l] += weight;
        }
#pragma omp simd
    for (int l = 0; l < LANES; l++) {
        kept[l] = exponential(most[l] - now[l]);
        total[l] = total[l] * kept[l] + sums[l];
        most[l] = now[l];
    }
}

// Many queries of the heads that share one key head, over the n_keys rows that the last of them
// sees: blocks of keys, softmax as it goes (Milakov and Gimelshein, arXiv:1805.02867). The queries
// are a layer's weights here, in panels, and a block's keys its tokens; then the weights of the
// values are, and the numbers of a value its tokens. `q` and `out` (n_queries, ld).
INLINE void attend_many(const struct pool *p, int type, const float *q, long ldq, int n_queries,
                        const int32_t *rows, int n_keys, int head, float *scratch, float *out,
                        long ldo) {
    int d = p->d_head, shared = p->n_head / p->n_kv_head, lines = n_queries * shared;
    int padded = round_up(lines, LANES);
    float rate = 1.0f / sqrtf(d);
    Word *keys = (Word *)scratch, *values = keys + KEYS * d;
    float *queries = scratch + 2 * KEYS * d, *sums = queries + (long)padded * d,
          *most = sums + (long)padded * d, *total = most + padded;
    memset(queries, 0, 2L * padded * d * sizeof *queries);
    for (int line = 0; line < lines; line++) {
        const float *from = q + line / shared * ldq + (head * shared + line % shared) * d;
        for (int i = 0; i < d; i++)
            queries[(long)(line / LANES * d + i) * LANES + line % LANES] = from[i] * rate;
    }
    for (int line = 0; line < padded; line++)
        most[line] = -INFINITY, total[line] = 0.0f;
    struct tiles of_values = {.n_tokens = d, .end = n_tiles(d)};
    for (int begin = 0; begin < n_keys; begin += KEYS) {
        int n = n_keys - begin < KEYS ? n_keys - begin : KEYS;
        struct tiles of_keys = {.n_tokens = n, .end = n_tiles(n)};
        copy_rows(p, type, rows + begin, n, n_keys - begin, head, of_keys, of_values, keys, values);
        for (int first = 0; first < padded; first += LANES) {
            // Keys of the block that a line sees, the panel's last one the most.
            int seen[LANES], most_seen;
            for (int l = 0; l < LANES; l++) {
                int line = first + l < lines ? first + l : lines - 1;
                most_seen = n_keys - n_queries + line / shared + 1 - begin;
                seen[l] = most_seen = most_seen < n ? most_seen : n;
            }
            if (most_seen <= 0)
                continue;
            float scores[KEYS * LANES] = {0}, kept[LANES];
            float *panel = queries + (long)first * d, *sum = sums + (long)first * d;
            struct block query = {(const char *)panel, 0, d},
                         weight = {(const char *)scores, 0, most_seen};
            FOR_TILES(of_keys, at, m) {
                if (at >= most_seen)
                    break;
                multiply_near(m, keys + (long)at * d, query, scores + at * LANES, LANES, 1);
            }
            weigh_panel(scores, most_seen, seen, most + first, total + first, kept);
            for (int i = 0; i < d; i++)
#pragma omp simd
                for (int l = 0; l < LANES; l++)
                    sum[i * LANES + l] *= kept[l];
            FOR_TILES(of_values, at, m)
            multiply_near(m, values + (long)at * n, weight, sum + at * LANES, LANES, 1);
        }
    }
    for (int line = 0; line < lines; line++)
        for (int i = 0; i < d; i++)
            out[line / shared * ldo + (head * shared + line % shared) * d + i] =
                sums[(long)(line / LANES * d + i) * LANES + line % LANES] / total[line];
}

// The queries of a block, fewer where several heads share a key head.
static int block_queries(const struct pool *p) {
    int n = QUERIES * p->n_kv_head / p->n_head;
    return n > 1 ? n : 1;
}

// Floats that one thread needs as scratch to attend over at most n_keys rows.
static long attend_scratch(const struct pool *p, long n_keys) {
    long one = p->n_head * n_keys;
    long lines = round_up(block_queries(p) * p->n_head / p->n_kv_head, LANES);
    long many = (KEYS + lines) * 2L * p->d_head + 2 * lines;
    return (one > many ? one : many) + LANES; // no two threads write to one cache line
}

INLINE void attend_heads(const struct pool *p, int type, const float *q, long ldq, int n_queries,
                         const int32_t *rows, int n_keys, int first, int last, float *scratch,
                         float *out) {
    long ldo = (long)p->n_head * p->d_head;
    if (n_queries == 1) {
        attend_one(p, type, q, rows, n_keys, first, last, scratch, out);
        return;
    }
    for (int begin = 0; begin < n_queries; begin += block_queries(p)) {
        int n = n_queries - begin < block_queries(p) ? n_queries - begin : block_queries(p);
        for (int head = first; head < last; head++)
            attend_many(p, type, q + begin * ldq, ldq, n, rows, n_keys - n_queries + begin + n,
                        head, scratch, out + begin * ldo, ldo);
    }
}

INLINE void write_numbers(const float *x, int n, char *to, int type, long at) {
    if (type == FLOAT32)
        memcpy((float *)to + at, x, n * sizeof *x);
    else
#pragma omp simd
        for (int i = 0; i < n; i++)
            ((uint16_t *)to)[at + i] = to_bfloat16(x[i]);
}

// Writes keys and values of tokens into their rows, as far as key heads `first` to `last` go.
INLINE void write_rows(const struct pool *p, const int32_t *rows, int n_tokens, const float *k,
                       const float *v, long ldk, int first, int last) {
    long width = (long)p->n_kv_head * p->d_head, begin = (long)first * p->d_head;
    int n = (last - first) * p->d_head;
    for (int t = 0; t < n_tokens; t++) {
        write_numbers(k + t * ldk + begin, n, p->keys, p->type, rows[t] * width + begin);
        write_numbers(v + t * ldk + begin, n, p->values, p->type, rows[t] * width + begin);
    }
}

// Writes the keys and values of the step and lets each query look at the rows of its sequence up to
// its own. q (n_tokens, ldq), k and v (n_tokens, ldk), out (n_tokens, n_head * d_head). A phase: no
// sequence reads what another one writes in the same step, nor a head what another head writes, so
// a chunk is a sequence, or some key heads of one where there are few sequences, or prompts, which
// take long.
static void attend(struct member *me, const struct pool *p, const struct batch *b, const float *q,
                   long ldq, const float *k, const float *v, long ldk, int threads, float *out) {
    int few = b->n_sequences < 2 * threads;
    int prompts = b->n_tokens > b->n_sequences;
    int parts = prompts ? 4 * threads : few ? threads : 1;
    parts = parts < p->n_kv_head ? parts : p->n_kv_head;
    FOR_CHUNKS(me, chunk, b->n_sequences * parts) {
        int s = chunk / parts, part = chunk % parts;
        int first = p->n_kv_head * part / parts, last = p->n_kv_head * (part + 1) / parts;
        long from = b->queries[s];
        int n_queries = b->queries[s + 1] - from, n_keys = b->keys[s + 1] - b->keys[s];
        const int32_t *rows = b->rows + b->keys[s];
        write_rows(p, b->write + from, n_queries, k + from * ldk, v + from * ldk, ldk, first, last);
        float *to = out + from * p->n_head * p->d_head;
        if (p->type == BFLOAT16)
            attend_heads(p, BFLOAT16, q + from * ldq, ldq, n_queries, rows, n_keys, first, last,
                         me->scratch, to);
        else
            attend_heads(p, FLOAT32, q + from * ldq, ldq, n_queries, rows, n_keys, first, last,
                         me->scratch, to);
    }
}

// What follows is called from outside, by kernel.py.

int onerow_version(void) { return 3; }

// Whether the processor multiplies pairs of bfloat16, so that BFLOAT16_BOTH is worth its rounding.
int onerow_multiplies_bfloat16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

// y (n_tokens, n) = x (n_tokens, k) W^T + bias; `scratch` is as large as x.
void onerow_linear(const struct linear *l, const float *x, int n_tokens, Word *scratch, float *y,
                   int threads) {
    struct phase phases[2] = {0};
#pragma omp parallel num_threads(threads)
    linear(&(struct member){phases, NULL}, l, x, n_tokens, scratch, y, l->n, 0, NONE);
}

// Floats of scratch that onerow_attend needs.
long onerow_attend_scratch(const struct pool *p, int n_keys, int threads) {
    return threads * attend_scratch(p, n_keys);
}

void onerow_attend(const struct pool *p, const struct batch *b, const float *q, long ldq,
                   const float *k, const float *v, long ldk, float *scratch, float *out,
                   int threads) {
    struct phase phase = {0};
#pragma omp parallel num_threads(threads)
    {
        float *own = scratch + omp_get_thread_num() * attend_scratch(p, b->n_keys);
        attend(&(struct member){&phase, own}, p, b, q, ldq, k, v, ldk, threads, out);
    }
}

// Embedding and last norm; of a layer two for each linear layer, two norms and attention.
static long n_phases(const struct model *m) { return 11 * m->n_layer + 2; }

// The most inputs that a linear layer of the network has.
static long widest(const struct model *m) { return m->d_ff > m->d_model ? m->d_ff : m->d_model; }

// Bytes of scratch that onerow_forward needs.
long onerow_forward_scratch(const struct model *m, const struct pool *p, int n_tokens, int n_keys,
                            int threads) {
    long d_qkv = m->d_model + 2L * p->n_kv_head * p->d_head;
    long floats = n_tokens * (2L * m->d_model + d_qkv + m->d_ff + widest(m)) +
                  threads * attend_scratch(p, n_keys);
    return n_phases(m) * sizeof(struct phase) + floats * sizeof(float);
}

// The network, from tokens to hidden states (n_tokens, d_model). `first` is the first layer's part
// of the pool; each next layer's begins `layer_bytes` further on. `scratch` is aligned to 64 bytes.
void onerow_forward(const struct model *m, const struct pool *first, long layer_bytes,
                    const struct batch *b, char *scratch, float *hidden, int threads) {
    long n = b->n_tokens, d = m->d_model, d_kv = (long)first->n_kv_head * first->d_head,
         d_qkv = d + 2 * d_kv;
    struct phase *phases = (struct phase *)scratch;
    float *h = (float *)(phases + n_phases(m)), *heads = h + n * d, *qkv = heads + n * d,
          *wide = qkv + n * d_qkv, *own = wide + n * (m->d_ff + widest(m)), *x = hidden;
    Word *packed = (Word *)(wide + n * m->d_ff);
    memset(phases, 0, n_phases(m) * sizeof *phases);
#pragma omp parallel num_threads(threads)
    {
        struct member *me =
            &(struct member){phases, own + omp_get_thread_num() * attend_scratch(first, b->n_keys)};
        embed(me, m, b, x);
        for (int i = 0; i < m->n_layer; i++) {
            const struct layer *l = &m->layers[i];
            struct pool p = *first;
            p.keys += i * layer_bytes;
            p.values += i * layer_bytes;
            if (m->norm_first)
                normalise(me, &l->ln_1, x, n, d, m->epsilon, h);
            linear(me, &l->c_attn, m->norm_first ? h : x, n, packed, qkv, d_qkv, 0, NONE);
            attend(me, &p, b, qkv, d_qkv, qkv + d, qkv + d + d_kv, d_qkv, threads, heads);
            linear(me, &l->attn_proj, heads, n, packed, x, d, 1, NONE);
            if (m->norm_first)
                normalise(me, &l->ln_2, x, n, d, m->epsilon, h);
            else
                normalise(me, &l->ln_1, x, n, d, m->epsilon, x);
            linear(me, &l->c_fc, m->norm_first ? h : x, n, packed, wide, m->d_ff, 0, m->activation);
            linear(me, &l->mlp_proj, wide, n, packed, x, d, 1, NONE);
            if (!m->norm_first)
                normalise(me, &l->ln_2, x, n, d, m->epsilon, x);
        }
        if (m->norm_first)
            normalise(me, &m->ln_f, x, n, d, m->epsilon, x);
    }
}
