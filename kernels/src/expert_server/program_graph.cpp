#include "expert_server/program_graph.hpp"

#include <cstring>
#include <vector>

namespace swarm {

ProgramShape program_shape(const Program & program, const std::map<std::string, std::vector<int64_t>> & tensors) {
    ProgramShape shape;
    std::vector<int64_t> widths;
    const auto fail = [&](const std::string & what) {
        throw ProgramError("layer program, step %" + std::to_string(widths.size()) + ": " + what);
    };
    const auto width = [&](int operand) -> int64_t {
        if (operand == operand_w) {
            return 1;
        }
        if (operand == operand_h) {
            if (shape.n_in == 0) {
                fail("uses h before its width is known");
            }
            return shape.n_in;
        }
        return widths.at(static_cast<size_t>(operand));
    };
    const auto tensor = [&](const Step & s, size_t dims) -> const std::vector<int64_t> & {
        const auto it = tensors.find(s.tensor);
        if (it == tensors.end()) {
            fail("tensor '" + s.tensor + "' is not given");
        }
        if (it->second.size() != dims) {
            fail("tensor '" + s.tensor + "' has " + std::to_string(it->second.size()) + " dimensions per expert, not " +
                 std::to_string(dims));
        }
        return it->second;
    };
    for (const Step & s : program.steps) {
        int64_t w = 0;
        switch (s.op) {
            case StepOp::matmul: {
                const auto & ne = tensor(s, 2);
                if (s.x == operand_h && shape.n_in == 0) {
                    shape.n_in = ne[0];
                }
                if (width(s.x) != ne[0]) {
                    fail("tensor '" + s.tensor + "' takes rows of " + std::to_string(ne[0]) + " values, not " +
                         std::to_string(width(s.x)));
                }
                w = ne[1];
                break;
            }
            case StepOp::bias:
                w = width(s.x);
                if (tensor(s, 1)[0] != w) {
                    fail("tensor '" + s.tensor + "' does not fit rows of " + std::to_string(w) + " values");
                }
                break;
            case StepOp::gather:
                tensor(s, 0);
                w = 1;
                break;
            case StepOp::cut:
                if (s.x < 0) {
                    fail("cuts an input");
                }
                if (s.offset + s.length > width(s.x)) {
                    fail("cuts beyond a row of " + std::to_string(width(s.x)) + " values");
                }
                w = s.length;
                break;
            case StepOp::glu:
                w = width(s.x);
                if (width(s.y) != w || s.x < 0 || s.y < 0) {
                    fail("combines rows of different widths or inputs");
                }
                break;
            case StepOp::mul:
            case StepOp::add:
                w = width(s.x);
                if (s.x < 0 || (width(s.y) != w && width(s.y) != 1)) {
                    fail("combines rows of different widths or inputs");
                }
                break;
            case StepOp::unary:
            case StepOp::sqr:
            case StepOp::scale:
            case StepOp::clamp:
                if (s.x < 0) {
                    fail("changes an input");
                }
                w = width(s.x);
                break;
        }
        widths.push_back(w);
    }
    shape.n_out = width(program.result);
    if (shape.n_in == 0) {
        throw ProgramError("layer program does not use h");
    }
    return shape;
}

namespace {

// Four tensors a step at most (gather), the inputs, and the result's copy.
size_t tensors_max(const Program & program) { return 4 * program.steps.size() + 8; }

// Rows without gaps: a cut of several pairs has some.
ggml_tensor * contiguous(ggml_context * context, ggml_tensor * t) {
    return ggml_is_contiguous(t) ? t : ggml_cont(context, t);
}

}  // namespace

size_t program_graph_context_bytes(const Program & program) {
    return tensors_max(program) * ggml_tensor_overhead() + ggml_graph_overhead_custom(tensors_max(program), false);
}

ProgramGraph build_program_graph(ggml_context * context, const Program & program, const ProgramShape & shape,
                                 const std::map<std::string, ggml_tensor *> & weights, int64_t n_pairs) {
    ProgramGraph g;
    g.h   = ggml_new_tensor_3d(context, GGML_TYPE_F32, shape.n_in, 1, n_pairs);
    g.ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, 1, n_pairs);
    ggml_set_input(g.h);
    ggml_set_input(g.ids);
    if (program.uses_weight()) {
        g.weight = ggml_new_tensor_3d(context, GGML_TYPE_F32, 1, 1, n_pairs);
        ggml_set_input(g.weight);
    }
    std::vector<ggml_tensor *> values;
    const auto value = [&](int operand) {
        return operand == operand_h ? g.h : operand == operand_w ? g.weight : values[static_cast<size_t>(operand)];
    };
    for (const Step & s : program.steps) {
        ggml_tensor * t = nullptr;
        switch (s.op) {
            case StepOp::matmul:
                t = ggml_mul_mat_id(context, weights.at(s.tensor), value(s.x), g.ids);
                std::memcpy(t->op_params, s.prec, sizeof(s.prec));
                // Vulkan's shaders add up in F16 otherwise, which is too coarse for hidden values of which one is far
                // larger than all others (docs/equivalence.md). CPUs add up in F32 anyway.
                t->op_params[0] = GGML_PREC_F32;
                break;
            case StepOp::bias:
                t = ggml_add_id(context, value(s.x), weights.at(s.tensor), g.ids);
                break;
            case StepOp::gather: {
                ggml_tensor * all = weights.at(s.tensor);
                ggml_tensor * ids = ggml_reshape_1d(context, g.ids, n_pairs);
                t = ggml_get_rows(context, ggml_reshape_2d(context, all, 1, ggml_nelements(all)), ids);
                t = ggml_reshape_3d(context, t, 1, 1, n_pairs);
                break;
            }
            case StepOp::cut: {
                ggml_tensor * x = value(s.x);
                t = ggml_view_3d(context, x, s.length, 1, n_pairs, x->nb[1], x->nb[2],
                                 static_cast<size_t>(s.offset) * sizeof(float));
                break;
            }
            case StepOp::glu:
                if (s.kind == GGML_GLU_OP_SWIGLU_OAI) {
                    t = ggml_swiglu_oai(context, value(s.x), value(s.y), s.a, s.b);
                } else if (s.kind == GGML_GLU_OP_SWIGLU_CLAMP) {
                    t = ggml_swiglu_clamp(context, value(s.x), value(s.y), s.b);
                } else {
                    t = ggml_glu_split(context, value(s.x), value(s.y), static_cast<ggml_glu_op>(s.kind));
                }
                break;
            case StepOp::unary:
                t = ggml_unary(context, value(s.x), static_cast<ggml_unary_op>(s.kind));
                break;
            case StepOp::sqr:   t = ggml_sqr(context, value(s.x)); break;
            case StepOp::scale: t = ggml_scale_bias(context, contiguous(context, value(s.x)), s.a, s.b); break;
            case StepOp::clamp: t = ggml_clamp(context, value(s.x), s.a, s.b); break;
            case StepOp::mul:   t = ggml_mul(context, value(s.x), value(s.y)); break;
            case StepOp::add:   t = ggml_add(context, value(s.x), value(s.y)); break;
        }
        values.push_back(t);
    }
    g.out = contiguous(context, values[static_cast<size_t>(program.result)]);
    ggml_set_output(g.out);
    g.graph = ggml_new_graph_custom(context, tensors_max(program), false);
    ggml_build_forward_expand(g.graph, g.out);
    return g;
}

}  // namespace swarm
