// Decoder layer of the Llama kind: norm, q, k and v, rotate-half RoPE, attention, norm and a gated MLP, with two
// residuals. Gemma layers also norm the outputs of attention and MLP. Whatever the dtype of weights and caches,
// computation is in float32; stored and returned values are rounded once.
#pragma once

#include "attention.h"
#include "convolutions.h"
#include "products.h"

// Function of an optional kernel part that adds a result to rows of a matrix product, in place. `to` selects the
// product, `rows` the rows to change.
using Add = void (*)(const void* to, const void* rows, const float* x, int64_t x_stride, float* out, int64_t out_stride);

// Weights are stored input-major, [inputs, outputs].
struct Layer {
    int64_t hidden, inputs, intermediate;  // widths of the residual, of the input of q, k and v, and of the MLP
    Heads heads;
    const float* input_norm;  // [hidden]; null if the inputs are already normed
    float input_eps, query_eps, output_eps;
    const float *query_norm, *key_norm;  // [key_dim], shared by all heads; or null
    Matrix query_key_value[3];
    Matrix output;
    const float* output_norm;
    Matrix gate, up, down;
    void *key_cache, *value_cache;  // of `kind`, as are x and out
    void* captured;                 // of `kind`: keys and values of each row, side by side; or null
    int64_t kind;
    const void *added_qkv, *added_output, *added_gate_up, *added_down;  // passed to `Batch::add`
    Convolution attention_conv, mlp_conv;  // around either sublayer; without taps: none
    const float *attended_norm, *left_norm;  // norms of the outputs of attention and MLP, or null
    float attended_eps, left_eps;
    int64_t gate_kind;  // a `Gate`
};

struct Batch {
    int64_t num_rows, block_size;
    const float *cos, *sin;       // [num_rows, key_dim]
    const int64_t* slot_mapping;  // [num_rows]
    const Segment* segments;
    int64_t num_segments;
    Add add;                      // null: nothing is added to matrix products
    const void* added;            // passed to `add`
    const int64_t* wanted;        // ascending rows whose output is wanted; segments count only these; null: all
    int64_t num_wanted;
    int64_t num_slots;            // rows of a block; used by convolutions, which require that all rows are wanted
};

// out[row] = x[row] / rms(x[row]) * weight
static void norm_row(const float* x, const float* weight, float eps, int64_t width, float* out) {
    vec squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        vec some = load_upto(x + i, width - i);
        squares += some * some;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        vec normed = load_upto(x + i, width - i) * scale * load_upto(weight + i, width - i);
        store_upto(out + i, normed, width - i);
    }
}

// out[row] = residual[row] + x[row] / rms(x[row]) * weight
static void add_normed(const float* x, const float* weight, float eps, const float* residual, int64_t num_rows,
                       int64_t width, float* out) {
    by_row(num_rows, width, [&](int64_t row) {
        static thread_local std::vector<float> made;
        if ((int64_t)made.size() < width) made.resize(width);
        norm_row(x + row * width, weight, eps, width, made.data());
        const float* own = residual + row * width;
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t left = width - i;
            store_upto(out + row * width + i, load_upto(own + i, left) + load_upto(made.data() + i, left), left);
        }
    });
}

// Applies rotate-half RoPE (GPT-NeoX) to a head, in place. Reads the second halves of cos and sin,
// because the first half of sin may have a sign folded in.
static void rotate(float* head, const float* cos, const float* sin, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t left = half - i;
        vec low = load_upto(head + i, left), high = load_upto(head + half + i, left);
        vec cosine = load_upto(cos + half + i, left), sine = load_upto(sin + half + i, left);
        store_upto(head + i, low * cosine - high * sine, left);
        store_upto(head + half + i, high * cosine + low * sine, left);
    }
}

template <class To, class From>
static void copy_row(const From* from, int64_t width, To* to) {
    for (int64_t i = 0; i < width; i += LANES) store_upto(to + i, load_upto(from + i, width - i), width - i);
}

// Normalises (unless `norm` is null) one head of a query or key, and applies RoPE to it.
static void norm_and_rotate(const Layer& layer, const float* norm, float* head, const float* cos, const float* sin) {
    int64_t dim = layer.heads.key_dim;
    if (norm) norm_row(head, norm, layer.query_eps, dim, head);
    rotate(head, cos, sin, dim);
}

// Copies the keys of all heads from `key`, and the values that follow them in memory, into the caches.
static void store_row(const Layer& layer, int64_t slot, const float* key) {
    int64_t width = layer.heads.num_kv_heads * layer.heads.key_dim;
    int64_t value_width = layer.heads.num_kv_heads * layer.heads.value_dim;
    by_kind(layer.kind, [&](auto number) {
        using Stored = decltype(number);
        copy_row(key, width, (Stored*)layer.key_cache + slot * width);
        copy_row(key + width, value_width, (Stored*)layer.value_cache + slot * value_width);
    });
}

static void rotate_and_store(const Layer& layer, const Batch& batch, float* qkv, int64_t stride) {
    const Heads& heads = layer.heads;
    int64_t dim = heads.key_dim;
    by_row(batch.num_rows, stride, [&](int64_t row) {
        float* own = qkv + row * stride;
        for (int64_t head = 0; head < heads.num_heads + heads.num_kv_heads; head++) {
            const float* norm = head < heads.num_heads ? layer.query_norm : layer.key_norm;
            norm_and_rotate(layer, norm, own + head * dim, batch.cos + row * dim, batch.sin + row * dim);
        }
        const float* key = own + heads.num_heads * dim;
        store_row(layer, batch.slot_mapping[row], key);
        // Keys and values are also copied to `captured` for the drafter. The caches do not suffice, because a row that
        // is replayed for the drafter is not written to them.
        int64_t both = heads.num_kv_heads * (dim + heads.value_dim);
        if (layer.captured)
            by_kind(layer.kind, [&](auto number) { copy_row(key, both, (decltype(number)*)layer.captured + row * both); });
    });
}

// Does the same as `products` with `gated`, for layers in which `add` changes both factors.
static void added_gate_up(const Layer& layer, const Batch& batch, const float* x, float* both, float* active) {
    int64_t half = layer.intermediate, width = 2 * half;
    Matrix pair[2] = {layer.gate, layer.up};
    products(x, layer.hidden, batch.num_rows, layer.hidden, pair, 2, nullptr, nullptr, 0, both, width);
    batch.add(layer.added_gate_up, batch.added, x, layer.hidden, both, width);
    by_row(batch.num_rows, width, [&](int64_t row) {
        const float *gate = both + row * width, *up = gate + half;
        by_gate(layer.gate_kind, [&](auto activated) {
            for (int64_t i = 0; i < half; i += LANES) {
                int64_t left = half - i;
                vec gated = activated(load_upto(gate + i, left)) * load_upto(up + i, left);
                store_upto(active + row * half + i, gated, left);
            }
        });
    });
}

static void run_layer(const Layer& layer, const Batch& batch, const float* inputs, const float* x, float* out) {
    const Heads& heads = layer.heads;
    int64_t num_rows = batch.num_rows, hidden = layer.hidden;
    int64_t attended_width = heads.num_heads * heads.value_dim;
    int64_t qkv_width = heads.num_heads * heads.key_dim + heads.num_kv_heads * (heads.key_dim + heads.value_dim);
    static thread_local std::vector<float> scratch;
    bool adds = batch.add != nullptr;
    int64_t kernels_width = std::max(layer.attention_conv.dynamic.columns, layer.mlp_conv.dynamic.columns);
    int64_t active_width = (adds ? 3 : 1) * layer.intermediate;
    size_t needed = num_rows * (3 * hidden + qkv_width + attended_width + active_width + kernels_width);
    if (scratch.size() < needed) scratch.resize(needed);
    float *normed = scratch.data(), *middle = normed + num_rows * hidden, *mixed = middle + num_rows * hidden;
    float *qkv = mixed + num_rows * hidden, *attended = qkv + num_rows * qkv_width;
    float *active = attended + num_rows * attended_width, *kernels = active + num_rows * active_width;
    // Convolutions around a sublayer: `enter` computes its input, `leave` adds the convolved output to the residual.
    auto enter = [&](const Convolution& conv, const float* rows) {
        if (!conv) return rows;
        products(rows, hidden, num_rows, hidden, &conv.dynamic, 1, nullptr, nullptr, 0, kernels, conv.dynamic.columns);
        convolve(conv, num_rows, batch.num_slots, hidden, kernels, 0, rows, nullptr, mixed);
        return (const float*)mixed;
    };
    auto leave = [&](const Convolution& conv, const float* rows, const float* residual, float* to) {
        convolve(conv, num_rows, batch.num_slots, hidden, kernels, 1, rows, residual, to);
    };
    if (!inputs) {
        by_row(num_rows, hidden, [&](int64_t row) {
            norm_row(x + row * hidden, layer.input_norm, layer.input_eps, hidden, normed + row * hidden);
        });
        inputs = enter(layer.attention_conv, normed);
    }
    products(inputs, layer.inputs, num_rows, layer.inputs, layer.query_key_value, 3, nullptr, nullptr, 0, qkv,
             qkv_width);
    if (adds) batch.add(layer.added_qkv, batch.added, inputs, layer.inputs, qkv, qkv_width);
    rotate_and_store(layer, batch, qkv, qkv_width);
    if (batch.wanted) {
        num_rows = batch.num_wanted;
        for (int64_t i = 0; i < num_rows; i++) {
            int64_t row = batch.wanted[i];
            memmove(qkv + i * qkv_width, qkv + row * qkv_width, heads.num_heads * heads.key_dim * sizeof(float));
            memcpy(normed + i * hidden, x + row * hidden, hidden * sizeof(float));
        }
        x = normed;
    }
    by_kind(layer.kind, [&](auto number) {
        using Stored = decltype(number);
        attend(heads, batch.segments, batch.num_segments, qkv, qkv_width, (const Stored*)layer.key_cache,
               (const Stored*)layer.value_cache, batch.block_size, attended, attended_width);
    });
    const Convolution &around = layer.attention_conv, &within = layer.mlp_conv;
    bool apart = around || layer.attended_norm;
    products(attended, attended_width, num_rows, attended_width, &layer.output, 1, nullptr, apart ? nullptr : x, hidden,
             apart ? mixed : middle, hidden);
    if (around) leave(around, mixed, x, middle);
    if (adds)
        batch.add(layer.added_output, batch.added, attended, attended_width, layer.attended_norm ? mixed : middle, hidden);
    if (layer.attended_norm) add_normed(mixed, layer.attended_norm, layer.attended_eps, x, num_rows, hidden, middle);
    by_row(num_rows, hidden, [&](int64_t row) {
        norm_row(middle + row * hidden, layer.output_norm, layer.output_eps, hidden, normed + row * hidden);
    });
    if (adds)
        added_gate_up(layer, batch, normed, active + num_rows * layer.intermediate, active);
    else
        products(enter(within, normed), hidden, num_rows, hidden, &layer.gate, 1, &layer.up, nullptr, 0, active,
                 layer.intermediate, layer.gate_kind);
    apart = within || layer.left_norm;
    products(active, layer.intermediate, num_rows, layer.intermediate, &layer.down, 1, nullptr,
             apart ? nullptr : middle, hidden, apart ? mixed : out, hidden);
    if (within) leave(within, mixed, middle, out);
    if (adds) batch.add(layer.added_down, batch.added, active, layer.intermediate, layer.left_norm ? mixed : out, hidden);
    if (layer.left_norm) add_normed(mixed, layer.left_norm, layer.left_eps, middle, num_rows, hidden, out);
}

// `run_layer` for rows of the layer's kind.
static void run_rounded_layer(const Layer& layer, const Batch& batch, const void* x, void* out) {
    if (layer.kind == FLOAT) return run_layer(layer, batch, nullptr, (const float*)x, (float*)out);
    int64_t hidden = layer.hidden;
    static thread_local std::vector<float> scratch;
    if ((int64_t)scratch.size() < 2 * batch.num_rows * hidden) scratch.resize(2 * batch.num_rows * hidden);
    float *entering = scratch.data(), *leaving = entering + batch.num_rows * hidden;
    by_kind(layer.kind, [&](auto number) {
        using Rounded = decltype(number);
        for (int64_t row = 0; row < batch.num_rows; row++)
            copy_row((const Rounded*)x + row * hidden, hidden, entering + row * hidden);
        run_layer(layer, batch, nullptr, entering, leaving);
        for (int64_t row = 0; row < batch.num_rows; row++)
            copy_row(leaving + row * hidden, hidden, (Rounded*)out + row * hidden);
    });
}
