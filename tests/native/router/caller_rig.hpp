#pragma once
// Layers with known results, servers that compute them, and routing tables, for the tests of the caller.

#include "common/check.hpp"
#include "router/fake_server.hpp"

#include "router/caller.hpp"
#include "common/floats.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <memory>
#include <random>

namespace rig {

using namespace swarm;

constexpr uint64_t program = 0xabcdef0123456789u;

// What the fake experts compute, in float32 like a server would.
inline float expert_value(int expert, float weight, const float * h, int n_in, int o) {
    return weight * (h[o % n_in] * float(expert + 1) + 0.37f * float(o));
}

struct Layer {
    int                  n_tokens, n_used, n_in, n_out, n_expert;
    bool                 input_pair;
    std::vector<float>   h, weights;
    std::vector<int32_t> ids;

    Layer(int tokens, int used, int experts, int in = 12, int out = 20, bool pair = false, unsigned seed = 1)
        : n_tokens(tokens), n_used(used), n_in(in), n_out(out), n_expert(experts), input_pair(pair) {
        std::mt19937                          random(seed);
        std::uniform_real_distribution<float> exponent(-12, 12);
        const auto value = [&] { return (random() % 2 ? 1.0f : -1.0f) * std::exp2(exponent(random)); };
        h.resize(size_t(tokens) * size_t(pair ? used : 1) * size_t(in) +
                 size_t(tokens) * 3);                       // rows lie 3 floats apart
        weights.resize(size_t(tokens) * size_t(used) * 2);  // slots lie 2 floats apart
        for (float & x : h) {
            x = value();
        }
        for (float & x : weights) {
            x = value();
        }
        for (int t = 0; t < tokens; t++) {
            std::vector<int32_t> all;
            for (int e = 0; e < experts; e++) {
                all.push_back(e);
            }
            std::shuffle(all.begin(), all.end(), random);
            ids.insert(ids.end(), all.begin(), all.begin() + used);
            ids.push_back(-77);  // rows of ids lie apart too
        }
    }

    LayerInput input(int layer = 0) const {
        LayerInput result;
        result.layer                = layer;
        result.program              = program;
        result.n_tokens             = n_tokens;
        result.n_used               = n_used;
        result.n_in                 = n_in;
        result.n_out                = n_out;
        result.input_pair           = input_pair;
        result.h                    = h.data();
        result.h_token_stride       = size_t(input_pair ? n_used : 1) * size_t(n_in) + 3;
        result.h_slot_stride        = size_t(n_in);
        result.ids                  = ids.data();
        result.ids_token_stride     = size_t(n_used) + 1;
        result.weights              = weights.data();
        result.weights_token_stride = size_t(n_used) * 2;
        result.weights_slot_stride  = 2;
        return result;
    }

    int     id(int t, int s) const { return ids[size_t(t) * size_t(n_used + 1) + size_t(s)]; }
    float   value(int t, int s, int o) const {
        const LayerInput in  = input();
        const float * row = h.data() + size_t(t) * in.h_token_stride + (input_pair ? size_t(s) * in.h_slot_stride : 0);
        return expert_value(id(t, s), weights[size_t(t) * size_t(n_used) * 2 + size_t(s) * 2], row, n_in, o);
    }

    // In slot order, as ggml adds.
    std::vector<float> expected_rows() const {
        std::vector<float> out;
        for (int t = 0; t < n_tokens; t++) {
            for (int o = 0; o < n_out; o++) {
                float sum = value(t, 0, o);
                for (int s = 1; s < n_used; s++) {
                    sum = sum + value(t, s, o);
                }
                out.push_back(sum);
            }
        }
        return out;
    }

    // Each node's partial sum in slot order, then the nodes in the order given: lists of their experts.
    std::vector<float> expected_sum(const std::vector<std::pair<int, int>> & nodes) const {
        std::vector<float> out;
        for (int t = 0; t < n_tokens; t++) {
            for (int o = 0; o < n_out; o++) {
                float total   = 0;
                bool  started = false;
                for (const auto & node : nodes) {
                    float part     = 0;
                    bool  has_part = false;
                    for (int s = 0; s < n_used; s++) {
                        if (id(t, s) >= node.first && id(t, s) <= node.second) {
                            part     = has_part ? part + value(t, s, o) : value(t, s, o);
                            has_part = true;
                        }
                    }
                    if (has_part) {
                        total   = started ? total + part : part;
                        started = true;
                    }
                }
                out.push_back(total);
            }
        }
        return out;
    }
};

inline bool same_bits(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The right answer. Checks on the way that the request is as the protocol wants it.
inline fake::Data answer(const fake::Request & request, int n_in, int n_out) {
    Dtype dtype = Dtype::f32;
    CHECK(parse_dtype(request.dtype, dtype));
    const size_t n_pairs = request.expert.size();
    const size_t n_h     = request.h.size() / dtype_bytes(dtype) / size_t(n_in);
    CHECK(n_h * dtype_bytes(dtype) * size_t(n_in) == request.h.size());
    CHECK(n_h == request.n_rows || n_h == n_pairs);
    CHECK(request.weight.size() == n_pairs && request.program == program && request.deadline_ms > 0);
    std::vector<float> h(n_h * size_t(n_in));
    CHECK(decode_floats(dtype, request.h.data(), h.size(), h.data()));
    const bool         by_rows = request.reduce == "rows";
    std::vector<float> y((by_rows ? n_pairs : size_t(request.n_rows)) * size_t(n_out));
    std::vector<bool>  started(size_t(request.n_rows));
    for (size_t i = 0; i < n_pairs; i++) {
        CHECK(request.row[i] >= 0 && uint64_t(request.row[i]) < request.n_rows);
        CHECK(i == 0 || request.row[i] == request.row[i - 1] || request.row[i] == request.row[i - 1] + 1);
        const size_t  row   = size_t(request.row[i]);
        const float * input = h.data() + (n_h == request.n_rows ? row : i) * size_t(n_in);
        for (int o = 0; o < n_out; o++) {
            const float value  = expert_value(request.expert[i], request.weight[i], input, n_in, o);
            float &     target = y[(by_rows ? i : row) * size_t(n_out) + size_t(o)];
            target             = by_rows || !started[row] ? value : target + value;
        }
        started[row] = true;
    }
    for (const bool row_has_pair : started) {
        CHECK(row_has_pair);
    }
    fake::Data bytes(y.size() * dtype_bytes(dtype));
    encode_floats(dtype, y.data(), y.size(), bytes.data());
    return fake::reply(request.id, bytes);
}

using OnRequest = std::function<bool(fake::Connection &, const fake::Request &)>;  // false: the connection ends

inline std::unique_ptr<fake::Server> server_of(OnRequest on_request, uint16_t port = 0) {
    return std::make_unique<fake::Server>(
        [on_request](fake::Connection & connection) {
            unsigned   opcode = 0;
            fake::Data message;
            while (connection.read_frame(opcode, message)) {
                fake::Request request;
                if (opcode == 8) {
                    return;
                }
                const bool ok = parse_request(message, request);
                CHECK(ok);
                if (!ok || !on_request(connection, request)) {
                    return;
                }
            }
        },
        true, port);
}

inline OnRequest good(const Layer & layer) {
    return [n_in = layer.n_in, n_out = layer.n_out](fake::Connection & connection, const fake::Request & request) {
        return connection.message(answer(request, n_in, n_out));
    };
}

struct Part {
    int              first, last;
    std::vector<int> nodes;
};

inline std::shared_ptr<const RoutingTable>
table_of(const std::vector<uint16_t> & ports, const std::vector<Part> & parts, const std::string & reduce = "rows",
         const std::string & dtype = "f32", int floor_ms = 20000, int sequence = 1) {
    std::string nodes, slices;
    for (size_t i = 0; i < ports.size(); i++) {
        nodes += std::string(i ? "," : "") + "{\"name\":\"node" + std::to_string(i) +
                 "\",\"host\":\"127.0.0.1\",\"port\":" + std::to_string(ports[i]) + "}";
    }
    for (const Part & part : parts) {
        std::string owners;
        for (const int node : part.nodes) {
            owners += (owners.empty() ? "" : ",") + std::to_string(node);
        }
        slices += std::string(slices.empty() ? "" : ",") + "{\"layer\":0,\"first\":" + std::to_string(part.first) +
                  ",\"last\":" + std::to_string(part.last) + ",\"nodes\":[" + owners + "]}";
    }
    std::string problem;
    const auto  table = RoutingTable::parse("{\"version\":1,\"term\":3,\"sequence\":" + std::to_string(sequence) +
                                                ",\"model\":\"demo-0123\",\"reduce\":\"" + reduce + "\",\"dtype\":\"" +
                                                dtype + "\",\"deadline_floor_ms\":" + std::to_string(floor_ms) +
                                                ",\"nodes\":[" + nodes + "],\"slices\":[" + slices + "]}",
                                            problem);
    CHECK(table != nullptr);
    CHECK(problem.empty());
    return table;
}

struct Result {
    bool               ok = false;
    std::vector<float> out;
    Failure            failure;
    double             wall_ms = 0, cpu_ms = 0;
};

inline Result call(Caller & caller, const Layer & layer, int number = 0) {
    Result result;
    result.out.assign(size_t(layer.n_tokens) * size_t(layer.n_out), -1.0f);
    timespec before{}, after{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
    const auto begun = std::chrono::steady_clock::now();
    result.ok        = caller.ffn(layer.input(number), result.out.data(), result.failure);
    result.wall_ms   = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
    result.cpu_ms = double(after.tv_sec - before.tv_sec) * 1e3 + double(after.tv_nsec - before.tv_nsec) / 1e6;
    return result;
}

// The call failed for `reason` at node0, layer 0, its experts, no earlier than `least_ms` and within its deadline.
inline void check_failure(const Result & result, const std::string & reason, double least_ms, double deadline_ms) {
    CHECK(!result.ok);
    CHECK(result.failure.node == "node0");
    CHECK(result.failure.layer == 0 && result.failure.first_expert == 0 && result.failure.last_expert == 3);
    CHECK_CONTAINS(result.failure.reason, reason);
    CHECK(result.failure.waited_ms >= least_ms && result.wall_ms >= least_ms);
    CHECK(result.wall_ms < deadline_ms + 2000);  // room for a busy machine
    CHECK(result.cpu_ms < deadline_ms / 2 + 20);  // it waited, it did not spin
}

// Experts 0 to 3 on node0, which does `on_request`; 2 tokens, 2 of 4 experts.
constexpr int floor_ms = 100, first_deadline_ms = floor_ms + 4 * 5;

inline void check_bad_node(OnRequest on_request, const std::string & reason, double least_ms = 0) {
    const Layer layer(2, 2, 4);
    const auto  server = server_of(on_request);
    Caller      caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms)));
    check_failure(call(caller, layer), reason, least_ms, first_deadline_ms);
    CHECK(caller.statistics().failures == 1);
}

}  // namespace rig
