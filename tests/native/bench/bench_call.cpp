// What one expert call costs, measured where the router makes it: the Swarm backend's caller against real servers.
//   swarm-bench-call TABLE.json PROGRAM_DIGEST N_EMBD N_USED N_EXPERT ROUNDS TOKENS
// Layer 0 of the table; a token uses N_USED experts, spread evenly over the N_EXPERT. Prints one JSON object, times in
// microseconds. Encoding and decoding are measured by themselves, on the same sizes, since they cost less than a clock.

#include "common/environment.hpp"
#include "router/caller.hpp"
#include "router/wire.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

using namespace swarm;

namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point begun) {
    return std::chrono::duration<double, std::micro>(Clock::now() - begun).count();
}

double percentile(std::vector<double> & sorted, double part) {
    return sorted[size_t(double(sorted.size() - 1) * part)];
}

// One call with all pairs of all tokens: what encoding the request and reading the reply take, each.
void codec(const LayerInput & input, const RoutingTable & table, double & encode_us, double & decode_us) {
    std::vector<const float *> rows;
    std::vector<int32_t>       row;
    for (int t = 0; t < input.n_tokens; t++) {
        rows.push_back(input.h + size_t(t) * input.h_token_stride);
        row.insert(row.end(), size_t(input.n_used), t);
    }
    Request request;
    request.model       = table.model;
    request.program     = input.program;
    request.reduce      = table.reduce;
    request.dtype       = table.dtype;
    request.n_rows      = request.n_h = uint32_t(input.n_tokens);
    request.n_pairs     = uint32_t(row.size());
    request.n_in        = uint32_t(input.n_in);
    request.h           = rows.data();
    request.row         = row.data();
    request.expert      = input.ids;
    request.weight      = input.weights;
    request.deadline_ms = 1000;
    std::vector<uint8_t> message(request_bytes_bound(request));
    constexpr int        rounds = 2000;
    std::string          problem;
    auto                 begun = Clock::now();
    for (int i = 0; i < rounds; i++) {
        MsgpackWriter writer(message.data(), message.size(), 0x12345678u + uint32_t(i));
        encode_request(request, writer, problem);
    }
    encode_us            = us_since(begun) / rounds;
    const size_t n       = (table.reduce == Reduce::rows ? row.size() : rows.size()) * size_t(input.n_out);
    const size_t y_bytes = n * dtype_bytes(table.dtype);
    std::vector<uint8_t> reply(y_bytes + 256);
    MsgpackWriter        writer(reply.data(), reply.size());
    writer.map(5);
    writer.str("v");
    writer.number(1);
    writer.str("id");
    writer.number(1);
    writer.str("y");
    writer.bin_header(y_bytes);
    const std::vector<uint8_t> zeros(y_bytes);
    writer.raw(zeros.data(), y_bytes);
    writer.str("compute_us");
    writer.number(1);
    writer.str("queue_us");
    writer.number(1);
    std::vector<float> sum(n);
    begun = Clock::now();
    for (int i = 0; i < rounds; i++) {
        Reply read;
        decode_reply(reply.data(), writer.size(), read, problem);
        accumulate_floats(table.dtype, read.y.data, n, sum.data());
    }
    decode_us = us_since(begun) / rounds;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 8) {
        std::fprintf(stderr, "usage: %s TABLE.json PROGRAM_DIGEST N_EMBD N_USED N_EXPERT ROUNDS TOKENS\n", argv[0]);
        return 2;
    }
    std::ifstream     file(argv[1]);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const int         n_embd = std::atoi(argv[3]), n_used = std::atoi(argv[4]), n_expert = std::atoi(argv[5]);
    const int         rounds = std::atoi(argv[6]), n_tokens = std::atoi(argv[7]);
    std::string       problem;
    const auto        table = RoutingTable::parse(text, problem);
    Caller            caller("", environment::poll_limit());
    if (n_embd < 1 || n_used < 1 || n_expert < n_used || rounds < 1 || n_tokens < 1 || !table ||
        !caller.set_table(table)) {
        std::fprintf(stderr, "swarm-bench-call: bad argument %s\n", problem.c_str());
        return 2;
    }
    std::vector<float>   h(size_t(n_tokens) * size_t(n_embd), 0.5f), out(h.size());
    std::vector<float>   weights(size_t(n_tokens) * size_t(n_used), 1.0f);
    std::vector<int32_t> ids(weights.size());
    for (size_t i = 0; i < ids.size(); i++) {
        ids[i] = int32_t(i % size_t(n_used)) * (n_expert / n_used);
    }
    LayerInput input;
    input.program              = std::strtoull(argv[2], nullptr, 10);
    input.n_tokens             = n_tokens;
    input.n_used               = n_used;
    input.n_in                 = input.n_out = n_embd;
    input.h                    = h.data();
    input.h_token_stride       = size_t(n_embd);
    input.ids                  = ids.data();
    input.ids_token_stride     = size_t(n_used);
    input.weights              = weights.data();
    input.weights_token_stride = size_t(n_used);
    input.weights_slot_stride  = 1;

    std::vector<double> us;
    Failure             failure;
    Statistics          before;
    Trace               trace_before;
    for (int round = -std::max(50, rounds / 10); round < rounds; round++) {
        if (round == 0) {
            before       = caller.statistics();
            trace_before = caller.trace();
        }
        const auto begun = Clock::now();
        if (!caller.ffn(input, out.data(), failure)) {
            std::fprintf(stderr, "swarm-bench-call: node %s: %s\n", failure.node.c_str(), failure.reason.c_str());
            return 1;
        }
        if (round >= 0) {
            us.push_back(us_since(begun));
        }
    }
    const Statistics after = caller.statistics();
    double           calls = 0, compute_us = 0, sent = 0, received = 0;
    for (size_t i = 0; i < after.nodes.size(); i++) {
        calls += double(after.nodes[i].calls - before.nodes[i].calls);
        compute_us += double(after.nodes[i].compute_us - before.nodes[i].compute_us);
        sent += double(after.nodes[i].bytes_sent - before.nodes[i].bytes_sent);
        received += double(after.nodes[i].bytes_received - before.nodes[i].bytes_received);
    }
    const auto layer_of = [](const Trace & trace) {
        return trace.layers.empty() ? LayerTrace() : trace.layers.front().counters;
    };
    const LayerTrace from = layer_of(trace_before), to = layer_of(caller.trace());
    const auto us_of_round = [&](uint64_t LayerTrace::*part) { return double(to.*part - from.*part) / 1000 / rounds; };
    double encode_us = 0, decode_us = 0;
    codec(input, *table, encode_us, decode_us);
    std::sort(us.begin(), us.end());
    std::printf("{\"p50_us\": %.1f, \"p99_us\": %.1f, \"least_us\": %.1f, \"encode_us\": %.1f, \"decode_us\": %.1f, "
                "\"send_us\": %.1f, \"wait_us\": %.1f, \"add_us\": %.1f, \"compute_us\": %.1f, \"bytes_sent\": %.0f, "
                "\"bytes_received\": %.0f}\n",
                percentile(us, 0.5), percentile(us, 0.99), us.front(), encode_us, decode_us,
                us_of_round(&LayerTrace::encode_ns), us_of_round(&LayerTrace::wait_ns),
                us_of_round(&LayerTrace::add_ns), compute_us / calls, sent / calls, received / calls);
    return 0;
}
