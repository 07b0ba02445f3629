// One layer's call: splitting, order of additions, deadlines, retries, everything a node can do wrong.

#include "check.hpp"
#include "fake_server.hpp"

#include "caller.hpp"
#include "floats.hpp"

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <ctime>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>

using namespace swarm;

namespace {

constexpr uint64_t program = 0xabcdef0123456789u;

// What the fake experts compute, in float32 like a server would.
float expert_value(int expert, float weight, const float * h, int n_in, int o) {
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
        h.resize(size_t(tokens) * size_t(pair ? used : 1) * size_t(in) + size_t(tokens) * 3);  // rows lie 3 floats apart
        weights.resize(size_t(tokens) * size_t(used) * 2);                                    // slots lie 2 floats apart
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
        const float *    row = h.data() + size_t(t) * in.h_token_stride + (input_pair ? size_t(s) * in.h_slot_stride : 0);
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

bool same_bits(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The right answer. Checks on the way that the request is as the protocol wants it.
fake::Data answer(const fake::Request & request, int n_in, int n_out) {
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

std::unique_ptr<fake::Server> server_of(OnRequest on_request, uint16_t port = 0) {
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

OnRequest good(const Layer & layer) {
    return [n_in = layer.n_in, n_out = layer.n_out](fake::Connection & connection, const fake::Request & request) {
        return connection.message(answer(request, n_in, n_out));
    };
}

struct Part {
    int              first, last;
    std::vector<int> nodes;
};

std::shared_ptr<const RoutingTable> table_of(const std::vector<uint16_t> & ports, const std::vector<Part> & parts,
                                             const std::string & reduce = "rows", const std::string & dtype = "f32",
                                             int floor_ms = 20000, int sequence = 1) {
    std::string nodes, slices;
    for (size_t i = 0; i < ports.size(); i++) {
        nodes += std::string(i ? "," : "") + "{\"name\":\"node" + std::to_string(i) + "\",\"host\":\"127.0.0.1\",\"port\":" + std::to_string(ports[i]) + "}";
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
    const auto  table = RoutingTable::parse("{\"version\":1,\"term\":3,\"sequence\":" + std::to_string(sequence) + ",\"model\":\"demo-0123\",\"reduce\":\"" +
                                                reduce + "\",\"dtype\":\"" + dtype + "\",\"deadline_floor_ms\":" + std::to_string(floor_ms) +
                                                ",\"nodes\":[" + nodes + "],\"slices\":[" + slices + "]}", problem);
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

Result call(Caller & caller, const Layer & layer, int number = 0) {
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
void check_failure(const Result & result, const std::string & reason, double least_ms, double deadline_ms) {
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

void check_bad_node(OnRequest on_request, const std::string & reason, double least_ms = 0) {
    const Layer layer(2, 2, 4);
    const auto  server = server_of(on_request);
    Caller      caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms)));
    check_failure(call(caller, layer), reason, least_ms, first_deadline_ms);
    CHECK(caller.statistics().failures == 1);
}

}  // namespace

TEST(caller_rows_are_added_in_slot_order) {
    for (const bool pair : {false, true}) {
        for (const int n_tokens : {1, 2, 33}) {
            for (const int n_used : {1, 3, 8}) {
                const Layer layer(n_tokens, n_used, 8, 12, 20, pair, unsigned(n_tokens * 10 + n_used));
                const auto  a = server_of(good(layer)), b = server_of(good(layer)), c = server_of(good(layer));
                Caller      caller;
                CHECK(caller.set_table(table_of({a->port(), b->port(), c->port()}, {{0, 2, {0}}, {3, 3, {1}}, {4, 5, {2}}, {6, 7, {1}}})));
                for (int round = 0; round < 2; round++) {
                    const Result result = call(caller, layer);
                    CHECK(result.ok);
                    CHECK(same_bits(result.out, layer.expected_rows()));
                }
                CHECK(a->n_connections() <= 1 && b->n_connections() <= 1 && c->n_connections() <= 1);
            }
        }
    }
}

TEST(caller_float_formats) {
    for (const std::string dtype : {"bf16", "f16"}) {
        Layer layer(5, 3, 8);
        for (float & x : layer.h) {
            x = std::fmod(x, 8.0f);
        }
        for (float & x : layer.weights) {
            x = 0.25f;
        }
        const auto a = server_of(good(layer)), b = server_of(good(layer));
        Caller     caller;
        CHECK(caller.set_table(table_of({a->port(), b->port()}, {{0, 3, {0}}, {4, 7, {1}}}, "rows", dtype)));
        const Result       result   = call(caller, layer);
        const auto         expected = layer.expected_rows();
        const float        step     = dtype == "f16" ? 1.0f / 1024 : 1.0f / 128;
        CHECK(result.ok);
        for (size_t i = 0; i < expected.size(); i++) {
            CHECK(std::fabs(result.out[i] - expected[i]) <= 3 * step * 24);  // three values of at most 18, rounded twice
        }
        if (dtype == "f16") {
            layer.h[0]          = 1e6f;
            const Result misfit = call(caller, layer);
            CHECK(!misfit.ok);
            CHECK_CONTAINS(misfit.failure.reason, "f16");
        }
    }
}

TEST(caller_sums_in_slice_order_whatever_the_order_of_arrival) {
    const Layer layer(6, 5, 9, 12, 20, false, 5);
    const auto  expected = layer.expected_sum({{0, 2}, {3, 5}, {6, 8}});
    CHECK(!same_bits(expected, layer.expected_sum({{6, 8}, {3, 5}, {0, 2}})));  // the order can be seen
    for (int last = 0; last < 3; last++) {  // this node answers only after the others have
        std::mutex              mutex;
        std::condition_variable answered;
        int                     n_answered = 0;
        std::vector<std::unique_ptr<fake::Server>> servers;
        for (int i = 0; i < 3; i++) {
            servers.push_back(server_of([&, i](fake::Connection & connection, const fake::Request & request) {
                std::unique_lock<std::mutex> lock(mutex);
                if (i == last) {
                    answered.wait(lock, [&] { return n_answered == 2; });
                }
                const bool ok = connection.message(answer(request, layer.n_in, layer.n_out));
                n_answered++;
                answered.notify_all();
                return ok;
            }));
        }
        Caller caller;
        // Slices are given in another order than that of their experts.
        CHECK(caller.set_table(table_of({servers[0]->port(), servers[1]->port(), servers[2]->port()},
                                        {{6, 8, {2}}, {0, 2, {0}}, {3, 5, {1}}}, "sum")));
        const Result result = call(caller, layer);
        CHECK(result.ok);
        CHECK(same_bits(result.out, expected));
    }
}

TEST(caller_asks_only_owners_and_once) {
    Layer layer(2, 2, 8);
    layer.ids = {4, 1, -77, 0, 2, -77};  // nothing of node 2
    std::mutex                              mutex;
    std::map<int, std::vector<fake::Request>> seen;
    std::vector<std::unique_ptr<fake::Server>> servers;
    for (int i = 0; i < 3; i++) {
        servers.push_back(server_of([&, i](fake::Connection & connection, const fake::Request & request) {
            const std::lock_guard<std::mutex> lock(mutex);
            seen[i].push_back(request);
            return connection.message(answer(request, layer.n_in, layer.n_out));
        }));
    }
    Caller caller;
    CHECK(caller.set_table(table_of({servers[0]->port(), servers[1]->port(), servers[2]->port()}, {{0, 3, {0}}, {4, 5, {1}}, {6, 7, {2}}})));
    CHECK(call(caller, layer).ok);
    const std::lock_guard<std::mutex> lock(mutex);
    CHECK(seen[0].size() == 1 && seen[1].size() == 1 && seen[2].empty() && servers[2]->n_connections() == 0);
    CHECK((seen[0][0].row == std::vector<int32_t>{0, 1, 1}) && (seen[0][0].expert == std::vector<int32_t>{1, 0, 2}));
    CHECK(seen[0][0].n_rows == 2 && seen[0][0].h.size() == 2 * 12 * 4);
    CHECK((seen[1][0].row == std::vector<int32_t>{0}) && (seen[1][0].expert == std::vector<int32_t>{4}) && seen[1][0].h.size() == 12 * 4);
    CHECK(seen[0][0].model == "demo-0123" && seen[0][0].term == 3 && seen[0][0].layer == 0);
    const Statistics statistics = caller.statistics();
    CHECK(statistics.calls == 2 && statistics.failures == 0 && statistics.nodes.size() == 3 && statistics.layers.size() == 1);
    CHECK(statistics.nodes[0].calls == 1 && statistics.nodes[0].pairs == 3 && statistics.nodes[0].bytes_sent > 300);
    CHECK(statistics.nodes[1].pairs == 1 && statistics.nodes[2].calls == 0 && statistics.layers[0].rounds == 1);
    CHECK(statistics.nodes[0].bytes_received > 3 * 20 * 4 && statistics.nodes[0].compute_us == 10);
    CHECK_CONTAINS(statistics_json(statistics, "stats"), "\"type\":\"stats\"");
}

TEST(caller_refuses_bad_ids_and_tables) {
    Layer      layer(3, 2, 4);
    const auto server = server_of(good(layer));
    Caller     caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms, 5)));
    CHECK(!caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms, 5)));
    CHECK(!caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms, 4)));
    CHECK(!caller.set_table(nullptr));
    const auto refused = [&](std::vector<int32_t> ids, int expert, const std::string & reason) {
        layer.ids           = std::move(ids);
        const Result result = call(caller, layer);
        CHECK(!result.ok && result.failure.layer == 0 && result.failure.first_expert == expert && result.failure.last_expert == expert);
        CHECK_CONTAINS(result.failure.reason, reason);
    };
    refused({0, 1, 0, 2, 3, 0, 1, 1, 0}, 1, "expert 1 twice for token 2");
    refused({0, 1, 0, 2, 4, 0, 1, 2, 0}, 4, "expert 4 for token 1");
    refused({0, -1, 0, 2, 3, 0, 1, 2, 0}, -1, "expert -1 for token 0");
    CHECK(server->n_connections() == 0);  // nothing was sent
    const Result other = call(caller, layer, 7);
    CHECK(!other.ok && other.failure.layer == 7);
    CHECK_CONTAINS(other.failure.reason, "layer 7");
    CHECK(caller.set_table(table_of({server->port()}, {{0, 1, {0}}, {3, 3, {0}}}, "rows", "f32", floor_ms, 6)));
    layer.ids = {0, 1, 0, 0, 1, 0, 0, 1, 0};
    CHECK_CONTAINS(call(caller, layer).failure.reason, "expert 2 of layer 0");
}

TEST(caller_ends_by_the_deadline_when_a_node_is_silent) {
    check_bad_node([](fake::Connection & connection, const fake::Request &) { connection.wait_for_close(); return false; },
                   "no reply within", first_deadline_ms - 1);
    check_bad_node([](fake::Connection & connection, const fake::Request &) { connection.freeze(); return false; }, "no reply within",
                   first_deadline_ms - 1);
}

TEST(caller_ends_by_the_deadline_when_a_reply_drips) {
    check_bad_node(
        [](fake::Connection & connection, const fake::Request & request) {
            const fake::Data message = answer(request, 12, 20);
            uint8_t          head[4] = {0x82, 126, uint8_t(message.size() >> 8), uint8_t(message.size())};
            connection.write(head, 4);
            for (size_t i = 0; i < message.size() && connection.pause_ms(20) && connection.write(&message[i], 1); i++) {
            }
            return false;
        },
        "of the reply received", first_deadline_ms - 1);
}

TEST(caller_ends_by_the_deadline_when_a_node_closes_each_time) {
    check_bad_node([](fake::Connection &, const fake::Request &) { return false; }, "last: the peer closed the connection", first_deadline_ms - 1);
    check_bad_node(
        [](fake::Connection & connection, const fake::Request &) {
            const uint8_t frame[4] = {0x88, 2, 0x03, 0xe9};
            connection.write(frame, 4);
            return false;
        },
        "closed the connection with code 1001", first_deadline_ms - 1);
    check_bad_node(
        [](fake::Connection & connection, const fake::Request & request) {
            const fake::Data message = answer(request, 12, 20);
            connection.write("\x82\x7e\x01\x80", 4);  // a frame of 384 bytes is promised
            connection.write(message.data(), 100);
            return false;
        },
        "closed the connection", first_deadline_ms - 1);
}

TEST(caller_ends_by_the_deadline_when_nobody_listens_or_upgrades) {
    const Layer layer(2, 2, 4);
    uint16_t    port = 0;
    const int   fd   = fake::listen_on(port);
    {
        Caller caller;
        CHECK(caller.set_table(table_of({port}, {{0, 3, {0}}}, "rows", "f32", floor_ms)));
        // The kernel accepts, nobody answers: a stopped process.
        check_failure(call(caller, layer), "upgrade was not answered", first_deadline_ms - 1, first_deadline_ms);
    }
    close(fd);
    Caller caller;
    CHECK(caller.set_table(table_of({port}, {{0, 3, {0}}}, "rows", "f32", floor_ms)));
    check_failure(call(caller, layer), "refused", first_deadline_ms - 1, first_deadline_ms);
}

TEST(caller_ends_by_the_deadline_when_a_large_request_is_not_read) {
    const Layer  layer(64, 1, 4, 32768, 8);  // 8 MB, more than the kernel's buffers
    fake::Server server([](fake::Connection & connection) { connection.freeze(); });
    Caller       caller;
    CHECK(caller.set_table(table_of({server.port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms)));
    const double deadline_ms = floor_ms + 64 * 5;
    const Result result      = call(caller, layer);
    check_failure(result, "bytes of the request not sent yet", deadline_ms - 1, deadline_ms);
    CHECK(result.failure.reason.find("(0 bytes of the request") == std::string::npos);
}

TEST(caller_refuses_wrong_replies_at_once) {
    const auto with_values = [](std::vector<float> y, uint64_t id_offset = 0) {
        return [y, id_offset](fake::Connection & connection, const fake::Request & request) {
            const uint8_t * first = reinterpret_cast<const uint8_t *>(y.data());
            return connection.message(fake::reply(request.id + id_offset, fake::Data(first, first + y.size() * 4)));
        };
    };
    std::vector<float> values(4 * 20, 0.5f);
    check_bad_node(with_values(values, 1), "belongs to call");
    check_bad_node(with_values(std::vector<float>(4 * 20 - 1)), "bytes of values instead of 320");
    check_bad_node(with_values(std::vector<float>(4 * 20 + 1)), "bytes of values instead of 320");
    check_bad_node(with_values({}), "0 bytes of values");
    check_bad_node(with_values(std::vector<float>(10000)), "longer than");
    check_bad_node([](fake::Connection & connection, const fake::Request &) { return connection.message({0xc1, 2, 3}); }, "not a msgpack map");

    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        for (const std::string reduce : {"rows", "sum"}) {
            const Layer layer(2, 2, 4);
            const auto  server = server_of([&](fake::Connection & connection, const fake::Request & request) {
                std::vector<float> y((reduce == "rows" ? 4 : 2) * 20, 0.5f);
                y.back() = bad;
                fake::Data bytes(y.size() * 4);
                std::memcpy(bytes.data(), y.data(), bytes.size());
                return connection.message(fake::reply(request.id, bytes));
            });
            Caller caller;
            CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, reduce, "f32", floor_ms)));
            const Result result = call(caller, layer);
            CHECK(!result.ok && result.failure.node == "node0");
            CHECK_CONTAINS(result.failure.reason, "not finite");
            CHECK(reduce == "sum" || result.failure.first_expert == layer.id(1, 1));
        }
    }
}

TEST(caller_reports_a_nodes_error_in_its_words) {
    check_bad_node([](fake::Connection & connection, const fake::Request & request) {
        return connection.message(fake::error(request.id, "failed", "expert 2 gave a value that is not finite\n\x01", false));
    }, "failed: expert 2 gave a value that is not finite??");
    check_bad_node([](fake::Connection & connection, const fake::Request &) {
        return connection.message(fake::error(0, "bad_request", "no map", false));
    }, "bad_request: no map");
    check_bad_node([](fake::Connection & connection, const fake::Request & request) {
        return connection.message(fake::error(request.id, "not_ready", "layer 0 is loading", true));
    }, "not_ready: layer 0 is loading", first_deadline_ms - 1);
}

TEST(caller_tries_again_until_a_node_is_ready) {
    const Layer layer(2, 2, 4);
    int         n_requests = 0;
    const auto  server     = server_of([&](fake::Connection & connection, const fake::Request & request) {
        n_requests++;
        return n_requests == 1   ? connection.message(fake::error(request.id, "not_ready", "loading", true))
               : n_requests == 2 ? false
                                 : connection.message(answer(request, layer.n_in, layer.n_out));
    });
    Caller caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}})));
    const Result result = call(caller, layer);
    CHECK(result.ok && same_bits(result.out, layer.expected_rows()));
    CHECK(n_requests == 3 && server->n_connections() == 2);
    CHECK(result.wall_ms >= 20 + 40);  // the back-off
}

TEST(caller_goes_to_the_next_node_of_the_list) {
    const Layer layer(4, 3, 8);
    uint16_t    dead_port = 0;
    close(fake::listen_on(dead_port));
    const auto b = server_of(good(layer)), c = server_of(good(layer));
    for (const std::string reduce : {"rows", "sum"}) {
        // Node 0 holds three slices alone in name: their replicas differ, so its part is cut up.
        Caller caller;
        CHECK(caller.set_table(table_of({dead_port, b->port(), c->port()}, {{0, 1, {0, 1}}, {2, 3, {0, 2}}, {4, 5, {0, 1}}, {6, 7, {1}}}, reduce)));
        const Result result = call(caller, layer);
        CHECK(result.ok);
        if (reduce == "rows") {
            CHECK(same_bits(result.out, layer.expected_rows()));
        }
        const Result again = call(caller, layer);  // node 0 is being avoided now
        CHECK(again.ok);
        CHECK(caller.statistics().nodes[0].calls == 0 && caller.statistics().failures == 0);
    }
    const auto refusing = server_of([](fake::Connection & connection, const fake::Request & request) {
        return connection.message(fake::error(request.id, "not_held", "not here", false));
    });
    Caller caller;
    CHECK(caller.set_table(table_of({refusing->port(), b->port()}, {{0, 7, {0, 1}}})));
    const Result result = call(caller, layer);
    CHECK(result.ok && same_bits(result.out, layer.expected_rows()));
}

TEST(caller_replaces_a_silent_node_after_its_deadline) {
    const Layer layer(2, 2, 4);
    const auto  silent = server_of([](fake::Connection & connection, const fake::Request &) { connection.wait_for_close(); return false; });
    const auto  other  = server_of(good(layer));
    Caller      caller;
    CHECK(caller.set_table(table_of({silent->port(), other->port()}, {{0, 3, {0, 1}}}, "rows", "f32", floor_ms)));
    const Result first = call(caller, layer);
    CHECK(first.ok && same_bits(first.out, layer.expected_rows()) && first.wall_ms >= first_deadline_ms - 1);
    const Result second = call(caller, layer);
    CHECK(second.ok && silent->n_connections() == 1);  // not asked again so soon
}

TEST(caller_never_takes_a_late_reply) {
    const Layer first(2, 2, 4), second(2, 2, 4, 12, 20, false, 9);
    std::mutex              mutex;
    std::condition_variable changed;
    bool                    gave_up = false;
    int                     n_requests = 0;
    const auto server = server_of([&](fake::Connection & connection, const fake::Request & request) {
        if (n_requests++ == 0) {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [&] { return gave_up; });
        }
        return connection.message(answer(request, first.n_in, first.n_out));  // the first one: too late
    });
    Caller caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms)));
    check_failure(call(caller, first), "no reply within", first_deadline_ms - 1, first_deadline_ms);
    {
        const std::lock_guard<std::mutex> lock(mutex);
        gave_up = true;
        changed.notify_all();
    }
    const Result result = call(caller, second);
    CHECK(result.ok && same_bits(result.out, second.expected_rows()));
    CHECK(server->n_connections() == 2);
}

TEST(caller_finds_a_restarted_server) {
    const Layer layer(2, 2, 4);
    auto        server = server_of(good(layer));
    uint16_t    port   = server->port();
    Caller      caller;
    CHECK(caller.set_table(table_of({port}, {{0, 3, {0}}})));
    CHECK(call(caller, layer).ok);
    server.reset();
    server              = server_of(good(layer), port);
    const Result result = call(caller, layer);
    CHECK(result.ok && same_bits(result.out, layer.expected_rows()));
    CHECK(caller.statistics().failures == 0);
}

TEST(caller_follows_new_tables_and_keeps_connections) {
    const Layer layer(3, 2, 4);
    const auto  a = server_of(good(layer)), b = server_of(good(layer));
    Caller      caller;
    CHECK(caller.set_table(table_of({a->port(), b->port()}, {{0, 3, {0}}}, "rows", "f32", 20000, 1)));
    CHECK(call(caller, layer).ok && b->n_connections() == 0);
    CHECK(caller.set_table(table_of({a->port(), b->port()}, {{0, 3, {1}}}, "sum", "f32", 20000, 2)));
    CHECK(call(caller, layer).ok && b->n_connections() == 1);
    CHECK(caller.set_table(table_of({a->port(), b->port()}, {{0, 3, {0}}}, "rows", "f32", 20000, 3)));
    CHECK(call(caller, layer).ok && a->n_connections() == 1);
}

TEST(caller_answers_pings_between_calls) {
    const Layer layer(2, 2, 4);
    std::atomic<bool> ponged{false};
    fake::Server server([&](fake::Connection & connection) {
        unsigned   opcode = 0;
        fake::Data message;
        while (connection.read_frame(opcode, message)) {
            fake::Request request;
            if (opcode == 10) {
                ponged = true;
            } else if (opcode == 2 && parse_request(message, request)) {
                connection.message(answer(request, layer.n_in, layer.n_out));
                connection.frame(0x89, "", 0);
            }
        }
    });
    Caller caller;
    CHECK(caller.set_table(table_of({server.port()}, {{0, 3, {0}}})));
    while (!ponged && call(caller, layer).ok) {
    }
    CHECK(ponged);
}

TEST(caller_allocates_nothing_in_steady_state) {
    for (const std::string reduce : {"rows", "sum"}) {
        const Layer layer(7, 3, 8, 300, 300);
        const auto  a = server_of(good(layer)), b = server_of(good(layer));
        Caller      caller;
        CHECK(caller.set_table(table_of({a->port(), b->port()}, {{0, 3, {0}}, {4, 7, {1}}}, reduce)));
        std::vector<float> out(7 * 300);
        Failure            failure;
        for (int i = 0; i < 3; i++) {
            CHECK(caller.ffn(layer.input(), out.data(), failure));
        }
        const long before = n_allocations_of_thread();
        for (int i = 0; i < 50; i++) {
            CHECK(caller.ffn(layer.input(), out.data(), failure));
        }
        CHECK(n_allocations_of_thread() == before);
    }
}
