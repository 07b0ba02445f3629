#include "llama/capture.hpp"

#include "llama/expert_weights.hpp"

#include "ggml-impl.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <unordered_map>
#include <utility>

namespace swarm {

namespace {

// What a tensor of the graph is, seen from the routed experts.
enum class Role {
    external,  // computed by the trunk
    weight,    // an expert tensor
    gatherer,  // an expert tensor reshaped and repeated, on its way to GET_ROWS
    pair,      // one row per (token, used expert) pair
    slot,      // the rows of one of the n_used slots
    sum,       // the sum of slots 0 … n
};

bool is_view_op(const ggml_tensor * t) {
    return t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

// A view of whole rows is a slot, a view of a part of each row is a cut of the merged gate and up.
bool is_slot_view(const ggml_tensor * t) {
    const ggml_tensor * s = t->src[0];
    return t->op == GGML_OP_VIEW && t->ne[0] == s->ne[0] && t->ne[1] == s->ne[2] && t->ne[2] == 1 &&
           t->nb[1] == s->nb[2];
}

Role role(const ggml_tensor * t, int depth) {
    // A layer's experts are some 40 ops, and a chain of 64 sums at most; deeper means the trunk's residual stream.
    constexpr int depth_max = 96;
    if (t == nullptr || depth > depth_max) {
        return Role::external;
    }
    if (is_expert_weight(t)) {
        return Role::weight;
    }
    const auto of = [&](int i) { return role(t->src[i], depth + 1); };
    switch (t->op) {
        case GGML_OP_MUL_MAT_ID:
            return of(0) == Role::weight ? Role::pair : Role::external;
        case GGML_OP_RESHAPE:
        case GGML_OP_REPEAT: {
            const Role source = of(0);
            return source == Role::weight || source == Role::gatherer ? Role::gatherer
                   : source == Role::pair                             ? Role::pair
                                                                      : Role::external;
        }
        case GGML_OP_GET_ROWS: {
            const Role source = of(0);
            return source == Role::gatherer || source == Role::weight ? Role::pair : Role::external;
        }
        case GGML_OP_VIEW:
            return of(0) == Role::pair ? (is_slot_view(t) ? Role::slot : Role::pair) : Role::external;
        case GGML_OP_CONT: {
            const Role source = of(0);
            return source == Role::slot ? Role::sum : source == Role::pair ? Role::pair : Role::external;
        }
        case GGML_OP_ADD: {
            const Role x = of(0);
            const Role y = of(1);
            if ((x == Role::slot || x == Role::sum) && y == Role::slot) {
                return Role::sum;
            }
            return x == Role::pair || y == Role::pair ? Role::pair : Role::external;
        }
        case GGML_OP_ADD_ID:
        case GGML_OP_GLU:
        case GGML_OP_UNARY:
        case GGML_OP_SQR:
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
        case GGML_OP_MUL:
            return of(0) == Role::pair || of(1) == Role::pair ? Role::pair : Role::external;
        default:
            return Role::external;
    }
}

float f32_param(const ggml_tensor * t, int index) {
    float value;
    std::memcpy(&value, reinterpret_cast<const char *>(t->op_params) + sizeof(float) * static_cast<size_t>(index),
                sizeof(value));
    return value;
}

std::string describe(const ggml_tensor * t) {
    return std::string(ggml_op_desc(t)) + " (tensor '" + t->name + "')";
}

struct Refused {
    std::string reason;
    int         layer;
};

// Translates the nodes of one layer. Nodes come in graph order, so operands are known before their use.
class Translator {
  public:
    bool started() const { return capture_.layer >= 0; }
    bool complete() const { return capture_.out != nullptr; }

    void add(ggml_tensor * t) {
        switch (t->op) {
            case GGML_OP_MUL_MAT_ID: return matmul(t);
            case GGML_OP_ADD_ID:     return bias(t);
            case GGML_OP_GET_ROWS:   return gather(t);
            case GGML_OP_VIEW:       return view(t);
            case GGML_OP_CONT:       return cont(t);
            case GGML_OP_ADD:        return add_op(t);
            case GGML_OP_MUL:        return mul(t);
            case GGML_OP_GLU:        return glu(t);
            case GGML_OP_UNARY:      return unary(t);
            case GGML_OP_SQR:        return step(t, make(StepOp::sqr, value(t, 0)));
            case GGML_OP_SCALE:      return scale(t, StepOp::scale);
            case GGML_OP_CLAMP:      return scale(t, StepOp::clamp);
            case GGML_OP_RESHAPE:
            case GGML_OP_REPEAT:     return gatherer(t);
            default:                 refuse(t, "is not in the program language");
        }
    }

    Capture finish() {
        if (!complete()) {
            throw Refused{ "the sum over the used experts was not found; the values after '" + last_name_ +
                               "' leave the experts' part of the graph",
                           capture_.layer };
        }
        drop_unused();
        capture_.program.input_pair = h_per_pair_;
        if (capture_.program.steps.size() > Program::max_steps) {
            throw Refused{"the layer's program has " + std::to_string(capture_.program.steps.size()) +
                              " steps; at most " + std::to_string(Program::max_steps) + " are allowed",
                          capture_.layer};
        }
        capture_.digest = capture_.program.digest();
        return std::move(capture_);
    }

    int layer() const { return capture_.layer; }

  private:
    [[noreturn]] void refuse(const ggml_tensor * t, const std::string & why) const {
        throw Refused{ describe(t) + " " + why, capture_.layer };
    }

    // "blk.7.ffn_up_exps.weight" → 7 and "ffn_up_exps.weight"
    std::string tensor(const ggml_tensor * user, const ggml_tensor * t) {
        int  layer = -1;
        int  used  = 0;
        if (std::sscanf(t->name, "blk.%d.%n", &layer, &used) != 1 || used == 0 || layer < 0) {
            refuse(user, std::string("uses expert tensor '") + t->name + "', which is not named blk.N.…");
        }
        if (capture_.layer < 0) {
            capture_.layer = layer;
        } else if (capture_.layer != layer) {
            refuse(user, std::string("mixes layer ") + std::to_string(capture_.layer) + " with '" + t->name + "'");
        }
        const std::string name = t->name + used;
        ExpertTensor & known = capture_.tensors[name];
        if (known.type.empty()) {
            const auto ends_with = [&](const std::string & end) {
                return name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
            };
            // By name, because ggml does not keep trailing dimensions of 1: a weight is [in, out, expert], a bias
            // [out, expert], a scale [expert].
            const int dims = ends_with(".weight") ? 3 : ends_with(".bias") ? 2 : 1;
            known.type = ggml_type_name(t->type);
            known.ne.assign(t->ne, t->ne + dims);
        }
        if (capture_.n_expert == 0) {
            capture_.n_expert = known.ne.back();
        } else if (capture_.n_expert != known.ne.back()) {
            refuse(user, std::string("uses '") + t->name + "' of " + std::to_string(known.ne.back()) +
                             " experts in a layer of " + std::to_string(capture_.n_expert));
        }
        return name;
    }

    void take_ids(const ggml_tensor * user, const ggml_tensor * ids) {
        if (capture_.ids == nullptr) {
            capture_.ids      = ids;
            capture_.n_used   = ids->ne[0];
            capture_.n_tokens = ids->ne[1];
        } else if (capture_.ids != ids) {
            refuse(user, "selects with other expert ids than the layer's first op");
        }
    }

    int value(const ggml_tensor * t, int src) {
        const ggml_tensor * s  = t->src[src];
        const auto          it = values_.find(s);
        if (it == values_.end()) {
            refuse(t,
                   std::string("takes '") + (s != nullptr ? s->name : "nothing") + "', which the experts do not have");
        }
        return it->second;
    }

    bool is_value(const ggml_tensor * s) const { return values_.count(s) != 0; }

    static Step make(StepOp op, int x, int y = operand_none) {
        Step s;
        s.op = op;
        s.x  = x;
        s.y  = y;
        return s;
    }

    void step(const ggml_tensor * t, Step s) {
        values_[t] = static_cast<int>(capture_.program.steps.size());
        capture_.program.steps.push_back(std::move(s));
        last_name_ = t->name;
    }

    void matmul(ggml_tensor * t) {
        const ggml_tensor * x = t->src[1];
        Step s  = make(StepOp::matmul, operand_h);
        s.tensor = tensor(t, t->src[0]);
        take_ids(t, t->src[2]);
        std::memcpy(s.prec, t->op_params, sizeof(s.prec));
        if (is_value(x)) {
            s.x = value(t, 1);
        } else {
            if (capture_.h == nullptr) {
                capture_.h    = x;
                capture_.n_in = x->ne[0];
                h_per_pair_   = x->ne[1] != 1;
            } else if (!same_rows(capture_.h, x)) {
                refuse(t, std::string("takes a second input '") + x->name + "' besides '" + capture_.h->name + "'");
            }
            if (x->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float) ||
                (x->ne[1] != 1 && x->ne[1] != capture_.n_used) || x->ne[2] != capture_.n_tokens || x->ne[3] != 1) {
                refuse(t, "has an input that is not f32 rows per token or per pair");
            }
        }
        step(t, std::move(s));
    }

    // Two views of the same data count as one input.
    static bool same_rows(const ggml_tensor * a, const ggml_tensor * b) {
        if (a == b) {
            return true;
        }
        const ggml_tensor * root_a = a->view_src != nullptr ? a->view_src : a;
        const ggml_tensor * root_b = b->view_src != nullptr ? b->view_src : b;
        return root_a == root_b && a->view_offs == b->view_offs && std::equal(a->ne, a->ne + 4, b->ne) &&
               std::equal(a->nb, a->nb + 4, b->nb);
    }

    void bias(ggml_tensor * t) {
        Step s   = make(StepOp::bias, value(t, 0));
        if (!is_expert_weight(t->src[1])) {
            refuse(t, std::string("adds '") + t->src[1]->name + "', which is not an expert tensor");
        }
        s.tensor = tensor(t, t->src[1]);
        take_ids(t, t->src[2]);
        step(t, std::move(s));
    }

    void gatherer(ggml_tensor * t) {
        const ggml_tensor * s = t->src[0];
        if (is_value(s)) {
            refuse(t, "changes the shape of the values per expert");
        }
        gatherers_[t] = is_expert_weight(s) ? s : gatherers_.at(s);
    }

    void gather(ggml_tensor * t) {
        const auto          it = gatherers_.find(t->src[0]);
        const ggml_tensor * w  = it != gatherers_.end() ? it->second : t->src[0];
        Step s = make(StepOp::gather, operand_none);
        s.tensor = tensor(t, w);
        if (ggml_nelements(w) != w->ne[0] || w->type != GGML_TYPE_F32 || t->ne[0] != 1) {
            refuse(t, std::string("gathers '") + w->name + "', which is not one f32 per expert");
        }
        take_ids(t, t->src[1]);
        step(t, std::move(s));
    }

    void view(ggml_tensor * t) {
        const ggml_tensor * s = t->src[0];
        const size_t offset = t->view_offs - s->view_offs;
        if (is_slot_view(t)) {
            const int64_t slot = static_cast<int64_t>(offset / s->nb[1]);
            if (offset % s->nb[1] != 0 || slot >= capture_.n_used) {
                refuse(t, "is a view that is not one slot of the used experts");
            }
            slots_[t] = { value(t, 0), slot };
            last_name_ = t->name;
            return;
        }
        if (t->ne[1] != s->ne[1] || t->ne[2] != s->ne[2] || t->nb[1] != s->nb[1] || t->nb[2] != s->nb[2] ||
            offset % sizeof(float) != 0 ||
            offset / sizeof(float) + static_cast<size_t>(t->ne[0]) > static_cast<size_t>(s->ne[0])) {
            refuse(t, "is a view that is not a part of each row");
        }
        Step cut   = make(StepOp::cut, value(t, 0));
        cut.offset = static_cast<int64_t>(offset / sizeof(float));
        cut.length = t->ne[0];
        step(t, std::move(cut));
    }

    void sum(ggml_tensor * t, int source, int64_t n_slots) {
        sums_[t] = { source, n_slots };
        last_name_ = t->name;
        if (n_slots == capture_.n_used) {
            if (complete()) {
                refuse(t, "is a second result of the layer's experts");
            }
            capture_.out            = t;
            capture_.n_out          = t->ne[0];
            capture_.program.result = source;
        }
    }

    void cont(ggml_tensor * t) {
        const auto it = slots_.find(t->src[0]);
        if (it == slots_.end() || capture_.n_used != 1) {
            refuse(t, "copies values per expert");
        }
        sum(t, it->second.first, 1);
    }

    void add_op(ggml_tensor * t) {
        const auto y = slots_.find(t->src[1]);
        if (y != slots_.end()) {
            int     source = 0;
            int64_t n      = 0;
            if (const auto x = slots_.find(t->src[0]); x != slots_.end() && x->second.second == 0) {
                source = x->second.first;
                n      = 1;
            } else if (const auto p = sums_.find(t->src[0]); p != sums_.end()) {
                source = p->second.first;
                n      = p->second.second;
            }
            if (n == 0 || y->second.first != source || y->second.second != n) {
                refuse(t, "does not add the slots of the used experts in their order");
            }
            return sum(t, source, n + 1);
        }
        binary(t, StepOp::add);
    }

    void mul(ggml_tensor * t) {
        const ggml_tensor * w = t->src[1];
        if (!is_value(w)) {
            if (w->type != GGML_TYPE_F32 || w->ne[0] != 1 || w->ne[1] != capture_.n_used ||
                w->ne[2] != capture_.n_tokens || (capture_.weights != nullptr && capture_.weights != w)) {
                refuse(t, std::string("multiplies by '") + w->name + "', which is not the layer's gate weights");
            }
            capture_.weights = w;
            return step(t, make(StepOp::mul, value(t, 0), operand_w));
        }
        binary(t, StepOp::mul);
    }

    void binary(ggml_tensor * t, StepOp op) {
        const int x = value(t, 0);
        const int y = value(t, 1);
        const int64_t wx = t->src[0]->ne[0];
        const int64_t wy = t->src[1]->ne[0];
        if (wx != wy && wy != 1) {
            refuse(t, "combines rows of different widths");
        }
        step(t, make(op, x, y));
    }

    void glu(ggml_tensor * t) {
        const int32_t kind    = ggml_get_op_params_i32(t, 0);
        const bool    swapped = ggml_get_op_params_i32(t, 1) != 0;
        if (glu_kind_name(kind) == nullptr) {
            refuse(t, "is a gated activation that is not in the program language");
        }
        Step s = make(StepOp::glu, operand_none, operand_none);
        if (t->src[1] != nullptr) {
            s.x = value(t, 0);
            s.y = value(t, 1);
        } else {
            const int merged = value(t, 0);
            const int first  = static_cast<int>(capture_.program.steps.size());
            for (int half = 0; half < 2; half++) {
                Step cut   = make(StepOp::cut, merged);
                cut.offset = half * t->ne[0];
                cut.length = t->ne[0];
                capture_.program.steps.push_back(std::move(cut));
                    }
            s.x = first + (swapped ? 1 : 0);
            s.y = first + (swapped ? 0 : 1);
        }
        s.kind = kind;
        if (kind == GGML_GLU_OP_SWIGLU_OAI || kind == GGML_GLU_OP_SWIGLU_CLAMP) {
            s.a = f32_param(t, 2);
            s.b = f32_param(t, 3);
        }
        step(t, std::move(s));
    }

    void unary(ggml_tensor * t) {
        Step s = make(StepOp::unary, value(t, 0));
        s.kind = ggml_get_unary_op(t);
        if (unary_kind_name(s.kind) == nullptr) {
            refuse(t, "is an activation that is not in the program language");
        }
        step(t, std::move(s));
    }

    void scale(ggml_tensor * t, StepOp op) {
        Step s = make(op, value(t, 0));
        s.a = f32_param(t, 0);
        s.b = f32_param(t, 1);
        step(t, std::move(s));
    }

    // Steps that the result does not need go, and the rest is numbered anew.
    void drop_unused() {
        std::vector<Step> & steps = capture_.program.steps;
        std::vector<char>   needed(steps.size(), 0);
        needed[static_cast<size_t>(capture_.program.result)] = 1;
        for (size_t i = steps.size(); i-- > 0;) {
            for (const int operand : { steps[i].x, steps[i].y }) {
                if (needed[i] && operand >= 0) {
                    needed[static_cast<size_t>(operand)] = 1;
                }
            }
        }
        std::vector<int>  renumbered(steps.size(), operand_none);
        std::vector<Step> kept;
        for (size_t i = 0; i < steps.size(); i++) {
            if (!needed[i]) {
                continue;
            }
            Step s = std::move(steps[i]);
            s.x = s.x >= 0 ? renumbered[static_cast<size_t>(s.x)] : s.x;
            s.y = s.y >= 0 ? renumbered[static_cast<size_t>(s.y)] : s.y;
            renumbered[i] = static_cast<int>(kept.size());
            kept.push_back(std::move(s));
        }
        capture_.program.result = renumbered[static_cast<size_t>(capture_.program.result)];
        steps = std::move(kept);
    }

    Capture     capture_;
    bool        h_per_pair_ = false;
    std::string last_name_;
    std::unordered_map<const ggml_tensor *, int>                           values_;
    std::unordered_map<const ggml_tensor *, const ggml_tensor *>           gatherers_;
    std::unordered_map<const ggml_tensor *, std::pair<int, int64_t>>       slots_;
    std::unordered_map<const ggml_tensor *, std::pair<int, int64_t>>       sums_;
};

// Values inside the experts' subgraph that someone outside reads would never be computed.
void check_uses(ggml_cgraph * graph, const std::vector<ggml_tensor *> & nodes, const Capture & capture) {
    if (graph->use_counts == nullptr) {
        return;
    }
    std::unordered_map<const ggml_tensor *, int> uses;
    for (const ggml_tensor * t : nodes) {
        for (const ggml_tensor * s : t->src) {
            if (s != nullptr) {
                uses[s]++;
            }
        }
    }
    for (const ggml_tensor * t : nodes) {
        if (t == capture.out) {
            continue;
        }
        const size_t slot = ggml_hash_find(&graph->visited_hash_set, t);
        if (!ggml_bitset_get(graph->visited_hash_set.used, slot)) {
            continue;
        }
        if ((t->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 || graph->use_counts[slot] > uses[t]) {
            throw Refused{ describe(t) + " is also read outside the experts' part of the graph", capture.layer };
        }
    }
}

}  // namespace

bool belongs_to_experts(const ggml_tensor * op) {
    if (role(op, 0) != Role::external) {
        return true;
    }
    if (op->op == GGML_OP_NONE) {
        return false;
    }
    for (const ggml_tensor * source : op->src) {
        if (source != nullptr && role(source, 1) == Role::pair) {
            return true;
        }
    }
    return false;
}

CaptureResult capture(ggml_cgraph * graph) {
    CaptureResult result;
    std::vector<ggml_tensor *> nodes;
    std::unique_ptr<Translator> translator;
    try {
        for (int i = 0; i < graph->n_nodes; i++) {
            ggml_tensor * t = graph->nodes[i];
            if (!belongs_to_experts(t)) {
                // Views of other layers' state trail the subgraph and mean nothing to it.
                if (is_view_op(t) || t->op == GGML_OP_NONE) {
                    continue;
                }
                result.refused_layer = translator ? translator->layer() : -1;
                result.refusal       = describe(t) + " was given to the Swarm backend but is no expert op";
                return result;
            }
            if (!translator) {
                translator = std::make_unique<Translator>();
            }
            translator->add(t);
            nodes.push_back(t);
            if (translator->complete()) {
                result.captures.push_back(translator->finish());
                check_uses(graph, nodes, result.captures.back());
                translator.reset();
                nodes.clear();
            }
        }
        if (translator) {
            if (translator->started()) {
                result.captures.push_back(translator->finish());
            } else {
                result.refusal = "values per expert without an expert matrix product";
            }
        }
    } catch (const Refused & refused) {
        result.refused_layer = refused.layer;
        result.refusal       = refused.reason;
    }
    return result;
}

}  // namespace swarm
