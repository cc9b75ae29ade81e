/* A serving pass over a dense decoder, from token ids to hidden states, in one call: between the products of a narrow
   model there is little to do, and every call into it from outside would cost more than that.

   Tokens are taken in chunks, which threads share. A chunk goes from where one layer has its keys to where the next
   layer has them without waiting for others; then all wait, since tokens attend over keys of other chunks. */

#include <string.h>

#include "../../../models/ops/native/kernels.h"

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#endif

#define CHUNK 64
#define TILE 4

/* Weights as they are in checkpoints, those of q, k and v and of gate and up one below the other; `keys` and `values`
   are the layer's cache. Without norms of heads, `q_norm` and `k_norm` are null. */
struct layer {
    const float *input_norm, *qkv, *q_norm, *k_norm, *output, *mlp_norm, *gate_up, *down;
    float *keys, *values;
};

/* `cos` and `sin` have a row of `size` for every position; `sin` carries the sign of the rotation. */
struct decoder {
    long layers, width, heads, kv_heads, size, mlp_width, block_size;
    float eps;
    const float *embedding, *final_norm, *cos, *sin;
    const struct layer *layer;
};

/* Token t is `ids[t]`, at `positions[t]` of the sequence whose blocks are row `rows[t]` of `table`. `longest` is the
   largest position. The `results` that are wanted are those of tokens `wanted`, or, where that is null, of all. */
struct step {
    long tokens, results, table_stride, longest;
    const int64_t *ids, *positions, *rows, *table, *wanted;
};

/* What a pass keeps between layers, for all tokens, and what each thread needs for a chunk. */
struct scratch {
    float *stream, *queries;
    float *normed, *wide, *mixed, *scores;
};

static long most(long a, long b)
{
    return a > b ? a : b;
}

static long query_width(const struct decoder *d)
{
    return d->heads * d->size;
}

/* The widest rows: q, k and v, or gate and up. */
static long widest(const struct decoder *d)
{
    return most(query_width(d) + 2 * d->kv_heads * d->size, 2 * d->mlp_width);
}

static long chunk_of(const struct step *s, int threads)
{
    long share = threads > 1 ? s->tokens / (2 * threads) / TILE * TILE : CHUNK;
    return share < TILE ? TILE : share > CHUNK ? CHUNK : share;
}

static long shared_numbers(const struct decoder *d, const struct step *s)
{
    return s->tokens * (d->width + query_width(d));
}

static long own_numbers(const struct decoder *d, const struct step *s, int threads)
{
    return chunk_of(s, threads) * (d->width + widest(d) + most(query_width(d), d->mlp_width)) +
           (s->longest + 1) * d->heads;
}

/* The size of the scratch space of `forward`, in numbers. */
long forward_scratch(const struct decoder *d, const struct step *s, int threads)
{
    return shared_numbers(d, s) + threads * own_numbers(d, s, threads);
}

static struct scratch scratch_of(const struct decoder *d, const struct step *s, float *numbers, int thread,
                                 int threads)
{
    long chunk = chunk_of(s, threads);
    float *own = numbers + shared_numbers(d, s) + thread * own_numbers(d, s, threads);
    struct scratch scratch = {.stream = numbers, .queries = numbers + s->tokens * d->width, .normed = own};
    scratch.wide = scratch.normed + chunk * d->width;
    scratch.mixed = scratch.wide + chunk * widest(d);
    scratch.scores = scratch.mixed + chunk * most(query_width(d), d->mlp_width);
    return scratch;
}

static void embed(const struct decoder *d, const struct step *s, struct scratch scratch, long first, long last)
{
    for (long t = first; t < last; t++)
        memcpy(scratch.stream + t * d->width, d->embedding + s->ids[t] * d->width, d->width * sizeof(float));
}

/* Queries of the chunk, and its keys and values in the cache. */
static void project(const struct decoder *d, const struct layer *layer, const struct step *s, struct scratch scratch,
                    long first, long last)
{
    long q_width = query_width(d), kv_width = d->kv_heads * d->size, columns = q_width + 2 * kv_width;
    rms_norm(scratch.stream + first * d->width, d->width, last - first, d->width, layer->input_norm, d->eps,
             scratch.normed, 1);
    multiply(scratch.normed, d->width, last - first, layer->qkv, columns, d->width, scratch.wide, 0);
    for (long t = first; t < last; t++) {
        long position = s->positions[t];
        const float *row = scratch.wide + (t - first) * columns;
        const float *cos = d->cos + position * d->size, *sin = d->sin + position * d->size;
        int64_t block = s->table[s->rows[t] * s->table_stride + position / d->block_size];
        long slot = block * d->block_size + position % d->block_size;
        norm_rope_heads(row, d->heads, d->size, layer->q_norm, d->eps, cos, sin, scratch.queries + t * q_width);
        norm_rope_heads(row + q_width, d->kv_heads, d->size, layer->k_norm, d->eps, cos, sin,
                        layer->keys + slot * kv_width);
        memcpy(layer->values + slot * kv_width, row + q_width + kv_width, kv_width * sizeof(float));
    }
}

/* Attention of tokens `which`, or, where that is null, of tokens `first` to `last`, added to their stream. */
static void attend(const struct decoder *d, const struct layer *layer, const struct step *s, struct scratch scratch,
                   const int64_t *which, long first, long last, float *stream)
{
    long q_width = query_width(d);
    struct cache cache = {layer->keys, layer->values, d->block_size, d->kv_heads * d->size};
    for (long i = first; i < last; i++) {
        long t = which ? which[i] : i, after = i + 1 < last ? i + 1 : i;
        const int64_t *blocks = s->table + s->rows[t] * s->table_stride;
        const int64_t *next = s->table + s->rows[which ? which[after] : after] * s->table_stride;
        const float *then = layer->keys + *next * d->block_size * cache.width;
        struct span span = {blocks, s->positions[t] + 1, 0, d->kv_heads, then};
        attend_token(cache, span, d->heads / d->kv_heads, d->size, scratch.queries + t * q_width, scratch.scores,
                     scratch.mixed + (i - first) * q_width);
    }
    multiply(scratch.mixed, q_width, last - first, layer->output, d->width, q_width, stream, 1);
}

/* The gated MLP, added to the stream. */
static void mlp(const struct decoder *d, const struct layer *layer, struct scratch scratch, long rows, float *stream)
{
    long both = 2 * d->mlp_width;
    rms_norm(stream, d->width, rows, d->width, layer->mlp_norm, d->eps, scratch.normed, 1);
    multiply(scratch.normed, d->width, rows, layer->gate_up, both, d->width, scratch.wide, 0);
    gated_silu(scratch.wide, both, scratch.wide + d->mlp_width, both, rows, d->mlp_width, scratch.mixed, 1);
    multiply(scratch.mixed, d->mlp_width, rows, layer->down, d->width, d->mlp_width, stream, 1);
}

/* From the end of layer `number` - 1 to where layer `number` can attend. */
static void advance(const struct decoder *d, const struct step *s, struct scratch scratch, long number, long first,
                    long last)
{
    float *stream = scratch.stream + first * d->width;
    if (number == 0) {
        embed(d, s, scratch, first, last);
    } else {
        attend(d, d->layer + number - 1, s, scratch, NULL, first, last, stream);
        mlp(d, d->layer + number - 1, scratch, last - first, stream);
    }
    project(d, d->layer + number, s, scratch, first, last);
}

/* The last layer and the final norm, for the tokens that are wanted alone: of a prompt that is one. */
static void finish(const struct decoder *d, const struct step *s, struct scratch scratch, long first, long last,
                   float *hidden)
{
    const struct layer *layer = d->layer + d->layers - 1;
    float *stream = hidden + first * d->width;
    size_t row = d->width * sizeof(float);
    for (long i = first; i < last; i++)
        memcpy(hidden + i * d->width, scratch.stream + (s->wanted ? s->wanted[i] : i) * d->width, row);
    attend(d, layer, s, scratch, s->wanted, first, last, stream);
    mlp(d, layer, scratch, last - first, stream);
    rms_norm(stream, d->width, last - first, d->width, d->final_norm, d->eps, scratch.normed, 1);
    memcpy(stream, scratch.normed, (last - first) * row);
}

static long least(long a, long b)
{
    return a < b ? a : b;
}

/* Hidden states (results, width) after the final norm. `numbers` has space for `forward_scratch` of them. */
void forward(const struct decoder *d, const struct step *s, float *numbers, float *hidden, int threads)
{
    long chunk = chunk_of(s, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        struct scratch scratch = scratch_of(d, s, numbers, omp_get_thread_num(), threads);
        for (long number = 0; number < d->layers; number++) {
#pragma omp for schedule(dynamic)
            for (long first = 0; first < s->tokens; first += chunk)
                advance(d, s, scratch, number, first, least(first + chunk, s->tokens));
        }
#pragma omp for schedule(dynamic)
        for (long first = 0; first < s->results; first += chunk)
            finish(d, s, scratch, first, least(first + chunk, s->results), hidden);
    }
}
