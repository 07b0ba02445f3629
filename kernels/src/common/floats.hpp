#pragma once
// Float formats of the wire. Sources and destinations on the wire side may be unaligned.

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace swarm {

enum class Dtype : uint8_t { f32, bf16, f16 };

bool             parse_dtype(std::string_view name, Dtype & dtype);
std::string_view dtype_name(Dtype dtype);
constexpr size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// n floats to `dtype`, rounded to nearest even. False: a finite value does not fit (would become infinite).
bool encode_floats(Dtype dtype, const float * src, size_t n, void * dst);

// dst = src. False: a value is not finite; dst is written all the same.
bool decode_floats(Dtype dtype, const void * src, size_t n, float * dst);

// dst = dst + src, one float32 addition per value. False: a value of src is not finite.
bool accumulate_floats(Dtype dtype, const void * src, size_t n, float * dst);

bool all_finite(const float * values, size_t n);

}  // namespace swarm
