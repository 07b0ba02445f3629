// ggml's types of weights, by name, and their values as ggml's scalar code reads them.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace swarm {

// GGML_TYPE_COUNT when there is none of that name. Integers, doubles and the formats of activations (q8_1, q8_K) are no
// types of weights.
ggml_type weight_type(const std::string & name);

// out: [n_values]. `data` are rows of `row_values` values each. Throws std::invalid_argument for a name that is no type
// of weights, rows that are not whole blocks, or a wrong number of bytes.
void dequantise(const std::string & type, int64_t row_values, int64_t n_values, const uint8_t * data, size_t n_bytes,
                double * out);

}  // namespace swarm
