#include "expert_server/expert_store.hpp"

#include "common/floats.hpp"
#include "expert_server/program_graph.hpp"
#include "expert_server/tensor_files.hpp"
#include "expert_server/weight_types.hpp"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <list>
#include <thread>
#include <unordered_map>
#include <utility>

namespace swarm {

namespace {

// A layer's 1.58 GB slice of the reference model is the common case; a tensor beyond this is a wrong file.
constexpr int64_t dimension_max = int64_t{ 1 } << 24;
constexpr int64_t elements_max  = int64_t{ 1 } << 44;
constexpr int     n_expert_max  = 1 << 16;

// A graph of a SwiGLU layer takes 25 KB: this keeps ten shapes of each of 64 layers.
constexpr size_t kept_graphs_bytes_max = size_t{ 16 } << 20;
// Values of one kept graph; those of the reference model take 4 MB for 64 pairs. All kept graphs share the memory.
constexpr size_t kept_values_bytes_max = size_t{ 16 } << 20;

// Multiplications worth a thread: 0.3 ms of a core. To wake one takes up to 0.05 ms, and where the cores are busy a
// step waits for the thread that has none: three processes of two threads each on two cores took five times as long.
constexpr int64_t thread_products_min = int64_t{ 1 } << 22;

// One multiplication per value, as ggml does it, so the bits are the same.
void scale(float * values, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i++) {
        values[i] *= factor;
    }
}

std::string slice_name(int layer, int first, int last) {
    return "layer " + std::to_string(layer) + ", experts " + std::to_string(first) + " to " + std::to_string(last);
}

}  // namespace

struct ExpertStore::Slice {
    SliceInfo    info;
    uint64_t     serial   = 0;  // of no other slice of this store, ever
    int          n_expert = 0;
    Program      program;                // what the graph computes of it: without the last step when that is left out
    bool scales_result = false;  // the last step, times w, is done on the result: ggml takes 4 ns for each value
    uint64_t     digest = 0;
    bool         uses_weight = false;
    ProgramShape shape;
    int64_t      products_per_pair = 0;
    std::map<std::string, ggml_tensor *> weights;
    ggml_context_ptr        context;
    ggml_backend_buffer_ptr buffer;
};

namespace {

// Grows without being filled: what is not used costs no memory.
class FloatBuffer {
  public:
    float * get(size_t n) {
        if (n > capacity_) {
            data_.reset(new float[n]);
            capacity_ = n;
        }
        return data_.get();
    }

  private:
    std::unique_ptr<float[]> data_;
    size_t                   capacity_ = 0;
};

}  // namespace

// What one call needs while it is computed: the thread's for a small one, the store's spare one for a large one.
struct ExpertStore::Scratch {
    std::vector<int32_t> slice_of_pair;
    std::vector<int32_t> seen_in_row;
    std::vector<int64_t> pairs;
    std::vector<int32_t> ids;
    std::vector<float>   weight;
    FloatBuffer          h;
    FloatBuffer          out;
    FloatBuffer          rows;
};

struct ExpertStore::Engine {
    struct ThreadpoolDeleter {
        void operator()(ggml_threadpool * pool) const { ggml_threadpool_free(pool); }
    };
    struct KeptGraph {
        uint64_t             key = 0;
        std::vector<uint8_t> memory;
        ggml_context_ptr     context;
        ProgramGraph         graph;
    };
    ggml_backend_dev_t                                  device = nullptr;
    std::unique_ptr<ggml_threadpool, ThreadpoolDeleter> threadpool, lone_thread;
    ggml_backend_ptr                                    backend;
    // A backend of one thread, null if `backend` has no more. A pool wakes all its threads, whatever number of them a
    // graph takes, and waits for those that it takes at each of its steps.
    ggml_backend_ptr                                    lone_backend;
    bool                                                is_cpu = false;
    int                                                 n_threads = 1;
    ggml_gallocr_ptr                                    allocator;
    std::vector<uint8_t>                                graph_memory;

    // Values of all kept graphs lie here: only one of them is computed at a time.
    ggml_backend_buffer_ptr                                     kept_values;
    std::list<KeptGraph>                                        kept;  // the most recently used one first
    std::unordered_map<uint64_t, std::list<KeptGraph>::iterator> kept_by_key;
    size_t                                                      kept_bytes = 0;

    // Of the last large call, for the next: memory fresh from the system costs more than copying to it.
    std::mutex               spare_mutex;
    std::unique_ptr<Scratch> spare;

    // The backend for a graph of that much work.
    ggml_backend_t backend_for(int64_t n_products) const {
        if (lone_backend == nullptr) {
            return backend.get();
        }
        if (n_products < 2 * thread_products_min) {
            return lone_backend.get();
        }
        const int64_t threads = std::min<int64_t>(n_threads, n_products / thread_products_min);
        ggml_backend_cpu_set_n_threads(backend.get(), static_cast<int>(threads));
        return backend.get();
    }

    void forget_kept() {
        kept_by_key.clear();
        kept.clear();
        kept_bytes = 0;
    }
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
        const auto add_threads = [](ggml_backend_t backend, int n) {
            ggml_threadpool_params params = ggml_threadpool_params_default(n);
            // Waiting threads sleep: a second busy pool on the machine would slow both a hundredfold.
            params.poll                = 0;
            ggml_threadpool * const pool = ggml_threadpool_new(&params);
            ggml_backend_cpu_set_n_threads(backend, n);
            ggml_backend_cpu_set_threadpool(backend, pool);
            return pool;
        };
        engine_->n_threads = threads;
        engine_->threadpool.reset(add_threads(engine_->backend.get(), threads));
        if (threads > 1) {
            engine_->lone_backend.reset(ggml_backend_dev_init(engine_->device, nullptr));
            if (!engine_->lone_backend) {
                throw LoadError("ggml cannot start device '" + device + "' a second time");
            }
            engine_->lone_thread.reset(add_threads(engine_->lone_backend.get(), 1));
        }
    }
    engine_->is_cpu = ggml_backend_is_cpu(engine_->backend.get());
    engine_->allocator.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(engine_->backend.get())));
    gate_ = DeviceGate::of(device);
}

ExpertStore::~ExpertStore() = default;

SliceInfo ExpertStore::load(int layer, const Program & program, int first, int last, int n_expert,
                            const std::map<std::string, TensorParts> & tensors) {
    const std::string where = slice_name(layer, first, last) + ": ";
    if (layer < 0 || first < 0 || last < first || n_expert < 1 || n_expert > n_expert_max || last >= n_expert) {
        throw LoadError(where + "not a range of a layer of " + std::to_string(n_expert) + " experts");
    }
    const auto check_others = [&](const std::shared_ptr<const Slices> & others) {
        for (const auto & other : others ? *others : Slices()) {
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
    slice->uses_weight = program.uses_weight();
    const Step & last_step = program.steps.at(static_cast<size_t>(std::max(program.result, 0)));
    if (engine_->is_cpu && last_step.op == StepOp::mul && last_step.x >= 0 && last_step.y == operand_w) {
        slice->scales_result  = true;
        slice->program.result = last_step.x;
    }
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
            throw LoadError(where + "tensor '" + name + "' is " + ggml_type_name(type) +
                            "; biases and scales must be f32");
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
        slice->products_per_pair += ggml_nelements(t) / n_local;
        uint64_t given = 0;
        for (const TensorPart & part : tensors.at(name).parts) {
            given += std::min(part.bytes, std::numeric_limits<uint64_t>::max() - given);  // a sum must not wrap
        }
        if (given != ggml_nbytes(t)) {
            throw LoadError(where + "tensor '" + name + "' needs " + std::to_string(ggml_nbytes(t)) +
                            " bytes, given are " + std::to_string(given));
        }
    }

    // The ops themselves, on this device, before a byte is read. Two pairs as well: cuts of more than one have gaps.
    for (const int64_t n_pairs : { 1, 2 }) {
        const ggml_init_params graph_params = { program_graph_context_bytes(program), nullptr, true };
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
    std::shared_ptr<const Slices> & of_layer = slices_[layer];
    check_others(of_layer);
    auto changed = std::make_shared<Slices>(of_layer ? *of_layer : Slices());
    slice->serial = ++last_serial_;
    changed->push_back(slice);
    std::sort(changed->begin(), changed->end(),
              [](const auto & a, const auto & b) { return a->info.first < b->info.first; });
    of_layer = std::move(changed);
    return slice->info;
}

void ExpertStore::drop(int layer, int first, int last) {
    const std::lock_guard<std::mutex> lock(slices_mutex_);
    const auto it = slices_.find(layer);
    if (it != slices_.end()) {
        auto changed = std::make_shared<Slices>(*it->second);
        const auto found = std::find_if(changed->begin(), changed->end(), [&](const auto & slice) {
            return slice->info.first == first && slice->info.last == last;
        });
        if (found != changed->end()) {
            // Its kept graphs are never used again, since no other slice gets its serial, and go with the oldest.
            changed->erase(found);
            if (changed->empty()) {
                slices_.erase(it);
            } else {
                it->second = std::move(changed);
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
        for (const auto & slice : *of_layer) {
            infos.push_back(slice->info);
        }
    }
    return infos;
}

std::shared_ptr<const ExpertStore::Slices> ExpertStore::held(int layer) const {
    const std::lock_guard<std::mutex> lock(slices_mutex_);
    const auto it = slices_.find(layer);
    return it == slices_.end() ? nullptr : it->second;
}

int64_t ExpertStore::n_out(int layer) const {
    const auto of_layer = held(layer);
    if (!of_layer) {
        throw NotHeld("no experts of layer " + std::to_string(layer) + " are held here");
    }
    return of_layer->front()->shape.n_out;
}

size_t ExpertStore::kept_graphs() const {
    const DeviceGate::Turn turn(*gate_, DeviceGate::Size::small);
    return engine_->kept.size();
}

// The graph for so many pairs, built now or before; nullptr when it is too large to be kept.
const ProgramGraph * ExpertStore::kept_graph(const Slice & slice, int64_t n_pairs) {
    Engine &       engine = *engine_;
    const uint64_t key    = slice.serial * (kept_pairs_max + 1) + static_cast<uint64_t>(n_pairs);
    const auto     found  = engine.kept_by_key.find(key);
    if (found != engine.kept_by_key.end()) {
        engine.kept.splice(engine.kept.begin(), engine.kept, found->second);
        return &engine.kept.front().graph;
    }
    std::list<Engine::KeptGraph> one(1);
    Engine::KeptGraph &          made = one.front();
    made.key = key;
    made.memory.resize(program_graph_context_bytes(slice.program));
    const ggml_init_params params = { made.memory.size(), made.memory.data(), true };
    made.context.reset(ggml_init(params));
    ggml_context * const context = made.context.get();
    made.graph = build_program_graph(context, slice.program, slice.shape, slice.weights, n_pairs);

    ggml_backend_buffer_type_t type      = ggml_backend_get_default_buffer_type(engine.backend.get());
    const size_t               alignment = ggml_backend_buft_get_alignment(type);
    const auto is_own = [](const ggml_tensor * t) { return t->data == nullptr && t->view_src == nullptr; };
    size_t needed = alignment;
    for (ggml_tensor * t = ggml_get_first_tensor(context); t != nullptr; t = ggml_get_next_tensor(context, t)) {
        if (is_own(t)) {
            needed += GGML_PAD(ggml_backend_buft_get_alloc_size(type, t), alignment);
        }
    }
    if (needed > kept_values_bytes_max) {
        return nullptr;
    }
    if (!engine.kept_values || ggml_backend_buffer_get_size(engine.kept_values.get()) < needed) {
        engine.forget_kept();  // their values lie in the memory that is given up
        engine.kept_values.reset();
        const size_t size = std::min(kept_values_bytes_max, 2 * needed);
        engine.kept_values.reset(ggml_backend_buft_alloc_buffer(type, size));
        if (!engine.kept_values) {
            return nullptr;
        }
        ggml_backend_buffer_set_usage(engine.kept_values.get(), GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    }
    ggml_tallocr allocator = ggml_tallocr_new(engine.kept_values.get());
    for (ggml_tensor * t = ggml_get_first_tensor(context); t != nullptr; t = ggml_get_next_tensor(context, t)) {
        const ggml_status status = is_own(t)                                        ? ggml_tallocr_alloc(&allocator, t)
                                   : t->buffer == nullptr && t->view_src != nullptr ? ggml_backend_view_init(t)
                                                                                    : GGML_STATUS_SUCCESS;
        if (status != GGML_STATUS_SUCCESS) {
            return nullptr;
        }
    }
    engine.kept_bytes += made.memory.size();
    engine.kept.splice(engine.kept.begin(), one);
    engine.kept_by_key[key] = engine.kept.begin();
    while (engine.kept_bytes > kept_graphs_bytes_max && engine.kept.size() > 1) {
        engine.kept_bytes -= engine.kept.back().memory.size();
        engine.kept_by_key.erase(engine.kept.back().key);
        engine.kept.pop_back();
    }
    return &engine.kept.front().graph;
}

void ExpertStore::compute_graph(const ProgramGraph & graph, int64_t n_products, const float * h, const int32_t * ids,
                                const float * weight, float * out) {
    const std::pair<ggml_tensor *, const void *> inputs[] = {{graph.h, h}, {graph.ids, ids}, {graph.weight, weight}};
    for (const auto & [tensor, data] : inputs) {
        // One that the result does not depend on may have no memory.
        if (tensor != nullptr && tensor->buffer != nullptr) {
            ggml_backend_tensor_set(tensor, data, 0, ggml_nbytes(tensor));
        }
    }
    const ggml_status status = ggml_backend_graph_compute(engine_->backend_for(n_products), graph.graph);
    if (status != GGML_STATUS_SUCCESS) {
        throw ComputeError("device " + device_name_ + " failed: " + ggml_status_to_string(status));
    }
    ggml_backend_tensor_get(graph.out, out, 0, ggml_nbytes(graph.out));
}

void ExpertStore::compute(const Slice & slice, const float * h, const int32_t * ids, const float * weight,
                          int64_t n_pairs, float * out) {
    const int64_t        n_products = n_pairs * slice.products_per_pair;
    const ProgramGraph * kept       = n_pairs <= kept_pairs_max ? kept_graph(slice, n_pairs) : nullptr;
    if (kept != nullptr) {
        compute_graph(*kept, n_products, h, ids, weight, out);
        return;
    }
    engine_->graph_memory.resize(std::max(engine_->graph_memory.size(), program_graph_context_bytes(slice.program)));
    const ggml_init_params params = { engine_->graph_memory.size(), engine_->graph_memory.data(), true };
    const ggml_context_ptr context(ggml_init(params));
    const ProgramGraph graph = build_program_graph(context.get(), slice.program, slice.shape, slice.weights, n_pairs);
    if (!ggml_gallocr_alloc_graph(engine_->allocator.get(), graph.graph)) {
        throw ComputeError("device " + device_name_ + " has no memory to compute " + std::to_string(n_pairs) +
                           " pairs");
    }
    compute_graph(graph, n_products, h, ids, weight, out);
}

// Everything of a call that can be wrong; which slice has which pair.
void ExpertStore::check(const FfnCall & call, const Slices & of_layer, Scratch & scratch) const {
    const auto    where = [&] { return "layer " + std::to_string(call.layer) + ": "; };
    const Slice & any   = *of_layer.front();
    if (any.digest != call.program_digest) {
        throw ProgramMismatch(where() + "the caller's layer program is not the one loaded here");
    }
    if (call.n_in != any.shape.n_in) {
        throw BadCall(where() + "rows of " + std::to_string(call.n_in) + " values; the layer takes " +
                      std::to_string(any.shape.n_in));
    }
    if (call.n_out >= 0 && call.n_out != any.shape.n_out) {
        throw BadCall(where() + "results of " + std::to_string(call.n_out) + " values; the layer gives " +
                      std::to_string(any.shape.n_out));
    }
    if (call.n_rows < 0 || call.n_pairs < 0 || call.n_h != (any.program.input_pair ? call.n_pairs : call.n_rows)) {
        throw BadCall(where() + std::to_string(call.n_h) + " input rows for " + std::to_string(call.n_rows) +
                      " rows and " + std::to_string(call.n_pairs) + " pairs");
    }
    if (any.uses_weight != (call.weight != nullptr)) {
        throw BadCall(where() + (call.weight != nullptr
                                     ? "gate weights given, but the layer's program does not use them"
                                     : "the layer's program needs gate weights"));
    }
    if (!all_finite(call.h, static_cast<size_t>(call.n_h * call.n_in)) ||
        (call.weight != nullptr && !all_finite(call.weight, static_cast<size_t>(call.n_pairs)))) {
        throw BadCall(where() + "an input or gate weight is not finite");
    }
    scratch.slice_of_pair.resize(static_cast<size_t>(call.n_pairs));
    for (int64_t p = 0; p < call.n_pairs; p++) {
        const int32_t row    = call.row[p];
        const int32_t expert = call.expert[p];
        if (row < 0 || row >= call.n_rows || (p > 0 && row < call.row[p - 1])) {
            throw BadCall(where() + "row index " + std::to_string(row) + " of pair " + std::to_string(p) +
                          " is out of range or descends");
        }
        if (expert < 0 || expert >= any.n_expert) {
            throw BadCall(where() + "expert " + std::to_string(expert) + " of a layer of " +
                          std::to_string(any.n_expert));
        }
        std::vector<int32_t> & seen = scratch.seen_in_row;
        if (p == 0 || row != call.row[p - 1]) {
            seen.clear();
        }
        if (std::find(seen.begin(), seen.end(), expert) != seen.end()) {
            throw BadCall(where() + "expert " + std::to_string(expert) + " is asked for twice for row " +
                          std::to_string(row));
        }
        seen.push_back(expert);
        size_t s = 0;
        while (s < of_layer.size() && expert > of_layer[s]->info.last) {
            s++;
        }
        if (s == of_layer.size() || expert < of_layer[s]->info.first) {
            throw NotHeld(where() + "expert " + std::to_string(expert) + " is not held here");
        }
        scratch.slice_of_pair[static_cast<size_t>(p)] = static_cast<int32_t>(s);
    }
}

// Some pairs of a call, all of one slice, into their places in rows [call.n_pairs, n_out]. The device is ours.
void ExpertStore::compute_pairs(const FfnCall & call, const Slice & slice, const int64_t * pairs, int64_t n_pairs,
                                float * rows, Scratch & scratch) {
    const size_t n_in    = static_cast<size_t>(slice.shape.n_in);
    const size_t n_out   = static_cast<size_t>(slice.shape.n_out);
    const bool   whole   = n_pairs == call.n_pairs;
    const bool   in_order = whole && (slice.program.input_pair || call.n_rows == call.n_pairs);
    // h is already what the graph takes when each pair, in order, has its own row.
    bool as_given = in_order;
    for (int64_t i = 0; as_given && !slice.program.input_pair && i < n_pairs; i++) {
        as_given = call.row[i] == i;
    }
    scratch.ids.clear();
    scratch.weight.clear();
    float * const gathered = as_given ? nullptr : scratch.h.get(static_cast<size_t>(n_pairs) * n_in);
    for (int64_t i = 0; i < n_pairs; i++) {
        const int64_t p = pairs[i];
        scratch.ids.push_back(call.expert[p] - slice.info.first);
        if (call.weight != nullptr) {
            scratch.weight.push_back(call.weight[p]);
        }
        if (!as_given) {
            const float * source = call.h + static_cast<size_t>(slice.program.input_pair ? p : call.row[p]) * n_in;
            std::memcpy(gathered + static_cast<size_t>(i) * n_in, source, n_in * sizeof(float));
        }
    }
    float * const target = whole ? rows : scratch.out.get(static_cast<size_t>(n_pairs) * n_out);
    compute(slice, as_given ? call.h : gathered, scratch.ids.data(), scratch.weight.data(), n_pairs, target);
    for (int64_t i = 0; slice.scales_result && i < n_pairs; i++) {
        scale(target + static_cast<size_t>(i) * n_out, slice.shape.n_out, scratch.weight[static_cast<size_t>(i)]);
    }
    if (!all_finite(target, static_cast<size_t>(n_pairs * slice.shape.n_out))) {
        throw NotFinite("layer " + std::to_string(call.layer) + ": experts " + std::to_string(slice.info.first) +
                        " to " + std::to_string(slice.info.last) + " gave a value that is not finite on device " +
                        device_name_);
    }
    for (int64_t i = 0; !whole && i < n_pairs; i++) {
        std::memcpy(rows + static_cast<size_t>(pairs[i]) * n_out, target + static_cast<size_t>(i) * n_out,
                    n_out * sizeof(float));
    }
}

// Cut by experts only: all pairs of an expert stay together, since the number of an expert's rows chooses its kernel.
void ExpertStore::compute_in_parts(const FfnCall & call, const Slices & of_layer, float * rows, Scratch & scratch,
                                   const std::function<void()> & begin_turn) {
    std::vector<std::vector<int64_t>> pairs_of(static_cast<size_t>(of_layer.front()->n_expert));
    for (int64_t p = 0; p < call.n_pairs; p++) {
        pairs_of[static_cast<size_t>(call.expert[p])].push_back(p);
    }
    bool begun = false;
    for (const auto & slice : of_layer) {
        const int64_t pairs_max = part_products_max_ / std::max<int64_t>(slice->products_per_pair, 1);
        for (int e = slice->info.first; e <= slice->info.last;) {
            scratch.pairs.clear();
            for (; e <= slice->info.last; e++) {
                const auto & more = pairs_of[static_cast<size_t>(e)];
                if (!scratch.pairs.empty() && static_cast<int64_t>(scratch.pairs.size() + more.size()) > pairs_max) {
                    break;
                }
                scratch.pairs.insert(scratch.pairs.end(), more.begin(), more.end());
            }
            if (scratch.pairs.empty()) {
                continue;
            }
            // In the call's order, as in the call that is not cut.
            std::sort(scratch.pairs.begin(), scratch.pairs.end());
            const DeviceGate::Turn turn(*gate_, DeviceGate::Size::part_of_large);
            if (!std::exchange(begun, true)) {
                begin_turn();
            }
            compute_pairs(call, *slice, scratch.pairs.data(), static_cast<int64_t>(scratch.pairs.size()), rows,
                          scratch);
        }
    }
}

namespace {

// The sum over the pairs of each row in their order; rows without pairs are zero.
void add_up(const FfnCall & call, const float * rows, int64_t n_out, float * out) {
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

}  // namespace

void ExpertStore::ffn(const FfnCall & call, float * out, FfnTiming * timing) {
    const auto of_layer = held(call.layer);
    if (!of_layer) {
        throw NotHeld("no experts of layer " + std::to_string(call.layer) + " are held here");
    }
    thread_local Scratch     of_thread;
    std::unique_ptr<Scratch> of_call;
    if (call.n_pairs > kept_pairs_max) {
        const std::lock_guard<std::mutex> lock(engine_->spare_mutex);
        of_call = std::move(engine_->spare);
        of_call = of_call ? std::move(of_call) : std::make_unique<Scratch>();
    }
    Scratch & scratch = of_call ? *of_call : of_thread;
    check(call, *of_layer, scratch);

    const Slice & any   = *of_layer->front();
    const int64_t n_out = any.shape.n_out;
    float *       rows  = out;
    if (call.reduce == Reduce::sum) {
        rows = scratch.rows.get(static_cast<size_t>(call.n_pairs * n_out));
    }
    const auto begin_turn = [&] {
        if (timing == nullptr) {
            return;
        }
        const auto now   = FfnTiming::Clock::now();
        timing->queue_us = static_cast<uint64_t>(
            std::chrono::duration_cast<std::chrono::microseconds>(now - timing->arrived).count());
        if (now > timing->deadline) {
            throw TooLate("the deadline passed");
        }
        if (timing->delay_s > 0) {
            std::this_thread::sleep_for(std::chrono::duration<double>(timing->delay_s));
        }
    };
    if (timing != nullptr && gate_->waiting() >= timing->waiting_max) {
        throw TooLate("too many calls are waiting");
    }
    const bool is_large = call.n_pairs >
                          large_in_parts * part_products_max_ / std::max<int64_t>(any.products_per_pair, 1);
    // On another device the cut could choose other kernels, and with them other bits; and such a device is fast.
    if (!is_large || !engine_->is_cpu) {
        const DeviceGate::Turn turn(*gate_, is_large ? DeviceGate::Size::part_of_large : DeviceGate::Size::small);
        begin_turn();
        for (size_t s = 0; s < of_layer->size(); s++) {
            scratch.pairs.clear();
            for (int64_t p = 0; p < call.n_pairs; p++) {
                if (scratch.slice_of_pair[static_cast<size_t>(p)] == static_cast<int32_t>(s)) {
                    scratch.pairs.push_back(p);
                }
            }
            if (!scratch.pairs.empty()) {
                compute_pairs(call, *(*of_layer)[s], scratch.pairs.data(), static_cast<int64_t>(scratch.pairs.size()),
                              rows, scratch);
            }
        }
    } else {
        compute_in_parts(call, *of_layer, rows, scratch, begin_turn);
    }
    if (call.reduce == Reduce::sum) {
        add_up(call, rows, n_out, out);
    }
    if (of_call) {
        const std::lock_guard<std::mutex> lock(engine_->spare_mutex);
        engine_->spare = std::move(of_call);
    }
    if (timing != nullptr) {
        const auto us      = std::chrono::duration_cast<std::chrono::microseconds>(FfnTiming::Clock::now() -
                                                                                   timing->arrived);
        timing->compute_us = static_cast<uint64_t>(us.count()) - timing->queue_us;
    }
}

}  // namespace swarm
