// The layer program: what the routed experts of one layer compute, as llama.cpp built it.
// Text form, limits and digest: docs/protocol.md, "Layer program".
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace swarm {

struct ProgramError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class StepOp { matmul, bias, gather, cut, glu, unary, sqr, scale, clamp, mul, add };

// Operand of a step: an earlier step's index, or one of these.
constexpr int operand_none = -1;
constexpr int operand_h    = -2;  // the hidden row
constexpr int operand_w    = -3;  // the gate weight

struct Step {
    StepOp      op{};
    std::string tensor;           // matmul, bias, gather: name without "blk.N."
    int         x    = operand_none;
    int         y    = operand_none;
    int         kind = 0;         // glu: ggml_glu_op; unary: ggml_unary_op
    float       a    = 0.0f;      // glu: alpha; scale: factor; clamp: minimum
    float       b    = 0.0f;      // glu: limit; scale: bias;   clamp: maximum
    int64_t     offset = 0;       // cut, in elements
    int64_t     length = 0;
    int32_t     prec[2] = { 0, 0 };  // matmul: ggml's precision parameters
};

struct Program {
    static constexpr size_t max_steps = 64;
    static constexpr size_t max_bytes = 4096;
    static constexpr size_t max_name  = 63;

    bool              input_pair = false;  // h has one row per (token, expert) pair
    std::vector<Step> steps;
    int               result = operand_none;

    std::string text() const;
    uint64_t    digest() const;  // FNV-1a 64 of text()
    bool        uses_weight() const;
    std::vector<std::string> tensors() const;  // distinct, in order of first use

    // Throws ProgramError naming the line and the step.
    static Program parse(const std::string & text);
};

// Names of the program text; nullptr or -1 when the program language has no such kind.
const char * glu_kind_name(int kind);
const char * unary_kind_name(int kind);

}  // namespace swarm
