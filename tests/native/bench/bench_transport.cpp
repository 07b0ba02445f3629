// What one expert call costs on loopback with servers that do nothing: the transport and the kernel alone.
//   bench_transport [nodes 1] [tokens 1] [n_embd 3072] [n_used 1] [rounds 20000] [rows|sum] [f32|bf16|f16]
// Default: one node, 12 KB each way. The server's process shares the machine, as everything on loopback does.

#include "router/fake_server.hpp"

#include "router/caller.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>

using namespace swarm;

int main(int argc, char ** argv) {
    const auto number = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
    const int  n_nodes = number(1, 1), n_tokens = number(2, 1), n_embd = number(3, 3072), n_used = number(4, 1),
              rounds         = number(5, 20000);
    const std::string reduce = argc > 6 ? argv[6] : "rows", dtype = argc > 7 ? argv[7] : "f32";
    const size_t      value_bytes = dtype == "f32" ? 4 : 2;

    std::vector<std::unique_ptr<fake::Server>> servers;
    std::string                                nodes, slices;
    for (int i = 0; i < n_nodes; i++) {
        servers.push_back(std::make_unique<fake::Server>([&](fake::Connection & connection) {
            // Large reads, and the answer's bytes prepared once: as little server as there can be.
            fake::Data received(size_t(1) << 16), message;
            for (;;) {
                uint8_t head[14];
                if (!connection.read(head, 2) || (head[0] & 0x0f) == 8) {
                    return;
                }
                const unsigned code = head[1] & 0x7f, n_length = code == 126 ? 2 : code == 127 ? 8 : 0;
                if (!connection.read(head + 2, n_length + 4)) {
                    return;
                }
                uint64_t size = n_length ? 0 : code;
                for (unsigned k = 0; k < n_length; k++) {
                    size = size << 8 | head[2 + k];
                }
                received.resize(size_t(size));
                if (!connection.read(received.data(), received.size())) {
                    return;
                }
                fake::Request request;
                masked_copy(received.data(), received.data(), received.size(),
                            uint32_t(head[2 + n_length]) | uint32_t(head[3 + n_length]) << 8 |
                                uint32_t(head[4 + n_length]) << 16 | uint32_t(head[5 + n_length]) << 24);
                if (!fake::parse_request(received, request)) {
                    std::printf("bad request\n");
                    return;
                }
                const size_t n = (reduce == "rows" ? request.expert.size() : size_t(request.n_rows)) * size_t(n_embd) *
                                 value_bytes;
                message        = fake::reply(request.id, fake::Data(n), 0);
                if (!connection.message(message)) {
                    return;
                }
            }
        }));
        nodes += std::string(i ? "," : "") + "{\"name\":\"n" + std::to_string(i) +
                 "\",\"host\":\"127.0.0.1\",\"port\":" + std::to_string(servers.back()->port()) + "}";
        slices += std::string(i ? "," : "") + "{\"layer\":0,\"first\":" + std::to_string(i * n_used) +
                  ",\"last\":" + std::to_string((i + 1) * n_used - 1) + ",\"nodes\":[" + std::to_string(i) + "]}";
    }
    std::string problem;
    Caller      caller;
    if (!caller.set_table(RoutingTable::parse(
            "{\"version\":1,\"term\":1,\"sequence\":1,\"model\":\"bench\",\"reduce\":\"" + reduce + "\",\"dtype\":\"" +
                dtype + "\",\"deadline_floor_ms\":10000,\"nodes\":[" + nodes + "],\"slices\":[" + slices + "]}",
            problem))) {
        std::printf("%s\n", problem.c_str());
        return 1;
    }
    const int            n_all = n_nodes * n_used;  // every node is asked for all its experts
    std::vector<float>   h(size_t(n_tokens) * size_t(n_embd), 0.5f), weights(size_t(n_tokens) * size_t(n_all), 1.0f),
        out(h.size());
    std::vector<int32_t> ids(weights.size());
    for (size_t i = 0; i < ids.size(); i++) {
        ids[i] = int32_t(i % size_t(n_all));
    }
    LayerInput input;
    input.n_tokens             = n_tokens;
    input.n_used               = n_all;
    input.n_in                 = input.n_out = n_embd;
    input.h                    = h.data();
    input.h_token_stride       = size_t(n_embd);
    input.ids                  = ids.data();
    input.ids_token_stride     = size_t(n_all);
    input.weights              = weights.data();
    input.weights_token_stride = size_t(n_all);
    input.weights_slot_stride  = 1;

    std::vector<double> us;
    Failure             failure;
    for (int round = -rounds / 10; round < rounds; round++) {
        const auto begun = std::chrono::steady_clock::now();
        if (!caller.ffn(input, out.data(), failure)) {
            std::printf("node %s: %s\n", failure.node.c_str(), failure.reason.c_str());
            return 1;
        }
        if (round >= 0) {
            us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begun).count());
        }
    }
    std::sort(us.begin(), us.end());
    double sum = 0;
    for (const double value : us) {
        sum += value;
    }
    const Statistics statistics = caller.statistics();
    std::printf("%d nodes, %d tokens, %zu bytes of h, %s %s: mean %.1f us, p50 %.1f, p99 %.1f; %.0f bytes sent and "
                "%.0f received per call\n",
                n_nodes, n_tokens, h.size() * value_bytes, reduce.c_str(), dtype.c_str(), sum / double(us.size()),
                us[us.size() / 2], us[us.size() * 99 / 100],
                double(statistics.nodes[0].bytes_sent) / double(statistics.nodes[0].calls),
                double(statistics.nodes[0].bytes_received) / double(statistics.nodes[0].calls));
    return 0;
}
