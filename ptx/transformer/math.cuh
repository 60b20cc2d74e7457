// Elementary functions with the bits of src/device/cpu/kernels/{math,pointwise}.rs, on every GPU: polynomials in a fixed order of
// operations. Compile with -fmad=false, so that only what is written as fmaf is fused.
#pragma once

// Reduced argument of an exponential: e^x = p * 2^n.
struct Exponential {
    float p;
    // 1.5 * 2^23 + n as bits: n in two's complement, above bits of a constant.
    unsigned shifted;
};

// min and max that keep NaN, in one instruction.
__device__ __forceinline__ float min_nan(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float max_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// `x` must lie in -104..89 or be NaN; p is less by 1 here, and precise near 0.
__device__ __forceinline__ Exponential reduce_exp_m1(float x) {
    const float round = 12582912.0f;
    float shifted = fmaf(x, 1.44269504f, round);
    float n = shifted - round;
    float r = fmaf(n, -1.4286068e-6f, fmaf(n, -0.69314575f, x));
    float p = 0.0013926184f;
    p = fmaf(p, r, 0.008363179f);
    p = fmaf(p, r, 0.041666556f);
    p = fmaf(p, r, 0.16666576f);
    p = fmaf(p, r, 0.5f);
    return {fmaf(r * r, p, r), __float_as_uint(shifted)};
}

__device__ __forceinline__ Exponential reduce_exp(float x) {
    Exponential e = reduce_exp_m1(x);
    return {e.p + 1.0f, e.shifted};
}

// e^x; 0 and infinity beyond the range; NaN stays NaN.
__device__ __forceinline__ float exp_exact(float x) {
    Exponential e = reduce_exp(max_nan(min_nan(x, 89.0f), -104.0f));
    // In two halves, because 2^n leaves the range of floats before the product does.
    int n = int(e.shifted - 0x4b400000u);
    int half = n >> 1;
    return e.p * __uint_as_float(unsigned(half + 127) << 23) * __uint_as_float(unsigned(n - half + 127) << 23);
}

// As exp_exact from -86 on, and e^-86 below: for sums with a term of at least 1, which do not feel the difference. Cheaper,
// because one power of two does.
__device__ __forceinline__ float exp_floored(float x) {
    Exponential e = reduce_exp(max_nan(min_nan(x, 89.0f), -86.0f));
    // 2p * 2^(n - 1): n is at most 128. The shift drops all but n; 126 is the bias less one.
    return (e.p + e.p) * __uint_as_float((e.shifted << 23) + (126u << 23));
}

// As exp_floored for numbers up to 0.
__device__ __forceinline__ float exp_nonpositive(float x) {
    Exponential e = reduce_exp(max_nan(x, -86.0f));
    return e.p * __uint_as_float((e.shifted << 23) + (127u << 23));
}

// A divisor from 1e-3 to 1e9, and its reciprocal, rounded to nearest as 1 / divisor is.
struct Divisor {
    float value, reciprocal;

    __device__ __forceinline__ explicit Divisor(float value) : value(value) {
        float estimate;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
        reciprocal = fmaf(fmaf(-value, estimate, 1.0f), estimate, estimate);
    }
    // x / value, without the branch of a division: a correction of the product with a rounded reciprocal has the bits of the quotient
    // (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). A dividend below 2^-100 may have
    // another last bit.
    __device__ __forceinline__ float divides(float x) const {
        const float quotient = x * reciprocal;
        return fmaf(fmaf(-quotient, value, x), reciprocal, quotient);
    }
};

// tanh(x) for numbers from -10 to 10, and NaN.
__device__ __forceinline__ float tanh_exact(float x) {
    const Exponential reduced = reduce_exp_m1(2.0f * x);
    const float power = __uint_as_float((reduced.shifted << 23) + (127u << 23));
    const float e = fmaf(reduced.p, power, power - 1.0f);
    return Divisor(e + 2.0f).divides(e);
}

// `x` bent so that it stays between `-cap` and `cap`, and its slope.
struct Capped {
    float value, slope;
};

// Beyond 10 caps the result is the cap to the last bit.
__device__ __forceinline__ Capped soft_capped(float x, const Divisor& cap) {
    const float limit = 10.0f * cap.value;
    const float t = tanh_exact(cap.divides(max_nan(min_nan(x, limit), -limit)));
    return {cap.value * t, fmaf(t, -t, 1.0f)};
}

// Ways to take a number before anything else is done with it.
struct AsItIs {
    __device__ __forceinline__ Capped operator()(float x) const { return {x, 1.0f}; }
};

struct SoftCap {
    Divisor cap;
    __device__ __forceinline__ explicit SoftCap(float cap) : cap(cap) {}
    __device__ __forceinline__ Capped operator()(float x) const { return soft_capped(x, cap); }
};

// 1 / (1 + e^-x).
__device__ __forceinline__ float sigmoid(float x) {
    return __frcp_rn(1.0f + exp_floored(-x));
}

// The argument of the sigmoid in GELU's tanh form: 0.5 x (1 + tanh u) is x sigmoid(2u).
__device__ __forceinline__ float gelu_argument(float x) {
    return 2.0f * (0.7978846f * fmaf(x * x * 0.044715f, x, x));
}

__device__ __forceinline__ float gelu(float x) {
    return x * sigmoid(gelu_argument(x));
}

// Derivative of gelu.
__device__ __forceinline__ float gelu_slope(float x) {
    float du = 0.7978846f * fmaf(x * x, 3.0f * 0.044715f, 1.0f);
    float s = sigmoid(gelu_argument(x));
    return fmaf(2.0f * x * s * (1.0f - s), du, s);
}

// Derivative of x sigmoid(x), from s = sigmoid(x).
__device__ __forceinline__ float silu_slope(float x, float s) {
    return s * fmaf(x, 1.0f - s, 1.0f);
}
