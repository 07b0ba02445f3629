#include "expert_server/weight_types.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace swarm {

ggml_type weight_type(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const ggml_type type  = static_cast<ggml_type>(i);
        const char *    known = ggml_type_name(type);
        // Without to_float, ggml would call a null pointer.
        if (known != nullptr && ggml_blck_size(type) > 0 && ggml_type_size(type) > 0 && name == known &&
            (type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr)) {
            return type;
        }
    }
    return GGML_TYPE_COUNT;
}

void dequantise(const std::string & type_name, int64_t row_values, int64_t n_values, const uint8_t * data,
                size_t n_bytes, double * out) {
    const ggml_type type = weight_type(type_name);
    if (type == GGML_TYPE_COUNT) {
        throw std::invalid_argument("'" + type_name.substr(0, 32) + "' is no type of weights of this build's ggml");
    }
    if (row_values < 1 || row_values % ggml_blck_size(type) != 0 || n_values < 0 || n_values % row_values != 0) {
        throw std::invalid_argument(std::to_string(n_values) + " values in rows of " + std::to_string(row_values) +
                                    " are not whole blocks of " + type_name);
    }
    const size_t row_bytes = ggml_row_size(type, row_values);
    if (n_bytes / row_bytes != static_cast<size_t>(n_values / row_values) || n_bytes % row_bytes != 0) {
        throw std::invalid_argument(std::to_string(n_bytes) + " bytes are not " + std::to_string(n_values) +
                                    " values of " + type_name);
    }
    // Blocks want their alignment, which bytes of a file need not have.
    std::vector<uint64_t> row((row_bytes + 7) / 8);
    std::vector<float>    values(static_cast<size_t>(row_values));
    for (int64_t i = 0; i < n_values; i += row_values, data += row_bytes) {
        if (type == GGML_TYPE_F32) {
            std::memcpy(values.data(), data, row_bytes);
        } else {
            std::memcpy(row.data(), data, row_bytes);
            ggml_get_type_traits(type)->to_float(row.data(), values.data(), row_values);
        }
        std::copy(values.begin(), values.end(), out + i);
    }
}

}  // namespace swarm
