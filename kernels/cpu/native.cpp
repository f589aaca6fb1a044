// C interface of the library, called from Python by ctypes.
#include "accept.h"
#include "attention.h"
#include "block.h"
#include "choice.h"
#include "draft.h"
#include "drafted.h"
#include "layer.h"
#include "products.h"
#include "rounds.h"

extern "C" {

void wingbeat_threads(int count) { threads.resize(count - 1); }

int64_t wingbeat_panel() { return PANEL; }

void wingbeat_product(const float* x, int64_t num_rows, int64_t inputs, const Matrix* matrices, int num_matrices,
                      float* out) {
    Threads::Turn turn(threads);
    int64_t columns = 0;
    for (int m = 0; m < num_matrices; m++) columns += matrices[m].columns;
    products(x, inputs, num_rows, inputs, matrices, num_matrices, nullptr, nullptr, 0, out, columns);
}

void wingbeat_pack(const uint8_t* values, int64_t column_stride, int64_t input_stride, int64_t columns, int64_t inputs,
                   int64_t kind, uint8_t* into) {
    by_form(kind - FIRST_GROUPED, [&](auto form) {
        pack_panels(values, column_stride, input_stride, columns, inputs, form, into);
    });
}

// Writes columns [count, inputs] to `out`. Returns false, having written nothing, if a column does not exist.
bool wingbeat_columns(const Matrix* matrix, int64_t inputs, const int64_t* columns, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++)
        if (columns[i] < 0 || columns[i] >= matrix->columns) return false;
    by_form(matrix->kind - FIRST_GROUPED, [&](auto form) {
        for (int64_t i = 0; i < count; i++)
            unpack_column((const uint8_t*)matrix->weight, matrix->groups, inputs, columns[i], form, out + i * inputs);
    });
    return true;
}

void wingbeat_norm(const float* x, int64_t num_rows, int64_t width, const float* weight, float eps, float* out) {
    for (int64_t row = 0; row < num_rows; row++) norm_row(x + row * width, weight, eps, width, out + row * width);
}

void wingbeat_attention(const Heads* heads, const Segment* segments, int64_t num_segments, const float* query,
                        const void* key_cache, const void* value_cache, int64_t kind, int64_t block_size, float* out) {
    Threads::Turn turn(threads);
    int64_t query_stride = heads->num_heads * heads->key_dim, out_stride = heads->num_heads * heads->value_dim;
    by_kind(kind, [&](auto number) {
        using Stored = decltype(number);
        attend(*heads, segments, num_segments, query, query_stride, (const Stored*)key_cache,
               (const Stored*)value_cache, block_size, out, out_stride);
    });
}

void wingbeat_layers(const Layer* layers, int64_t num_layers, const Batch* batch, const void* x, void* out) {
    Threads::Turn turn(threads);
    for (int64_t index = 0; index < num_layers; index++) {
        run_rounded_layer(layers[index], *batch, x, out);
        x = out;
        out = (void*)element(out, batch->num_rows * layers[index].hidden, layers[index].kind);
    }
}

static Room& own_room() {
    static thread_local Room room;
    return room;
}

void wingbeat_take_in(const Head* head, const Sequences* sequences, const Decided* decided) {
    Threads::Turn turn(threads);
    take_in(*head, *sequences, *decided, own_room());
}

int64_t wingbeat_grow(const Head* head, const Sequences* sequences, const Roots* roots) {
    Threads::Turn turn(threads);
    return grow(*head, *sequences, *roots, own_room());
}

int64_t wingbeat_answer(const Head* head, const Sequences* sequences, const Channel* channel) {
    Threads::Turn turn(threads);
    return answer(*head, *sequences, *channel, own_room());
}

void wingbeat_block_take_in(const BlockHead* head, const Sequences* sequences, const Decided* decided) {
    Threads::Turn turn(threads);
    take_in(*head, *sequences, *decided, own_room());
}

int64_t wingbeat_block_grow(const BlockHead* head, const Sequences* sequences, const Roots* roots) {
    Threads::Turn turn(threads);
    return grow(*head, *sequences, *roots, own_room());
}

int64_t wingbeat_block_answer(const BlockHead* head, const Sequences* sequences, const Channel* channel) {
    Threads::Turn turn(threads);
    return answer(*head, *sequences, *channel, own_room());
}

int64_t wingbeat_check_trees(const Answer* from, const TreeColumns* into) { return check_trees(*from, *into); }

void wingbeat_take_trees(const Intake* from, int64_t* out, int64_t* tables, Taken* taken) {
    *taken = take_trees(*from, out, tables);
}

void wingbeat_choose_tokens(const Sampling* sampling) { choose_tokens(*sampling); }

int64_t wingbeat_accept(const VerifiedTrees* trees, const Paths* paths, const Pools* pools) {
    return accept(*trees, *paths, *pools);
}
}
