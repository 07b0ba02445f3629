#include "common/floats.hpp"

#include <cstring>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire is little-endian and so must this machine be"
#endif

namespace swarm {

namespace {

// Everything below is free of branches so that compilers turn the loops into vector code.

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <typename T> inline T load(const uint8_t * at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
}

// Not `?:`: compilers do not move floating-point work out of a branch, and then keep the branch.
inline uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - uint32_t(condition);
    return (yes & mask) | (no & ~mask);
}

struct F32 {
    using Stored = uint32_t;
    static float    decode(Stored stored) { return float_of(stored); }
    static Stored   encode(float value) { return bits_of(value); }
    static uint32_t misfit(Stored, float) { return 0; }
};

struct Bf16 {
    using Stored = uint16_t;
    static float  decode(Stored stored) { return float_of(uint32_t(stored) << 16); }
    static Stored encode(float value) {
        const uint32_t bits    = bits_of(value);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const uint32_t quiet   = (bits >> 16) | 0x40u;
        return Stored(choose((bits & 0x7fffffffu) > 0x7f800000u, quiet, rounded));
    }
    // A float just below infinity rounds up to it.
    static uint32_t misfit(Stored stored, float value) {
        return uint32_t((stored & 0x7fffu) == 0x7f80u) & uint32_t((bits_of(value) & 0x7fffffffu) < 0x7f800000u);
    }
};

struct F16 {
    using Stored = uint16_t;
    // The float unit does the shifting: normal numbers by a product, subnormal ones by a difference.
    static float decode(Stored stored) {
        const uint32_t wide      = uint32_t(stored) << 16;
        const uint32_t magnitude = wide + wide;
        const float    normal    = float_of((magnitude >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
        const float    subnormal = float_of((magnitude >> 17) | (126u << 23)) - 0.5f;
        return float_of((wide & 0x80000000u) | choose(magnitude < (1u << 27), bits_of(subnormal), bits_of(normal)));
    }
    static Stored encode(float value) {
        const uint32_t bits      = bits_of(value);
        const uint32_t magnitude = bits + bits;
        const float    scaled    = (float_of(bits & 0x7fffffffu) * 0x1.0p+112f) * 0x1.0p-110f;
        const uint32_t exponent  = magnitude & 0xff000000u;
        const uint32_t bias      = choose(exponent < 0x71000000u, 0x71000000u, exponent);
        const uint32_t rounded   = bits_of(float_of((bias >> 1) + 0x07800000u) + scaled);
        const uint32_t unsigned_ = ((rounded >> 13) & 0x7c00u) + (rounded & 0x0fffu);
        return Stored((bits >> 16 & 0x8000u) | choose(magnitude > 0xff000000u, 0x7e00u, unsigned_));
    }
    static uint32_t misfit(Stored stored, float value) {
        return uint32_t((stored & 0x7fffu) == 0x7c00u) & uint32_t((bits_of(value) & 0x7fffffffu) < 0x7f800000u);
    }
};

inline uint32_t not_finite(float value) { return (bits_of(value) & 0x7f800000u) == 0x7f800000u ? 1u : 0u; }

template <typename Format> bool encode(const float * src, size_t n, uint8_t * __restrict dst) {
    uint32_t misfits = 0;
    for (size_t i = 0; i < n; i++) {
        const typename Format::Stored stored = Format::encode(src[i]);
        misfits |= Format::misfit(stored, src[i]);
        std::memcpy(dst + i * sizeof(stored), &stored, sizeof(stored));
    }
    return misfits == 0;
}

template <typename Format> bool decode(const uint8_t * src, size_t n, float * __restrict dst) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        const float value = Format::decode(load<typename Format::Stored>(src + i * sizeof(typename Format::Stored)));
        bad |= not_finite(value);
        dst[i] = value;
    }
    return bad == 0;
}

template <typename Format> bool accumulate(const uint8_t * src, size_t n, float * __restrict dst) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        const float value = Format::decode(load<typename Format::Stored>(src + i * sizeof(typename Format::Stored)));
        bad |= not_finite(value);
        dst[i] = dst[i] + value;
    }
    return bad == 0;
}

}  // namespace

bool all_finite(const float * values, size_t n) {
    // On the bits, because a floating-point reduction would not vectorise: all exponent bits set is Inf or NaN.
    constexpr uint32_t exponent = 0x7f800000u;
    uint32_t           bad      = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, values + i, sizeof(bits));
        bad |= static_cast<uint32_t>((bits & exponent) == exponent);
    }
    return bad == 0;
}

bool parse_dtype(std::string_view name, Dtype & dtype) {
    for (const Dtype known : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
        if (name == dtype_name(known)) {
            dtype = known;
            return true;
        }
    }
    return false;
}

std::string_view dtype_name(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16: return "bf16";
        case Dtype::f16: return "f16";
        case Dtype::f32: break;
    }
    return "f32";
}

bool encode_floats(Dtype dtype, const float * src, size_t n, void * dst) {
    uint8_t * bytes = static_cast<uint8_t *>(dst);
    switch (dtype) {
        case Dtype::bf16: return encode<Bf16>(src, n, bytes);
        case Dtype::f16: return encode<F16>(src, n, bytes);
        case Dtype::f32: break;
    }
    return encode<F32>(src, n, bytes);
}

bool decode_floats(Dtype dtype, const void * src, size_t n, float * dst) {
    const uint8_t * bytes = static_cast<const uint8_t *>(src);
    switch (dtype) {
        case Dtype::bf16: return decode<Bf16>(bytes, n, dst);
        case Dtype::f16: return decode<F16>(bytes, n, dst);
        case Dtype::f32: break;
    }
    return decode<F32>(bytes, n, dst);
}

bool accumulate_floats(Dtype dtype, const void * src, size_t n, float * dst) {
    const uint8_t * bytes = static_cast<const uint8_t *>(src);
    switch (dtype) {
        case Dtype::bf16: return accumulate<Bf16>(bytes, n, dst);
        case Dtype::f16: return accumulate<F16>(bytes, n, dst);
        case Dtype::f32: break;
    }
    return accumulate<F32>(bytes, n, dst);
}

}  // namespace swarm
