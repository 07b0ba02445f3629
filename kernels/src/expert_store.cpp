#include "expert_store.hpp"

#include "program_graph.hpp"
#include "tensor_files.hpp"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace swarm {

namespace {

// A layer's 1.58 GB slice of the reference model is the common case; a tensor beyond this is a wrong file.
constexpr int64_t dimension_max = int64_t{ 1 } << 24;
constexpr int64_t elements_max  = int64_t{ 1 } << 44;
constexpr int     n_expert_max  = 1 << 16;

// GGML_TYPE_COUNT when there is none of that name. Integers, doubles and the formats of activations (q8_1, q8_K) are no
// types of weights: ggml would call a null pointer.
ggml_type weight_type(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const ggml_type type  = static_cast<ggml_type>(i);
        const char *    known = ggml_type_name(type);
        if (known != nullptr && ggml_blck_size(type) > 0 && ggml_type_size(type) > 0 && name == known &&
            (type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr)) {
            return type;
        }
    }
    return GGML_TYPE_COUNT;
}

bool all_finite(const float * values, int64_t n) {
    // On the bits, because a floating-point reduction would not vectorise: all exponent bits set is Inf or NaN.
    constexpr uint32_t exponent = 0x7f800000u;
    uint32_t           bad      = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, values + i, sizeof(bits));
        bad |= static_cast<uint32_t>((bits & exponent) == exponent);
    }
    return bad == 0;
}

std::string slice_name(int layer, int first, int last) {
    return "layer " + std::to_string(layer) + ", experts " + std::to_string(first) + " to " + std::to_string(last);
}

}  // namespace

struct ExpertStore::Slice {
    SliceInfo    info;
    int          n_expert = 0;
    Program      program;
    uint64_t     digest = 0;
    ProgramShape shape;
    std::map<std::string, ggml_tensor *> weights;
    ggml_context_ptr        context;
    ggml_backend_buffer_ptr buffer;
};

struct ExpertStore::Engine {
    struct ThreadpoolDeleter {
        void operator()(ggml_threadpool * pool) const { ggml_threadpool_free(pool); }
    };
    ggml_backend_dev_t                                  device = nullptr;
    std::unique_ptr<ggml_threadpool, ThreadpoolDeleter> threadpool;
    ggml_backend_ptr                                    backend;
    ggml_gallocr_ptr                                    allocator;
    std::vector<float>                                  gathered_h;
    std::vector<float>                                  pair_rows;
    std::vector<uint8_t>                                graph_memory;
};

ExpertStore::ExpertStore(const std::string & device, int threads)
    : device_name_(device), threads_(threads), engine_(std::make_unique<Engine>()) {
    engine_->device = ggml_backend_dev_by_name(device.c_str());
    if (engine_->device == nullptr) {
        throw LoadError("no ggml device named '" + device + "' in this build");
    }
    if (threads < 1 || threads > GGML_MAX_N_THREADS) {
        throw LoadError(std::to_string(threads) + " threads; 1 to " + std::to_string(GGML_MAX_N_THREADS) +
                        " are possible");
    }
    engine_->backend.reset(ggml_backend_dev_init(engine_->device, nullptr));
    if (!engine_->backend) {
        throw LoadError("ggml cannot start device '" + device + "'");
    }
    if (ggml_backend_is_cpu(engine_->backend.get())) {
        ggml_threadpool_params params = ggml_threadpool_params_default(threads);
        // Waiting threads sleep: a second busy pool on the machine would slow both a hundredfold.
        params.poll = 0;
        engine_->threadpool.reset(ggml_threadpool_new(&params));
        ggml_backend_cpu_set_n_threads(engine_->backend.get(), threads);
        ggml_backend_cpu_set_threadpool(engine_->backend.get(), engine_->threadpool.get());
    }
    engine_->allocator.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(engine_->backend.get())));
    engine_->graph_memory.resize(program_graph_context_bytes());
}

ExpertStore::~ExpertStore() = default;

SliceInfo ExpertStore::load(int layer, const Program & program, int first, int last, int n_expert,
                            const std::map<std::string, TensorParts> & tensors) {
    const std::string where = slice_name(layer, first, last) + ": ";
    if (layer < 0 || first < 0 || last < first || n_expert < 1 || n_expert > n_expert_max || last >= n_expert) {
        throw LoadError(where + "not a range of a layer of " + std::to_string(n_expert) + " experts");
    }
    const auto check_others = [&](const std::vector<std::shared_ptr<Slice>> & others) {
        for (const auto & other : others) {
            if (first <= other->info.last && last >= other->info.first) {
                throw LoadError(where + "overlaps experts " + std::to_string(other->info.first) + " to " +
                                std::to_string(other->info.last) + ", which are held already");
            }
            if (other->n_expert != n_expert || other->digest != program.digest()) {
                throw LoadError(where + "differs in its program or number of experts from what is held of this layer");
            }
        }
    };
    check_others(held(layer));
    auto slice        = std::make_shared<Slice>();
    slice->n_expert   = n_expert;
    slice->program    = program;
    slice->digest     = program.digest();
    const int n_local = last - first + 1;

    std::map<std::string, std::vector<int64_t>> dimensions;
    for (const std::string & name : program.tensors()) {
        const auto it = tensors.find(name);
        if (it == tensors.end()) {
            throw LoadError(where + "tensor '" + name + "' of the layer's program is not given");
        }
        const auto & ne = it->second.ne;
        int64_t elements = n_local;
        bool    possible = ne.size() <= 2;
        for (const int64_t n : ne) {
            possible = possible && n >= 1 && n <= dimension_max && elements <= elements_max / n;
            elements *= possible ? n : 1;
        }
        if (!possible) {
            throw LoadError(where + "tensor '" + name + "' has impossible dimensions");
        }
        dimensions[name] = ne;
    }
    try {
        slice->shape = program_shape(program, dimensions);
    } catch (const ProgramError & error) {
        throw LoadError(where + error.what());
    }

    const ggml_init_params params = { ggml_tensor_overhead() * (dimensions.size() + 1), nullptr, true };
    slice->context.reset(ggml_init(params));
    for (const auto & [name, ne] : dimensions) {
        const ggml_type type = weight_type(tensors.at(name).type);
        if (type == GGML_TYPE_COUNT) {
            throw LoadError(where + "tensor '" + name + "' is of type '" + tensors.at(name).type.substr(0, 32) +
                            "', which this build of ggml does not have for weights");
        }
        if (ne.size() < 2 && type != GGML_TYPE_F32) {
            throw LoadError(where + "tensor '" + name + "' is " + ggml_type_name(type) + "; biases and scales must be f32");
        }
        std::vector<int64_t> shape = ne;
        shape.push_back(n_local);
        if (shape[0] % ggml_blck_size(type) != 0) {
            throw LoadError(where + "tensor '" + name + "' has rows of " + std::to_string(shape[0]) +
                            " values, not whole blocks of " + ggml_type_name(type));
        }
        ggml_tensor * t = ggml_new_tensor(slice->context.get(), type, static_cast<int>(shape.size()), shape.data());
        ggml_set_name(t, name.c_str());
        slice->weights[name] = t;
        uint64_t given = 0;
        for (const TensorPart & part : tensors.at(name).parts) {
            given += std::min(part.bytes, std::numeric_limits<uint64_t>::max() - given);  // a sum must not wrap
        }
        if (given != ggml_nbytes(t)) {
            throw LoadError(where + "tensor '" + name + "' needs " + std::to_string(ggml_nbytes(t)) + " bytes, given are " +
                            std::to_string(given));
        }
    }

    // The ops themselves, on this device, before a byte is read. Two pairs as well: cuts of more than one have gaps.
    for (const int64_t n_pairs : { 1, 2 }) {
        const ggml_init_params graph_params = { program_graph_context_bytes(), nullptr, true };
        const ggml_context_ptr context(ggml_init(graph_params));
        const ProgramGraph graph = build_program_graph(context.get(), program, slice->shape, slice->weights, n_pairs);
        for (int i = 0; i < ggml_graph_n_nodes(graph.graph); i++) {
            const ggml_tensor * node = ggml_graph_node(graph.graph, i);
            if (!ggml_backend_dev_supports_op(engine_->device, node)) {
                throw LoadError(where + "device " + device_name_ + " cannot compute " + ggml_op_desc(node) + " on " +
                                (node->src[0] != nullptr ? ggml_type_name(node->src[0]->type) : "nothing"));
            }
        }
    }

    slice->buffer.reset(ggml_backend_alloc_ctx_tensors(slice->context.get(), engine_->backend.get()));
    if (!slice->buffer) {
        throw LoadError(where + "device " + device_name_ + " has no memory for it");
    }
    ggml_backend_buffer_set_usage(slice->buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (const auto & [name, t] : slice->weights) {
        try {
            read_tensor(tensors.at(name).parts, t);
        } catch (const LoadError & error) {
            throw LoadError(where + "tensor '" + name + "': " + error.what());
        }
    }
    slice->info = { layer, first, last, slice->shape.n_in, slice->shape.n_out,
                    ggml_backend_buffer_get_size(slice->buffer.get()) };

    const std::lock_guard<std::mutex> lock(slices_mutex_);
    // Again: another load may have been faster.
    const auto it = slices_.find(layer);
    if (it != slices_.end()) {
        check_others(it->second);
    }
    auto & of_layer = slices_[layer];
    of_layer.push_back(slice);
    std::sort(of_layer.begin(), of_layer.end(),
              [](const auto & a, const auto & b) { return a->info.first < b->info.first; });
    return slice->info;
}

void ExpertStore::drop(int layer, int first, int last) {
    const std::lock_guard<std::mutex> lock(slices_mutex_);
    const auto it = slices_.find(layer);
    if (it != slices_.end()) {
        auto & of_layer = it->second;
        const auto found = std::find_if(of_layer.begin(), of_layer.end(), [&](const auto & slice) {
            return slice->info.first == first && slice->info.last == last;
        });
        if (found != of_layer.end()) {
            of_layer.erase(found);
            if (of_layer.empty()) {
                slices_.erase(it);
            }
            return;
        }
    }
    throw NotHeld(slice_name(layer, first, last) + " are not held here");
}

std::vector<SliceInfo> ExpertStore::slices() const {
    const std::lock_guard<std::mutex> lock(slices_mutex_);
    std::vector<SliceInfo> infos;
    for (const auto & [layer, of_layer] : slices_) {
        for (const auto & slice : of_layer) {
            infos.push_back(slice->info);
        }
    }
    return infos;
}

std::vector<std::shared_ptr<ExpertStore::Slice>> ExpertStore::held(int layer) const {
    const std::lock_guard<std::mutex> lock(slices_mutex_);
    const auto it = slices_.find(layer);
    return it == slices_.end() ? std::vector<std::shared_ptr<Slice>>{} : it->second;
}

int64_t ExpertStore::n_out(int layer) const {
    const auto of_layer = held(layer);
    if (of_layer.empty()) {
        throw NotHeld("no experts of layer " + std::to_string(layer) + " are held here");
    }
    return of_layer.front()->shape.n_out;
}

void ExpertStore::compute(const Slice & slice, const float * h, const int32_t * ids, const float * weight,
                          int64_t n_pairs, float * out) {
    const ggml_init_params params = { engine_->graph_memory.size(), engine_->graph_memory.data(), true };
    const ggml_context_ptr context(ggml_init(params));
    const ProgramGraph graph = build_program_graph(context.get(), slice.program, slice.shape, slice.weights, n_pairs);
    if (!ggml_gallocr_alloc_graph(engine_->allocator.get(), graph.graph)) {
        throw ComputeError("device " + device_name_ + " has no memory to compute " + std::to_string(n_pairs) + " pairs");
    }
    const std::pair<ggml_tensor *, const void *> inputs[] = { { graph.h, h }, { graph.ids, ids }, { graph.weight, weight } };
    for (const auto & [tensor, data] : inputs) {
        // One that the result does not depend on has no memory.
        if (tensor != nullptr && tensor->buffer != nullptr) {
            ggml_backend_tensor_set(tensor, data, 0, ggml_nbytes(tensor));
        }
    }
    const ggml_status status = ggml_backend_graph_compute(engine_->backend.get(), graph.graph);
    if (status != GGML_STATUS_SUCCESS) {
        throw ComputeError("device " + device_name_ + " failed: " + ggml_status_to_string(status));
    }
    ggml_backend_tensor_get(graph.out, out, 0, ggml_nbytes(graph.out));
}

void ExpertStore::ffn(const FfnCall & call, float * out) {
    const std::string where = "layer " + std::to_string(call.layer) + ": ";
    const auto        of_layer = held(call.layer);
    if (of_layer.empty()) {
        throw NotHeld("no experts of layer " + std::to_string(call.layer) + " are held here");
    }
    const Slice & any = *of_layer.front();
    if (any.digest != call.program_digest) {
        throw ProgramMismatch(where + "the caller's layer program is not the one loaded here");
    }
    if (call.n_in != any.shape.n_in) {
        throw BadCall(where + "rows of " + std::to_string(call.n_in) + " values; the layer takes " +
                      std::to_string(any.shape.n_in));
    }
    if (call.n_rows < 0 || call.n_pairs < 0 || call.n_h != (any.program.input_pair ? call.n_pairs : call.n_rows)) {
        throw BadCall(where + std::to_string(call.n_h) + " input rows for " + std::to_string(call.n_rows) + " rows and " +
                      std::to_string(call.n_pairs) + " pairs");
    }
    if (any.program.uses_weight() != (call.weight != nullptr)) {
        throw BadCall(where + (call.weight != nullptr ? "gate weights given, but the layer's program does not use them"
                                                      : "the layer's program needs gate weights"));
    }
    if (!all_finite(call.h, call.n_h * call.n_in) || (call.weight != nullptr && !all_finite(call.weight, call.n_pairs))) {
        throw BadCall(where + "an input or gate weight is not finite");
    }

    // Which slice has which pairs. One pass, and nothing is computed before all of it is known to be right.
    std::vector<std::vector<int64_t>> pairs_of(of_layer.size());
    std::vector<int32_t>              seen_in_row;
    for (int64_t p = 0; p < call.n_pairs; p++) {
        const int32_t row    = call.row[p];
        const int32_t expert = call.expert[p];
        if (row < 0 || row >= call.n_rows || (p > 0 && row < call.row[p - 1])) {
            throw BadCall(where + "row index " + std::to_string(row) + " of pair " + std::to_string(p) +
                          " is out of range or descends");
        }
        if (expert < 0 || expert >= any.n_expert) {
            throw BadCall(where + "expert " + std::to_string(expert) + " of a layer of " + std::to_string(any.n_expert));
        }
        if (p > 0 && row != call.row[p - 1]) {
            seen_in_row.clear();
        }
        if (std::find(seen_in_row.begin(), seen_in_row.end(), expert) != seen_in_row.end()) {
            throw BadCall(where + "expert " + std::to_string(expert) + " is asked for twice for row " +
                          std::to_string(row));
        }
        seen_in_row.push_back(expert);
        size_t s = 0;
        while (s < of_layer.size() && expert > of_layer[s]->info.last) {
            s++;
        }
        if (s == of_layer.size() || expert < of_layer[s]->info.first) {
            throw NotHeld(where + "expert " + std::to_string(expert) + " is not held here");
        }
        pairs_of[s].push_back(p);
    }

    const int64_t n_in  = any.shape.n_in;
    const int64_t n_out = any.shape.n_out;
    const std::lock_guard<std::mutex> lock(compute_mutex_);
    Engine & engine = *engine_;
    float *  rows   = out;
    if (call.reduce == Reduce::sum) {
        engine.pair_rows.resize(static_cast<size_t>(call.n_pairs * n_out));
        rows = engine.pair_rows.data();
    }
    std::vector<int32_t> ids;
    std::vector<float>   weight;
    std::vector<float>   partial;
    for (size_t s = 0; s < of_layer.size(); s++) {
        const std::vector<int64_t> & pairs = pairs_of[s];
        if (pairs.empty()) {
            continue;
        }
        const bool whole = static_cast<int64_t>(pairs.size()) == call.n_pairs;
        ids.clear();
        weight.clear();
        // h of a pair program in pair order is already what the graph takes.
        const bool gather = !(whole && any.program.input_pair);
        engine.gathered_h.resize(gather ? pairs.size() * static_cast<size_t>(n_in) : 0);
        for (size_t i = 0; i < pairs.size(); i++) {
            const int64_t p = pairs[i];
            ids.push_back(call.expert[p] - of_layer[s]->info.first);
            if (call.weight != nullptr) {
                weight.push_back(call.weight[p]);
            }
            if (gather) {
                const float * source = call.h + (any.program.input_pair ? p : call.row[p]) * n_in;
                std::memcpy(engine.gathered_h.data() + i * static_cast<size_t>(n_in), source,
                            static_cast<size_t>(n_in) * sizeof(float));
            }
        }
        if (!whole) {
            partial.resize(pairs.size() * static_cast<size_t>(n_out));
        }
        float * target = whole ? rows : partial.data();
        compute(*of_layer[s], gather ? engine.gathered_h.data() : call.h, ids.data(), weight.data(),
                static_cast<int64_t>(pairs.size()), target);
        if (!all_finite(target, static_cast<int64_t>(pairs.size()) * n_out)) {
            throw ComputeError(where + "experts " + std::to_string(of_layer[s]->info.first) + " to " +
                               std::to_string(of_layer[s]->info.last) + " gave a value that is not finite on device " +
                               device_name_);
        }
        for (size_t i = 0; !whole && i < pairs.size(); i++) {
            std::memcpy(rows + pairs[i] * n_out, target + i * static_cast<size_t>(n_out),
                        static_cast<size_t>(n_out) * sizeof(float));
        }
    }
    if (call.reduce == Reduce::rows) {
        return;
    }
    std::fill(out, out + call.n_rows * n_out, 0.0f);
    for (int64_t p = 0; p < call.n_pairs; p++) {
        const bool    first_of_row = p == 0 || call.row[p] != call.row[p - 1];
        float *       sum          = out + call.row[p] * n_out;
        const float * value        = rows + p * n_out;
        if (first_of_row) {
            std::copy(value, value + n_out, sum);
        } else {
            for (int64_t i = 0; i < n_out; i++) {
                sum[i] += value[i];
            }
        }
    }
}

}  // namespace swarm
