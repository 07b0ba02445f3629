#pragma once
// What a call gives back.

#include <cstdint>

namespace swarm {

// rows: one row for each pair. sum: one for each row, the sum over its pairs in the order given.
enum class Reduce : uint8_t { rows, sum };

}  // namespace swarm
