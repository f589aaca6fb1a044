// Low-rank adapters (LoRA, arXiv 2106.09685) on top of a matrix product: out += (x * a) * b. Each row has its own
// adapter, or none. Compiled with the sources of `kernels/cpu`.
#pragma once

#include "../cpu/products.h"

constexpr int MOST_PARTS = 3;

// Weights of all adapters for one matrix product, or for a few with the same inputs. Each product is a part. Weights
// are stored input-major; adapter `id`, from 1 on, is at index id - 1.
struct Adapters {
    // of `kind`, by adapter [inputs, columns of all parts, `rank` each]; rows are `a_row` elements apart
    const void* a;
    const void* b;         // of `kind`, by adapter [rank, columns of all parts]; rows are `b_row` elements apart
    const int64_t* ranks;  // by id; 0 if an adapter does not change the product
    int64_t a_stride, a_row, b_stride, b_row, inputs, rank, num_parts;
    int64_t columns[MOST_PARTS], kind;
};

// Rows [begin, end) of a batch that have the same adapter.
struct AdapterRun {
    int64_t id, begin, end;
};

static void adapt(const Adapters& adapters, const AdapterRun* runs, int64_t num_runs, const float* x, int64_t x_stride,
                  float* out, int64_t out_stride) {
    static thread_local std::vector<float> scratch;
    for (int64_t index = 0; index < num_runs; index++) {
        const AdapterRun& run = runs[index];
        int64_t rank = adapters.ranks[run.id], num_rows = run.end - run.begin, width = rank * adapters.num_parts;
        if (!rank) continue;
        if ((int64_t)scratch.size() < num_rows * width) scratch.resize(num_rows * width);
        float* low = scratch.data();
        const void* a = element(adapters.a, (run.id - 1) * adapters.a_stride, adapters.kind);
        const void* b = element(adapters.b, (run.id - 1) * adapters.b_stride, adapters.kind);
        Matrix down[MOST_PARTS];
        for (int64_t part = 0; part < adapters.num_parts; part++)
            down[part] = plain_matrix(element(a, part * adapters.rank, adapters.kind), nullptr, rank, adapters.a_row,
                                      adapters.kind);
        products(x + run.begin * x_stride, x_stride, num_rows, adapters.inputs, down, (int)adapters.num_parts, nullptr,
                 nullptr, 0, low, width);
        float* into = out + run.begin * out_stride;
        for (int64_t part = 0; part < adapters.num_parts; part++) {
            Matrix up = plain_matrix(b, nullptr, adapters.columns[part], adapters.b_row, adapters.kind);
            products(low + part * rank, width, num_rows, rank, &up, 1, nullptr, into, out_stride, into, out_stride);
            b = element(b, adapters.columns[part], adapters.kind), into += adapters.columns[part];
        }
    }
}

// All runs of a batch.
struct AdapterRuns {
    const AdapterRun* runs;
    int64_t num_runs;
};

extern "C" {

// An `Add` for decoder layers.
void wingbeat_add_adapters(const void* adapters, const void* rows, const float* x, int64_t x_stride, float* out,
                           int64_t out_stride) {
    const AdapterRuns* own = (const AdapterRuns*)rows;
    adapt(*(const Adapters*)adapters, own->runs, own->num_runs, x, x_stride, out, out_stride);
}

void wingbeat_adapt(const Adapters* adapters, const AdapterRun* runs, int64_t num_runs, const float* x, float* out,
                    int64_t out_stride) {
    Threads::Turn turn(threads);
    adapt(*adapters, runs, num_runs, x, adapters->inputs, out, out_stride);
}
}
