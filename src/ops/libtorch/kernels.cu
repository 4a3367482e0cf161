// Kernels for GPUs of both makers, compiled at run time (NVRTC, HIPRTC) once for each element type: with ELEMENT_BF16
// defined elements are bfloat16, otherwise float; EMBEDDING_ROWS and EMBEDDING_COLUMNS are the sides of a block there. All arithmetic is in float. Elements are read and written in vectors of
// eight: rows are a multiple of that long, and tensors contiguous and aligned to 16 bytes.

typedef long long Long;

// ---- Elements ------------------------------------------------------------------------------------------------------

struct Eight {
    float v[8];
};

#ifdef ELEMENT_BF16
typedef unsigned short Element;

__device__ inline float low_half(unsigned int word) { return __uint_as_float(word << 16); }
__device__ inline float high_half(unsigned int word) { return __uint_as_float(word & 0xffff0000u); }

// Rounded to the nearest, ties to even.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ inline unsigned int packed(float low, float high) {
    unsigned int word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
#else
__device__ inline unsigned int upper_half(float value) {
    unsigned int bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
__device__ inline unsigned int packed(float low, float high) { return upper_half(low) | (upper_half(high) << 16); }
#endif

__device__ inline float load_one(const Element* base, Long index) { return __uint_as_float((unsigned int)base[index] << 16); }
__device__ inline void store_one(Element* base, Long index, float value) { base[index] = (Element)packed(value, 0.0f); }

__device__ inline Eight load(const Element* base, Long vector) {
    uint4 words = ((const uint4*)base)[vector];
    Eight out = {{low_half(words.x), high_half(words.x), low_half(words.y), high_half(words.y),
                  low_half(words.z), high_half(words.z), low_half(words.w), high_half(words.w)}};
    return out;
}
__device__ inline void store(Element* base, Long vector, const Eight& value) {
    const float* v = value.v;
    uint4 words;
    words.x = packed(v[0], v[1]);
    words.y = packed(v[2], v[3]);
    words.z = packed(v[4], v[5]);
    words.w = packed(v[6], v[7]);
    ((uint4*)base)[vector] = words;
}
__device__ inline float exponential(float x) { return __expf(x); }
__device__ inline float tangens_hyperbolicus(float x) { return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x)); }
#else
typedef float Element;

__device__ inline float load_one(const Element* base, Long index) { return base[index]; }
__device__ inline void store_one(Element* base, Long index, float value) { base[index] = value; }

__device__ inline Eight load(const Element* base, Long vector) {
    float4 a = ((const float4*)base)[2 * vector], b = ((const float4*)base)[2 * vector + 1];
    Eight out = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    return out;
}
__device__ inline void store(Element* base, Long vector, const Eight& value) {
    const float* v = value.v;
    ((float4*)base)[2 * vector] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4*)base)[2 * vector + 1] = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ inline float exponential(float x) { return expf(x); }
__device__ inline float tangens_hyperbolicus(float x) { return tanhf(x); }
#endif

// ---- Sums over threads ---------------------------------------------------------------------------------------------

#if defined(__HIPCC_RTC__) || defined(__HIP_DEVICE_COMPILE__)
#define SHUFFLE_XOR(value, mask, width) __shfl_xor(value, mask, width)
#else
#define SHUFFLE_XOR(value, mask, width) __shfl_xor_sync(0xffffffffu, value, mask, width)
#endif

// Over `width` neighbouring threads, a power of two up to 32; every thread of a warp has to call it.
__device__ inline float group_sum(float value, int width) {
    for (int mask = width / 2; mask > 0; mask /= 2) value += SHUFFLE_XOR(value, mask, width);
    return value;
}

// Over a block of up to 1024 threads, a multiple of 32.
__device__ inline float block_sum(float value) {
    __shared__ float partial[32];
    value = group_sum(value, 32);
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < blockDim.x / 32; i++) total += partial[i];
    return total;
}

// ---- Rows: `width` threads of a block share a row -------------------------------------------------------------------

struct Row {
    Long index;
    int lane;
    bool live;
};

__device__ inline Row my_row(Long rows, int width) {
    Row row;
    row.index = (Long)blockIdx.x * (blockDim.x / width) + threadIdx.x / width;
    row.lane = threadIdx.x % width;
    row.live = row.index < rows;
    // Threads past the end read the last row: sums over threads need all of them.
    if (!row.live) row.index = rows - 1;
    return row;
}

// y = x · r with r = 1 / sqrt(mean(x²) + eps).
extern "C" __global__ void rms_norm_forward(const Element* x, Element* y, float* inverse_rms, Long rows, int vectors,
                                            int width, float eps) {
    Row row = my_row(rows, width);
    Long start = row.index * vectors;
    float sum = 0.0f;
    for (int i = row.lane; i < vectors; i += width) {
        Eight a = load(x, start + i);
        for (int j = 0; j < 8; j++) sum += a.v[j] * a.v[j];
    }
    float scale = 1.0f / sqrtf(group_sum(sum, width) / (8 * vectors) + eps);
    if (!row.live) return;
    for (int i = row.lane; i < vectors; i += width) {
        Eight a = load(x, start + i);
        for (int j = 0; j < 8; j++) a.v[j] *= scale;
        store(y, start + i, a);
    }
    if (row.lane == 0) inverse_rms[row.index] = scale;
}

// dx = r · (grad − y · mean(grad · y)).
extern "C" __global__ void rms_norm_backward(const Element* y, const float* inverse_rms, const Element* grad, Element* dx,
                                             Long rows, int vectors, int width) {
    Row row = my_row(rows, width);
    Long start = row.index * vectors;
    float sum = 0.0f;
    for (int i = row.lane; i < vectors; i += width) {
        Eight a = load(y, start + i), g = load(grad, start + i);
        for (int j = 0; j < 8; j++) sum += a.v[j] * g.v[j];
    }
    float mean = group_sum(sum, width) / (8 * vectors), scale = inverse_rms[row.index];
    if (!row.live) return;
    for (int i = row.lane; i < vectors; i += width) {
        Eight a = load(y, start + i), g = load(grad, start + i);
        for (int j = 0; j < 8; j++) g.v[j] = scale * (g.v[j] - a.v[j] * mean);
        store(dx, start + i, g);
    }
}

// Rows [b · t · heads], each two halves of `vectors`: rotated by the angle of its time, then normalised.
extern "C" __global__ void rotary_rms_norm_forward(const Element* x, const Element* cos, const Element* sin, Element* y,
                                                   float* inverse_rms, Long rows, int heads, int times, int vectors,
                                                   int width, float eps) {
    Row row = my_row(rows, width);
    Long first = row.index * 2 * vectors, second = first + vectors, angles = row.index / heads % times * vectors;
    float sum = 0.0f;
    for (int i = row.lane; i < vectors; i += width) {
        // A rotation keeps the length.
        Eight a = load(x, first + i), b = load(x, second + i);
        for (int j = 0; j < 8; j++) sum += a.v[j] * a.v[j] + b.v[j] * b.v[j];
    }
    float scale = 1.0f / sqrtf(group_sum(sum, width) / (16 * vectors) + eps);
    if (!row.live) return;
    for (int i = row.lane; i < vectors; i += width) {
        Eight a = load(x, first + i), b = load(x, second + i), c = load(cos, angles + i), s = load(sin, angles + i);
        Eight u, w;
        for (int j = 0; j < 8; j++) {
            u.v[j] = scale * (a.v[j] * c.v[j] + b.v[j] * s.v[j]);
            w.v[j] = scale * (b.v[j] * c.v[j] - a.v[j] * s.v[j]);
        }
        store(y, first + i, u);
        store(y, second + i, w);
    }
    if (row.lane == 0) inverse_rms[row.index] = scale;
}

extern "C" __global__ void rotary_rms_norm_backward(const Element* y, const float* inverse_rms, const Element* grad,
                                                    const Element* cos, const Element* sin, Element* dx, Long rows,
                                                    int heads, int times, int vectors, int width) {
    Row row = my_row(rows, width);
    Long first = row.index * 2 * vectors, second = first + vectors, angles = row.index / heads % times * vectors;
    float sum = 0.0f;
    for (int i = row.lane; i < vectors; i += width) {
        Eight ya = load(y, first + i), yb = load(y, second + i), ga = load(grad, first + i), gb = load(grad, second + i);
        for (int j = 0; j < 8; j++) sum += ya.v[j] * ga.v[j] + yb.v[j] * gb.v[j];
    }
    float mean = group_sum(sum, width) / (16 * vectors), scale = inverse_rms[row.index];
    if (!row.live) return;
    for (int i = row.lane; i < vectors; i += width) {
        Eight ya = load(y, first + i), yb = load(y, second + i), ga = load(grad, first + i), gb = load(grad, second + i);
        Eight c = load(cos, angles + i), s = load(sin, angles + i), da, db;
        for (int j = 0; j < 8; j++) {
            float u = scale * (ga.v[j] - ya.v[j] * mean), w = scale * (gb.v[j] - yb.v[j] * mean);
            // The opposite rotation.
            da.v[j] = u * c.v[j] - w * s.v[j];
            db.v[j] = u * s.v[j] + w * c.v[j];
        }
        store(dx, first + i, da);
        store(dx, second + i, db);
    }
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Rows [b · t · heads] with a gate each: out = x + 2 · sigmoid(gate) · y.
extern "C" __global__ void gated_add_forward(const Element* x, const Element* gate, const Element* y, Element* out, Long rows,
                                             int vectors, int width) {
    Row row = my_row(rows, width);
    if (!row.live) return;
    float factor = 2.0f * sigmoid(load_one(gate, row.index));
    for (int i = row.lane; i < vectors; i += width) {
        Eight a = load(x, row.index * vectors + i), b = load(y, row.index * vectors + i);
        for (int j = 0; j < 8; j++) a.v[j] += factor * b.v[j];
        store(out, row.index * vectors + i, a);
    }
}

extern "C" __global__ void gated_add_backward(const Element* gate, const Element* y, const Element* grad, Element* dgate,
                                              Element* dy, Long rows, int vectors, int width) {
    Row row = my_row(rows, width);
    float open = sigmoid(load_one(gate, row.index)), sum = 0.0f;
    for (int i = row.lane; i < vectors; i += width) {
        Eight b = load(y, row.index * vectors + i), g = load(grad, row.index * vectors + i);
        for (int j = 0; j < 8; j++) {
            sum += g.v[j] * b.v[j];
            g.v[j] *= 2.0f * open;
        }
        if (row.live) store(dy, row.index * vectors + i, g);
    }
    sum = group_sum(sum, width);
    if (row.live && row.lane == 0) store_one(dgate, row.index, 2.0f * open * (1.0f - open) * sum);
}

// ---- Element by element --------------------------------------------------------------------------------------------

__device__ inline Long my_vector() { return (Long)blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void mix_forward(const Element* x, const float* x_scale, const Element* y, const float* y_scale,
                                       Element* out, Long vectors) {
    Long i = my_vector();
    if (i >= vectors) return;
    float p = *x_scale, q = *y_scale;
    Eight a = load(x, i), b = load(y, i);
    for (int j = 0; j < 8; j++) a.v[j] = p * a.v[j] + q * b.v[j];
    store(out, i, a);
}

// partial [blocks, 2]: each block's share of the sums of grad · x and grad · y.
extern "C" __global__ void mix_backward(const Element* x, const float* x_scale, const Element* y, const float* y_scale,
                                        const Element* grad, Element* dx, Element* dy, float* partial, Long vectors) {
    float p = *x_scale, q = *y_scale, dot_x = 0.0f, dot_y = 0.0f;
    for (Long i = my_vector(); i < vectors; i += (Long)gridDim.x * blockDim.x) {
        Eight a = load(x, i), b = load(y, i), g = load(grad, i);
        for (int j = 0; j < 8; j++) {
            dot_x += a.v[j] * g.v[j];
            dot_y += b.v[j] * g.v[j];
            a.v[j] = p * g.v[j];
            b.v[j] = q * g.v[j];
        }
        store(dx, i, a);
        store(dy, i, b);
    }
    dot_x = block_sum(dot_x);
    dot_y = block_sum(dot_y);
    if (threadIdx.x == 0) {
        partial[2 * blockIdx.x] = dot_x;
        partial[2 * blockIdx.x + 1] = dot_y;
    }
}

extern "C" __global__ void squared_relu_forward(const Element* x, Element* out, Long vectors) {
    Long i = my_vector();
    if (i >= vectors) return;
    Eight a = load(x, i);
    for (int j = 0; j < 8; j++) a.v[j] = a.v[j] < 0.0f ? 0.0f : a.v[j] * a.v[j];
    store(out, i, a);
}

extern "C" __global__ void squared_relu_backward(const Element* out, const Element* grad, Element* dx, Long vectors) {
    Long i = my_vector();
    if (i >= vectors) return;
    Eight a = load(out, i), g = load(grad, i);
    for (int j = 0; j < 8; j++) g.v[j] *= 2.0f * sqrtf(a.v[j]);
    store(dx, i, g);
}

// ---- The loss: one block a row of logits ---------------------------------------------------------------------------

// Vectors of a row that a thread keeps between its two passes over them; of a longer row it computes the rest twice.
#define KEPT 2

struct Capped {
    Eight squashed, exponential;
};

__device__ inline Capped capped(const Element* logits, Long vector, float cap) {
    Eight z = load(logits, vector);
    Capped out;
    float inverse = 1.0f / cap;
    for (int j = 0; j < 8; j++) {
        out.squashed.v[j] = tangens_hyperbolicus(z.v[j] * inverse);
        // |u| ≤ cap: no maximum has to be taken out for the sum to stay in range.
        out.exponential.v[j] = exponential(cap * out.squashed.v[j]);
    }
    return out;
}

__device__ inline float sum_of(const Eight& x) {
    float sum = 0.0f;
    for (int j = 0; j < 8; j++) sum += x.v[j];
    return sum;
}

// The gradient of `scale` times the row's loss with respect to eight logits; `hit`: which of them is the target, if any.
__device__ inline void store_gradient(Element* logits, Long vector, const Capped& x, float inverse_sum, Long hit, float scale) {
    Eight gradient;
    for (int j = 0; j < 8; j++) {
        float probability = x.exponential.v[j] * inverse_sum;
        float slope = 1.0f - x.squashed.v[j] * x.squashed.v[j];
        gradient.v[j] = (probability - (j == hit ? 1.0f : 0.0f)) * slope * scale;
    }
    store(logits, vector, gradient);
}

// losses[row] = ln Σ exp(u) − u[target] with u = cap · tanh(logits / cap). The logits' gradient times `scale` replaces them.
extern "C" __global__ void softcap_cross_entropy(Element* logits, const Long* targets, float* losses, int vectors,
                                                 float cap, float scale) {
    Long start = (Long)blockIdx.x * vectors, target = targets[blockIdx.x];
    Capped kept[KEPT];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int i = threadIdx.x + k * blockDim.x;
        if (i < vectors) {
            kept[k] = capped(logits, start + i, cap);
            sum += sum_of(kept[k].exponential);
        }
    }
    for (int i = threadIdx.x + KEPT * blockDim.x; i < vectors; i += blockDim.x)
        sum += sum_of(capped(logits, start + i, cap).exponential);
    // The target's logit is read before it is overwritten: block_sum waits for all threads.
    if (threadIdx.x == 0) {
        bool known = target >= 0 && target < 8ll * vectors;
        // A target that is no token leaves a loss that is no number.
        losses[blockIdx.x] = known ? capped(logits, start + target / 8, cap).squashed.v[target % 8] : 0.0f / 0.0f;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) - cap * losses[blockIdx.x];
    float inverse_sum = 1.0f / sum;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int i = threadIdx.x + k * blockDim.x;
        if (i < vectors) store_gradient(logits, start + i, kept[k], inverse_sum, target - 8ll * i, scale);
    }
    for (int i = threadIdx.x + KEPT * blockDim.x; i < vectors; i += blockDim.x)
        store_gradient(logits, start + i, capped(logits, start + i, cap), inverse_sum, target - 8ll * i, scale);
}

// ---- Embeddings ----------------------------------------------------------------------------------------------------

// dweight [v, c]: the sum of the rows of grad [n, c] at the places of each token, which are order[starts[v] .. starts[v + 1]].
// A block of EMBEDDING_ROWS x EMBEDDING_COLUMNS threads for each token and share of the columns.
extern "C" __global__ void embedding_backward(const Element* grad, const Long* order, const Long* starts, Element* dweight,
                                              int vectors) {
    __shared__ float partial[EMBEDDING_ROWS][EMBEDDING_COLUMNS][8];
    int lane = threadIdx.x % EMBEDDING_COLUMNS, share = threadIdx.x / EMBEDDING_COLUMNS;
    int shares = (vectors + EMBEDDING_COLUMNS - 1) / EMBEDDING_COLUMNS;
    Long token = blockIdx.x / shares;
    int column = blockIdx.x % shares * EMBEDDING_COLUMNS + lane;
    Eight sum = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}};
    if (column < vectors) {
        for (Long i = starts[token] + share; i < starts[token + 1]; i += EMBEDDING_ROWS) {
            Eight row = load(grad, order[i] * vectors + column);
            for (int j = 0; j < 8; j++) sum.v[j] += row.v[j];
        }
    }
    for (int j = 0; j < 8; j++) partial[share][lane][j] = sum.v[j];
    __syncthreads();
    if (share > 0 || column >= vectors) return;
    for (int k = 1; k < EMBEDDING_ROWS; k++)
        for (int j = 0; j < 8; j++) sum.v[j] += partial[k][lane][j];
    store(dweight, token * vectors + column, sum);
}

// ---- Attention in blocks of `window` tokens: [b, n, window, h · d] in `row` vectors a token --------------------------
// The blocks before the last (`first` 0) or after the first (`first` 1) with time reversed are [b, n - 1, window, h · d].

struct Place {
    Long vector;  // in [b, n, window, row]
    bool live;
};

// Where vector `i` of the reversed blocks comes from.
__device__ inline Place place_of_reversed(Long i, Long vectors, int row, int window, int n, int first) {
    Place place;
    place.live = i < vectors;
    Long token = i / row, within = i % row;
    Long block = token / window % (n - 1) + first, batch = token / window / (n - 1);
    place.vector = ((batch * n + block) * window + (window - 1 - token % window)) * row + within;
    return place;
}

extern "C" __global__ void reverse_blocks(const Element* blocks, Element* reversed, Long vectors, int row, int window, int n,
                                          int first) {
    Long i = my_vector();
    Place place = place_of_reversed(i, vectors, row, window, n, first);
    if (place.live) store(reversed, i, load(blocks, place.vector));
}

extern "C" __global__ void add_reversed_blocks(Element* blocks, const Element* reversed, Long vectors, int row, int window,
                                               int n, int first) {
    Long i = my_vector();
    Place place = place_of_reversed(i, vectors, row, window, n, first);
    if (!place.live) return;
    Eight sum = load(blocks, place.vector), part = load(reversed, i);
    for (int j = 0; j < 8; j++) sum.v[j] += part.v[j];
    store(blocks, place.vector, sum);
}

// out [b, n, window, h, d]: each query's attention to its own block, to which that to the block before is added.
// before [b, n - 1, window, h, d], time reversed. Log-sum-exps own_sums [b, n, h, window], before_sums [b, n - 1, h, window],
// time reversed; merged_sums [b, h, n · window].
extern "C" __global__ void merge_blocks(Element* out, const Element* before, const float* own_sums, const float* before_sums,
                                        float* merged_sums, Long vectors, int heads, int head, int window, int n) {
    Long i = my_vector();
    if (i >= vectors) return;
    Long token = i / (heads * head);
    int h = i / head % heads, time = token % window, block = token / window % n;
    Long batch = token / window / n;
    float own = own_sums[((batch * n + block) * heads + h) * window + time], merged = own;
    if (block > 0) {
        Long source = (batch * (n - 1) + block - 1) * heads + h;
        float other = before_sums[source * window + (window - 1 - time)];
        float largest = fmaxf(own, other);
        merged = largest + logf(expf(own - largest) + expf(other - largest));
        float share = expf(other - merged);
        Long place = ((batch * (n - 1) + block - 1) * window + (window - 1 - time)) * heads * head + i % (heads * head);
        Eight a = load(out, i), b = load(before, place);
        for (int j = 0; j < 8; j++) a.v[j] += share * (b.v[j] - a.v[j]);
        store(out, i, a);
    }
    if (i % head == 0) merged_sums[(batch * heads + h) * n * window + block * window + time] = merged;
}
